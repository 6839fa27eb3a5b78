"""Do influence selectors find the needle that a prediction needs?

The target is the first value token; the short context is the second key, and everything before it is far. The needle's
tokens are the earlier key and its first value token, q + 1 far columns. The placebo [ours] is the far context of
another sample, with its needle, whose value is not the target: a selector that finds those tokens as often goes by how
they look, not by what they do.

Shapes: n samples, N tokens of context, q of the key, F = N - q far tokens, K values of how many are selected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis.contexts import Contexts
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.measured import PLACEBO, TRUE
from analysis.stats.numbers import CHANCE
from analysis.synthetic.planted import KS, chance_recall, found_at, selected_columns
from olmo_sparsity.util.progress import Advance

if TYPE_CHECKING:
    from analysis.model.token_losses import TokenLosses


def needle_contexts(rows: np.ndarray, key_tokens: int) -> dict[str, Contexts]:
    """True and placebo contexts from contexts and their first value token, (n, N + 1), behind keys of q tokens."""
    contexts = Contexts(rows[:, :-1], rows[:, -1:], np.arange(len(rows))[:, None], key_tokens)
    donors = np.roll(np.arange(len(rows)), 1)
    return {TRUE: contexts, PLACEBO: contexts.with_far(contexts.tokens[donors, : contexts.n_far])}


def recall_of_needles(
    token_losses: TokenLosses,
    rows: np.ndarray,
    needle: np.ndarray,
    places: pd.DataFrame,
    selectors: Sequence[str],
    seed: int,
    advance: Advance,
) -> pd.DataFrame:
    """Recall of the needle's tokens: selector, far_context, k, value, low, high; chance is a selector.

    ``rows``: as for `needle_contexts`; ``needle``: (q + 1,) its far columns; ``places``: text and maybe group of each
    sample; ``seed``: of what selectors draw, and of the bootstrap.
    """
    from analysis.model.losses import Scorer

    scorer = Scorer(
        token_losses.model, device=token_losses.device, tokens_per_batch=token_losses.tokens_per_batch
    )
    contexts = needle_contexts(rows, len(needle) - 1)
    n_far = contexts[TRUE].n_far
    planted, ks = np.tile(needle, (len(rows), 1)), [k for k in KS if k <= n_far]
    groups = places["group"].to_numpy() if "group" in places else None
    bootstrap = ClusterBootstrap(places["text"].to_numpy(), groups=groups, seed=seed)
    recalls: list[dict[str, Any]] = []
    for name in selectors:
        for far_context, some in contexts.items():
            selected = selected_columns(name, scorer, some, seed, max(ks))
            recall = found_at(selected, planted, ks).mean(axis=2)  # (n, K)
            for k, of_k in zip(ks, recall.T, strict=True):
                interval = bootstrap.ratio_interval(of_k, np.ones(len(rows)))
                recalls.append({"selector": name, "far_context": far_context, "k": k, **vars(interval)})
            advance(1)
    chance = {"selector": CHANCE, "far_context": TRUE, "low": math.nan, "high": math.nan}
    return pd.DataFrame(recalls + [{**chance, "k": k, "value": chance_recall(k, n_far)} for k in ks])
