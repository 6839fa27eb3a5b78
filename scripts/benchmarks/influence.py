"""The influence analysis: its engine against a plain loop, screened against exact selectors, and what it costs.

Shapes: n targets, N long and M short context length, F = N - M far tokens.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.model.adapters import OlmoForAnalysis
from analysis.model.load import OWN_FAMILY, LoadedModel, load_for_analysis
from analysis.model.scorer import Scorer, long_and_short_losses
from analysis.text.contexts import Contexts, long_contexts, placebo_contexts, sample_targets
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.data.workers import available_cores
from olmo_sparsity.model.build import build_model
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import provenance
from olmo_sparsity.util.streams import Stream

log = logging.getLogger(__name__)

PARTS = ("speed", "screened", "cost")
TARGETS_SEARCHED = 8192
"""Sampled targets among which those over tau are looked for."""
_BLOCK = 64

Json = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """Which model is measured, and where; small enough to be handed to a fresh process."""

    checkpoint: str | None
    """Checkpoint, run or transformers directory; None for random weights."""
    config: str
    """YAML of the shape where there is no checkpoint."""
    overrides: tuple[str, ...] = ()
    """Of that YAML."""
    device: str = "cpu"

    def load(self) -> LoadedModel:
        """The model on its device. Raises `UserError` where there is none."""
        if self.checkpoint is None:
            config = load_config(self.config, list(self.overrides))
            loaded = LoadedModel(
                model=OlmoForAnalysis(build_model(config)).eval().requires_grad_(False),
                checkpoint=Path(self.config),
                family=OWN_FAMILY,
                weights_sha256="",
                training_seed=config.seed,
            )
        elif self.overrides:
            raise UserError(f"{self.overrides[0]} changes a --config; a checkpoint is measured as it is")
        else:
            loaded = load_for_analysis(self.checkpoint)
        return replace(loaded, model=loaded.model.to(self.device))


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured on what."""

    subject: Subject
    corpus: str | None
    """Prepared corpus; None: contexts of random tokens, without a placebo."""
    parts: tuple[str, ...] = PARTS
    n_long: int = 256
    n_short: int = 32
    targets: int = 2
    """Targets of the comparison with the plain loop."""
    screened_targets: int = 8
    repeats: int = 3
    tau_nats: float = 1.0
    seed: int = 0
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    """N of the cost sweep."""
    ks: tuple[int, ...] = (1, 2, 4, 8, 16)
    counts: tuple[int, ...] = (1, 2, 4)
    """Numbers of targets of the cost sweep."""

    def check(self) -> None:
        """Raise `UserError` for anything that would fail later."""
        if unknown := [part for part in self.parts if part not in PARTS]:
            raise UserError(f"--parts has no {unknown[0]!r}; choose among {', '.join(PARTS)}")
        if not 0 < self.n_short < min([self.n_long, *self._lengths]):
            raise UserError(
                f"--n-short {self.n_short} must be positive and smaller than --n-long and --lengths"
            )
        if min(self.targets, self.screened_targets, self.repeats, *self.ks, *self.counts) < 1:
            raise UserError("--targets, --screened-targets, --repeats, --k and --counts take 1 or more")
        if "cost" in self.parts and max(self.ks) > self.n_long - self.n_short:
            raise UserError(
                f"--k {max(self.ks)} is more than the {self.n_long - self.n_short} far tokens; raise --n-long"
            )
        if self.corpus and not self.subject.checkpoint:
            raise UserError(
                "--corpus needs a checkpoint that was trained on its like; random weights gain nothing"
            )

    @property
    def longest(self) -> int:
        """The most positions that any part needs."""
        return max([self.n_long, *self._lengths])

    @property
    def _lengths(self) -> tuple[int, ...]:
        return self.lengths if "cost" in self.parts else ()


@dataclass(frozen=True)
class BenchmarkTargets:
    """The targets that are measured: real ones over tau with their placebo, or random tokens without."""

    contexts: Contexts
    placebo: Contexts | None
    document: np.ndarray
    """(n,)"""
    gain_nats: np.ndarray
    """L_short - L_long, (n,); NaN for random tokens."""


def run_influence_benchmark(settings: BenchmarkSettings) -> Json:
    """Every part that is asked for, and what it was measured on."""
    from benchmarks.influence_cost import measure_costs
    from benchmarks.influence_speed import measure_screened, measure_speed

    settings.check()
    about = _about(settings)
    loaded = settings.subject.load()
    loaded.check_context(settings.longest)
    result = {**about, "parameters": sum(each.numel() for each in loaded.model.parameters())}
    if {"speed", "screened"} & set(settings.parts):
        targets = benchmark_targets(loaded, settings)
        result["contexts"] = (
            "random tokens" if targets.placebo is None else f"targets over tau of {settings.corpus}"
        )
        if "speed" in settings.parts:
            first = targets.contexts.take(slice(settings.targets))
            result["speed"] = measure_speed(loaded.model, settings.subject.device, first, settings.repeats)
        if "screened" in settings.parts:
            result["screened"] = measure_screened(
                loaded.model, settings.subject.device, targets, settings.screened_targets
            )
    if "cost" in settings.parts:
        result["cost"] = measure_costs(settings)
    return result


def benchmark_targets(loaded: LoadedModel, settings: BenchmarkSettings) -> BenchmarkTargets:
    """As many targets as any part needs; fewer, with a warning, where the corpus has no more over tau."""
    wanted = max(
        settings.targets * ("speed" in settings.parts),
        settings.screened_targets * ("screened" in settings.parts),
    )
    if settings.corpus is None:
        contexts = random_contexts(
            vocabulary_size(loaded), wanted, settings.n_long, settings.n_short, settings.seed
        )
        return BenchmarkTargets(contexts, None, np.arange(wanted), np.full(wanted, np.nan))
    loaded.check_corpus(settings.corpus)
    found = _targets_over_tau(Scorer(loaded.model, device=settings.subject.device), settings, wanted)
    if len(found.contexts) < wanted:
        log.warning("only %d targets over tau were found, not %d", len(found.contexts), wanted)
    return found


def random_contexts(vocabulary: int, count: int, n_long: int, n_short: int, seed: int) -> Contexts:
    """Contexts of uniformly drawn tokens: what a pass costs does not depend on them."""
    generator = np.random.default_rng([Stream.BENCHMARK_TARGETS, seed])
    tokens = generator.integers(vocabulary, size=(count, n_long + 1))
    return Contexts(tokens[:, :-1], tokens[:, -1], np.arange(count), n_short)


def vocabulary_size(loaded: LoadedModel) -> int:
    """Token ids that the model knows."""
    config: Any = loaded.model.model.config
    return config.get_text_config().vocab_size if hasattr(config, "get_text_config") else config.vocab_size


def _targets_over_tau(scorer: Scorer, settings: BenchmarkSettings, wanted: int) -> BenchmarkTargets:
    """The first ``wanted`` targets over tau of a sample of the held-out split in a random order."""
    tokens = TokenFiles.of_split(settings.corpus or "", "heldout")
    shape = {"n_long": settings.n_long, "n_short": settings.n_short}
    sampled = sample_targets(tokens, TARGETS_SEARCHED, seed=settings.seed, **shape)
    order = np.random.default_rng([Stream.BENCHMARK_ORDER, settings.seed]).permutation(len(sampled.document))
    over, gains = np.empty(0, dtype=np.int64), np.empty(0)
    with progress("looking for targets over tau", wanted, "targets") as advance:
        for start in range(0, len(order), _BLOCK):
            rows = order[start : start + _BLOCK]
            contexts = long_contexts(tokens, sampled.document[rows], sampled.position[rows], rows, **shape)
            long, short = long_and_short_losses(scorer, contexts)
            good = np.flatnonzero(short - long > settings.tau_nats)[: wanted - len(over)]
            over, gains = np.append(over, rows[good]), np.append(gains, (short - long)[good])
            advance(len(good))
            if len(over) == wanted:
                break
    if len(over) == 0:
        raise UserError(
            f"none of {len(order):,} targets of {settings.corpus} gains more than tau = {settings.tau_nats} nats; "
            "lower --tau, or leave --corpus out to measure on random tokens"
        )
    contexts = long_contexts(tokens, sampled.document[over], sampled.position[over], over, **shape)
    placebo = placebo_contexts(tokens, contexts, sampled.placebo_document[over], sampled.placebo_start[over])
    return BenchmarkTargets(contexts, placebo, sampled.document[over], gains)


def _about(settings: BenchmarkSettings) -> Json:
    """Machine, code, model and settings; called first, so that the load of the machine is not our own."""
    made = provenance()
    cuda = settings.subject.device == "cuda"
    shown = ("n_long", "n_short", "targets", "screened_targets", "repeats", "tau_nats", "seed")
    return {
        "benchmark": "influence",
        "model": settings.subject.checkpoint or f"{settings.subject.config}, random weights",
        "settings": {name: getattr(settings, name) for name in shown},
        "machine": {
            "cores": available_cores(),
            "threads": torch.get_num_threads(),
            "load_average_before": os.getloadavg()[0],
            "gpu": torch.cuda.get_device_name() if cuda else None,
            "processor": platform.machine(),
            "torch": torch.__version__,
        },
        "commit": made["commit"],
        "command": made["command"],
        "started": made["started"],
    }
