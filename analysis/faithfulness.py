"""Further losses by which other fields judge a choice of tokens: faithfulness (docs/method.md, 2.8).

An opt-in step of `analysis.measure`; `analysis.stats.attribution.faithfulness` turns its columns into numbers.
Shapes: m targets, N long and M short context length, F = N - M far tokens, K values of k, k_max the largest of them, S
selectors, n subsets of j far tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import scipy

from analysis.contexts import NO_FAR, Contexts
from analysis.selectors import Selection
from analysis.settings import ContextSettings
from olmo_sparsity.util.rng import Stream

if TYPE_CHECKING:  # its correlations are read without torch
    from analysis.model.losses import Scorer

SUBSETS = 32
"""n, random subsets of the far tokens on which summed influence is compared with the loss (LDS)."""
SUBSET_KEEP_RATE = 0.5
"""Share of the far tokens that a random subset keeps, rounded to a whole number of them."""
CONTEXT_LENGTHS = (32, 96, 256)
"""Lengths of context that are always among those measured, where they are below N [ours]."""
EXACT = "leave-one-out"
"""The selector that others are compared with: the exact influence of every single token."""


@dataclass(frozen=True)
class Faithfulness:
    """Measures what a result may have beside the losses of the targets and of S_k."""

    scorer: Scorer
    """Of the model that evaluates."""
    ks: Sequence[int]
    seed: int
    """Of the subsets."""

    def of_targets(self, contexts: Contexts, targets: np.ndarray) -> dict[str, np.ndarray]:
        """Further columns of the targets, (m,) nats each; ``targets``: (m, 2) as in `Scorer.losses`."""
        # the short context as a text of its own, with position ids from 0 instead of from F
        alone = replace(contexts, tokens=contexts.tokens[:, contexts.n_far :], ids=None)
        return {"loss_short_from_0_nats": self.scorer.losses(alone, NO_FAR, targets)[:, 0]}

    def of_choices(
        self, contexts: Contexts, targets: np.ndarray, chosen: Mapping[str, Selection]
    ) -> dict[str, dict[str, np.ndarray]]:
        """Further columns of what selectors chose in these contexts, by selector:

        comprehensiveness_nats   what is lost without the first k tokens, (m, K)
        subset_loss_nats         loss with each random subset of the far tokens, the same for all selectors, (m, n)
        subset_influence         summed influence of each subset, (m, n); NaN where single tokens have none
        leave_one_out_spearman   rank correlation of its influence of all far tokens with leave-one-out's, (m,)
        """
        k_max = max(self.ks)  # some rank more tokens, as sinks may be among them
        selected = np.stack([choice.columns[:, :k_max] for choice in chosen.values()], axis=1)
        drops = self._comprehensiveness(contexts, targets, selected)
        agreement = score_agreement(chosen)
        no_agreement = np.full(len(targets), np.nan)
        blocks = contexts.target_id[targets[:, 0], 0] // contexts.targets_per_block
        subsets_of_targets = []
        for block in blocks:
            subsets_of_targets.append(far_subsets(contexts.n_far, SUBSETS, seed=self.seed, block=block))
        subsets = np.stack(subsets_of_targets)
        losses = self._subset_losses(contexts, targets, subsets)
        columns = {}
        for number, (name, choice) in enumerate(chosen.items()):
            of_choice = {"comprehensiveness_nats": drops[:, number]}
            if agreement:
                of_choice["leave_one_out_spearman"] = agreement.get(name, no_agreement)
            sums = np.full(losses.shape, np.nan)
            if choice.scores is not None:
                sums = subset_influence(choice.scores, subsets)
            columns[name] = of_choice | {"subset_loss_nats": losses, "subset_influence": sums}
        return columns

    def _comprehensiveness(self, contexts: Contexts, targets: np.ndarray, selected: np.ndarray) -> np.ndarray:
        """loss(t | C_long without the first k of ``selected``, (m, S, k_max)) - L_long, true or placebo, (m, S, K)."""
        n_far = contexts.n_far
        count, selectors, _ = selected.shape
        long = self.scorer.losses(contexts, contexts.all_far, targets)
        drops = []
        for k in self.ks:
            kept = np.ones((count, selectors, n_far), dtype=bool)
            np.put_along_axis(kept, selected[:, :, :k], False, axis=2)
            _, _, columns = np.nonzero(kept)
            columns = columns.reshape(count, selectors, n_far - k)
            losses = self.scorer.losses(contexts, columns, targets)
            drops.append(losses - long)
        return np.stack(drops, axis=2)

    def _subset_losses(self, contexts: Contexts, targets: np.ndarray, subsets: np.ndarray) -> np.ndarray:
        """loss(t | C_short and a subset of the far tokens), (m, n), of subsets (m, n, j) of the targets' blocks."""
        if contexts.targets_per_block == 1:
            return self.scorer.losses(contexts, subsets, targets)
        losses = np.empty(subsets.shape[:2])
        for block in np.unique(targets[:, 0]):  # the targets of a block share the passes
            rows = np.flatnonzero(targets[:, 0] == block)
            losses[rows] = self.scorer.losses(contexts, subsets[rows[0]], targets[rows])
        return losses


def measured_lengths(contexts: ContextSettings, *, faithfulness: bool) -> tuple[int, ...]:
    """The lengths of further contexts that are measured, ascending: those that are set, and `CONTEXT_LENGTHS`."""
    always = [length for length in CONTEXT_LENGTHS if faithfulness and length < contexts.n_long]
    return tuple(sorted({*contexts.lengths, *always}))


def far_subsets(n_far: int, count: int, *, seed: int, block: int) -> np.ndarray:
    """Random subsets of the far tokens of a block, (n, j) ascending columns: a pure function of (seed, block).

    Each keeps `SUBSET_KEEP_RATE` of them exactly, drawn without replacement, as the subsets of Park et al. 2023
    (arXiv 2303.14186) do: a sum over a subset then says nothing about how many tokens it has.
    """
    kept = max(1, round(SUBSET_KEEP_RATE * n_far))
    generator = np.random.default_rng([Stream.FAR_SUBSETS, seed, block])
    columns = np.tile(np.arange(n_far), (count, 1))
    shuffled = generator.permuted(columns, axis=1)
    return np.sort(shuffled[:, :kept], axis=1)


def subset_influence(scores: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """Summed influence of what each subset keeps, (m, n), of scores (m, F) and subsets (m, n, j).

    A token without a score counts as 0 [ours]: a screened selector holds what was not proposed to have no influence.
    """
    influence = np.nan_to_num(scores)[:, None]
    of_kept = np.take_along_axis(influence, subsets, axis=2)
    return of_kept.sum(axis=2)


def score_agreement(chosen: Mapping[str, Selection]) -> dict[str, np.ndarray]:
    """Spearman correlation of each selector's influence of all far tokens with leave-one-out's, (m,) by selector.

    Only where that is among them and both have scores; a token without one counts as 0 [ours].
    """
    scores = {}
    for name, choice in chosen.items():
        if choice.scores is not None:
            scores[name] = np.nan_to_num(choice.scores)
    if EXACT not in scores:
        return {}
    exact = scores.pop(EXACT)
    return {name: row_spearman(values, exact) for name, values in scores.items()}


def row_pearson(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson's correlation of row i of ``first`` with row i of ``second``, (m, n) both: (m,).

    NaN where a row is constant or has a value that is not finite.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        # The mean of equal values may be rounded: what is left of them is then noise, not 0.
        constant = (np.ptp(first, axis=1) == 0) | (np.ptp(second, axis=1) == 0)
        first = first - first.mean(axis=1, keepdims=True)
        second = second - second.mean(axis=1, keepdims=True)
        products = (first * second).sum(axis=1)
        squares = (first**2).sum(axis=1) * (second**2).sum(axis=1)
        correlation = products / np.sqrt(squares)
    defined = np.isfinite(correlation) & ~constant
    return np.where(defined, np.clip(correlation, -1, 1), np.nan)


def row_spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of the rows, (m,); equal values share their mean rank. NaN as in `row_pearson`."""
    finite = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    first = np.where(finite[:, None], first, 0.0)
    second = np.where(finite[:, None], second, 0.0)
    first_ranks = scipy.stats.rankdata(first, axis=1)
    second_ranks = scipy.stats.rankdata(second, axis=1)
    correlation = row_pearson(first_ranks, second_ranks)
    return np.where(finite, correlation, np.nan)
