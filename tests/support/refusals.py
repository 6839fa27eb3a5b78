"""What a user is told who gave something wrong."""

from __future__ import annotations

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
