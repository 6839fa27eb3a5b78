"""The one error that is meant for the user, and what errors of others say."""

from __future__ import annotations

import os
import re


class UserError(ValueError):
    """Bad input. The message is one line that names what is wrong and the remedy."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def hidden_os_error(error: Exception, path: object) -> OSError | None:
    """The system error that a library written in Rust names in its text alone; None where it names none."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else None
