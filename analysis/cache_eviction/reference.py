"""Rankings of far keys that see the targets: what policies are judged against (docs/method.md, 2.2c [ours]).

No policy can see what comes next. A reference reads the targets of a block with and without far keys and ranks by what
that does to their predictions. None is an upper bound: each judges keys by one or few of all subsets.
Shapes: one block of B targets, N long and M short context length, F = N - M far keys, s sinks, G heads of keys in all
layers, C subsets. A row is a pass over M + B - 1 tokens, over B where the near tokens keep their keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from analysis.parameters import find
from olmo_sparsity.util.registry import Registry

if TYPE_CHECKING:  # the names of references are known without torch
    from analysis.cache_eviction.reading import BlockReading


@dataclass(frozen=True)
class RankedBlock:
    """One block whose far keys are ranked."""

    reading: BlockReading
    """Up to the last target that counts."""
    places: np.ndarray
    """Of the targets that count, (m,), ascending."""
    sinks: int
    """So many of the first far keys are in every subset, and are no candidates."""

    @property
    def n_far(self) -> int:
        """F."""
        return self.reading.n_far

    @property
    def candidates(self) -> np.ndarray:
        """Columns of the far keys that are ranked, (F - s,)."""
        return np.arange(self.sinks, self.n_far)

    def divergences(self, subsets: np.ndarray) -> np.ndarray:
        """KL from the predictions with all far keys to those with the sinks and a subset, summed over targets, (C,).

        ``subsets``: columns of candidates, (C, j).
        """
        kept = np.zeros((len(subsets), self.n_far), dtype=bool)
        kept[:, : self.sinks] = True
        np.put_along_axis(kept, subsets, True, axis=1)
        kl = self.reading.measures(kept, ("kl",))[..., 0]
        return kl[self.places].sum(axis=0)

    def without_each(self, columns: np.ndarray) -> np.ndarray:
        """`divergences` of some candidates (j,) without each of them in turn, (j,)."""
        count = len(columns)
        known = self.reading.effects_nats
        if known is not None and count == len(self.candidates):
            of_targets = known[self.places][:, columns]
            if np.isfinite(of_targets).all():
                return of_targets.sum(axis=0)
        all_but_one = ~np.eye(count, dtype=bool)
        subsets = np.broadcast_to(columns, (count, count))[all_but_one]
        return self.divergences(subsets.reshape(count, count - 1))


@dataclass(frozen=True)
class Reference(ABC):
    """A ranking of the far keys of a block by what its targets say."""

    first: int | None = None
    """The first so many targets of the block count; None: all."""

    def scores(
        self, reading: BlockReading, sinks: int = 0, places: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """(F,), or by head (G, F): the higher, the longer a key is kept.

        Args:
            reading: of one block.
            sinks: so many of the first far keys are kept beside what is ranked; they score above all others.
            places: of the targets in the block that count, (m,); None: all. Special tokens, for example, are none.
        """
        counted = np.unique(np.arange(reading.contexts.targets_per_block) if places is None else places)
        if self.first is not None:
            counted = counted[counted < self.first]
        block = RankedBlock(_up_to(reading, counted[-1]), counted, sinks)
        with reading.scorer.keeping_far():
            ranked = self.rank(block)
        above = ranked.max() + 1
        of_sinks = np.full((*ranked.shape[:-1], sinks), above)
        return np.concatenate([of_sinks, ranked], axis=-1)

    @abstractmethod
    def rank(self, block: RankedBlock) -> np.ndarray:
        """Scores of the candidates, (F - s,) or (G, F - s)."""

    @property
    def most_keys(self) -> int | None:
        """It ranks for budgets of at most so many keys, sinks included; None: for all."""
        return None


REFERENCES: Registry[type[Reference]] = Registry("reference")
"""By name."""


def find_reference(text: str) -> Reference:
    """The reference of NAME or NAME:PARAMETER=NUMBER:…, such as ``greedy-kl:keys=8:first=16``.

    Raises `UserError` that lists the choices.
    """
    reference: Reference = find(REFERENCES, text)
    return reference


@REFERENCES.register("leave-one-out-kl")
@dataclass(frozen=True)
class LeaveOneOutKL(Reference):
    """The exact effect of a key: KL to the full cache without it in all layers and heads, summed over targets, nats.

    F - s rows. Keys that stand in for one another have no effect.
    """

    def rank(self, block: RankedBlock) -> np.ndarray:
        """(F - s,)."""
        return block.without_each(block.candidates)


@REFERENCES.register("halving-kl")
@dataclass(frozen=True)
class HalvingKL(Reference):
    """Leave one out of what is left, drop the half of least KL to the full cache, and again, until none is left.

    2 (F - s) rows. A score is a rank. Where one of two keys that stand in for one another is dropped before the other,
    the effect of this one is seen.
    """

    def rank(self, block: RankedBlock) -> np.ndarray:
        """(F - s,)."""
        left = block.candidates
        last_first: list[int] = []
        while len(left):
            order = np.argsort(-block.without_each(left), kind="stable")
            kept = len(left) // 2
            dropped = left[order[kept:]]
            last_first.extend(dropped[::-1])
            left = np.sort(left[order[:kept]])
        return _by_order(block, last_first[::-1])


@REFERENCES.register("presence-gradient")
@dataclass(frozen=True)
class PresenceGradient(Reference):
    """Minus the slope of the summed loss by the presence of a key in one layer and head, (G, F), nats.

    One row, forward and back: `analysis.model.far_cache.presence_gradient`. It says what a key does where a little of
    it is taken away.
    """

    def rank(self, block: RankedBlock) -> np.ndarray:
        """(G, F - s)."""
        from analysis.model import far_cache  # the names of references are known without torch

        reading = block.reading
        slopes = far_cache.presence_gradient(reading.scorer, reading.contexts, block.places)
        return slopes[:, block.candidates]


@REFERENCES.register("greedy-kl")
@dataclass(frozen=True)
class GreedyKL(Reference):
    """Forward selection: to the sinks it adds the key that brings the predictions nearest to the full cache in KL.

    (keys - s) (F - s) rows at most, and F - s for the order of the others, that of leave-one-out-kl. A score is a rank.
    """

    keys: int = 16
    """So many keys are chosen, sinks included."""

    def rank(self, block: RankedBlock) -> np.ndarray:
        """(F - s,)."""
        chosen: list[int] = []
        others = block.candidates
        while len(others) and block.sinks + len(chosen) < self.keys:
            beside = np.broadcast_to(np.array(chosen, dtype=np.int64), (len(others), len(chosen)))
            subsets = np.concatenate([beside, others[:, None]], axis=1)
            best = block.divergences(subsets).argmin()
            chosen.append(others[best])
            others = np.delete(others, best)
        effects = block.without_each(block.candidates)[others - block.sinks]
        rest = others[np.argsort(-effects, kind="stable")]
        return _by_order(block, [*chosen, *rest])

    @property
    def most_keys(self) -> int:
        """See `Reference`."""
        return self.keys


def _up_to(reading: BlockReading, last: int) -> BlockReading:
    """The same block with its targets up to a place."""
    contexts = reading.contexts
    up_to_last = replace(
        contexts,
        tokens=contexts.tokens[:, : contexts.n_long + last],
        targets=contexts.targets[:, : last + 1],
        target_id=contexts.target_id[:, : last + 1],
    )
    return replace(reading, contexts=up_to_last)


def _by_order(block: RankedBlock, columns: Sequence[int]) -> np.ndarray:
    """Scores of the candidates whose columns are given in order, the first the highest, (F - s,)."""
    scores = np.empty(len(columns))
    scores[np.array(columns) - block.sinks] = np.arange(len(columns), 0, -1)
    return scores
