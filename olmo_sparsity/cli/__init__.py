"""The commands: ``olmo-sparsity NAME`` runs them, and in a checkout so does the script of that name."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any, cast

from olmo_sparsity.util.background import WANDB_THREAD
from olmo_sparsity.util.errors import UserError, exit_code_of, first_line, is_full_disk, is_out_of_memory
from olmo_sparsity.util.extras import EXTRA_OF, missing_module
from olmo_sparsity.util.files import shipped

PROGRAM = "olmo-sparsity"


@dataclass(frozen=True)
class Command:
    """One command: what runs it is imported when it is called."""

    function: str
    """``module:function``."""
    about: str
    check: str = ""
    """``module:function`` that returns the command's arguments, and raises `UserError` for those that it refuses before
    its work: `submit` calls it before a job waits."""


COMMANDS = {
    "train": Command("olmo_sparsity.cli.train:main", "train a model from a YAML config"),
    "prepare_data": Command(
        "olmo_sparsity.cli.prepare_data:main", "tokenize text for training and measuring"
    ),
    "sweep": Command(
        "olmo_sparsity.cli.sweep:main", "train, and for synthetic tasks evaluate, a grid of runs"
    ),
    "submit": Command("olmo_sparsity.cli.submit:main", "submit a command to SLURM"),
    "export_hf": Command(
        "olmo_sparsity.cli.export_hf:main", "write a checkpoint as a folder for transformers"
    ),
    "measure": Command(
        "analysis.cli:run_measure",
        "how much far context helps, and what k far tokens recover (Eq. 20)",
        check="analysis.cli:checked_measure",
    ),
    "figure2": Command("analysis.cli:run_figure2", "print and draw what was measured"),
    "eviction": Command(
        "analysis.cache_eviction.command:main", "which eviction policy keeps what predictions need"
    ),
    "xray": Command("analysis.cli:run_xray", "which earlier tokens every token of a text needs"),
    "verify": Command("analysis.cli:run_verify", "measure targets of a result again"),
    "length": Command("analysis.probes.length:main", "loss by position, at and beyond the training length"),
    "needle": Command("analysis.probes.needle:main", "needles in held-out text"),
    "longppl": Command("analysis.probes.longppl:main", "perplexity on key tokens (LongPPL)"),
    "exact_match": Command("olmo_sparsity.cli.exact_match:main", "how often a run answers its task exactly"),
    "figure1": Command("analysis.synthetic.figure1:main", "exact match by length of synthetic tasks"),
}


def main() -> None:
    """``olmo-sparsity NAME …``: run a command; without one, list them all."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"{PROGRAM} {version(PROGRAM)}")
    elif (module := name.replace("-", "_")) in COMMANDS:
        sys.argv = [f"{PROGRAM} {module}", *arguments]
        run(module)
    else:
        alike = get_close_matches(module, COMMANDS, n=1)
        hint = f"did you mean {alike[0]}? See" if alike else "see"
        print(f"error: there is no command {name!r}; {hint} {PROGRAM} --help", file=sys.stderr)
        sys.exit(2)


def run(name: str) -> None:
    """Run the command of this name with the arguments of the process, and leave with its exit code.

    Before PyTorch is imported: next to other work its threads would spin where they wait, and slow down both.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # results/benchmarks has the table
    run_script(lambda: imported(COMMANDS[name].function)())


def imported(name: str) -> Callable[..., Any]:
    """The function of a ``module:function`` in the table of commands."""
    module, function = name.split(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), function))


def run_script(main: Callable[[], int | None]) -> None:
    """Run a command's ``main`` and exit: 0 when done, 1 with one line on bad input, 130 on Ctrl-C.

    Only errors that a user can fix become one line; any other keeps its traceback. Under a launcher a line below it
    says where to look, and the exit code whether another start may help (`exit_code_of`).
    """
    try:
        code = main() or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(
            "interrupted: files that were written are kept; the same command starts again or goes on",
            file=sys.stderr,
        )
        code = 130
    except Exception as error:
        is_of_many = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
        message = _line_of(error)
        if not message:
            if not _leaves_at_once():
                raise
            traceback.print_exc()
            if is_out_of_memory(error):
                message = "out of memory; lower device_train_microbatch_size, or set activation_checkpointing"
            elif is_of_many:
                message = "if another process ended first, its own message says why; go on with --resume"
            else:
                message = "not expected, see above; go on with --resume"
        rank = f"rank {os.environ['RANK']}: " if is_of_many else ""
        print(f"error: {rank}{message}", file=sys.stderr)
        code = exit_code_of(error)
    if _leaves_at_once():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _leaves_at_once() -> bool:
    """Whether the process ends without what libraries do at the end of one; everything is written by then.

    The threads of a process group may abort or stall an interpreter that is tearing down, and a launcher would take the
    finished run for a failed one. W&B, where it was given up, would wait for a server that is silent, for days.
    """
    return "RANK" in os.environ or any(thread.name == WANDB_THREAD for thread in threading.enumerate())


def _line_of(error: Exception) -> str:
    """What is printed of an error that a user can fix, in place of a traceback; empty for any other."""
    olmo = sys.modules.get("olmo.exceptions")  # importing it would load torch
    if isinstance(error, UserError) or (olmo and isinstance(error, olmo.OLMoConfigurationError)):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        # standard output is no longer read, as after ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return first_line(error)
    if is_full_disk(error):
        return f"the disk is full, or a quota is reached ({first_line(error)})"
    # pyarrow has the name of the file in its text alone
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.filename):
        return first_line(error)
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return missing_module(name, EXTRA_OF[name]) if name in EXTRA_OF else ""


def show_log(*packages: str) -> None:
    """Print warnings to standard error, and what these packages tell on their way.

    Called before PyTorch is imported: what its C++ warns of is a page of addresses, and an error follows it.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    for package in packages:
        logging.getLogger(package).setLevel(logging.INFO)


def command_line(name: str, arguments: Sequence[object] = ()) -> list[str]:
    """The words that start a command in a process of its own, from a checkout or an installed package alike.

    ``-P`` keeps a folder of the user's that happens to be called olmo_sparsity from being imported instead.
    """
    return [sys.executable, "-P", "-m", "olmo_sparsity.cli", name, *map(str, arguments)]


def _help() -> str:
    commands = "\n".join(f"  {name:<12}  {command.about}" for name, command in COMMANDS.items())
    return f"""usage: {PROGRAM} COMMAND …

Which few far-away tokens does each prediction of a language model need?

commands:
{commands}

example: {PROGRAM} train configs/demo.yaml; {PROGRAM} COMMAND --help shows what a command takes.
configs/…, docs/… and slurm/… are in {shipped(".")}"""
