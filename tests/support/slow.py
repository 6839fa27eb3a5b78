"""Which of a test's parameters the quick suite leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """``values`` as parameters, of which only ``quick`` are not slow; a tuple is one of several parameters each."""
    values = list(values)
    unknown = [each for each in quick if each not in values]
    assert not unknown, f"{unknown} are none of the parameters"
    return [
        each if each in quick else pytest.param(*_several(each), marks=pytest.mark.slow) for each in values
    ]


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
