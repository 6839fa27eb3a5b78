"""Seconds per target and peak memory of the engine against N, k and the number of targets.

Every point is measured in a process of its own: what an earlier point left in memory cannot hide what this one takes.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass

import torch

from analysis.model.device import MemoryGrowth
from analysis.model.scorer import Scorer
from benchmarks.influence import load_model, random_contexts, vocabulary_size
from benchmarks.influence_speed import K, select
from benchmarks.settings import InfluenceSettings, ModelSettings
from benchmarks.timing import Json, chosen_device, synchroniser
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress

SELECTORS = ("leave-one-out", "greedy")
SECONDS_ENOUGH = 2.0
"""A point that takes longer is not repeated."""


@dataclass(frozen=True)
class Point:
    """What is selected from what."""

    selector: str
    n_long: int
    n_short: int
    k: int
    targets: int


def measure_costs(settings: InfluenceSettings) -> Json:
    """All sweeps; a point of several sweeps is measured once."""
    sweeps = cost_sweeps(settings)
    points = list(dict.fromkeys(point for sweep in sweeps.values() for point in sweep))
    measured: dict[Point, Json] = {}
    with progress("cost", len(points), "points") as advance:
        for point in points:
            measured[point] = measure_apart(settings, point, settings.repeats)
            advance()
    return {"sweeps": {name: [measured[point] for point in sweep] for name, sweep in sweeps.items()}}


def cost_sweeps(settings: InfluenceSettings) -> dict[str, list[Point]]:
    """Points by what varies: N, k or the number of targets; the others are N, `K` and one target."""
    n_long, n_short = settings.n_long, settings.n_short
    k = min(K, n_long - n_short, min(settings.lengths) - n_short)
    return {
        "n_long": [Point(name, each, n_short, k, 1) for name in SELECTORS for each in settings.lengths],
        "k": [Point(name, n_long, n_short, each, 1) for name in SELECTORS for each in settings.ks],
        "targets": [Point(name, n_long, n_short, k, each) for name in SELECTORS for each in settings.counts],
    }


def measure_apart(settings: ModelSettings, point: Point, repeats: int) -> Json:
    """`measure_point` in a fresh process. Raises `UserError` where that process dies."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        try:
            return pool.submit(measure_point, settings, point, repeats).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"the process that measured {point} died, of too little memory most likely; lower --lengths or --counts"
            ) from error


def measure_point(settings: ModelSettings, point: Point, repeats: int) -> Json:
    """Median seconds per target, and the memory that the first run took beyond what was in use, in this process.

    On a CPU that is growth of the resident set, on a GPU of the memory that torch allocated; None where the system
    does not report it.
    """
    loaded, device = load_model(settings), chosen_device(settings.device)
    scorer = Scorer(loaded.model, device=device)
    vocabulary = vocabulary_size(loaded)
    contexts = random_contexts(vocabulary, point.targets, point.n_long, point.n_short, seed=0)
    # The smallest question first: what is set up once in a process is no cost of this point.
    select(point.selector, scorer, 1, random_contexts(vocabulary, 1, 3, 1, seed=0))
    memory = MemoryGrowth(torch.device(device))
    seconds: list[float] = []
    peak_bytes = None
    while not seconds or (len(seconds) < repeats and sum(seconds) < SECONDS_ENOUGH):
        started = time.perf_counter()
        select(point.selector, scorer, point.k, contexts)
        synchroniser(device)()
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            peak_bytes = memory.growth_bytes()
    per_target = statistics.median(seconds) / point.targets
    return {**asdict(point), "seconds_per_target": per_target, "peak_bytes": peak_bytes}
