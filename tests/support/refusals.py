"""What a user is told who gave something wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from olmo_sparsity.util.errors import UserError


@contextmanager
def refused(message: str | None = None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The block raises a `UserError` of one line that the regular expression ``message`` matches."""
    with pytest.raises(UserError, match=message) as error:
        yield error
    assert "\n" not in str(error.value)


def assert_refused(done: subprocess.CompletedProcess[str], said: str, code: int = 1) -> None:
    """A script that ended with exit code ``code`` and one line, which has ``said`` in it."""
    assert done.returncode == code
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and said in done.stderr
