"""What a model predicts where some far keys and values are not in its cache (docs/method.md, 2.2b [ours]).

The far context is read once, whole. Then the near tokens, the short context and the targets before the last one, attend
to one another and to the far keys and values that are left, in every layer and head: a token that is left out has still
been read by those behind it. A pass reads the near tokens of many rows, each with far tokens of its own.
Shapes: n blocks of B targets, m targets that are asked for, C subsets of each, j far tokens of one, S rows in all, R of
one pass, L near tokens, F far tokens, G heads of keys in all layers, V vocabulary (logits). Losses are nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.far_attention import KeyValues
from analysis.model.losses import (
    BACKWARD_TOKENS,
    CACHE_TOKENS,
    DIVERGENCES,
    LOGITS_PER_BATCH,
    Asked,
    Reduce,
    Scorer,
    log_probabilities,
    retry_smaller_on_oom,
)
from analysis.model.on_device import chunks
from olmo_sparsity.util.errors import UserError


@dataclass(frozen=True)
class _Rows(Asked):
    """Rows that see some of the far keys and values of their block."""

    visible: np.ndarray
    """(S, F) bool; or (S, G, F), others in every head of keys, layer after layer."""


def subset_masks(far: np.ndarray, n_far: int) -> np.ndarray:
    """Which far tokens are in each subset, (…, F) bool, of subsets given as columns, (…, j)."""
    masks = np.zeros((*far.shape[:-1], n_far), dtype=bool)
    np.put_along_axis(masks, far, True, axis=-1)
    return masks


@retry_smaller_on_oom
@torch.inference_mode()
def measures(
    scorer: Scorer, contexts: Contexts, visible: np.ndarray, names: Sequence[str], targets: np.ndarray
) -> np.ndarray:
    """Some of `analysis.model.losses.MEASURES` with some far tokens in the cache, (m, C, number of names) float64.

    A divergence is from the prediction with all of them.

    Args:
        scorer: computes them.
        contexts: n blocks.
        visible: which far tokens are in the cache: (C, F) bool, the same subsets for all targets, or (m, C, F); or
            (m, 1, G, F), others in every head of keys.
        names: of measures.
        targets: (m, 2) block and place in it of each target.
    """
    num_subsets = visible.shape[0 if visible.ndim == 2 else 1]
    values = np.empty((len(targets), num_subsets, len(names)))
    for block in np.unique(targets[:, 0]):
        of_block = np.flatnonzero(targets[:, 0] == block)
        one = contexts.take(slice(block, block + 1))
        places = targets[of_block, 1]
        if visible.ndim == 2:
            values[of_block] = _same_for_all(scorer, one, visible, names, places)
        else:
            values[of_block] = _of_each(scorer, one, visible[of_block], names, places)
    return values


@retry_smaller_on_oom
@torch.inference_mode()
def block_measures(
    scorer: Scorer, contexts: Contexts, visible: np.ndarray, names: Sequence[str]
) -> np.ndarray:
    """`measures` of all targets of one block, which share their subsets: (B, C, number of names) float64.

    ``visible``: (C, F) bool; or (C, G, F), others in every head of keys, layer after layer, where rows share far keys.
    """
    return _same_for_all(scorer, contexts, visible, names, np.arange(contexts.targets_per_block))


@retry_smaller_on_oom
def presence_gradient(scorer: Scorer, contexts: Contexts, places: np.ndarray) -> np.ndarray:
    """-∂ (summed loss of some targets of one block) / ∂ (presence of each far key in each head), (G, F) nats.

    The presence of a key multiplies its exponentiated scores of all near queries, in one layer and head of keys: 1 is
    the cache as it is, 0 the cache without the key. The near tokens are read once, forward and back, or in parts with
    fewer targets where these are more than a batch may differentiate.
    ``places``: of the targets in the block, (m,), ascending. Rows must share far keys.
    """
    with torch.inference_mode():
        far = scorer.far_key_values(contexts.tokens[:, : contexts.n_far])
    # what was computed in inference mode cannot be kept for a backward pass
    far = [(keys.clone(), values.clone()) for keys, values in far]
    presence = []
    for keys, _ in far:
        everywhere = torch.ones(1, keys.shape[1], contexts.n_far, device=scorer.device)
        presence.append(everywhere.requires_grad_())
    gradient = np.zeros((sum(keys.shape[1] for keys, _ in far), contexts.n_far))
    for some in chunks(places, scorer.tokens_per_batch // BACKWARD_TOKENS - contexts.n_short):
        near = contexts.tokens[:, contexts.n_far : contexts.n_long + some[-1]]
        queries = int(some[-1] - some[0]) + 1
        logits = scorer.model.near_logits(
            far, presence, scorer.tensor(near), queries, _first_near_id(contexts)
        )
        scorer.on_read(near.size)
        of_targets = logits[0, scorer.tensor(some - some[0])].float()
        loss = F.cross_entropy(of_targets, scorer.tensor(contexts.targets[0, some]), reduction="sum")
        slopes = torch.autograd.grad(-loss, presence)
        gradient += _array(torch.cat(slopes, dim=1)[0])
    return gradient


def losses_by_head(
    scorer: Scorer, contexts: Contexts, kept: Sequence[np.ndarray], targets: np.ndarray
) -> np.ndarray:
    """-log p of targets where every layer and head keeps far tokens of its own, (m, K) nats.

    Raises `UserError` where the model's cached keys need their position ids and rows do not share far keys.

    Args:
        scorer: computes them.
        contexts: n blocks.
        kept: K sets of columns of the far context, each (m, G, j), of the heads of keys, layer after layer.
        targets: (m, 2) block and place in it of each target.
    """
    if scorer.model.shares_far_keys:
        masks = [subset_masks(columns, contexts.n_far) for columns in kept]
        return losses_of_masks(scorer, contexts, masks, targets)
    if not scorer.model.caches_rotated_keys:
        raise UserError(
            "this model rotates keys when they are read, so heads cannot keep tokens of their own; convert it with "
            "olmo-sparsity export_hf, or leave the eviction policies out"
        )
    far = scorer.prefixes(contexts, contexts.n_far)
    return np.stack([_gathered_losses(scorer, contexts, far, columns, targets) for columns in kept], axis=1)


def losses_of_masks(
    scorer: Scorer, contexts: Contexts, kept: Sequence[np.ndarray], targets: np.ndarray
) -> np.ndarray:
    """-log p of targets where heads keep far tokens of their own, as many as they will, (m, K) nats.

    Raises `UserError` where rows do not share far keys.

    Args:
        scorer: computes them.
        contexts: n blocks.
        kept: K sets of far tokens, each (m, G, F) bool, of the heads of keys, layer after layer.
        targets: (m, 2) block and place in it of each target.
    """
    if not scorer.model.shares_far_keys:
        raise UserError(
            "this model reads copies of far keys, of which every head must keep as many; leave out the policies whose "
            "heads keep unequal numbers, such as ada-snapkv and kvzip, or their keeping as cache"
        )
    losses = []
    for masks in kept:
        losses.append(measures(scorer, contexts, masks[:, None], ("loss",), targets)[:, 0, 0])
    return np.stack(losses, axis=1)


@retry_smaller_on_oom
@torch.inference_mode()
def part_read_losses(
    scorer: Scorer, contexts: Contexts, read: np.ndarray, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """-log p of targets where some far tokens are read, and some of these left in the cache, (m,) nats.

    What is read is one subsequence, every token at its own position id; the short context sees what is kept.

    Args:
        scorer: computes them.
        contexts: n blocks.
        read: columns that are read, (m, j), ascending.
        kept: those of them that are kept, (m, i), ascending.
        targets: (m, 2) block and place in it of each target.
    """
    losses = np.empty(len(targets))
    rows_by_tokens = scorer.tokens_per_batch // max(read.shape[1], contexts.n_short)
    for rows in chunks(np.arange(len(targets)), rows_by_tokens):
        block, place = targets[rows].T
        tokens = scorer.tensor(contexts.tokens[block[:, None], read[rows]])
        far = scorer.model.key_values(tokens, scorer.tensor(read[rows]))
        among_read = (read[rows][:, None] == kept[rows][:, :, None]).argmax(axis=-1)
        past = _kept_key_values(far, np.arange(len(rows)), among_read[:, None], scorer)
        losses[rows] = _losses_behind(scorer, contexts, past, kept[rows], block, place)
    return losses


@retry_smaller_on_oom
@torch.inference_mode()
def _gathered_losses(
    scorer: Scorer, contexts: Contexts, far: KeyValues, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """`losses_by_head` of one set of columns, whose keys and values are copied for every row, (m,) nats."""
    losses = np.empty(len(targets))
    longest = contexts.n_short + contexts.targets_per_block
    rows_by_tokens = scorer.tokens_per_batch // longest
    rows_by_cache = CACHE_TOKENS * scorer.tokens_per_batch // (longest + kept.shape[-1])
    order = np.argsort(targets[:, 1], kind="stable")
    for rows in chunks(order, min(rows_by_tokens, rows_by_cache)):
        block, place = targets[rows].T
        past = _kept_key_values(far, block, kept[rows], scorer)
        no_ids = np.zeros((len(rows), kept.shape[-1]), dtype=np.int64)  # heads differ, and they are not read
        losses[rows] = _losses_behind(scorer, contexts, past, no_ids, block, place)
    return losses


def _kept_key_values(far: KeyValues, block: np.ndarray, kept: np.ndarray, scorer: Scorer) -> KeyValues:
    """The keys and values of the kept columns, (R, G or 1, j), of some of the far contexts, (R,)."""
    key_heads = [keys.shape[1] for keys, _ in far]
    of_layers = scorer.tensor(kept).expand(-1, sum(key_heads), -1).split(key_heads, dim=1)
    rows = scorer.tensor(block)[:, None, None]
    layers = []
    for (keys, values), columns in zip(far, of_layers, strict=True):
        heads = torch.arange(keys.shape[1], device=scorer.device)[:, None]
        layers.append((keys[rows, heads, columns], values[rows, heads, columns]))
    return layers


def _losses_behind(
    scorer: Scorer, contexts: Contexts, past: KeyValues, ids: np.ndarray, block: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """-log p of targets behind cached tokens (R, j) of these ids and their short contexts, (R,) nats."""
    behind = contexts.n_far + np.arange(contexts.n_short + place.max())
    near_ids = contexts.position_ids[behind]
    all_ids = np.concatenate([ids, np.broadcast_to(near_ids, (len(block), len(behind)))], axis=1)
    tokens = scorer.tensor(contexts.tokens[block[:, None], behind])
    queries = int(np.ptp(place)) + 1
    logits = scorer.model.logits_after(past, tokens, scorer.tensor(all_ids), queries)
    of_target = logits[torch.arange(len(block)), scorer.tensor(place - place.min())].float()
    target_tokens = scorer.tensor(contexts.targets[block, place])
    return _array(F.cross_entropy(of_target, target_tokens, reduction="none"))


def _same_for_all(
    scorer: Scorer, contexts: Contexts, visible: np.ndarray, names: Sequence[str], places: np.ndarray
) -> np.ndarray:
    """`measures` of targets of one block, by their places in it, (m,), given subsets (C, …) that they share."""
    reader = _BlockReader(scorer, contexts)
    rows = _rows_of(contexts, visible, places.min(), places.max())
    values = reader.read(rows, reader.reduction(names, places))
    return _array(values)[:, places].swapaxes(0, 1)


def _of_each(
    scorer: Scorer, contexts: Contexts, visible: np.ndarray, names: Sequence[str], places: np.ndarray
) -> np.ndarray:
    """`measures` of targets of one block, by their places in it, (m,), given subsets (m, C, …), others for each."""
    reader = _BlockReader(scorer, contexts)
    count = visible.shape[1]
    place = np.repeat(places, count)
    rows = _rows_of(contexts, visible.reshape(-1, *visible.shape[2:]), place, place)
    values = reader.read(rows, reader.reduction(names, places))
    return _array(values)[np.arange(len(place)), place].reshape(len(places), count, -1)


class _BlockReader:
    """Reads the near tokens of one block behind its far keys."""

    def __init__(self, scorer: Scorer, contexts: Contexts):
        self.scorer = scorer
        self.contexts = contexts
        self.far = scorer.far_key_values(contexts.tokens[:, : contexts.n_far])

    def read(self, rows: _Rows, reduce: Reduce) -> Tensor:
        """What ``reduce`` keeps of the logits of every row, (S, B, …)."""

        def logits_of(some: np.ndarray, queries: int) -> Tensor:
            end = self.contexts.n_long + int(rows.last[some].max())
            near = self.contexts.tokens[:, self.contexts.n_far : end]
            tokens = self.scorer.tensor(near).expand(len(some), -1)
            masks = _masks(rows.visible[some], self.far, self.scorer)
            first_id = _first_near_id(self.contexts)
            logits = self.scorer.model.near_logits(self.far, masks, tokens, queries, first_id)
            self.scorer.on_read(tokens.numel())
            return logits

        return self.scorer.read_targets(rows, _batches(self.scorer, rows), logits_of, reduce)

    def reduction(self, names: Sequence[str], places: np.ndarray) -> Reduce:
        """Of logits to measures; for a divergence the block is read once with all far keys, up to these targets."""
        log_long = None
        if DIVERGENCES.keys() & set(names):
            everything = np.ones((1, self.contexts.n_far), dtype=bool)
            rows = _rows_of(self.contexts, everything, places.min(), places.max())
            log_long = self.read(rows, log_probabilities)
        return self.scorer.reduction(self.contexts, names, log_long)


def _rows_of(
    contexts: Contexts, visible: np.ndarray, first: np.ndarray | int, last: np.ndarray | int
) -> _Rows:
    """Rows of one block, which are asked for its targets from ``first`` to ``last``, each (S,) or the same for all."""
    block = np.zeros(len(visible), dtype=np.int64)
    return _Rows(contexts, block, block + first, block + last, visible)


def _batches(scorer: Scorer, rows: _Rows) -> Iterator[np.ndarray]:
    """Rows that are read together, those that read most first."""
    order = np.argsort(-rows.last, kind="stable")
    while len(order):
        length = rows.contexts.n_short + int(rows.last[order[0]])
        size = scorer.tokens_per_batch // length
        if not scorer.model.shares_far_keys:
            in_cache = CACHE_TOKENS * scorer.tokens_per_batch // (rows.contexts.n_far + length)
            size = min(size, in_cache)
        size = max(1, size)
        queries = 1 + int(rows.last[order[:size]].max() - rows.first[order[:size]].min())
        logits = queries * scorer.model.vocabulary_size
        size = max(1, min(size, LOGITS_PER_BATCH[scorer.device.type] // logits))
        yield order[:size]
        order = order[size:]


def _masks(visible: np.ndarray, far: KeyValues, scorer: Scorer) -> Tensor | list[Tensor]:
    """As `analysis.model.adapter.Adapter.near_logits` takes them."""
    masks = torch.from_numpy(np.ascontiguousarray(visible)).to(scorer.device)
    if masks.ndim == 2:
        return masks
    return list(masks.split([keys.shape[1] for keys, _ in far], dim=1))


def _first_near_id(contexts: Contexts) -> int:
    """The position id of the first token of the short context."""
    return int(contexts.position_ids[contexts.n_far])


def _array(values: Tensor) -> np.ndarray:
    return values.double().cpu().numpy()
