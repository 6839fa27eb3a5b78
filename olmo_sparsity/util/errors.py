"""The one error that is meant for the user, and how a command ends: with one clear line for what a user can mend."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Callable

OF_TRAINING = ("olmo", "datasets", "accelerate", "deepspeed", "omegaconf", "httpx")
"""What `pip install olmo-sparsity` leaves out and its extra ``train`` brings."""


class UserError(ValueError):
    """Bad input. The message is one line that names what is wrong and the remedy."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def hidden_os_error(error: Exception, path: object) -> OSError | None:
    """The system error that a library written in Rust names in its text alone; None where it names none."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else None


def run_script(main: Callable[[], int | None]) -> None:
    """Run a command's ``main`` and exit: 0 when done, 1 with one line on bad input, 130 on Ctrl-C.

    Only errors that a user can mend become one line; any other keeps its traceback, with a remedy under it if known.
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
        message = _line_of(error)
        if not message:
            message = _remedy_of(error)
            if not message:
                raise
            traceback.print_exc()
        rank = f"rank {os.environ['RANK']}: " if _is_of_many_processes() else ""
        print(f"error: {rank}{message}", file=sys.stderr)
        code = 1
    if "RANK" in os.environ:
        # The threads of a process group may abort or stall an interpreter that is tearing down, and a launcher would
        # take the finished run for a failed one. Everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_of_many_processes() -> bool:
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def _line_of(error: Exception) -> str:
    """What is printed of an error that a user can mend, in place of a traceback; empty for any other."""
    olmo = sys.modules.get("olmo.exceptions")  # importing it would load torch
    if isinstance(error, UserError) or (olmo and isinstance(error, olmo.OLMoConfigurationError)):
        return str(error)
    if isinstance(error, BrokenPipeError):  # standard output is no longer read, as after ``| head``
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for the interpreter flushes once more
        return first_line(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
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
    if _is_of_many_processes():
        return "if another process ended first, its own message says why; what was saved is whole, go on with --resume"
    return ""
