"""Far tokens as a key-value cache keeps them: losses from some keys and values, and what eviction policies look at.

The whole far context is read, so that a key and a value hold what their token has read before it. The short context and
the target then read on behind those that are kept (docs/method.md, 2.2a [ours]).
Shapes: n blocks of B targets, m targets, N long and M short context length, F far tokens, j of them kept, L tokens of a
block, R rows of one pass, H heads of queries, G heads of keys and values (H / G queries share one), D head dimension.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from analysis.contexts import Contexts
from analysis.model.adapter import KeyValues
from analysis.model.losses import CACHE_TOKENS, Scorer, smaller_when_memory_runs_out
from analysis.model.memory import chunks
from olmo_sparsity.util.errors import UserError


@smaller_when_memory_runs_out
@torch.inference_mode()
def far_key_values(scorer: Scorer, contexts: Contexts) -> KeyValues:
    """Keys and values of all far tokens of every block, each (n, G, F, D), a pair per layer."""
    return scorer.prefixes(contexts, contexts.n_far)


@smaller_when_memory_runs_out
@torch.inference_mode()
def cache_losses(
    scorer: Scorer, contexts: Contexts, whole: KeyValues, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """-log p of each target where j far tokens are left in the cache, (m,) nats.

    Args:
        scorer: computes them.
        contexts: n blocks.
        whole: `far_key_values` of them.
        kept: columns of the far context: (m, j), ascending, the same in every layer and head; or (m, layers, G, j).
        targets: (m, 2) block and place in it of each target.

    Raises `UserError` where every head has columns of its own and the model's cached keys need their position ids.
    """
    by_head = kept.ndim > 2
    if by_head and not scorer.model.caches_rotated_keys:
        raise UserError(
            "this model rotates keys when they are read, so heads cannot keep tokens of their own; convert it with "
            "olmo-sparsity export_hf, or leave the eviction policies out"
        )
    losses = np.empty(len(targets))
    longest = contexts.n_short + contexts.targets_per_block
    size = scorer.tokens_per_batch // longest
    size = min(size, CACHE_TOKENS * scorer.tokens_per_batch // (longest + kept.shape[-1]))
    for rows in chunks(np.argsort(targets[:, 1], kind="stable"), size):
        block, place = targets[rows].T
        behind = contexts.n_far + np.arange(contexts.n_short + place.max())
        # where heads differ, the ids of cached tokens are not read
        kept_ids = np.zeros((len(rows), kept.shape[-1]), dtype=np.int64) if by_head else kept[rows]
        ids = np.concatenate([kept_ids, np.broadcast_to(behind, (len(rows), len(behind)))], axis=1)
        with scorer.precision():
            logits = scorer.model.logits_after(
                _kept_key_values(whole, scorer.tensor(block), scorer.tensor(kept[rows])),
                scorer.tensor(contexts.tokens[block[:, None], behind]),
                scorer.tensor(ids),
                int(np.ptp(place)) + 1,
            )
        of_target = logits[torch.arange(len(rows)), scorer.tensor(place - place.min())].float()
        wanted = scorer.tensor(contexts.targets[block, place])
        losses[rows] = functional.cross_entropy(of_target, wanted, reduction="none").double().cpu().numpy()
    return losses


def _kept_key_values(whole: KeyValues, block: Tensor, kept: Tensor) -> KeyValues:
    """The keys and values of the kept columns, (R, j) or (R, layers, G, j), of the far contexts of some blocks (R,)."""
    columns = kept[:, None, None] if kept.ndim == 2 else kept
    columns = columns.expand(-1, len(whole), whole[0][0].shape[1], -1)
    rows, heads = block[:, None, None], torch.arange(columns.shape[2], device=block.device)[:, None]
    return [
        (keys[rows, heads, columns[:, layer]], values[rows, heads, columns[:, layer]])
        for layer, (keys, values) in enumerate(whole)
    ]


@smaller_when_memory_runs_out
@torch.inference_mode()
def accumulated_attention(
    scorer: Scorer, contexts: Contexts, targets: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Attention that far tokens get from all tokens before each target, by layer and head of keys, (m, layers, G, F).

    Summed over the last ``window`` tokens of the short context (None: over all tokens), mean over the heads of queries
    that share a head of keys.
    """
    length, size = contexts.tokens.shape[1], contexts.targets_per_block
    one_key = scorer.model.key_values(scorer.tensor(contexts.tokens[:1, :1]), scorer.first_ids(1, 1))
    key_heads = one_key[0][0].shape[1]
    ends = torch.arange(length - size, length, device=scorer.device)

    def read(attention: Tensor) -> Tensor:
        """(R, G, B, F) of the attention (R, H, L, L) of a layer, maybe with a prefix before the columns."""
        to_far = attention[..., -length:][..., : contexts.n_far].cumsum(dim=2)
        summed = to_far[:, :, ends]
        if window is not None:
            summed = summed - to_far[:, :, (ends - window).clamp(min=contexts.n_far - 1)]
        return summed.unflatten(1, (key_heads, -1)).mean(dim=2)

    parts = []
    for rows in scorer.long_parts(contexts, np.arange(len(contexts)), "attention weights"):
        with scorer.precision():
            layers = scorer.model.attention(
                scorer.tensor(contexts.tokens[rows]), scorer.first_ids(len(rows), length), length, read
            )
        parts.append(torch.stack(layers, dim=1).cpu().numpy())  # (R, layers, G, B, F)
    return np.concatenate(parts)[targets[:, 0], :, :, targets[:, 1]]
