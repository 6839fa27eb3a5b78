"""Which of a test's parameters the quick suite leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """``values`` as parameters, of which only ``quick`` are not slow; a tuple is one of several parameters each."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} are none of the parameters"
    arguments = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [
        value if value in quick else pytest.param(*arguments[value], marks=pytest.mark.slow)
        for value in values
    ]
