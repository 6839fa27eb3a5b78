"""Exact match by length: how often a checkpoint trained on a synthetic task answers test samples without an error.

examples:
  olmo-sparsity exact_match runs/parity-ppc
  olmo-sparsity exact_match runs/parity-ppc/step00003000 --lengths 10,20,40,80 --samples 500 --out runs/parity-ppc/early
  olmo-sparsity exact_match runs/sparse-parity --lengths 20,50,100,500 --out runs/sparse-parity/long
  olmo-sparsity exact_match runs/sparse-parity --lengths 40,80 --ks 4,8,16
  olmo-sparsity exact_match runs/planted --parameters '{distance: [100, 200]}' --lengths 300 --out runs/planted/far

The model reads its own output (free-running), chooses the likeliest token at every step, and has to give the whole
response: every token, every position id where it predicts ids, and the end where it belongs. Lengths are in the task's
own unit: bits, digits, symbols, assignments, or tokens of the prompt. Every checkpoint gets the same test samples.

Writes exact_match.json and prints a table: exact match with Wilson's 95 % interval over samples, the sorts of errors,
and, of the same samples, how many tokens (and ids) are right when the model reads the true ones before them. A file
that holds the same lengths, k, samples and seed of the same weights is left alone, so that a sweep can be run again.
One that holds another measurement is replaced with --overwrite only.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from olmo_sparsity.util.arguments import (
    Parser,
    out_folder,
    whole_number,
    whole_number_or_zero,
    whole_numbers,
)
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import EXACT_MATCH_NAME

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.evaluate.exact_match import LengthResult, Size
    from olmo_sparsity.tasks import Task


def parser() -> Parser:
    """The options of the command."""
    made = Parser(prog="olmo-sparsity exact_match", description=__doc__)
    add = made.add_argument
    add("checkpoint", metavar="CKPT", help="checkpoint folder, or a run folder (then its last checkpoint)")
    up_to_8 = "up to 8, from the training range to 10 times the longest training length, within test_length"
    lengths = f"lengths of test samples in the task's unit, comma-separated (default: {up_to_8})"
    add("--lengths", type=whole_numbers, metavar="L,L,…", help=lengths)
    planted = (
        "numbers of planted tokens, comma-separated; every length must hold them (default: k_test, where a length "
        "holds it)"
    )
    add("--ks", type=whole_numbers, metavar="K,K,…", help=planted)
    differ = "changes of the task's parameters, such as '{distance: [100, 200]}' (default: those of training)"
    add("--parameters", type=_parameters, default={}, metavar="YAML", help=differ)
    add(
        "--samples",
        type=whole_number,
        default=200,
        metavar="COUNT",
        help="test samples of each length (default: 200)",
    )
    add("--seed", type=whole_number_or_zero, default=0, help="seed of the test samples (default: 0)")
    batch = "maximum number of tokens that are decoded together (default: 32768)"
    add("--batch-tokens", type=whole_number, default=1 << 15, metavar="N", help=batch)
    out = "folder to write exact_match.json to (default: that of CKPT)"
    add("--out", type=out_folder, metavar="DIR", help=out)
    add("--overwrite", action="store_true", help="replace another measurement in --out")
    device = "where the model runs: cpu, cuda, cuda:1, … (default: a GPU where there is one, else the CPU)"
    add("--device", help=device)
    return made


def main() -> None:
    """Measure, write and print, unless it is measured already."""
    options = parser().parse_args()

    from olmo_sparsity.checkpoint import load_model, resolve_checkpoint
    from olmo_sparsity.data.build import task_positions
    from olmo_sparsity.evaluate.exact_match import measure_exact_match
    from olmo_sparsity.evaluate.exact_match_record import exact_match_record, record_is_of
    from olmo_sparsity.model.build import as_predictor
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.progress import progress
    from olmo_sparsity.util.provenance import pick_device

    device = pick_device(options.device)
    folder = resolve_checkpoint(options.checkpoint)
    model, config = load_model(folder)
    task, sizes = planned(options, config)
    path = (options.out or folder.parent) / EXACT_MATCH_NAME
    if record_is_of(path, folder, task, sizes, samples=options.samples, seed=options.seed):
        print(f"{path} is there already, of the same weights, task, lengths, k, samples and seed")
        return
    if path.is_file() and not options.overwrite:
        raise UserError(f"{path} holds another measurement; give --out, or --overwrite")
    predictor = as_predictor(model.to(device))
    with progress("exact match", len(sizes) * options.samples, "samples") as advance:
        rows = measure_exact_match(
            predictor,
            task,
            task_positions(config),
            sizes,
            samples=options.samples,
            seed=options.seed,
            device=device,
            batch_tokens=options.batch_tokens,
            advance=advance,
        )
    write_json(
        path, exact_match_record(folder, config, task, predictor, rows, seed=options.seed, device=device)
    )
    print(_table(rows))
    print(f"wrote {path}")


def planned(options: argparse.Namespace, config: Config) -> tuple[Task, list[Size]]:
    """The task of ``config`` with the parameters of ``options``, and the sizes to measure it at.

    Raises `UserError` for what cannot be measured of a run of ``config``.
    """
    from olmo_sparsity.data.build import task_of, task_positions
    from olmo_sparsity.evaluate.exact_match import grid, multiples_of_training_length
    from olmo_sparsity.tasks import make_task

    if config.task.name is None:
        raise UserError(
            "exact match is of a task, and this run trained on text; olmo-sparsity length measures its loss by position"
        )
    task = make_task(config.task.name, {**config.task.parameters, **options.parameters})
    if task.vocabulary != task_of(config).vocabulary[: len(task.vocabulary)]:
        raise UserError(
            f"--parameters {options.parameters} give the symbols other ids than in training; leave them out"
        )
    lengths = options.lengths or multiples_of_training_length(task)
    return task, grid(task_positions(config), task, lengths, options.ks)


def _parameters(text: str) -> dict[str, Any]:
    """Parameters of a task by name. Raises `ArgumentTypeError` for what is no YAML."""
    from omegaconf import OmegaConf

    from olmo_sparsity.config.load import NOT_LOADED

    try:
        return dict(OmegaConf.create(text).items())
    except NOT_LOADED as error:
        raise argparse.ArgumentTypeError(
            f"{first_line(error)}; give a mapping, such as '{{NAME: VALUE}}'"
        ) from None


def _table(rows: list[LengthResult]) -> str:
    """A row for every length and k, without columns that do not apply; shares in per cent, with Wilson's interval."""
    import pandas as pd
    from scipy.stats import binomtest

    counts = pd.DataFrame(rows).dropna(axis="columns", how="all")
    table = counts[[name for name in ("length", "k", "samples") if name in counts]].copy()
    intervals = [binomtest(row.exact, row.samples).proportion_ci(method="wilson") for row in rows]
    table["exact"] = [
        f"{row.exact / row.samples:.1%} [{wilson.low:.1%}, {wilson.high:.1%}]"
        for row, wilson in zip(rows, intervals, strict=True)
    ]
    predicted = ["token", "id"] if "teacher_forced_ids" in counts else ["token"]
    for error in (*predicted, "stop"):
        table[error] = counts[f"wrong_{error}"]
    for name in predicted:
        right = counts[f"teacher_forced_{name}s"] / counts["response_tokens"]
        table[f"{name}s"] = right.map("{:.2%}".format)
    legend = "token, id, stop: the first error; tokens, ids: right where the true ones before are read"
    return f"{table.to_string(index=False)}\n{legend}"
