"""The attention that far tokens get from those before a target, which selectors and policies rank by.

Shapes: n blocks of B targets, m targets that are asked for, F far tokens, R rows of one pass, Q queries, q of them in a
slice, H heads of queries and G heads of keys, in all layers where none is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.losses import Scorer, retry_smaller_on_oom


@retry_smaller_on_oom
@torch.inference_mode()
def last_attention(scorer: Scorer, contexts: Contexts, targets: np.ndarray) -> np.ndarray:
    """Attention of the position before each target to each far token, mean over heads and layers, (m, F).

    ``targets``: as in `Scorer.losses`.
    """
    parts = []
    for layers in _layers_of(scorer, contexts, window=1):
        of_layers = torch.stack([layer.mean(dim=1) for layer in layers])
        parts.append(of_layers.mean(dim=0).double().cpu().numpy())
    return np.concatenate(parts)[targets[:, 0], targets[:, 1]]


@retry_smaller_on_oom
@torch.inference_mode()
def accumulated_attention(
    scorer: Scorer, contexts: Contexts, targets: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Attention to far tokens from all tokens before each target, by head of keys, (m, G, F).

    Summed over the last ``window`` tokens of the short context, or of the far one where there is no short one
    (None: over all tokens), mean over the heads of queries that share one of the keys. G counts the heads of all
    layers, one layer after the other; layers may differ in how many they have. ``targets``: as in `Scorer.losses`.
    """
    key_heads = scorer.key_heads(contexts)
    parts = []
    for layers in _layers_of(scorer, contexts, window):
        of_keys = []
        for layer, count in zip(layers, key_heads, strict=True):
            by_key_head = layer.unflatten(1, (count, -1))
            of_keys.append(by_key_head.mean(dim=2))
        parts.append(torch.cat(of_keys, dim=1).cpu().numpy())  # (R, G, B, F)
    return np.concatenate(parts)[targets[:, 0], :, targets[:, 1]]


def _layers_of(scorer: Scorer, contexts: Contexts, window: int | None) -> Iterator[list[Tensor]]:
    """Attention to far tokens, summed over a window, of each layer (R, H, B, F), of some blocks after the others.

    Where the far context is kept (`keeping_far`), the adapter shares far keys and all that observe are near tokens,
    only these are read.
    """
    n_far, length = contexts.n_far, contexts.tokens.shape[1]
    observers = _observers(contexts, window).to(scorer.device)
    queries = observers.shape[1]

    def of_layer(to_far: Iterable[Tensor]) -> Tensor:
        return _observed(to_far, observers)

    if scorer.keeps_far and scorer.model.shares_far_keys and queries <= length - n_far:
        first_id = int(contexts.position_ids[n_far])
        for tokens in contexts.tokens:
            far = scorer.far_key_values(tokens[None, :n_far])
            near = scorer.tensor(tokens[None, n_far:])
            yield scorer.model.attention_of_near(
                far, near, lambda weights: of_layer(of_some[:, :, -queries:] for of_some in weights), first_id
            )
        return
    for some in scorer.long_parts(contexts, contexts.tokens):
        ids = scorer.ids_of(contexts, len(some), length)
        yield scorer.model.attention(
            scorer.tensor(some),
            ids,
            queries,
            # maybe with a prefix before the columns
            lambda weights: of_layer(of_some[..., -length:][..., :n_far] for of_some in weights),
        )


def _observers(contexts: Contexts, window: int | None) -> Tensor:
    """Which of the last Q tokens observe for each target, 1.0 or 0.0, (B, Q): no target has others among them."""
    targets = contexts.targets_per_block
    if window is None:
        window = queries = contexts.tokens.shape[1]
    else:
        queries = min(window, contexts.n_short or contexts.n_far) + targets - 1
    before = torch.arange(queries - targets + 1, queries + 1)[:, None]
    query = torch.arange(queries)
    return ((query < before) & (query >= before - window)).float()


def _observed(to_far: Iterable[Tensor], observers: Tensor) -> Tensor:
    """Slices of attention (R, H, q, F) of Q queries, summed over the observers of each target, (R, H, B, F)."""
    total: Tensor | None = None
    start = 0
    for some in to_far:
        end = start + some.shape[2]
        observed = observers[:, start:end] @ some
        total = observed if total is None else total + observed
        start = end
    assert total is not None and start == observers.shape[1]
    return total
