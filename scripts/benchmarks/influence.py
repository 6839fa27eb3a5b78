"""The influence analysis: its engine against a plain loop, blocks of targets, screened selectors, and what it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.measure.selectors import Question, Selection, find_selector
from analysis.model.adapters import OlmoForAnalysis
from analysis.model.device import MemoryGrowth
from analysis.model.load import OWN_FAMILY, LoadedModel, load_for_analysis
from analysis.model.scorer import Scorer
from analysis.plots.costs import cost_figure, pareto_figure
from analysis.plots.style import save_figure
from analysis.records.results import INFLUENCE_BENCHMARK
from analysis.text.contexts import Contexts, long_contexts, sample_targets
from benchmarks.influence_blocks import measure_agreement, measure_blocks
from benchmarks.influence_screened import counted_tokens, measure_screened
from benchmarks.plain_loop import PLAIN_SELECTORS, compare_selections, plain_selection
from benchmarks.settings import InfluenceSettings, ModelSettings
from benchmarks.timing import (
    Json,
    about_this_run,
    chosen_device,
    in_own_process,
    summarise,
    synchroniser,
    time_in_turn,
)
from olmo_sparsity.config.load import load_config
from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.streams import Stream

PLAIN = "plain loop"
K = 8
"""Tokens that are selected."""
COST_SELECTORS = ("leave-one-out", "greedy")
SECONDS_ENOUGH = 2.0
"""A point of the costs that takes longer is not repeated."""
Choose = Callable[[Contexts], Selection]


def run(settings: InfluenceSettings) -> Json:
    """Every part that is asked for, written to influence.json, and the figure of the costs."""
    for name in settings.selectors:
        find_selector(name)  # refuses what a later part would
    device = chosen_device(settings.device)
    settings = replace(settings, device=device)
    made = about_this_run(device)
    loaded = load_model(settings)
    loaded.check_context(settings.longest)
    shown = ("n_long", "n_short", "targets", "targets_per_block", "sampled_targets", "repeats", "seed")
    result = {
        "benchmark": "influence",
        "model": settings.model,
        "parameters": sum(each.numel() for each in loaded.model.parameters()),
        "contexts": settings.corpus or "random tokens",
        "settings": {name: getattr(settings, name) for name in shown},
        **made,
    }

    def speed() -> Json:
        contexts = contexts_of(loaded, settings, settings.targets)
        return measure_speed(loaded.model, device, contexts, settings.repeats)

    def blocks() -> Json:
        block = contexts_of(loaded, settings, 1, settings.targets_per_block)
        return measure_blocks(loaded.model, device, block, settings)

    measures: dict[str, Callable[[], Any]] = {"speed": speed, "blocks": blocks}
    if settings.corpus is not None:
        measures["agreement"] = partial(measure_agreement, loaded, settings)
        measures["screened"] = partial(measure_screened, loaded, settings)
    measures["cost"] = partial(measure_costs, settings)
    for part, measure in measures.items():
        if part in settings.parts:
            result[part] = measure()
            # After each part: a later one may fail.
            write_json(settings.out / INFLUENCE_BENCHMARK.name, INFLUENCE_BENCHMARK.stamped(result))
    if "cost" in result:
        save_figure(cost_figure(result), settings.out, "cost")
    if "screened" in result:
        save_figure(pareto_figure(result), settings.out, "pareto")
    return INFLUENCE_BENCHMARK.stamped(result)


def load_model(settings: ModelSettings) -> LoadedModel:
    """The model on its device. Raises `UserError` where there is none."""
    if settings.checkpoint is not None:
        if settings.overrides:
            raise UserError(f"{settings.overrides[0]} changes a --config; a checkpoint is measured as it is")
        loaded = load_for_analysis(settings.checkpoint)
    else:
        config = load_config(settings.config, settings.overrides)
        model = build_model(config)
        if not isinstance(model, PositionedOLMo):
            raise UserError(f"{settings.config}: give a config of an OLMo model, or a checkpoint")
        analysed = OlmoForAnalysis(model).eval().requires_grad_(False)
        loaded = LoadedModel(analysed, Path(settings.config), OWN_FAMILY, "", config.seed)
    return replace(loaded, model=loaded.model.to(chosen_device(settings.device)))


def contexts_of(
    loaded: LoadedModel, settings: InfluenceSettings, count: int, targets_per_block: int = 1
) -> Contexts:
    """Contexts of ``count`` sampled held-out blocks, or random tokens."""
    n_long, n_short = settings.n_long, settings.n_short
    if settings.corpus is None:
        vocabulary = loaded.model.vocabulary_size
        return random_contexts(vocabulary, count, n_long, n_short, settings.seed, targets_per_block)
    loaded.check_corpus(settings.corpus)
    tokens = TokenFiles.of_split(settings.corpus, "heldout")
    sizes = {"n_long": n_long, "n_short": n_short, "targets_per_block": targets_per_block}
    sampled = sample_targets(tokens, count * targets_per_block, seed=settings.seed, **sizes)
    first = np.arange(0, len(sampled.document), targets_per_block)
    return long_contexts(tokens, sampled.document[first], sampled.position[first], first, **sizes)


def random_contexts(
    vocabulary: int, count: int, n_long: int, n_short: int, seed: int, targets_per_block: int = 1
) -> Contexts:
    """Contexts of uniformly drawn tokens: what a pass costs does not depend on them."""
    generator = np.random.default_rng([Stream.BENCHMARK_TARGETS, seed])
    tokens = generator.integers(vocabulary, size=(count, n_long + targets_per_block))
    target_id = np.arange(count * targets_per_block).reshape(count, targets_per_block)
    return Contexts(tokens[:, :-1], tokens[:, n_long:], target_id, n_short)


def measure_speed(model: Any, device: str, contexts: Contexts, repeats: int) -> Json:
    """Targets per second of each selector, plain and by the engine, and whether both choose the same tokens.

    The plain loop computes in fp32. All candidates are ranked where the selector ranks them anyway; the first
    `K` count as selected.
    """
    scorers = {
        "engine": Scorer(model, device=device),
        "engine, bf16": Scorer(model, device=device, bf16=True),
        "engine, prefixes not shared": Scorer(model, device=device, share_prefixes=False),
    }
    k = min(K, contexts.n_far)
    selectors = {}
    for name in PLAIN_SELECTORS:
        ranked = k if name == "greedy" else contexts.n_far
        choosers: dict[str, Choose] = {PLAIN: partial(plain_selection, name, model, device, ranked)}
        choosers |= {label: partial(select, name, scorer, ranked) for label, scorer in scorers.items()}
        seconds, chosen = run_in_turn(choosers, [contexts] * repeats, device, f"{name}, plain and engine")
        timed = summarise(seconds, baseline=PLAIN, amount=len(contexts), unit="targets/s")
        compared = {label: compare_selections(chosen[PLAIN], chosen[label], k) for label in scorers}
        selectors[name] = {**timed, "seconds": seconds, "selections": compared}
    return {"k": k, "targets": len(contexts), "selectors": selectors}


def run_in_turn(
    choosers: dict[str, Choose], rounds: Sequence[Contexts], device: str, description: str
) -> tuple[dict[str, list[float]], dict[str, list[Selection]]]:
    """Seconds and selections of each chooser, round by round, after a warm-up on one target."""
    todo = [rounds[0].take(slice(1)), *rounds]
    chosen: dict[str, list[Selection]] = {name: [] for name in choosers}
    with progress(description, len(todo) * len(choosers), "runs") as advance:

        def run(name: str) -> None:
            contexts = todo[len(chosen[name])]
            chosen[name].append(choosers[name](contexts))
            advance()

        runners = {name: partial(run, name) for name in choosers}
        seconds = time_in_turn(runners, len(rounds), device, warm_up=1)
    return seconds, {name: found[1:] for name, found in chosen.items()}


def select(
    name: str, scorer: Scorer, k: int, contexts: Contexts, proposing: Scorer | None = None
) -> Selection:
    """The k tokens that a selector of the engine puts first."""
    return find_selector(name)(Question(scorer, contexts, seed=0, k=k, proposing=proposing))


@dataclass(frozen=True)
class Point:
    """What is selected from what."""

    selector: str
    n_long: int
    n_short: int
    k: int
    targets: int


def measure_costs(settings: InfluenceSettings) -> Json:
    """Seconds and memory against N, k and the number of targets; a point of several sweeps is measured once.

    Raises `UserError` where a process that measures dies.
    """
    sweeps = cost_sweeps(settings)
    points = list(dict.fromkeys(point for sweep in sweeps.values() for point in sweep))
    measured: dict[Point, Json] = {}
    with progress("cost", len(points), "points") as advance:
        for point in points:
            try:
                measured[point] = in_own_process(measure_point, settings, point)
            except BrokenProcessPool as error:
                raise UserError(
                    f"the process that measured {point} died, of too little memory most likely; lower --lengths "
                    "or --counts"
                ) from error
            advance()
    return {"sweeps": {name: [measured[point] for point in sweep] for name, sweep in sweeps.items()}}


def cost_sweeps(settings: InfluenceSettings) -> dict[str, list[Point]]:
    """Points by what varies: N, k or the number of targets; the others are N, `K` and one target."""
    n_long, n_short = settings.n_long, settings.n_short
    k = min(K, n_long - n_short, min(settings.lengths) - n_short)
    names = settings.selectors or COST_SELECTORS
    return {
        "n_long": [Point(name, each, n_short, k, 1) for name in names for each in settings.lengths],
        "k": [Point(name, n_long, n_short, each, 1) for name in names for each in settings.ks],
        "targets": [Point(name, n_long, n_short, k, each) for name in names for each in settings.counts],
    }


def measure_point(settings: InfluenceSettings, point: Point) -> Json:
    """Median seconds and computed tokens per target, and the memory that the first run took beyond what was in use.

    Tokens are compared with those of leave-one-out in a plain loop: N - 1 for each far token left out, and N.
    A token of a smaller model that proposes counts as its share of the parameters [ours].

    On a CPU that is growth of the resident set, on a GPU of the memory that torch allocated; None where the system
    does not report it.
    """
    loaded, device = load_model(settings), chosen_device(settings.device)
    scorer = Scorer(loaded.model, device=device)
    models, proposing = [loaded.model], None
    if settings.propose_with is not None:
        models.append(load_model(replace(settings, checkpoint=None, config=settings.propose_with)).model)
        proposing = Scorer(models[1], device=device)
    vocabulary = loaded.model.vocabulary_size
    contexts = random_contexts(vocabulary, point.targets, point.n_long, point.n_short, seed=0)
    # The smallest question first: what is set up once in a process is no cost of this point.
    select(point.selector, scorer, 1, random_contexts(vocabulary, 1, 3, 1, seed=0), proposing)
    memory = MemoryGrowth(torch.device(device))
    seconds: list[float] = []
    peak_bytes = None
    while not seconds or (len(seconds) < settings.repeats and sum(seconds) < SECONDS_ENOUGH):
        started = time.perf_counter()
        with ExitStack() as stack:
            counts = [stack.enter_context(counted_tokens(model)) for model in models]
            select(point.selector, scorer, point.k, contexts, proposing)
            synchroniser(device)()
        seconds.append(time.perf_counter() - started)
        if len(seconds) == 1:
            peak_bytes = memory.growth_bytes()
    per_target = statistics.median(seconds) / point.targets
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    of_models = [sum(count) / point.targets for count in counts]
    tokens = sum(count * size / sizes[0] for count, size in zip(of_models, sizes, strict=True))
    plain = contexts.n_far * (point.n_long - 1) + point.n_long
    return {
        **asdict(point),
        "seconds_per_target": per_target,
        "peak_bytes": peak_bytes,
        "tokens_per_target": tokens,
        **({"tokens_of_models": of_models, "parameters_of_models": sizes} if proposing else {}),
        "plain_loop_tokens_ratio": plain / tokens,
    }
