"""Timing in turn, and what is said of it: ratios within a round, never of times from different moments."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch

from olmo_sparsity.util.provenance import provenance

Json = dict[str, Any]
PRODUCT = "matrix product"


def about_this_run() -> Json:
    """Machine, code and command. Call it first, so that the load average is not our own."""
    made = provenance()
    made["machine"] |= {"load_average_before": os.getloadavg()[0], "torch": torch.__version__}
    return {name: made[name] for name in ("machine", "commit", "command", "started")}


def synchronise() -> None:
    """Wait until a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_product(device: torch.device, dtype: torch.dtype, of: Any = torch.nn.Linear) -> tuple[Any, float]:
    """A product of square matrices by a layer `of` a kind, the machine's limit, and its floating-point operations."""
    size = 8192 if device.type == "cuda" else 2048  # of smaller ones a GPU's time is that of the launch
    layer = of(size, size, bias=False, device=device, dtype=dtype).requires_grad_(False)
    return partial(layer, torch.randn(size, size, device=device, dtype=dtype)), 2.0 * size**3


def time_in_turn(
    runners: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each runner, round by round; the order turns so that none is always first.

    A runner that returns a float has timed itself, without what should not count.
    """
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            synchronise()
            started = clock()
            of_its_own = runners[name]()
            synchronise()
            if number >= 0:
                seconds[name].append(of_its_own if isinstance(of_its_own, float) else clock() - started)
    return seconds


def rates(seconds: Mapping[str, Sequence[float]], amount: float, baselines: Sequence[str]) -> dict[str, Json]:
    """Median rate of ``amount`` a second, and median, lowest and highest ratio of speed to baselines in a round."""
    rows: dict[str, Json] = {}
    for name, values in seconds.items():
        rows[name] = {"rate": amount / statistics.median(values)}
        for baseline in baselines:
            ratios = [x / y for x, y in zip(seconds[baseline], values, strict=True)]
            rows[name][f"to {baseline}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return rows


def table(result: Json) -> str:
    """What was measured on what, in a line, and a row for each result."""
    about = {**result, **result["machine"]}
    head = ", ".join(f"{name} {about[name]}" for name in about if isinstance(about[name], str | int | float))
    rows = pd.DataFrame(result["results"]).T.map(
        lambda cell: "{:.3g} [{:.3g}, {:.3g}]".format(*cell) if isinstance(cell, list) else cell
    )
    return f"{head}\n\n{rows.to_string(float_format='{:,.3g}'.format)}"
