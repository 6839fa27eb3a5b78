"""The influence analysis: its engine against a plain loop, screened against exact selectors, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.model.adapters import OlmoForAnalysis
from analysis.model.load import OWN_FAMILY, LoadedModel, load_for_analysis
from analysis.plots.costs import cost_figure
from analysis.plots.style import save_figure
from analysis.records.results import INFLUENCE_BENCHMARK
from analysis.text.contexts import Contexts, long_contexts, sample_targets
from benchmarks.settings import InfluenceSettings, ModelSettings
from benchmarks.timing import Json, about_this_run, chosen_device
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.streams import Stream


def run(settings: InfluenceSettings) -> Json:
    """Every part that is asked for, written to influence.json, and the figure of the costs."""
    from benchmarks.influence_cost import measure_costs
    from benchmarks.influence_speed import measure_screened, measure_speed

    device = chosen_device(settings.device)
    settings = replace(settings, device=device)
    made = about_this_run(device)
    loaded = load_model(settings)
    loaded.check_context(settings.longest)
    shown = ("n_long", "n_short", "targets", "screened_targets", "repeats", "seed")
    result = {
        "benchmark": "influence",
        "model": settings.model,
        "parameters": sum(each.numel() for each in loaded.model.parameters()),
        "contexts": settings.corpus or "random tokens",
        "settings": {name: getattr(settings, name) for name in shown},
        **made,
    }
    if "speed" in settings.parts:
        contexts = contexts_of(loaded, settings, settings.targets)
        result["speed"] = measure_speed(loaded.model, device, contexts, settings.repeats)
    if "screened" in settings.parts:
        contexts = contexts_of(loaded, settings, settings.screened_targets)
        result["screened"] = measure_screened(loaded.model, device, contexts)
    if "cost" in settings.parts:
        result["cost"] = measure_costs(settings)
    result = INFLUENCE_BENCHMARK.stamped(result)
    write_json(settings.out / INFLUENCE_BENCHMARK.name, result)
    if "cost" in result:
        save_figure(cost_figure(result), settings.out, "cost")
    return result


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


def contexts_of(loaded: LoadedModel, settings: InfluenceSettings, count: int) -> Contexts:
    """Contexts of sampled held-out targets, or random tokens."""
    n_long, n_short = settings.n_long, settings.n_short
    if settings.corpus is None:
        return random_contexts(vocabulary_size(loaded), count, n_long, n_short, settings.seed)
    loaded.check_corpus(settings.corpus)
    tokens = TokenFiles.of_split(settings.corpus, "heldout")
    sampled = sample_targets(tokens, count, n_long=n_long, n_short=n_short, seed=settings.seed)
    rows = np.arange(len(sampled.document))
    return long_contexts(tokens, sampled.document, sampled.position, rows, n_long=n_long, n_short=n_short)


def random_contexts(vocabulary: int, count: int, n_long: int, n_short: int, seed: int) -> Contexts:
    """Contexts of uniformly drawn tokens: what a pass costs does not depend on them."""
    generator = np.random.default_rng([Stream.BENCHMARK_TARGETS, seed])
    tokens = generator.integers(vocabulary, size=(count, n_long + 1))
    return Contexts(tokens[:, :-1], tokens[:, -1], np.arange(count), n_short)


def vocabulary_size(loaded: LoadedModel) -> int:
    """Token ids that the model knows."""
    inner: Any = loaded.model.model
    config = inner.config
    return config.get_text_config().vocab_size if hasattr(config, "get_text_config") else config.vocab_size
