"""How a script ends: with one clear line for what a user can mend, and with an exit code that says how it went."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable

from olmo_sparsity.util.errors import NO_ROOM, UserError, first_line

OF_TRAINING = ("olmo", "datasets", "accelerate", "deepspeed", "omegaconf", "httpx")
"""What `pip install olmo-sparsity` leaves out and its extra ``train`` brings."""


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's ``main`` and exit: 0 when done, 1 with one line on bad input, 130 on Ctrl-C.

    Only errors that a user can mend become one line; any other keeps its traceback, with a remedy under it if known.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
        _leave(code)
    except KeyboardInterrupt:
        kept = "files that were written are kept; the same command starts again or goes on"
        print(f"interrupted: {kept}", file=sys.stderr)
        _leave(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            _leave_unread()
        message = _line_of(error)
        if not message:
            message = _remedy_of(error)
            if not message:
                raise
            traceback.print_exc()
    rank = f"rank {os.environ['RANK']}: " if _is_one_of_several() else ""
    print(f"error: {rank}{message}", file=sys.stderr)
    _leave(1)


def _is_one_of_several() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _line_of(error: Exception) -> str:
    """What is printed of an error that a user can mend, in place of a traceback; empty for any other."""
    olmo = sys.modules.get("olmo.exceptions")  # importing it would load torch
    if isinstance(error, UserError) or (olmo and isinstance(error, olmo.OLMoConfigurationError)):
        return str(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:  # "File too large", the system may say
        return f"the disk is full, or a quota is reached ({first_line(error)})"
    # pyarrow has the name of the file in its text alone
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.filename):
        return first_line(error)
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name in OF_TRAINING:
        return f"this needs {name}, which is not installed; run: pip install 'olmo-sparsity[train]'"
    return ""


def _remedy_of(error: Exception) -> str:
    """What stands under the traceback of an error that is no bad input; empty where nothing is known."""
    of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if of_torch or isinstance(error, MemoryError):
        return "too little memory; smaller batches need less (training: --device_train_microbatch_size)"
    if _is_one_of_several():
        return "if another process ended first, its own message says why; what was saved is whole, go on with --resume"
    return ""


def _leave(code: int) -> None:
    """Exit; one process of several does so at once.

    The threads of a process group may abort or stall an interpreter that is tearing down, and a launcher would take
    the finished run for a failed one. Everything is written by now.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _leave_unread() -> None:
    """Exit if standard output is no longer read, as after ``| head``; else return."""
    printed = select.poll()
    printed.register(sys.stdout.fileno(), 0)
    if printed.poll(0):
        # for the interpreter flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(1)
