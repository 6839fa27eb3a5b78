"""Blocks of targets: their speed against a plain loop, and whether they change what is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from analysis.measure.crossfit import ModelChooser
from analysis.measure.influence import InfluenceEngine
from analysis.measure.selectors import Question, Selection, find_selector
from analysis.model.load import LoadedModel
from analysis.model.scorer import Scorer
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, difference
from analysis.stats.recovery import Columns, SumsBootstrap
from analysis.text.contexts import Contexts, SampledTargets, sample_targets
from analysis.text.decode import TextDecoder
from benchmarks.plain_loop import compare_selections, plain_selection
from benchmarks.recovered import KS, gains_of, recovered_columns
from benchmarks.settings import InfluenceSettings
from benchmarks.timing import Json, summarise, synchroniser, time_beside_matrix_product
from olmo_sparsity.corpus.tokens import TokenFiles

PLAIN, ALONE, BLOCK = "plain loop", "engine, one target at a time", "engine, a block"
SELECTORS = ("leave-one-out", "leave-one-in")
SELECTOR = "leave-one-out"


def measure_blocks(model: Any, device: str, block: Contexts, settings: InfluenceSettings) -> Json:
    """Targets per second: some targets of a block by a plain loop and by the engine, and all of them at once.

    ``block``: one block. The plain loop computes in fp32. The share of the machine's matrix product is that of the
    floating-point operations of matrix products and attention in a block, in the same run.
    """
    places = np.unique(np.linspace(0, block.targets_per_block - 1, settings.targets).astype(int))
    scorer = Scorer(model, device=device)
    return {
        "targets_per_block": block.targets_per_block,
        "targets_alone": len(places),
        **{name: _measure_selector(name, scorer, block, places, settings.repeats) for name in SELECTORS},
    }


def _measure_selector(name: str, scorer: Scorer, block: Contexts, places: np.ndarray, repeats: int) -> Json:
    alone = [block.alone(0, place) for place in places]
    model, device = scorer.model, str(scorer.device)
    chosen: dict[str, list[Selection]] = {}

    def engine(contexts: Contexts) -> Selection:
        return find_selector(name)(Question(scorer, contexts, seed=0, k=block.n_far))

    def timed(label: str, choose: Callable[[Contexts], Selection], asked: Sequence[Contexts]) -> float:
        started = time.perf_counter()
        chosen[label] = [choose(each) for each in asked]
        synchroniser(device)()
        return (time.perf_counter() - started) / sum(each.targets.size for each in asked)

    runners = {
        PLAIN: partial(timed, PLAIN, partial(plain_selection, name, model, device, block.n_far), alone),
        ALONE: partial(timed, ALONE, engine, alone),
        BLOCK: partial(timed, BLOCK, engine, [block]),
    }
    seconds, product_rate = time_beside_matrix_product(
        runners, repeats, scorer.device, torch.float32, warm_up=1
    )
    with FlopCounterMode(display=False) as counter:
        engine(block)
    rate = counter.get_total_flops() / (np.median(seconds[BLOCK]) * block.targets_per_block)
    (shared,) = chosen[BLOCK]
    of_block = [Selection(shared.columns[[place]], shared.influence[[place]]) for place in places]
    compared = compare_selections(chosen[PLAIN], of_block, min(8, block.n_far))
    return {
        **summarise(seconds, baseline=PLAIN, amount=1, unit="targets/s"),
        "same_set": compared["same_set"],
        "largest_influence_difference_nats": compared["largest_influence_difference_nats"],
        "matrix_product_tflops": product_rate / 1e12,
        "share_of_matrix_product": rate / product_rate,
    }


def measure_agreement(loaded: LoadedModel, settings: InfluenceSettings) -> Json:
    """Net recovery with blocks and without on the same targets, their paired difference, and what each costs.

    The targets are those of whole blocks. Without blocks each has its own N and M tokens, and the same placebo. Both
    select where the gain of their own contexts is above tau; the difference over the targets of both is given too.
    """
    assert settings.corpus is not None
    tokens = TokenFiles.of_split(settings.corpus, "heldout")
    sampled = sample_targets(
        tokens,
        settings.sampled_targets,
        n_long=settings.n_long,
        n_short=settings.n_short,
        seed=settings.seed,
        targets_per_block=settings.targets_per_block,
    )
    sizes = (1, settings.targets_per_block)
    measured = {size: _measure(loaded, tokens, sampled, settings, size) for size in sizes}
    single, blocks = (columns for columns, _ in measured.values())
    columns = single | blocks
    both = (columns["gain", sizes[0]] > 0) & (columns["gain", sizes[1]] > 0)
    found: Json = {"targets": len(both), "tau_nats": settings.tau_nats, "selector": SELECTOR}
    *nets, apart = _net_recoveries(columns, sizes, sampled, settings.seed)
    for (size, (_, costs)), net in zip(measured.items(), nets, strict=True):
        found[f"B = {size}"] = {**costs, "net_recovery": net}
    found["difference"] = {"net_recovery": apart}
    of_both = {name: column * both for name, column in columns.items()}
    *_, apart = _net_recoveries(of_both, sizes, sampled, settings.seed)
    found["difference, over tau in both"] = {"over_tau": int(both.sum()), "net_recovery": apart}
    return found


def _net_recoveries(
    columns: Columns, sizes: tuple[int, int], sampled: SampledTargets, seed: int
) -> list[Json]:
    """Net recovery by k of single targets, of blocks, and the second minus the first, from columns of `_measure`."""
    sums = SumsBootstrap(columns, sampled.document, DEFAULT_RESAMPLES, seed, sampled.document_group)
    found: list[Json] = [{}, {}, {}]
    for k in KS:
        first, second = (sums.recovery_statistics(SELECTOR, k, size)["net_recovery"] for size in sizes)
        for by_k, statistic in zip(found, (first, second, difference(second, first)), strict=True):
            by_k[str(k)] = sums.interval(statistic)
    return found


def _measure(
    loaded: LoadedModel,
    tokens: TokenFiles,
    sampled: SampledTargets,
    settings: InfluenceSettings,
    targets_per_block: int,
) -> tuple[Columns, Json]:
    """What blocks of a size recover, as the columns of a group of that name, and what they cost."""
    scorer = Scorer(loaded.model, device=settings.device or "cpu")
    engine = InfluenceEngine(
        tokens,
        TextDecoder.from_file(loaded.tokenizer_file),
        scorer,
        ModelChooser(scorer, seed=settings.seed, k_max=max(KS)),
        settings.n_long,
        settings.n_short,
        KS,
        (SELECTOR,),
        targets_per_block,
    )
    started = time.perf_counter()
    targets = gains_of(engine, sampled)
    over = targets.over(settings.tau_nats)
    of_gains = time.perf_counter() - started
    description = f"agreement, B = {targets_per_block}"
    columns = recovered_columns(engine, targets, over, description, group=targets_per_block)
    seconds = time.perf_counter() - started
    return columns, {
        "over_tau": len(over),
        "seconds": seconds,
        "seconds_of_gains": of_gains,
        "seconds_per_target_over_tau": seconds / max(1, len(over)),
    }
