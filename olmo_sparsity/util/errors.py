"""The one error that is meant for the user, and the first line of any other."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. The message is one line that names what is wrong and the remedy; ``problems`` each have another."""

    def __init__(self, message: str, *problems: str):
        super().__init__(message, *problems)

    def __str__(self) -> str:
        # the name of a file may have a line break
        return "\n  ".join(text.replace("\n", r"\n") for text in self.args)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
