"""Student's t from leaving out one unit at a time, written out: what intervals of few groups are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student

Statistic = Callable[[np.ndarray], float]
"""A number of the rows with these numbers, (n,)."""


def jackknife(statistic: Statistic, units: Sequence[Any]) -> tuple[float, float, float]:
    """A statistic of all rows, its standard error from it without each unit in turn, and degrees of freedom."""
    units = np.asarray(units)
    value = statistic(np.arange(len(units)))
    without = [statistic(np.flatnonzero(units != unit)) for unit in np.unique(units)]
    squares = (np.array(without) - value) ** 2
    if squares.sum() < 1e-20:
        return value, 0.0, 1.0
    most = len(squares) - 1
    effective = squares.sum() ** 2 / (squares**2).sum()
    freedom = min(max(effective, min(2, most / 3)), most)
    return value, (most / len(squares) * squares.sum()) ** 0.5, freedom


def assert_jackknife(
    row: Mapping[str, Any],
    statistic: Statistic,
    units: Sequence[Any],
    *,
    is_share: bool = False,
    confidence: float = 0.95,
) -> None:
    """That a row has a statistic of all rows and, where it varies, its interval; a share's is cut at 0 and 1."""
    value, error, freedom = jackknife(statistic, units)
    assert row["value"] == pytest.approx(value)
    if error:
        half = student.ppf((1 + confidence) / 2, freedom) * error
        bounds = np.array([value - half, value + half])
        if is_share:
            bounds = bounds.clip(0, 1)
        assert [row["low"], row["high"]] == pytest.approx(bounds.tolist())
