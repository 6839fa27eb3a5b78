"""Further losses by which other fields judge a choice of tokens: faithfulness (docs/method.md, 2.8).

`analysis.stats.faithfulness` turns these records into numbers. Shapes: m targets that are asked for, N long and M short
context length, F = N - M far tokens, K values of k, k_max the largest of them, S selectors, n subsets of j far
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.measure.selectors import Selection
from analysis.model.scorer import Scorer
from analysis.records.schema import CONTEXT_LENGTHS, length_column
from analysis.stats.correlation import row_spearman
from analysis.stats.faithfulness import EXACT
from analysis.text.contexts import NO_FAR, Contexts
from olmo_sparsity.util.streams import Stream

SUBSET_KEEP_RATE = 0.5
"""Share of the far tokens that a random subset keeps, rounded to a whole number of them."""


@dataclass(frozen=True)
class Faithfulness:
    """Measures what the records have beside the losses of the targets and of S_k."""

    scorer: Scorer
    """Of the model that evaluates."""
    ks: Sequence[int]
    subsets: int
    """n; 0: none are measured."""
    seed: int
    """Of the subsets."""

    def of_targets(self, contexts: Contexts, asked: np.ndarray) -> dict[str, np.ndarray]:
        """Columns of `FURTHER_TARGETS`, (m,) each."""
        # the short context as a text of its own, with position ids from 0 instead of from F
        alone = replace(contexts, tokens=contexts.tokens[:, contexts.n_far :])
        found = {"loss_short_from_0_nats": self.scorer.losses(alone, NO_FAR, asked)[:, 0]}
        for length in CONTEXT_LENGTHS:
            if length < contexts.n_long:
                # in a block target b is given M' + b tokens, as its short context has M + b
                last = replace(contexts, n_short=length)
                found[length_column(length)] = self.scorer.losses(last, NO_FAR, asked)[:, 0]
        return found

    def of_selections(
        self, contexts: Contexts, asked: np.ndarray, chosen: Mapping[str, Selection]
    ) -> dict[str, dict[str, np.ndarray]]:
        """Columns of `FURTHER_SELECTIONS` by selector, (m, …) each, of what selectors chose in these contexts."""
        selected = np.stack([each.columns for each in chosen.values()], axis=1)
        drops = comprehensiveness(self.scorer, contexts, asked, selected, self.ks)
        found = {name: {"comprehensiveness_nats": drops[:, i]} for i, name in enumerate(chosen)}
        agreement = score_agreement(chosen)
        for name in chosen if agreement else ():
            found[name]["leave_one_out_spearman"] = agreement.get(name, np.full(len(asked), np.nan))
        if self.subsets:
            subsets = subsets_of(contexts, asked[:, 0], self.subsets, self.seed)
            losses = subset_losses(self.scorer, contexts, asked, subsets)
            for name, each in chosen.items():
                sums = np.full(losses.shape, np.nan)
                if each.scores is not None:
                    sums = subset_influence(each.scores, subsets)
                found[name] |= {"subset_loss_nats": losses, "subset_influence": sums}
        return found


def far_subsets(n_far: int, count: int, *, seed: int, block: int) -> np.ndarray:
    """Random subsets of the far tokens of a block, (n, j) ascending columns: a pure function of (seed, block).

    Each keeps `SUBSET_KEEP_RATE` of them exactly, drawn without replacement, as the subsets of Park et al. 2023
    (arXiv 2303.14186) do: a sum over a subset then says nothing about how many tokens it has.
    """
    kept = max(1, round(SUBSET_KEEP_RATE * n_far))
    generator = np.random.default_rng([Stream.FAR_SUBSETS, seed, block])
    shuffled = generator.permuted(np.tile(np.arange(n_far), (count, 1)), axis=1)
    return np.sort(shuffled[:, :kept], axis=1)


def subsets_of(contexts: Contexts, blocks: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`far_subsets` of some blocks of the contexts, one for each of ``blocks`` (m,), (m, n, j)."""
    numbers = contexts.target_id[blocks, 0] // contexts.targets_per_block
    return np.stack([far_subsets(contexts.n_far, count, seed=seed, block=each) for each in numbers.tolist()])


def subset_losses(scorer: Scorer, contexts: Contexts, asked: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """loss(t | C_short and a subset of the far tokens), (m, n) nats, of subsets (m, n, j) that are those of the blocks:
    the targets of a block share the passes."""
    if contexts.targets_per_block == 1:
        return scorer.losses(contexts, subsets, asked)
    losses = np.empty(subsets.shape[:2])
    for block in np.unique(asked[:, 0]):
        rows = np.flatnonzero(asked[:, 0] == block)
        losses[rows] = scorer.losses(contexts, subsets[rows[0]], asked[rows])
    return losses


def subset_influence(scores: np.ndarray, subsets: np.ndarray) -> np.ndarray:
    """Summed influence of what each subset keeps, (m, n), of scores (m, F) and subsets (m, n, j).

    A token without a score counts as 0 [ours]: a screened selector holds what was not proposed to have no influence.
    """
    return np.take_along_axis(np.nan_to_num(scores)[:, None], subsets, axis=2).sum(axis=2)


def comprehensiveness(
    scorer: Scorer, contexts: Contexts, asked: np.ndarray, selected: np.ndarray, ks: Sequence[int]
) -> np.ndarray:
    """loss(t | C_long without the first k selected tokens) - L_long, (m, S, K) nats.

    ``selected``: far columns of S selectors, (m, S, k_max). L_long is that of these contexts, true or placebo.
    """
    whole = scorer.losses(contexts, contexts.all_far, asked)
    losses = []
    for k in ks:
        kept = np.ones((*selected.shape[:2], contexts.n_far), dtype=bool)
        np.put_along_axis(kept, selected[:, :, :k], False, axis=2)
        columns = np.nonzero(kept)[2].reshape(*selected.shape[:2], contexts.n_far - k)
        losses.append(scorer.losses(contexts, columns, asked) - whole)
    return np.stack(losses, axis=2)


def score_agreement(chosen: Mapping[str, Selection]) -> dict[str, np.ndarray]:
    """Spearman correlation of each selector's influence of all far tokens with leave-one-out's, (m,) by selector.

    Only where that is among them and both have scores; a token without one counts as 0 [ours].
    """
    scores = {name: np.nan_to_num(each.scores) for name, each in chosen.items() if each.scores is not None}
    exact = scores.pop(EXACT, None)
    return {} if exact is None else {name: row_spearman(each, exact) for name, each in scores.items()}
