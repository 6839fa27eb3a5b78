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
One that holds another measurement is replaced with --overwrite only. The same command, interrupted, goes on with the
length (and k) that it was at.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_sparsity.util.arguments import argument, out_folder, parse_settings, seed_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import EXACT_MATCH

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.evaluate.exact_match import Cell, LengthResult
    from olmo_sparsity.tasks import Task
    from olmo_sparsity.util.result_files import Json


def _parameters(text: str) -> dict[str, Any]:
    """Parameters of a task by name. Raises `ArgumentTypeError` for what is no mapping."""
    from omegaconf import DictConfig, OmegaConf

    from olmo_sparsity.config.load import NOT_LOADED
    from olmo_sparsity.util.errors import first_line

    try:
        found = OmegaConf.create(text)
    except NOT_LOADED as error:
        raise ArgumentTypeError(first_line(error)) from None
    if not isinstance(found, DictConfig):
        raise ArgumentTypeError(f"{text} is no mapping; give '{{NAME: VALUE}}'")
    return {str(name): value for name, value in found.items()}


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
    parameters: dict[str, Any] | None = field(
        default=None,
        metadata=argument(
            "parameters of the task that differ from those of training, as YAML: '{distance: [100, 200]}'",
            type=_parameters,
            metavar="YAML",
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
    overwrite: bool = field(default=False, metadata=argument("replace another measurement in --out"))
    device: str | None = field(
        default=None, metadata=argument("cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    )


def main() -> None:
    """Measure, write and print, unless it is measured already."""
    settings = parse_settings(__doc__, ExactMatchSettings)

    from olmo_sparsity.checkpoint import load_model, resolve_checkpoint
    from olmo_sparsity.data.task_batches import TaskPositions
    from olmo_sparsity.evaluate.exact_match import exact_match_record, is_measured, measure
    from olmo_sparsity.model.build import as_predictor
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import pick_device
    from olmo_sparsity.util.result_files import json_checksum

    device = pick_device(settings.device)
    folder = resolve_checkpoint(settings.checkpoint)
    model, config = load_model(folder)
    if config.task.name is None:
        raise UserError(
            f"{folder} was trained on text, and exact match is of a task; olmo-sparsity length measures its loss by "
            "position"
        )
    task, cells = planned(settings, config)
    path = (settings.out or folder.parent) / EXACT_MATCH.name
    if is_measured(path, folder, task, cells, samples=settings.samples, seed=settings.seed):
        print(f"{path} is there already, of the same weights, task, lengths, k, samples and seed")
        return
    if not settings.overwrite:
        _refuse_to_replace(path)
    predictor, positions = as_predictor(model.to(device)), TaskPositions(config)

    def measure_cell(cell: Cell, advance: Callable[[int], None]) -> LengthResult:
        [row] = measure(
            predictor,
            task,
            positions,
            lengths=[cell[0]],
            ks=None if cell[1] is None else [cell[1]],
            samples=settings.samples,
            seed=settings.seed,
            device=device,
            batch_tokens=settings.batch_tokens,
            advance=advance,
        )
        return row

    def record(rows: list[LengthResult]) -> Json:
        return exact_match_record(folder, config, task, predictor, rows, seed=settings.seed, device=device)

    asked = json_checksum({**record([]), "cells": cells, "samples": settings.samples})
    unfinished = path.with_name(f"{path.stem}-unfinished.json")
    rows = _measure_cells(unfinished, asked, cells, settings.samples, measure_cell)
    write_json(path, record(rows))
    unfinished.unlink(missing_ok=True)
    print(_table(rows))
    print(f"wrote {path}")


def planned(settings: ExactMatchSettings, config: Config) -> tuple[Task, list[Cell]]:
    """The task of ``config`` with the other parameters that are asked for, and the cells to measure it in.

    Raises `UserError` for what cannot be measured of a run of ``config``.
    """
    from olmo_sparsity.data.task_batches import TaskPositions, task_of
    from olmo_sparsity.evaluate.exact_match import checked_grid, multiples_of_training_length
    from olmo_sparsity.tasks import make_task

    assert config.task.name is not None, "only runs of a task are measured"
    task = make_task(config.task.name, {**config.task.parameters, **(settings.parameters or {})})
    if task.vocabulary != task_of(config).vocabulary[: len(task.vocabulary)]:
        raise UserError(
            f"--parameters {settings.parameters} number the symbols in another way; leave them as they were trained"
        )
    lengths = settings.lengths or multiples_of_training_length(task)
    return task, checked_grid(TaskPositions(config), task, lengths, settings.ks)


def _measure_cells(
    unfinished: Path,
    asked: str,
    cells: list[Cell],
    samples: int,
    measure_cell: Callable[[Cell, Callable[[int], None]], LengthResult],
) -> list[LengthResult]:
    """A row for each cell; each is kept in ``unfinished``, whence a measurement of the same checksum goes on."""
    from olmo_sparsity.evaluate.exact_match import LengthResult
    from olmo_sparsity.util.files import read_json, write_json
    from olmo_sparsity.util.progress import progress

    kept = read_json(unfinished, "remove it") if unfinished.is_file() else {}
    rows = [LengthResult(**row) for row in kept["rows"]] if kept.get("asked") == asked else []
    done = len(rows) * samples
    with progress("exact match", len(cells) * samples, "samples", done=done) as advance:
        for cell in cells[len(rows) :]:
            rows.append(measure_cell(cell, advance))
            write_json(unfinished, {"asked": asked, "rows": [asdict(row) for row in rows]})
    return rows


def _refuse_to_replace(path: Path) -> None:
    """Raise `UserError` where a measurement is there; what is damaged may be replaced."""
    try:
        record = EXACT_MATCH.load(path)
    except UserError:
        return
    lengths, samples = (sorted({row[name] for row in record["rows"]}) for name in ("length", "samples"))
    raise UserError(
        f"{path} holds another measurement (step {record['step']}, {', '.join(map(str, samples))} samples of lengths "
        f"{', '.join(map(str, lengths))}, evaluation seed {record['evaluation_seed']}); give --out, or --overwrite"
    )


def _table(rows: list[LengthResult]) -> str:
    """A row for every length and k, without columns that do not apply; shares in per cent, with Wilson's interval."""
    import pandas as pd
    from scipy.stats import binomtest

    def cells(row: LengthResult) -> dict[str, str | None]:
        has_ids = row.teacher_forced_ids is not None
        wilson = binomtest(row.exact, row.samples).proportion_ci(method="wilson")
        exact = [100 * share for share in (row.exact / row.samples, wilson.low, wilson.high)]
        return {
            "length": f"{row.length:,}",
            "k": None if row.k is None else str(row.k),
            "samples": f"{row.samples:,}",
            "exact [%]": "{:.1f} [{:.1f}, {:.1f}]".format(*exact),
            "token": f"{row.wrong_token:,}",
            "id": f"{row.wrong_id:,}" if has_ids else None,
            "stop": f"{row.wrong_stop:,}",
            "tokens [%]": f"{100 * row.teacher_forced_tokens / row.response_tokens:.2f}",
            "ids [%]": f"{100 * (row.teacher_forced_ids or 0) / row.response_tokens:.2f}"
            if has_ids
            else None,
        }

    table = pd.DataFrame([cells(row) for row in rows]).dropna(axis="columns", how="all")
    legend = (
        "token, id, stop: what the first error is; tokens, ids: right where the true ones before are read"
    )
    return f"{table.to_string(index=False)}\n{legend}"
