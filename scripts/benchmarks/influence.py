"""Leave-one-out of all far tokens: a plain loop, one target at a time by the engine, and whole blocks; and `measure`.

The plain loop has one forward pass per candidate, no batch, nothing shared, and shares no code with the engine.
Shapes: B targets of a block, F far tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from analysis.contexts import Contexts, long_contexts, open_texts, sample_targets
from analysis.engine import measure
from analysis.model.loading import LoadedModel, open_model
from analysis.model.losses import build_scorer
from analysis.model.memory import MemoryGrowth
from analysis.selectors import Selection, SelectorInput, find_selector
from benchmarks.settings import InfluenceSettings
from benchmarks.timing import (
    Json,
    about_this_run,
    chosen_device,
    in_own_process,
    summarise,
    synchroniser,
    time_beside_matrix_product,
)
from olmo_sparsity.config.load import load_config
from olmo_sparsity.model.build import build_model
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.streams import Stream

PLAIN, ALONE, BLOCK = "plain loop", "engine, one target at a time", "engine, a block"
SELECTORS = ("leave-one-out", "leave-one-in")


def run(settings: InfluenceSettings) -> Json:
    """Targets per second and exactness; with a text also seconds and memory of one measurement."""
    device = chosen_device(settings.device)
    made = about_this_run(device)
    loaded = load_model(settings, device)
    loaded.check_context(settings.n_long, settings.targets_per_block)
    block = block_of(loaded, settings)
    names = ("n_long", "n_short", "targets_per_block", "targets", "repeats", "seed")
    result = {
        "benchmark": "influence",
        "model": settings.model,
        "parameters": loaded.parameters,
        "contexts": settings.texts or "random tokens",
        "settings": {name: getattr(settings, name) for name in names},
        **made,
        "blocks": measure_blocks(loaded, device, block, settings),
    }
    if settings.texts and settings.checkpoint:
        result["measurement"] = in_own_process(measure_whole, settings)
    write_json(settings.out / "influence.json", result)
    return result


def load_model(settings: InfluenceSettings, device: str) -> LoadedModel:
    """The checkpoint, or random weights of the config's shape."""
    if settings.checkpoint is not None:
        return open_model(settings.checkpoint, device=device)
    return open_model(build_model(load_config(settings.config, settings.overrides)).eval(), device=device)


def block_of(loaded: LoadedModel, settings: InfluenceSettings) -> Contexts:
    """One block of held-out text, or of random tokens: what a pass costs does not depend on them."""
    n_long, size = settings.n_long, settings.targets_per_block
    if not settings.texts:
        generator = np.random.default_rng([Stream.BENCHMARK_TARGETS, settings.seed])
        tokens = generator.integers(loaded.model.vocabulary_size, size=(1, n_long + size))
        return Contexts(tokens[:, :-1], tokens[:, n_long:], np.arange(size)[None], settings.n_short)
    texts = open_texts(settings.texts, loaded.encode)
    sizes: Any = {"n_long": n_long, "n_short": settings.n_short, "targets_per_block": size}
    sampled = sample_targets(texts, size, seed=settings.seed, **sizes)
    text, first = (sampled[name].to_numpy()[:1] for name in ("text", "position"))
    return long_contexts(texts, text, first, np.zeros(1, int), **sizes)


def measure_blocks(loaded: LoadedModel, device: str, block: Contexts, settings: InfluenceSettings) -> Json:
    """Targets per second by selector; the share of the matrix product is that of the operations of a block."""
    places = np.unique(np.linspace(0, block.targets_per_block - 1, settings.targets).astype(int))
    return {
        "targets_per_block": block.targets_per_block,
        "targets_alone": len(places),
        **{name: _measure(name, loaded, device, block, places, settings.repeats) for name in SELECTORS},
    }


def _measure(
    name: str, loaded: LoadedModel, device: str, block: Contexts, places: np.ndarray, repeats: int
) -> Json:
    alone = [block.alone(0, place) for place in places]
    scorer = build_scorer(loaded.model, torch.device(device), block.n_long, block.targets_per_block)
    chosen: dict[str, list[Selection]] = {}

    def engine(contexts: Contexts) -> Selection:
        return find_selector(name)(SelectorInput(scorer, contexts, seed=0, k=block.n_far))

    def timed(label: str, choose: Callable[[Contexts], Selection], every: Sequence[Contexts]) -> float:
        started = time.perf_counter()
        chosen[label] = [choose(contexts) for contexts in every]
        synchroniser(device)()
        return (time.perf_counter() - started) / sum(contexts.targets.size for contexts in every)

    runners = {
        PLAIN: partial(timed, PLAIN, partial(plain_selection, name, loaded.model, device), alone),
        ALONE: partial(timed, ALONE, engine, alone),
        BLOCK: partial(timed, BLOCK, engine, [block]),
    }
    seconds, product_rate = time_beside_matrix_product(
        runners, repeats, torch.device(device), torch.float32, warm_up=1
    )
    with FlopCounterMode(display=False) as counter:
        engine(block)
    rate = counter.get_total_flops() / (np.median(seconds[BLOCK]) * block.targets_per_block)
    (shared,) = chosen[BLOCK]
    of_block = [Selection(shared.columns[[place]], shared.influence[[place]]) for place in places]
    return {
        **summarise(seconds, baseline=PLAIN, amount=1, unit="targets/s"),
        **compare(chosen[PLAIN], of_block, min(8, block.n_far)),
        "matrix_product_tflops": product_rate / 1e12,
        "share_of_matrix_product": rate / product_rate,
    }


@torch.inference_mode()
def plain_selection(name: str, model: Any, device: str, contexts: Contexts) -> Selection:
    """All far tokens of one target, most influential first (docs/method.md, 2.2), one forward pass for each."""
    tokens, target = contexts.tokens[0], torch.tensor(int(contexts.targets[0, 0]), device=device)
    long = list(range(contexts.n_long))
    far, short = long[: contexts.n_far], long[contexts.n_far :]

    def loss_nats(kept: list[int]) -> float:
        ids, positions = (torch.tensor([row], device=device) for row in (tokens[kept].tolist(), kept))
        logits = model(ids, position_ids=positions, logits_to_keep=0).logits[0, -1]
        return F.cross_entropy(logits.float(), target).item()

    if name == "leave-one-out":
        long_nats = loss_nats(long)
        influence = {i: loss_nats([j for j in long if j != i]) - long_nats for i in far}
    else:
        short_nats = loss_nats(short)
        influence = {i: short_nats - loss_nats([i, *short]) for i in far}
    ranked = sorted(influence.items(), key=lambda item: -item[1])  # equal ones keep the order of the text
    return Selection(np.array([[i for i, _ in ranked]]), np.array([[nats for _, nats in ranked]]))


def compare(plain: Sequence[Selection], engine: Sequence[Selection], k: int) -> Json:
    """Share of targets whose first k tokens are the same set, and the largest difference of an influence in nats."""
    same, apart = [], 0.0
    for one, other in zip(plain, engine, strict=True):
        same.append(set(one.columns[0, :k].tolist()) == set(other.columns[0, :k].tolist()))
        by_column = [part.influence[0][np.argsort(part.columns[0])] for part in (one, other)]
        apart = max(apart, float(np.abs(by_column[0] - by_column[1]).max()))
    return {"same_set": float(np.mean(same)), "largest_influence_difference_nats": apart}


def measure_whole(settings: InfluenceSettings) -> Json:
    """Seconds of one `analysis.measure`, and the memory that it took beyond what was in use."""
    device = chosen_device(settings.device)
    memory, started = MemoryGrowth(torch.device(device)), time.perf_counter()
    result = measure(
        settings.checkpoint,
        settings.texts,
        n_long=settings.n_long,
        n_short=settings.n_short,
        targets=settings.sampled_targets,
        targets_per_block=settings.targets_per_block,
        tau_nats=settings.tau_nats,
        selectors=SELECTORS,
        device=device,
        progress=False,
    )
    seconds = time.perf_counter() - started
    return {
        "targets": len(result.targets),
        "over_tau": len(result.over),
        "seconds": seconds,
        "peak_bytes": memory.growth_bytes(),
    }
