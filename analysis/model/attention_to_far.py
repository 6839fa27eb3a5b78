"""The attention that far tokens get from those before a target, which selectors and policies rank by.

Shapes: n blocks of B targets, m targets that are asked for, F far tokens, R rows of one pass, Q queries, H heads of
queries and G heads of keys, in all layers where none is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.losses import Scorer, retry_smaller_on_oom

ReduceToFar = Callable[[Tensor, Tensor], Tensor]
"""See `attention_to_far`."""


@retry_smaller_on_oom
@torch.inference_mode()
def last_attention(scorer: Scorer, contexts: Contexts, targets: np.ndarray) -> np.ndarray:
    """Attention of the position before each target to each far token, mean over heads and layers, (m, F).

    ``targets``: as in `Scorer.losses`.
    """

    def reduce(to_far: Tensor, last: Tensor) -> Tensor:
        return to_far[:, :, last].mean(dim=1)

    parts = []
    for layers in _layers_of(scorer, contexts, reduce, contexts.targets_per_block):
        parts.append(torch.stack(layers).mean(dim=0).double().cpu().numpy())
    return np.concatenate(parts)[targets[:, 0], targets[:, 1]]


def accumulated_attention(
    scorer: Scorer, contexts: Contexts, targets: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Attention to far tokens from all tokens before each target, by head of keys, (m, G, F).

    Summed over the last ``window`` tokens of the short context, or of the far one where there is no short one
    (None: over all tokens), mean over the heads of queries that share one of the keys. ``targets``: as in
    `Scorer.losses`.
    """

    def reduce(to_far: Tensor, last: Tensor) -> Tensor:
        to_far = to_far.cumsum(dim=2)
        summed = to_far[:, :, last]
        if window is not None:
            before = last - window
            is_one = (before >= 0)[:, None]
            summed = summed - to_far[:, :, before.clamp(min=0)] * is_one
        return summed

    queries = None
    if window is not None:
        observers = contexts.n_short or contexts.n_far
        queries = min(window, observers) + contexts.targets_per_block - 1
    return attention_to_far(scorer, contexts, targets, reduce, queries)


@retry_smaller_on_oom
@torch.inference_mode()
def attention_to_far(
    scorer: Scorer, contexts: Contexts, targets: np.ndarray, reduce: ReduceToFar, queries: int | None = None
) -> np.ndarray:
    """What is read off the attention to far tokens before each target, by head of keys, (m, G, F).

    It is the mean over the heads of queries that share one of the keys. G counts the heads of all layers, one layer
    after the other; layers may differ in how many they have.

    Args:
        contexts: n blocks.
        targets: as in `Scorer.losses`.
        reduce: from the attention of Q tokens to the far ones in one layer, (R, H, Q, F), and the last of the Q
            before each target of a block, (B,), to (R, H, B, F).
        queries: Q, how many tokens before the last target; None: all of them. Where the far context is kept
            (`keeping_far`), the adapter shares far keys and the Q are near tokens, only these are read.
    """
    key_heads = scorer.key_heads(contexts)
    parts = []
    for layers in _layers_of(scorer, contexts, reduce, queries or contexts.tokens.shape[1]):
        of_keys = []
        for layer, count in zip(layers, key_heads, strict=True):
            by_key_head = layer.unflatten(1, (count, -1))
            of_keys.append(by_key_head.mean(dim=2))
        parts.append(torch.cat(of_keys, dim=1).cpu().numpy())  # (R, G, B, F)
    return np.concatenate(parts)[targets[:, 0], :, targets[:, 1]]


def _layers_of(
    scorer: Scorer, contexts: Contexts, reduce: ReduceToFar, queries: int
) -> Iterator[list[Tensor]]:
    """What ``reduce`` gives of each layer, of some blocks after the others; see `attention_to_far`."""
    n_far, length = contexts.n_far, contexts.tokens.shape[1]
    last = torch.arange(queries - contexts.targets_per_block, queries, device=scorer.device)

    def of_layer(to_far: Tensor) -> Tensor:
        return reduce(to_far[:, :, -queries:], last)

    if scorer.keeps_far and scorer.model.shares_far_keys and queries <= length - n_far:
        first_id = int(contexts.position_ids[n_far])
        for tokens in contexts.tokens:
            far = scorer.far_key_values(tokens[None, :n_far])
            near = scorer.tensor(tokens[None, n_far:])
            yield scorer.model.attention_of_near(far, near, of_layer, first_id)
        return
    for some in scorer.long_parts(contexts, contexts.tokens):
        ids = scorer.ids_of(contexts, len(some), length)
        # maybe with a prefix before the columns
        yield scorer.model.attention(
            scorer.tensor(some), ids, queries, lambda weights: of_layer(weights[..., -length:][..., :n_far])
        )
