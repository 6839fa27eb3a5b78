"""Exact match by length: how often a checkpoint trained on a synthetic task answers test samples without an error.

examples:
  olmo-sparsity exact_match runs/parity-ppc
  olmo-sparsity exact_match runs/parity-ppc/step00003000 --lengths 10,20,40,80 --samples 500
  olmo-sparsity exact_match runs/sparse-parity --lengths 20,50,100,500 --out runs/sparse-parity/long
  olmo-sparsity exact_match runs/sparse-parity --lengths 40,80 --ks 4,8,16

The model reads its own output (free-running), chooses the likeliest token at every step, and has to give the whole
response: every token, every position id where it predicts ids, and the end where it belongs. An error is of the sort
that came first. Lengths are in the task's own unit: bits, digits, symbols, assignments, or tokens of the prompt.
Samples are of the test split, the same for every checkpoint; no training sample has a prompt of theirs.

Writes exact_match.json and prints a table: exact match with Wilson's 95 % interval over samples, the sorts of errors,
and, of the same samples, how many tokens (and ids) are right when the model reads the true ones before them. A file
that holds the same lengths, k, samples and seed of the same weights is left alone, so that a sweep can be run again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from olmo_sparsity.util.arguments import (
    Parser,
    add_arguments,
    argument,
    out_folder,
    seed_number,
    settings_from,
)
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.evaluate.exact_match import LengthResult


@dataclass(frozen=True, kw_only=True)
class ExactMatchSettings:
    """What is measured on what."""

    checkpoint: str = field(
        metadata=argument("checkpoint, or run (then its last one)", positional=True, metavar="CKPT")
    )
    lengths: tuple[int, ...] | None = field(
        default=None,
        metadata=argument(
            "comma-separated (default: up to 8, from the training range to 10 times the longest training length, as "
            "far as the task's test_length goes)"
        ),
    )
    ks: tuple[int, ...] | None = field(
        default=None,
        metadata=argument(
            "planted tokens, comma-separated; every length must hold them (default: the task's k_test, each at the "
            "lengths that hold it)"
        ),
    )
    samples: int = field(default=200, metadata=argument("samples of each length"))
    seed: int = field(default=0, metadata=argument("seed of the samples", type=seed_number))
    batch_tokens: int = field(
        default=1 << 15,
        metadata=argument("tokens decoded at a time; lower it when memory runs out", metavar="N"),
    )
    out: Path | None = field(
        default=None,
        metadata=argument("folder for exact_match.json (default: the run's)", type=out_folder, metavar="DIR"),
    )
    device: str | None = field(
        default=None, metadata=argument("default: a GPU where there is one", choices=["cpu", "cuda"])
    )


def parse_settings(arguments: list[str] | None = None) -> ExactMatchSettings:
    """What the command line asks for, or these ``arguments`` would."""
    parser = Parser(description=__doc__)
    add_arguments(parser, ExactMatchSettings)
    return settings_from(ExactMatchSettings, parser.parse_args(arguments))


def main() -> None:
    """Measure, write and print, unless it is measured already."""
    settings = parse_settings()
    import torch

    from analysis.stats.exact_match import RECORD_NAME
    from olmo_sparsity.checkpoint import load_model, resolve_checkpoint
    from olmo_sparsity.data.task_batches import TaskPositions, task_of
    from olmo_sparsity.evaluate.exact_match import (
        exact_match_record,
        grid,
        is_measured,
        measure,
        multiples_of_training_length,
    )
    from olmo_sparsity.model.build import as_predictor
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.progress import progress

    folder = resolve_checkpoint(settings.checkpoint)
    model, config = load_model(folder)
    if config.task.name is None:
        raise UserError(
            f"{folder} was trained on text, and exact match is of a task; olmo-sparsity length measures its loss by "
            "position"
        )
    task = task_of(config)
    lengths, ks = settings.lengths or multiples_of_training_length(task), settings.ks
    cells = grid(task, lengths, ks)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = (settings.out or folder.parent) / RECORD_NAME
    if is_measured(path, folder, cells, samples=settings.samples, seed=settings.seed):
        print(f"{path} is there already, of the same weights, lengths, k, samples and seed")
        return
    predictor = as_predictor(model.to(device))
    with progress("exact match", len(cells) * settings.samples, "samples") as advance:
        rows = measure(
            predictor,
            task,
            TaskPositions(config),
            lengths=lengths,
            ks=ks,
            samples=settings.samples,
            seed=settings.seed,
            device=device,
            batch_tokens=settings.batch_tokens,
            advance=advance,
        )
    write_json(path, exact_match_record(folder, config, predictor, rows, seed=settings.seed, device=device))
    console = Console(highlight=False, soft_wrap=True)
    console.print(_table(rows))
    console.print(f"wrote {path}", markup=False)


def _table(rows: list[LengthResult]) -> Table:
    """A row for every length and k; shares in per cent."""
    from analysis.stats.exact_match import wilson
    from analysis.stats.tables import percent_text, plain_table

    planted, ids = rows[0].k is not None, rows[0].teacher_forced_ids is not None
    names = ["samples", "exact [%]", "token", "id", "stop", "tokens [%]", "ids [%]"]
    kept = [
        name for name in ("k", *names) if (planted or name != "k") and (ids or name not in ("id", "ids [%]"))
    ]
    table = plain_table("length", *kept)
    table.caption = (
        "token, id, stop: what the first error is; tokens, ids: right where the true ones before are read"
    )
    table.caption_justify = "left"
    for row in rows:
        right_ids = 0 if row.teacher_forced_ids is None else row.teacher_forced_ids
        cells = {
            "k": str(row.k),
            "samples": f"{row.samples:,}",
            "exact [%]": percent_text(wilson(row.exact, row.samples).as_dict(), 1),
            "token": f"{row.wrong_token:,}",
            "id": f"{row.wrong_id:,}",
            "stop": f"{row.wrong_stop:,}",
            "tokens [%]": f"{100 * row.teacher_forced_tokens / row.response_tokens:.2f}",
            "ids [%]": f"{100 * right_ids / row.response_tokens:.2f}",
        }
        table.add_row(f"{row.length:,}", *(cells[name] for name in kept))
    return table
