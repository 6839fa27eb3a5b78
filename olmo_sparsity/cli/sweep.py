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
the others alone (exit code 1). On Ctrl-C, SIGTERM or SIGUSR1 the running cells save first (exit code 85).
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_sparsity.cli import command_line, exact_match, show_log
from olmo_sparsity.util.arguments import Parser, out_folder, whole_number
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import EXACT_MATCH_NAME, last_line
from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE, StopRequest

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config

LOG_NAME = "sweep.log"
SECONDS_BETWEEN_LOOKS = 0.2
_STOPPED = (REQUEUE_EXIT_CODE, -signal.SIGTERM, -signal.SIGUSR1)
"""Exit codes of a shell whose run saved, or that ended before it listened to signals."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    """Of its folder in the sweep's."""
    config: Config
    command: str
    """For a shell: the training and, where the config has a task, its evaluation."""
    evaluation: argparse.Namespace
    """Arguments of exact_match."""

    @property
    def folder(self) -> Path:
        return Path(self.config.save_folder)

    @property
    def is_finished(self) -> bool:
        """Whether it is trained to the end, and measured as is asked for now.

        Raises `UserError` where the folder holds a run of other settings.
        """
        from olmo_sparsity.evaluate.records import record_is_of
        from olmo_sparsity.training.resume import is_finished, starting_checkpoint

        checkpoint = starting_checkpoint(self.config, resume=True)
        if checkpoint is None or not is_finished(self.config, checkpoint):
            return False
        if self.config.task.name is None:
            return True
        task, cells = exact_match.planned(self.evaluation, self.config)
        path, how = (self.evaluation.out or self.folder) / EXACT_MATCH_NAME, self.evaluation
        return record_is_of(path, checkpoint, task, cells, samples=how.samples, seed=how.seed)


def main() -> int:
    """Check all cells, then print or run them."""
    show_log("olmo_sparsity")
    options, cells = plan(sys.argv[1:])
    finished = [cell.name for cell in cells if cell.is_finished]
    if options.dry_run:
        for cell in cells:
            print(cell.command + "  # finished" * (cell.name in finished))
        return 0
    if finished:
        print(f"{len(finished)} of {len(cells)} cells are finished already", flush=True)
    return run_cells([cell for cell in cells if cell.name not in finished], options.jobs or 1)


def plan(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Cell]]:
    """The options and the cells, the last axis fastest.

    Raises `UserError` for the first cell whose config is refused, or cannot be evaluated as is asked.
    """
    # A -- in front of the overrides is allowed: they are told from the options by their names.
    options, overrides = _parser().parse_known_args([word for word in arguments if word != "--"])
    axes = dict(map(_axis, options.grid))
    if len(axes) < len(options.grid):
        raise UserError("--grid: a key is given twice; put all of its values into one --grid")
    cells = []
    grid = [*itertools.product(options.configs, *axes.values())]
    for path, *values in grid[options.only - 1 : options.only] if options.only else grid:
        named = [("config", Path(path).stem)] if len(options.configs) > 1 else []
        name = ",".join(f"{key}={_plain(text)}" for key, text in [*named, *zip(axes, values, strict=True)])
        settings = [f"--{key}={value}" for key, value in zip(axes, values, strict=True)]
        try:
            cells.append(_make_cell(options, name, path, [*overrides, *settings]))
        except UserError as error:
            raise UserError(f"no cell is started, for one cannot run: {name}: {error}") from error
    if len({cell.name for cell in cells}) < len(cells):
        raise UserError("two cells would share a folder; put them into two sweeps")
    return options, cells


def run_cells(cells: Sequence[Cell], jobs: int) -> int:
    """Run ``jobs`` cells at a time and print how each ends; returns the exit code.

    On Ctrl-C, SIGTERM and SIGUSR1 no other cell starts, the running ones get SIGTERM, and this returns when they have
    saved. Two sweeps cannot train in one folder: the run locks it.
    """
    from olmo_sparsity.util.provenance import available_cores

    threads = str(max(1, available_cores() // max(1, min(jobs, len(cells)))))
    environment = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", **os.environ}
    waiting, running = list(cells), dict[str, subprocess.Popen[bytes]]()
    finished, failed, is_stopping = 0, 0, False
    with StopRequest() as stop:
        try:
            while running or (waiting and not stop.received):
                while waiting and len(running) < jobs and not stop.received:
                    cell = waiting.pop(0)
                    running[cell.name] = _start(cell, environment)
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if stop.received and not is_stopping:
                    is_stopping = True
                    _terminate(running.values())
                for cell in cells:
                    if cell.name not in running or (code := running[cell.name].poll()) is None:
                        continue
                    del running[cell.name]
                    end = "stopped"
                    if code not in _STOPPED:
                        finished, failed = finished + (code == 0), failed + (code != 0)
                        log = cell.folder / LOG_NAME
                        end = f"failed with exit code {code}: {last_line(log)}" if code else "finished"
                    print(f"[{finished + failed}/{len(cells)}] {cell.name}: {end}", flush=True)
        finally:  # none is left behind, whatever happened here
            _terminate(running.values())
            for process in running.values():
                process.wait()
    if left := len(cells) - finished - failed:
        print(f"{left} of {len(cells)} cells are stopped or have not started; the same command goes on")
        return REQUEUE_EXIT_CODE
    return 1 if failed else 0


def _start(cell: Cell, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a shell with the cell's commands, which print into its log."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    with open(cell.folder / LOG_NAME, "ab") as log:
        log.write(f"$ {cell.command}\n".encode())
        log.flush()
        # The shell ends with this code once the command has saved that gets the same signal, and starts no other.
        script = f"trap 'exit {REQUEUE_EXIT_CODE}' TERM USR1; {cell.command}"
        return subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,  # Ctrl-C in a terminal is for the sweep alone, which passes it on
        )


def _terminate(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def _make_cell(options: argparse.Namespace, name: str, path: str, overrides: Sequence[str]) -> Cell:
    from olmo_sparsity.config.load import load_config

    folder = options.out / name
    where = (f"--save_folder={folder}", f"--run_name={options.out.resolve().name}-{name}")
    config = load_config(path, [*where, *overrides], warn=False)
    if config.save_folder != str(folder):
        raise UserError(
            f"save_folder is {config.save_folder}, not {folder}; leave it to the sweep, and give --out a plain name"
        )
    command = shlex.join(command_line("train", [path, "--resume", *where, *overrides]))
    # where --evaluate has changed, the earlier measurement is replaced
    words = [str(folder), "--overwrite", *shlex.split(options.evaluate)]
    evaluation = exact_match.parser().parse_args(words)
    if config.task.name is not None:
        exact_match.planned(evaluation, config)
        command += f" && {shlex.join(command_line('exact_match', words))}"
    return Cell(name, config, command, evaluation)


def _axis(text: str) -> tuple[str, list[str]]:
    """Key and values of ``key=1,2`` or ``key=[5,20],[5,10]``: commas inside brackets belong to a value."""
    key, _, rest = text.partition("=")
    values, depth = [""], 0
    for character in rest:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    values = [value.strip() for value in values]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", key) or not all(values):
        raise UserError(
            f"--grid {text}: write a key of the config and its values, such as seed=1,2 or seed=null"
        )
    return key, values


def _plain(text: str) -> str:
    """``text`` without characters that are special to a shell, a path or YAML: 5-20 for [5, 20]."""
    return "-".join(filter(None, re.split(r"[^\w.+-]+", text, flags=re.ASCII)))


def _parser() -> Parser:
    parser = Parser(prog="olmo-sparsity sweep", description=__doc__)
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML file, or several to compare")
    add = parser.add_argument
    add("--grid", action="append", required=True, metavar="KEY=VALUE,VALUE", help="one for each axis")
    add("--out", type=out_folder, required=True, metavar="DIR", help="folder of all cells")
    add("--jobs", type=whole_number, metavar="N", help="cells at a time (default: 1; under SLURM: no limit)")
    add("--evaluate", default="", metavar="'OPTIONS'", help="arguments of exact_match, quoted")
    add("--only", type=whole_number, metavar="I", help="run the I-th cell alone, as a task of an array does")
    add("--dry-run", action="store_true", help="print the commands")
    return parser
