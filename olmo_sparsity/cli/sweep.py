"""Train, and for synthetic tasks evaluate, a grid of runs: every combination of some settings.

examples:
  olmo-sparsity sweep configs/demo.yaml --grid seed=1,2,3 --out runs/seeds
  olmo-sparsity sweep configs/synthetic/scratchpad_parity.yaml --grid seed=1,2,3 \\
      --grid positions.scheme=pose,coupled,predicted --out runs/parity --jobs 2 \\
      --evaluate "--samples 200 --lengths 20,40" --max_duration=5000
  olmo-sparsity sweep configs/rope.yaml configs/alibi.yaml configs/nope.yaml --grid seed=1,2 --out runs/encodings
  olmo-sparsity sweep configs/synthetic/scratchpad_parity.yaml --out runs/ranges \\
      --grid 'task.parameters.train_length=[5,20],[5,10]' --dry-run

A value of --grid ends at a comma outside of brackets and is read as in a YAML file; null is none. Any other option
overrides the config of all cells, as for train. All of them are checked before the first one starts.

Each cell is a run folder, OUT/seed=1,positions.scheme=pose, that train --resume trains; where the config has a task,
exact_match measures it then, with the arguments in --evaluate. OUT/CELL/sweep.log has what they printed.

The same command goes on where it was: it leaves out what is finished, and resumes what is not. A cell that fails leaves
the others alone (exit code 1). On Ctrl-C, SIGTERM or SIGUSR1, and where its terminal closes, the running cells save
first (exit code 85); a second Ctrl-C kills them, and they go on from their last checkpoints.
Under SLURM every cell is a task of an array: olmo-sparsity submit sweep …
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from olmo_sparsity.cli import command_line, exact_match, show_log
from olmo_sparsity.util.arguments import Parser, out_folder, whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import EXACT_MATCH_NAME, last_line
from olmo_sparsity.util.provenance import available_cores
from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE, StopRequest

LOG_NAME = "sweep.log"
SECONDS_BETWEEN_LOOKS = 0.2
STOPPED = "stopped"
"""What is printed of a cell that the same command goes on with."""


class Cell(NamedTuple):
    """One run of a sweep, by the name of its folder."""

    folder: Path
    commands: tuple[tuple[str, ...], ...]
    """The words of the training and, where the config has a task, of its evaluation, which is to follow it."""
    is_finished: bool = False
    """Whether it is trained to the end, and measured with the present options."""
    corpus: str | None = None
    """Folder of the prepared text that it reads, if any."""

    @property
    def line(self) -> str:
        """The commands, as a shell takes them."""
        return " && ".join(map(shlex.join, self.commands))


def main() -> int:
    """Check all cells, then print or run them."""
    show_log("olmo_sparsity")
    options, cells = plan(sys.argv[1:])
    if options.dry_run:
        for cell in cells:
            print(f"{cell.line}  # finished" if cell.is_finished else cell.line)
        return 0
    left = [cell for cell in cells if not cell.is_finished]
    if len(left) < len(cells):
        print(f"{len(cells) - len(left)} of {len(cells)} cells are finished already", flush=True)
    return run_cells(left, options.jobs or 1)


def plan(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Cell]]:
    """The options and the cells, the last axis fastest.

    Raises `UserError` for the first cell whose config is refused, that cannot be evaluated with the options, or whose
    folder holds a run of other settings.
    """
    # A -- in front of the overrides is allowed: they are distinguished from the options by their names.
    options, overrides = _parser().parse_known_args([word for word in arguments if word != "--"])
    axes = dict(map(_axis, options.grid))
    if len(axes) < len(options.grid):
        raise UserError("--grid: a key is given twice; put all of its values into one --grid")
    cells = []
    grid = [*itertools.product(options.configs, *axes.values())]
    if options.only is not None and options.only > len(grid):
        raise UserError(f"--only {options.only}: there are {len(grid)} cells; give one of them")
    for path, *values in grid[options.only - 1 : options.only] if options.only else grid:
        settings = dict(zip(axes, values, strict=True))
        named = {"config": Path(path).stem, **settings} if len(options.configs) > 1 else settings
        # without what is special to a shell, a path or YAML: 5-20 for [5, 20]
        words = (f"{key}={'-'.join(re.findall('[A-Za-z0-9_.+-]+', text))}" for key, text in named.items())
        name = ",".join(words)
        try:
            cell_overrides = [*overrides, *(f"--{key}={value}" for key, value in settings.items())]
            cells.append(_cell(options, options.out / name, path, cell_overrides))
        except UserError as error:
            message, *problems = error.args
            raise UserError(
                f"no cell is started, for one cannot run: {name}: {message}", *problems
            ) from error
    if len({cell.folder for cell in cells}) < len(cells):
        raise UserError("two cells would share a folder; put them into two sweeps")
    return options, cells


def _cell(options: argparse.Namespace, folder: Path, path: str, overrides: Sequence[str]) -> Cell:
    from olmo_sparsity.config.load import load_config
    from olmo_sparsity.evaluate.exact_match_record import record_is_of
    from olmo_sparsity.training.check import check_run
    from olmo_sparsity.training.resume import is_finished, starting_checkpoint

    where = (f"--save_folder={folder}", f"--run_name={options.out.resolve().name}-{folder.name}")
    config = load_config(path, [*where, *overrides], warn=False)
    if config.save_folder != str(folder):
        raise UserError(
            f"save_folder is {config.save_folder}, not {folder}; leave it to the sweep, and give --out a plain name"
        )
    commands = [command_line("train", [path, "--resume", *where, *overrides])]
    last = starting_checkpoint(config, resume=True)
    if last is None:
        check_run(config, 1)
    finished = last is not None and is_finished(config, last)
    # where --evaluate has changed, the earlier measurement is replaced
    words = [str(folder), "--overwrite", *shlex.split(options.evaluate)]
    evaluation = exact_match.parser().parse_args(words)
    if evaluation.out is not None:
        raise UserError(
            f"--evaluate: --out {evaluation.out} is one folder for all cells; leave it to the sweep"
        )
    if config.task.name is not None:
        commands.append(command_line("exact_match", words))
        task, sizes = exact_match.planned(evaluation, config)
        record = folder / EXACT_MATCH_NAME
        if finished and last is not None:
            finished = record_is_of(
                record, last, task, sizes, samples=evaluation.samples, seed=evaluation.seed
            )
    corpus = config.corpus.path if config.task.name is None else None
    return Cell(folder, tuple(map(tuple, commands)), finished, corpus)


def run_cells(cells: Sequence[Cell], jobs: int) -> int:
    """Run ``jobs`` cells at a time and print how each ends; returns the exit code.

    On Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP no other cell starts, the running ones get SIGTERM, and this returns when
    they have saved. Two sweeps cannot train in one folder: the run locks it.
    """
    threads = str(max(1, available_cores() // max(1, min(jobs, len(cells)))))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    waiting = list(cells)
    running = dict[Cell, _Running]()
    codes = list[int]()
    # A terminal that closes sends SIGHUP to the sweep, and not to the cells, which are in groups of their own.
    with StopRequest(signal.SIGHUP) as stop:
        try:
            while running or (waiting and not stop.received):
                while waiting and len(running) < jobs and not stop.received:
                    cell = waiting.pop(0)
                    running[cell] = _Running(_start(cell, 0, environment), 0)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if stop.received and running:
                    names = ", ".join(cell.folder.name for cell in running)
                    said = f"{stop.received}: waiting until these have saved: {names}"
                    print(said, file=sys.stderr, flush=True)
                    _stop(running.values())
                ended = {cell: state for cell, state in running.items() if state.process.poll() is not None}
                for cell, (process, number) in ended.items():
                    del running[cell]
                    code, is_last = process.returncode, number + 1 == len(cell.commands)
                    if code == 0 and not is_last and not stop.received:
                        running[cell] = _Running(_start(cell, number + 1, environment), number + 1)
                        continue
                    end = _end_of(cell, code, is_last)
                    if end != STOPPED:
                        codes.append(code)
                    print(f"[{len(codes)}/{len(cells)}] {cell.folder.name}: {end}", flush=True)
        finally:  # none goes on running, whatever happened here
            _stop(running.values())
    if left := len(cells) - len(codes):
        print(f"{left} of {len(cells)} cells are stopped or have not started; the same command goes on")
        return REQUEUE_EXIT_CODE
    return int(any(codes))


class _Running(NamedTuple):
    """What runs of a cell: its ``number``-th command, from 0."""

    process: subprocess.Popen[bytes]
    number: int


def _end_of(cell: Cell, code: int, is_last: bool) -> str:
    """In words, how a cell ended whose command, maybe its last, ended with this code."""
    if code == 0:
        return "finished" if is_last else STOPPED
    if code in (REQUEUE_EXIT_CODE, -signal.SIGTERM, -signal.SIGUSR1):
        return STOPPED  # its run has saved, or ended before it listened to signals
    how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
    return f"failed {how}: {last_line(cell.folder / LOG_NAME)}"


def _start(cell: Cell, number: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start one of the cell's commands, which prints into its log."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    with open(cell.folder / LOG_NAME, "ab", buffering=0) as log:
        if number == 0:
            log.write(f"$ {cell.line}\n".encode())
        # No shell: one that traps a signal loses it in a child that it has forked and that has not become the command
        # yet, and `_stop` would wait for ever.
        return subprocess.Popen(
            cell.commands[number],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the sweep alone, which passes it on
        )


def _stop(running: Collection[_Running]) -> None:
    """Let cells save, and wait for them; where something breaks off the wait, such as a second Ctrl-C, kill them."""
    try:
        _send(signal.SIGTERM, running)
        for cell in running:
            cell.process.wait()
    except BaseException:
        _send(signal.SIGKILL, running)
        for cell in running:
            cell.process.wait()
        raise


def _send(number: signal.Signals, running: Collection[_Running]) -> None:
    for cell in running:
        with suppress(ProcessLookupError):
            os.killpg(cell.process.pid, number)


def _axis(text: str) -> tuple[str, list[str]]:
    """Key and values of ``key=1,2`` or ``key=[5,20],[5,10]``: commas inside brackets belong to a value."""
    key, _, listed = text.partition("=")
    depths = itertools.accumulate((sign in "[{") - (sign in "]}") for sign in listed)
    marked = (
        "\0" if sign == "," and depth == 0 else sign for sign, depth in zip(listed, depths, strict=True)
    )
    values = [value.strip() for value in "".join(marked).split("\0")]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", key) or not all(values):
        raise UserError(
            f"--grid {text}: write a key of the config and its values, such as seed=1,2 or seed=null"
        )
    return key, values


def _parser() -> Parser:
    parser = Parser(prog="olmo-sparsity sweep", description=__doc__)
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG", help="YAML file to train from; give more to compare them"
    )
    add = parser.add_argument
    grid = "a setting and its values; give it once for each setting: all combinations are trained"
    add("--grid", action="append", required=True, metavar="KEY=VALUE,VALUE", help=grid)
    add(
        "--out",
        type=out_folder,
        required=True,
        metavar="DIR",
        help="folder to write the folders of all cells to",
    )
    jobs = "how many cells are trained at the same time (default: 1; under SLURM no limit)"
    add("--jobs", type=whole_number, metavar="N", help=jobs)
    evaluate = "options of exact_match for all cells, in quotes (default: those of exact_match)"
    add("--evaluate", default="", metavar="'OPTIONS'", help=evaluate)
    add(
        "--only",
        type=whole_number,
        metavar="I",
        help="run the I-th cell alone, as a task of an array does (default: all)",
    )
    add("--dry-run", action="store_true", help="print the commands and run none")
    return parser
