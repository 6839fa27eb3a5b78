"""How far a policy agrees with a reference: in its scores, and in the keys that it keeps (docs/method.md, 2.2c [ours]).

Shapes: F far keys of one block, s sinks, G heads of keys in all layers.
"""

from __future__ import annotations

import numpy as np

from analysis.faithfulness import row_spearman


def rank_correlation(scores: np.ndarray, effects: np.ndarray, sinks: int = 0) -> float:
    """Spearman's correlation of scores, (F,) or by head (G, F), of which the mean over heads counts, with others.

    Equal values share their mean rank. NaN where either are all equal, or one of them is not finite.

    Args:
        scores: of a policy.
        effects: of a reference, such as leave-one-out-kl, (F,) or (G, F).
        sinks: so many of the first far keys count nothing.
    """
    ranked = []
    for values in (scores, effects):
        by_head = np.atleast_2d(values)
        ranked.append(by_head[:, sinks:].mean(axis=0))
    first, second = ranked
    return float(row_spearman(first[None], second[None])[0])


def kept_overlap(first: np.ndarray, second: np.ndarray, sinks: int = 0) -> float:
    """|A ∩ B| / K of two kept sets, summed over heads before they are divided; K is what both keep in the mean.

    So a head that keeps much counts for much, as in Ada-KV. A set for all heads, (F,), is that of every head. NaN where
    neither keeps anything.

    Args:
        first: A, (F,) or (G, F) bool.
        second: B, likewise.
        sinks: so many of the first far keys, which both keep, count nothing.
    """
    first, second = np.broadcast_arrays(np.atleast_2d(first), np.atleast_2d(second))
    first = first[:, sinks:]
    second = second[:, sinks:]
    kept = (first.sum() + second.sum()) / 2
    if kept == 0:
        return np.nan
    return float((first & second).sum() / kept)
