"""How the targets of a block are read after one choice of far keys (docs/eviction.md [ours]).

Policies differ in what they have seen when they choose. Behind a choice that saw the near tokens, the keys and values
of these stay as they were read, with all far tokens, and only what comes behind them meets the reduced cache: the last
short token, whose query predicts the first target, and the targets before the last one. That is how SnapKV, H2O and
TOVA are published. Behind a choice that saw the far context alone, the near tokens meet the reduced cache, too; so they
do behind any choice where they are read again.
Shapes: one block of B targets, N long and M short context length, F = N - M far tokens, G heads of keys in all layers,
C choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.cache_eviction.settings import NEAR_KEPT
from analysis.contexts import Contexts
from analysis.model import far_cache
from analysis.model.losses import Scorer


@dataclass(frozen=True)
class BlockReading:
    """One block, read with some of its far keys."""

    scorer: Scorer
    contexts: Contexts
    """Of the block as it is read: where the near tokens are kept, all but the last short one are among the far ones."""
    n_far: int
    """F, the far tokens that are chosen from."""
    effects_nats: np.ndarray | None = None
    """KL to the full cache without each far key in all layers and heads, (B, F), NaN of targets for which it is not
    known; None: it is not known for any."""

    @classmethod
    def of(
        cls, scorer: Scorer, contexts: Contexts, near: str, effects_nats: np.ndarray | None = None
    ) -> BlockReading:
        """``contexts``: of one block; ``near``: one of `analysis.cache_eviction.settings.NEARS`.

        ``effects_nats``: as the attribute, with near tokens read again, which is what `analysis.measure` keeps.
        """
        n_far = contexts.n_far
        if near == NEAR_KEPT:
            contexts = replace(contexts, n_short=1)
            effects_nats = None
        return cls(scorer, contexts, n_far, effects_nats)

    def measures(self, kept: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Some of `analysis.model.losses.MEASURES` of all targets after each choice, (B, C, number of names) float64.

        ``kept``: which far keys are left, (C, F) bool; or (C, G, F), by head of keys, layer after layer. A divergence
        is from the prediction with all of them. Choices by head need rows that share far keys.
        """
        more = self.contexts.n_far - self.n_far
        always = np.ones((*kept.shape[:-1], more), dtype=bool)
        visible = np.concatenate([kept, always], axis=-1)
        return far_cache.block_measures(self.scorer, self.contexts, visible, names)
