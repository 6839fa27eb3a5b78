"""Timing in turn, and what is said of it: ratios within a round, never of times from different moments."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def time_in_turn(
    runners: Mapping[str, Callable[[], float | None]],
    rounds: int,
    synchronise: Callable[[], None],
    warm_up: int = 2,
) -> dict[str, list[float]]:
    """Seconds of each runner, round by round; the order turns so that none is always first.

    A runner that returns seconds has timed itself, without what should not count.
    """
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            synchronise()
            started = time.perf_counter()
            own = runners[name]()
            synchronise()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started if own is None else own)
    return seconds


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the ratios ``above[i] / below[i]`` of rounds."""
    ratios = [x / y for x, y in zip(above, below, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def summarise(seconds: dict[str, list[float]], *, baseline: str, amount: float, unit: str) -> dict[str, Any]:
    """Median rate of each, and the median, lowest and highest of its round-by-round ratio to the baseline."""
    rows = {
        name: {"rate": amount / statistics.median(values), **paired_ratio(seconds[baseline], values)}
        for name, values in seconds.items()
    }
    return {"unit": unit, "baseline": baseline, "rounds": len(seconds[baseline]), "results": rows}
