"""The one error that is meant for the user, and how a command ends: with one clear line for what a user can mend."""

from __future__ import annotations

import errno
import os
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


def run_script(main: Callable[[], int | None]) -> None:
    """Run a command's ``main`` and exit: 0 when done, 1 with one line on bad input, 130 on Ctrl-C.

    Only errors that a user can mend become one line; any other keeps its traceback; one of many
    processes says under it where to look.
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
            if not is_of_many:
                raise
            traceback.print_exc()
            message = "if another process ended first, its own message says why; go on with --resume"
        rank = f"rank {os.environ['RANK']}: " if is_of_many else ""
        print(f"error: {rank}{message}", file=sys.stderr)
        code = 1
    if "RANK" in os.environ:
        # The threads of a process group may abort or stall an interpreter that is tearing down, and a launcher would
        # take the finished run for a failed one. Everything is written by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _line_of(error: Exception) -> str:
    """What is printed of an error that a user can mend, in place of a traceback; empty for any other."""
    olmo = sys.modules.get("olmo.exceptions")  # importing it would load torch
    if isinstance(error, UserError) or (olmo and isinstance(error, olmo.OLMoConfigurationError)):
        return str(error)
    if isinstance(error, BrokenPipeError):  # standard output is no longer read, as after ``| head``
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
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
