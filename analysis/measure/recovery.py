"""How much of the long context's gain k tokens recover (Eq. 20, METHOD 2.2).

Shapes: n targets, K values of k, k_max the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.model.scorer import Scorer, short_columns
from analysis.text.contexts import Contexts


def selected_losses(
    scorer: Scorer, contexts: Contexts, selected: np.ndarray, ks: Sequence[int]
) -> np.ndarray:
    """L_k = loss(t | C_short and the first k selected tokens), (n, K) nats.

    ``selected``: (n, k_max) columns of far tokens, most influential first.
    """
    short = np.broadcast_to(short_columns(contexts), (len(contexts), contexts.n_short))
    losses = [
        scorer.losses(contexts, np.concatenate([np.sort(selected[:, :k], axis=1), short], axis=1)[:, None])
        for k in ks
    ]
    return np.concatenate(losses, axis=1)
