"""Which of a test's parameters the quick suite leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """``values`` as parameters, of which only ``quick`` are not slow; a tuple is one of several parameters each."""
    values = list(values)
    unknown = [each for each in quick if each not in values]
    assert not unknown, f"{unknown} are none of the parameters"
    several = {each: each if isinstance(each, tuple) else (each,) for each in values}
    return [
        each if each in quick else pytest.param(*several[each], marks=pytest.mark.slow) for each in values
    ]
