"""The one error that is meant for the user, and the first line and the exit code of any other.

A job decides by the exit code whether another start may help: `slurm/train.sbatch` tries again after
`FAILED_EXIT_CODE` and after a signal.
"""

from __future__ import annotations

import errno
import sys

BAD_INPUT_EXIT_CODE = 1
"""Another start would end in the same way: the user has to change something."""
OUT_OF_MEMORY_EXIT_CODE = 12
"""Memory did not suffice, of a GPU or of the machine: the number of ENOMEM."""
FAILED_EXIT_CODE = 70
"""Any other error, which may be gone the next time: a network, a file system, a machine; EX_SOFTWARE of sysexits.h."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk or quota, a file that is too large."""
_PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.EINTR,
    errno.EAGAIN,
)
"""What a network file system says while it is not well."""
_SAID_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
)
"""Where no error type says it: the CUDA driver, NCCL, cuBLAS, cuDNN, PyTorch on a CPU."""


class UserError(ValueError):
    """Bad input. The message is one line that names what is wrong and the remedy; ``problems`` each have another."""

    def __init__(self, message: str, *problems: str):
        super().__init__(message, *problems)

    def __str__(self) -> str:
        # the name of a file may have a line break
        return "\n  ".join(text.replace("\n", r"\n") for text in self.args)


class OtherRankFailed(UserError):
    """Another rank failed, so this one fails too, with the same exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class NotFinite(UserError):
    """A loss or a gradient is not finite: in all ranks at once, for they have the same sums."""


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with this error: one of the three above."""
    if isinstance(error, OtherRankFailed):
        return error.exit_code
    cause = error.__cause__ if isinstance(error, UserError) else error
    if isinstance(cause, OSError) and cause.errno in _PASSING:
        return FAILED_EXIT_CODE
    if isinstance(error, UserError) or is_full_disk(error):
        return BAD_INPUT_EXIT_CODE
    if is_out_of_memory(error):
        return OUT_OF_MEMORY_EXIT_CODE
    if isinstance(error, OSError):
        # EPIPE: standard output is no longer read
        is_of_user = isinstance(error, PermissionError) or error.filename or error.errno == errno.EPIPE
        return BAD_INPUT_EXIT_CODE if is_of_user else FAILED_EXIT_CODE
    olmo = sys.modules.get("olmo.exceptions")  # importing it would load torch
    is_of_olmo = olmo is not None and isinstance(error, olmo.OLMoConfigurationError)
    return BAD_INPUT_EXIT_CODE if is_of_olmo or isinstance(error, ImportError) else FAILED_EXIT_CODE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, of a GPU or of the machine."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID_OF_MEMORY)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_full_disk(error: BaseException) -> bool:
    """Whether a file could not grow: the disk is full, or a quota or limit is reached."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # Its library has the number of the system's error in the text alone; importing it here would load more.
    return type(error).__name__ == "SafetensorError" and any(
        f"(os error {code})" in str(error) for code in _NO_ROOM
    )
