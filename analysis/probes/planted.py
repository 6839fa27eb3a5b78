"""Recall of tokens that a prediction is known to depend on: do influence selectors find them?

Recall at k is the share of the p planted columns among the first k selected; chance is k / F.

The placebo [ours] is the far context of another sample, with its planted tokens, of another target: a selector that
finds those as often goes by how they look, not by what they do.

Shapes: n samples, F far tokens, p planted tokens of each sample, k_max selected tokens, K values of k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.contexts import Contexts
from analysis.selectors import SelectorInput, find_selector
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.measured import PLACEBO, TRUE
from analysis.stats.numbers import CHANCE
from olmo_sparsity.util.progress import Advance

if TYPE_CHECKING:
    from analysis.model.losses import Scorer

KS = (1, 2, 4, 8, 16)
"""Numbers of selected tokens for which recall is given."""
_SUBSET_ELEMENTS = 1 << 22  # columns of all subsets of one call: 32 MiB of int64


def found_at(selected: np.ndarray, planted: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Whether each planted token (n, p) is among the first k selected (n, k_max), (n, K, p) bool."""
    is_found = selected[:, :, None] == planted[:, None, :]
    return np.stack([is_found[:, :k].any(axis=1) for k in ks], axis=1)


def selected_columns(name: str, scorer: Scorer, contexts: Contexts, seed: int, k_max: int) -> np.ndarray:
    """The far columns that a selector chooses, most influential first, (n, k_max)."""
    size = max(1, _SUBSET_ELEMENTS // (contexts.n_far * contexts.n_long))
    parts = [contexts.take(slice(first, first + size)) for first in range(0, len(contexts), size)]
    select = find_selector(name)
    return np.concatenate([select(SelectorInput(scorer, part, seed, k_max)).columns for part in parts])


def recall_frame(
    scorer: Scorer,
    contexts: Contexts,
    planted: np.ndarray,
    donors: np.ndarray,
    selectors: Sequence[str],
    bootstrap: ClusterBootstrap,
    *,
    seed: int,
    advance: Advance,
) -> pd.DataFrame:
    """Token recall of selectors: selector, far_context, k, value, low, high; chance is a selector.

    ``planted``: (n, p) far columns; ``donors``: (n,) whose far context is each sample's placebo; ``seed``: of what
    selectors draw; ``advance`` is called when a selector has seen true or placebo contexts.
    """
    n_far = contexts.n_far
    ks = [k for k in KS if k <= n_far]
    of_donors = contexts.with_far(contexts.tokens[donors, :n_far])
    recalls: list[dict[str, object]] = []
    for name in selectors:
        for far_context, some, at in ((TRUE, contexts, planted), (PLACEBO, of_donors, planted[donors])):
            selected = selected_columns(name, scorer, some, seed, max(ks))
            recall = found_at(selected, at, ks).mean(axis=2)  # (n, K)
            for k, of_k in zip(ks, recall.T, strict=True):
                interval = bootstrap.ratio_interval(of_k, np.ones(len(contexts)))
                recalls.append({"selector": name, "far_context": far_context, "k": k, **vars(interval)})
            advance(1)
    chance = {"selector": CHANCE, "far_context": TRUE, "low": math.nan, "high": math.nan}
    return pd.DataFrame(recalls + [{**chance, "k": k, "value": k / n_far} for k in ks])
