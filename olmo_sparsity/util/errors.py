"""The one error that is meant for the user, and the first line of any other."""

from __future__ import annotations

import errno

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Bad input. The message is one line that names what is wrong and the remedy."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_full_disk(error: BaseException) -> bool:
    """Whether a file could not grow: the disk is full, or a quota or limit is reached."""
    if isinstance(error, OSError):
        return error.errno in _NO_ROOM
    # Its library has the number of the system's error in the text alone; importing it here would load more.
    return type(error).__name__ == "SafetensorError" and any(
        f"(os error {number})" in str(error) for number in _NO_ROOM
    )
