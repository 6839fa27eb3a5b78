"""Train, and for synthetic tasks evaluate, a grid of runs: every combination of some settings.

examples:
  olmo-sparsity sweep configs/demo.yaml --grid seed=1,2,3 --out runs/seeds
  olmo-sparsity sweep configs/synthetic/scratchpad_parity.yaml --grid seed=1,2,3 \\
      --grid positions.scheme=pose,coupled,predicted --out runs/parity --jobs 2 \\
      --evaluate "--samples 200 --lengths 20,40" -- --max_duration=5000
  olmo-sparsity sweep configs/rope.yaml configs/alibi.yaml configs/nope.yaml --grid seed=1,2 --out runs/encodings
  olmo-sparsity sweep configs/synthetic/scratchpad_parity.yaml --out runs/ranges \\
      --grid 'task.parameters.train_length=[5,20],[5,10]' --dry-run
  olmo-sparsity sweep configs/base.yaml --grid seed=1,2,3,4 --out runs/base-seeds --slurm --jobs 2 \\
      --gpus-per-node 1 --time 24:00:00 --partition gpu

A value of --grid ends at a comma outside of brackets and is read as in a YAML file; null is none. What follows `--`
overrides the config of all cells, as for train. All of them are checked before the first one starts.

Each cell is a run folder, OUT/seed=1,positions.scheme=pose, that train --resume trains; where the config has a task,
exact_match measures it then, with the arguments in --evaluate. OUT/sweep.json lists the axes and the
cells, OUT/CELL/sweep.log has what a cell printed, and OUT/CELL/sweep.json says that it is finished, with its settings.

The same command goes on where it was: it skips what is finished, and resumes what is not. To add values to an axis,
give it the old ones and the new. A cell that fails leaves the others alone; the failures are listed at the end (exit
code 1). On Ctrl-C, SIGTERM or SIGUSR1 the running cells save first (exit code 85). One sweep at a time works in OUT.

With --slurm every cell is a job of an array, and the options are those of submit. A job that is preempted or
meets its time limit saves and goes on by itself.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from olmo_sparsity.cli import command_line, exact_match, show_log
from olmo_sparsity.sweep.slurm import (
    OPTIONS,
    Array,
    Job,
    add_slurm_options,
    common_values,
    plain_word,
    split_arguments,
    words,
)
from olmo_sparsity.util.arguments import Parser, out_folder, parse_settings, whole_number
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.result_files import EXACT_MATCH

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.sweep.grid import Cell, Sweep
    from olmo_sparsity.sweep.runner import Outcome


def main() -> int:
    """Check all cells, then print, submit or run them."""
    own, overrides = split_arguments(sys.argv[1:])
    parser = _parser()
    options = parser.parse_args(own)
    show_log("olmo_sparsity")
    if not options.slurm:
        _refuse_slurm_options(options, parser)
    evaluation = _evaluation(options.evaluate)

    from olmo_sparsity.sweep.grid import Sweep, make_cells, parse_axes, write_sweep
    from olmo_sparsity.util.lock import folder_lock
    from olmo_sparsity.util.provenance import current_commit

    sweep = Sweep(
        tuple(options.configs),
        parse_axes(options.grid),
        options.out,
        tuple(overrides),
        train=tuple(command_line("train")),
        evaluate=tuple(command_line("exact_match", ["--overwrite"])),  # where --evaluate has changed, say
        evaluation=evaluation,
    )
    cells = make_cells(sweep, options.only, partial(_check_evaluation, evaluation, here=not options.slurm))
    if evaluation and options.only is None and all(cell.evaluation is None for cell in cells):
        raise UserError(f"--evaluate: {', '.join(options.configs)} has no task to evaluate; leave it out")
    job = _slurm_job(options, sweep, len(cells)) if options.slurm else None
    if options.dry_run:
        for cell in [] if job else cells:
            print(" && ".join(map(words, cell.commands)) + ("  # finished" if cell.is_finished else ""))
        print(job.script if job else "", end="")
        return 0
    commit = current_commit()
    if options.only is not None:  # the whole sweep is listed already, and its other cells may be running
        return _run(cells, 1, commit)
    with folder_lock(sweep.out):
        write_sweep(sweep, cells, commit)
        if job is None:
            return _run(cells, options.jobs or 1, commit)
    print(job.submit()[1])
    return 0


def _run(cells: Sequence[Cell], jobs: int, commit: str) -> int:
    """Run what is not finished, and say how each cell ended; returns the exit code."""
    from olmo_sparsity.sweep.runner import run_cells
    from olmo_sparsity.util.progress import progress
    from olmo_sparsity.util.provenance import available_cores
    from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE

    todo = [cell for cell in cells if not cell.is_finished]
    jobs = min(jobs, len(todo))
    counts, failures = Counter(finished=len(cells) - len(todo)), []
    if counts["finished"]:
        print(f"{counts['finished']} of {len(cells)} cells are finished already", flush=True)
    threads = str(max(1, available_cores() // max(1, jobs)))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    shown = sys.stderr.isatty()  # elsewhere the lines of the cells say it all
    with progress("sweep", len(cells), "cells", done=counts["finished"], enabled=shown) as advance:

        def report(outcome: Outcome) -> None:
            counts[outcome.state] += 1
            if outcome.state != "running":
                counts["running"] -= 1
                print(f"[{counts['finished'] + counts['failed']}/{len(cells)}] {_line(outcome)}", flush=True)
            if outcome.state == "failed":
                failures.append(outcome)
            ended = outcome.state in ("finished", "failed")
            advance(int(ended), note=f"{counts['running']} running, {counts['failed']} failed")

        run_cells(todo, jobs=jobs, environment=environment, commit=commit, report=report)
    if failures:
        print(f"{len(failures)} of {len(cells)} cells failed:")
        for failure in failures:
            print(f"  {failure.cell.folder}: {failure.reason}")
    left = len(cells) - counts["finished"] - counts["failed"]
    if left:
        print(f"{left} of {len(cells)} cells are stopped or have not started; the same command goes on")
        return REQUEUE_EXIT_CODE
    return 1 if failures else 0


def _line(outcome: Outcome) -> str:
    """How a cell ended: its last loss and, of a task, its exact match."""
    try:
        parts = [outcome.state, *_numbers(outcome)]
    except (OSError, UserError) as error:  # a damaged file of one cell must not stop the others
        parts = [outcome.state, first_line(error)]
    if outcome.reason:
        parts.append(outcome.reason)
    return f"{outcome.cell.name}: {'; '.join(parts)}"


def _numbers(outcome: Outcome) -> list[str]:
    """The last loss and, of a finished task, its exact match at the shortest and longest length."""
    from olmo_sparsity.training.metrics import METRICS_NAME, read_metrics

    cell, parts = outcome.cell, []
    losses = [row for row in read_metrics(cell.folder / METRICS_NAME) if "loss_nats" in row]
    if losses:
        parts.append(f"loss {losses[-1]['loss_nats']:.4f} nats at step {losses[-1]['step']:,}")
    if outcome.state == "finished" and (cell.folder / EXACT_MATCH.name).is_file():
        counted: dict[int, Counter[str]] = {}
        for row in EXACT_MATCH.load(cell.folder)["rows"]:
            counted.setdefault(row["length"], Counter()).update(exact=row["exact"], samples=row["samples"])
        shares = {length: 100 * n["exact"] / n["samples"] for length, n in counted.items()}
        ends = [f"{shares[length]:.1f} % at {length}" for length in sorted({min(shares), max(shares)})]
        parts.append(f"exact match {', '.join(ends)}")
    return parts


def _slurm_job(options: argparse.Namespace, sweep: Sweep, cells: int) -> Job:
    """An array of one task for each cell."""
    if options.gpus_per_node > 1:
        raise UserError(
            f"--gpus-per-node {options.gpus_per_node}: a cell is one process and takes one GPU; give 1, or submit runs "
            "on several with submit train"
        )
    out = plain_word(sweep.out, "--out")
    command = command_line("sweep", [*sweep.configs, "--out", out])
    command += [f"--grid={text}" for text in options.grid]
    command += [f"--evaluate={options.evaluate}"] if options.evaluate else []
    values = {
        **common_values(options, sweep.out.resolve().name),
        "OUT": out,
        "CPUS": options.cpus,
        "ARRAY": str(Array(cells, options.jobs)),
        "SWEEP": words(command),
        "OVERRIDES": words(["--", *sweep.overrides]),
    }
    return Job("sweep", sweep.out, values)


def _evaluation(text: str) -> tuple[str, ...]:
    """The arguments of exact_match, checked by its own parser."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--evaluate {text}: {error}") from error
    if parse_settings(None, exact_match.ExactMatchSettings, ["CELL", *arguments]).out is not None:
        raise UserError("--evaluate: --out is the folder of each cell; leave it out")
    return arguments


def _check_evaluation(evaluation: Sequence[str], config: Config, *, here: bool) -> None:
    """Raise `UserError` for what exact_match would refuse after the training; ``here``: on this machine, too."""
    from olmo_sparsity.util.provenance import pick_device

    settings = parse_settings(None, exact_match.ExactMatchSettings, ["CELL", *evaluation])
    try:
        exact_match.planned(settings, config)
        if here:
            pick_device(settings.device)
    except UserError as error:
        raise UserError(f"--evaluate: {error}") from error


def _refuse_slurm_options(options: argparse.Namespace, parser: Parser) -> None:
    for name in OPTIONS:
        if getattr(options, name) != parser.get_default(name):
            raise UserError(f"--{name.replace('_', '-')} is for SLURM; add --slurm, or leave it out")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG", help="YAML file, or several to compare; overrides follow --"
    )
    group = parser.add_argument_group("the grid")
    group.add_argument(
        "--grid",
        action="append",
        required=True,
        metavar="KEY=VALUE,VALUE",
        help="an axis: a key of the config and its values; give one --grid for each",
    )
    group.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder of all cells")
    group.add_argument(
        "--jobs", type=whole_number, metavar="N", help="cells at a time (default: 1; with --slurm: no limit)"
    )
    group.add_argument("--evaluate", default="", metavar="'OPTIONS'", help="arguments of exact_match, quoted")
    group.add_argument(
        "--dry-run", action="store_true", help="print the commands, or with --slurm the job script"
    )
    how = group.add_mutually_exclusive_group()
    how.add_argument("--slurm", action="store_true", help="submit an array of jobs, one for each cell")
    how.add_argument(
        "--only",
        type=whole_number,
        metavar="I",
        help="run the I-th cell alone; what each job of the array does",
    )
    add_slurm_options(parser.add_argument_group("the jobs, with --slurm"))
    return parser
