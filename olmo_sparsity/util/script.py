"""How a script ends: with one clear line for what a user can mend, and with an exit code that says how it went."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable

from olmo_sparsity.util.errors import NO_ROOM, UserError, first_line

OF_TRAINING = ("olmo", "datasets", "accelerate", "deepspeed", "omegaconf", "httpx")
"""What `pip install olmo-sparsity` leaves out and its extra ``train`` brings."""
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's ``main`` and exit: 0 when done, 1 with one line on bad input, 130 on Ctrl-C.

    Only errors that a user can mend become one line; any other keeps its traceback, with a remedy under it if known.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
        _leave(code)
    except _user_errors() as error:
        message = str(error)
    except BrokenPipeError:
        _leave_unread()
        raise
    except KeyboardInterrupt:
        kept = "files that were written are kept; the same command starts again or goes on"
        print(f"interrupted: {kept}", file=sys.stderr)
        _leave(130)
    except Exception as error:
        message = _line_of(error) if isinstance(error, OSError) else _absent(error)
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


def _absent(error: Exception) -> str:
    """One line for a package of training that is not installed; empty for any other error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in OF_TRAINING:
        return ""
    return f"this needs {name}, which is not installed; run: pip install 'olmo-sparsity[train]'"


def _remedy_of(error: Exception) -> str:
    """What stands under the traceback of an error that is no bad input; empty where nothing is known."""
    of_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    if of_torch or isinstance(error, MemoryError):
        return "too little memory; smaller batches need less (training: --device_train_microbatch_size)"
    if _is_one_of_several():
        return (
            "if another process ended first, its own message says why (training: error-rank*.txt in the run's folder); "
            "what was saved is whole, go on with --resume"
        )
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
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for the interpreter flushes once more
        _leave(1)


def _user_errors() -> tuple[type[BaseException], ...]:
    """Errors that become one line: ours, and OLMo's where OLMo is loaded (importing it would load torch)."""
    olmo = sys.modules.get("olmo.exceptions")
    return (UserError, olmo.OLMoConfigurationError) if olmo else (UserError,)


def _line_of(error: OSError) -> str:
    """One line for what the system refused, with its remedy; empty for what no user can mend.

    Nothing half-written is left behind: files are renamed when whole.
    """
    name = error.filename
    if error.errno in NO_ROOM:
        where = f" (writing {name})" if name else ""
        return f"the disk is full, or a quota is reached{where}; make room and run the same command again"
    if error.errno in _NO_PERMISSION:
        # pyarrow says it in its text
        which = f"for {name} ({error.strerror})" if name else f"({first_line(error)})"
        return f"no permission {which}; change its mode, or give another place"
    if name is None or error.errno is None:
        return ""
    remedies = {
        errno.ENOENT: "it was moved or removed; check the path and run the same command again",
        errno.EISDIR: "name a file, or remove the folder yourself",
        errno.ENOTDIR: "a file stands where a folder is needed; remove it, or give another place",
        errno.EEXIST: "a file stands where a folder is needed; remove it, or give another place",
    }
    return f"{name}: {error.strerror}; {remedies.get(error.errno, 'check the path and the file system')}"
