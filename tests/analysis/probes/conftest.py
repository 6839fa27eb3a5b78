"""Intervals of the few texts that a test can measure."""

from collections.abc import Iterator

import pytest

from analysis.stats import bootstrap


@pytest.fixture(scope="module")
def few_are_enough() -> Iterator[None]:
    """Two groups have an interval, as four have otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "LEAST_UNITS", 2)
        yield
