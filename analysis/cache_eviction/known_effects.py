"""Exact effects that `analysis.measure` kept, for a reference that would measure them again (docs/eviction.md [ours]).

`leave-one-out-kl/cache` and the reference `leave-one-out-kl` ask the same where the near tokens are read again: what
the predictions of the block lose, in KL to the full cache, without one far key and value in all layers and heads. With
near tokens that keep their keys it is another question, and nothing is read from a record.
Shapes: B targets of a block, F far tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.cache_eviction.settings import EvictionSettings
from analysis.contexts import Contexts
from analysis.measurement import Measurement
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)
_Place = tuple[int, int, int]
"""Number of the text, position of the block's first target in it, and place of the target in the block."""


def measured_effects(effects: Any) -> Measurement:
    """A result of `analysis.measure`, or that in a folder. Raises `UserError` where it has no effects."""
    if isinstance(effects, str | Path):
        name = str(effects)
        measured = Measurement.load(effects)
    elif isinstance(effects, Measurement):
        name = "the result"
        measured = effects
    else:
        raise UserError(
            f"effects takes a result of analysis.measure, or its folder, not a {type(effects).__name__}"
        )
    if measured.effects is None:
        raise UserError(f"{name} has no effects; measure with effects=True, or leave it out")
    return measured


@dataclass(frozen=True)
class KnownEffects:
    """KL to the full cache without each far key, of some targets."""

    kl_nats: Mapping[_Place, np.ndarray]
    """(F,) of every target."""

    @classmethod
    def of(cls, measured: Measurement, settings: EvictionSettings, targets: pd.DataFrame) -> KnownEffects:
        """Those of a result with effects, for the blocks of some targets.

        Raises `UserError` where the model, the texts or the contexts are others, and where it has none of the blocks.
        """
        assert measured.effects is not None
        of_record = measured.settings
        contexts = replace(of_record.contexts, seed=settings.contexts.seed)  # blocks are compared one by one
        alike = replace(settings, model=of_record.model, texts=of_record.texts, contexts=contexts)
        if differing := alike.differences(settings, when="resumed"):
            raise UserError(f"the effects are those of another measurement: {differing}; leave them out")
        size = settings.contexts.targets_per_block
        of_target = dict(zip(measured.effects["target_id"], measured.effects["kl_nats"], strict=True))
        known = {}
        for target_id, place in zip(
            measured.targets["target_id"], _places(measured.targets, size), strict=True
        ):
            if target_id in of_target:
                known[place] = np.asarray(of_target[target_id], dtype=np.float64)
        is_there = pd.Series([place in known for place in _places(targets, size)])
        by_block = is_there.groupby(targets["block"].to_numpy()).all()
        if not by_block.any():
            raise UserError(
                "the effects have none of the blocks that are judged; draw as many targets of the same seed, or leave "
                "them out"
            )
        log.info("effects of %d of %d blocks are known", by_block.sum(), len(by_block))
        return cls(known)

    def of_block(self, targets: pd.DataFrame, contexts: Contexts) -> np.ndarray:
        """(B, F) of a block, some of whose targets are given; NaN of others and of those that are not known."""
        size = contexts.targets_per_block
        effects = np.full((size, contexts.n_far), np.nan)
        for place in _places(targets, size):
            if place in self.kl_nats:
                effects[place[2]] = self.kl_nats[place]
        return effects


def _places(targets: pd.DataFrame, targets_per_block: int) -> list[_Place]:
    """Where every target stands, by its target_id, text and position."""
    places = []
    for target_id, text, position in targets[["target_id", "text", "position"]].itertuples(index=False):
        place = int(target_id % targets_per_block)
        places.append((int(text), int(position - place), place))
    return places
