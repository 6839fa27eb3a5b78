"""Timing in turn, and what is said of it: ratios within a round, never of times from different moments."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from olmo_sparsity.util.provenance import pick_device, provenance
from olmo_sparsity.util.result_files import Json


def about_this_run(device: str) -> Json:
    """Machine, code and command. Call it first, so that the load average is not our own."""
    made = provenance()
    return {
        "machine": {
            **made["machine"],
            "gpu": made["machine"]["gpu"] if device == "cuda" else None,
            "load_average_before": os.getloadavg()[0],
            "torch": torch.__version__,
        },
        **{name: made[name] for name in ("commit", "command", "started")},
    }


def chosen_device(device: str | None = None) -> str:
    """``device``, or a GPU where there is one. Raises `UserError` where it cannot be used."""
    return str(pick_device(device))


def synchroniser(device: str) -> Callable[[], None]:
    """A function that waits until the device has finished its work."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def time_in_turn(
    runners: Mapping[str, Callable[[], object]],
    rounds: int,
    device: str = "cpu",
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each runner, round by round; the order turns so that none is always first.

    A runner that returns a float has timed itself, without what should not count.
    """
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    synchronise = synchroniser(device)
    for number in range(-warm_up, rounds):
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            synchronise()
            started = clock()
            own = runners[name]()
            synchronise()
            if number >= 0:
                seconds[name].append(own if isinstance(own, float) else clock() - started)
    return seconds


def time_beside_matrix_product(
    runners: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    warm_up: int = 2,
    size: int = 2048,
) -> tuple[dict[str, list[float]], float]:
    """As `time_in_turn`, in turn with the machine's own product of two square matrices; also its FLOP/s (median)."""
    matrix = torch.randn(size, size, device=device, dtype=dtype)
    product = "matrix product"
    seconds = time_in_turn({**runners, product: lambda: matrix @ matrix}, rounds, device.type, warm_up)
    return seconds, 2.0 * size**3 / statistics.median(seconds.pop(product))


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result in a fresh process: what was measured before cannot hide what this takes of memory."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of the ratios ``above[i] / below[i]`` of rounds."""
    ratios = [x / y for x, y in zip(above, below, strict=True)]
    return {"ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}


def summarise(seconds: dict[str, list[float]], *, baseline: str, amount: float, unit: str) -> Json:
    """Median rate of each, and the median, lowest and highest of its round-by-round ratio to the baseline."""
    rows = {
        name: {"rate": amount / statistics.median(values), **paired_ratio(seconds[baseline], values)}
        for name, values in seconds.items()
    }
    return {"unit": unit, "baseline": baseline, "rounds": len(seconds[baseline]), "results": rows}
