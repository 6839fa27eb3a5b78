"""Attention of near tokens to far keys that all rows of a pass share, and of which each row may lack some.

Leaving each far token out of the cache in turn reads the near tokens once a row, and every row attends to the same far
keys and values: here nothing of them is copied a row. The parts of the softmax over far keys and over near ones are
joined under one maximum and one denominator. A hidden column is hidden before the maximum is taken: its share is never
subtracted from a finished softmax, where a sink may hold nearly all of it and the difference nothing but rounding.
Where far keys have a presence, a number in place of there or not, the softmax is the plain one, through which gradients
flow back to it.
Shapes: R rows, L near tokens and Q queries, the last of them, P far tokens (those of a prefix among them), H heads of
queries, G heads of keys, g = H / G, D head dimension of keys and E of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from analysis.model.cpu import product

KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values of tokens, each (R, G, P, D), a pair per layer."""
SCORES_PER_SLICE = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Scores (r, g, Q, P) that are computed at once; on a CPU 2 MB in fp32, so that they stay in the cache."""


@dataclass(frozen=True)
class FarKeys:
    """Keys and values of one far context, read once, and which of them every row may attend to."""

    layers: KeyValues
    """Keys (1, G, P, D) and values (1, G, P, E), a pair a layer; keys rotated, if they are."""
    visible: Tensor | list[Tensor]
    """(R, P) bool, the same in all layers and heads; or for each layer (R, G, P). Of each layer it may be float: the
    presence of the keys, by which their exponentiated scores are multiplied. 1 and 0 are True and False."""
    ids: Tensor
    """(P,) position ids of the far tokens, ascending."""
    near_ids: Tensor
    """(L,) those of the near tokens."""
    read: Callable[[Tensor], None] | None = None
    """Is given the attention (R, H, Q, P) of near queries to the far keys, of one layer after the other."""

    @classmethod
    def of(cls, layers: KeyValues, visible: Tensor | list[Tensor], near_ids: Tensor) -> FarKeys:
        """Far tokens at the ids 0 … P - 1, of which those that no row sees are left away."""
        ids = torch.arange(layers[0][0].shape[2], device=near_ids.device)
        if isinstance(visible, Tensor):
            seen = visible.any(dim=0)
            if not seen.all():
                ids = ids[seen]
                visible = visible[:, seen]
                layers = [(keys[:, :, seen], values[:, :, seen]) for keys, values in layers]
        return cls(layers, visible, ids, near_ids)

    def empty_weights(self, query: Tensor) -> Tensor | None:
        """Room for the attention of queries (R, G, g, Q, D), (R, G, g, Q, P), where it is read."""
        if self.read is None:
            return None
        return query.new_empty(*query.shape[:-1], len(self.ids), dtype=torch.float32)

    @property
    def has_presence(self) -> bool:
        """Whether keys have a presence, in place of being there or not."""
        return not isinstance(self.visible, Tensor) and self.visible[0].is_floating_point()

    @cached_property
    def _hidden_everywhere(self) -> tuple[Tensor, list[int]]:
        """Row and column of every hidden far key, (n, 2), and where those of each row begin: looked up once a pass."""
        assert isinstance(self.visible, Tensor)
        hidden = ~self.visible
        return hidden.nonzero(), [0, *hidden.sum(dim=1).cumsum(dim=0).tolist()]

    def hidden(self, layer: int, rows: slice, head: int) -> tuple[Tensor, Tensor]:
        """Row (counted from the first of ``rows``) and column of every far key that is hidden there."""
        if isinstance(self.visible, Tensor):
            places, begins = self._hidden_everywhere
            of_rows = places[begins[rows.start] : begins[min(rows.stop, len(begins) - 1)]]
            return of_rows[:, 0] - rows.start, of_rows[:, 1]
        row, column = (~self.visible[layer][rows, head]).nonzero(as_tuple=True)
        return row, column

    def beyond(self, window: int | None, queries: int) -> Tensor | None:
        """(Q, P) bool: which far keys are ``window`` ids or more before a query; None where none is."""
        if window is None:
            return None
        distance = self.near_ids[-queries:, None] - self.ids
        beyond = distance >= window
        return beyond if beyond.any() else None


@dataclass(frozen=True)
class Scores:
    """How a model makes scores of queries and keys."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    """(H,) logits that enter each denominator beside the keys', as GPT-OSS has them."""
    window: int | None = None
    """A query sees the far keys whose ids are less than this before its own; None: all."""
    far_bias: Tensor | None = None
    """(H, L, P), added to the scores of far keys, as ALiBi's."""

    def capped(self, scores: Tensor) -> Tensor:
        """Scores of scaled queries, in fp32."""
        scores = scores.float()
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap


def attend(
    query: Tensor, key: Tensor, value: Tensor, near_mask: Tensor | None, far: FarKeys, layer: int, how: Scores
) -> Tensor:
    """What near queries (R, H, Q, D) attend to among near keys (R, G, L, D) and far ones, (R, H, Q, E).

    ``near_mask``: (R or 1, H or 1, Q, L), added to the scores of near keys; None: causal.
    """
    if far.has_presence:
        return _attend_by_presence(query, key, value, near_mask, far, layer, how)
    rows, heads, queries, _ = query.shape
    groups = key.shape[1]
    query = (query * how.scale).unflatten(1, (groups, heads // groups))
    near = _near_scores(query, key, near_mask, how)
    highest = near.amax(dim=-1, keepdim=True)
    sinks = None
    if how.sinks is not None:
        sinks = how.sinks.float().view(groups, -1, 1, 1)
        highest = torch.maximum(highest, sinks)

    far_keys, far_values = far.layers[layer]
    beyond = far.beyond(how.window, queries)
    bias = None if how.far_bias is None else how.far_bias[:, -queries:].unflatten(0, (groups, -1))
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    weights = far.empty_weights(query)
    by_row = heads // groups * queries * max(1, len(far.ids))
    size = max(1, SCORES_PER_SLICE[query.device.type] // by_row)
    for group in range(groups):
        keys = far_keys[0, group]
        values_of = far_values[0, group].t().contiguous()
        for start in range(0, rows, size):
            some = slice(start, start + size)
            of_near = near[some, group]
            top = highest[some, group]
            scores = _far_scores(query[some, group], keys, None if bias is None else bias[group], how)
            if beyond is not None:
                scores.masked_fill_(beyond, -torch.inf)
            row, column = far.hidden(layer, some, group)
            scores.permute(0, 3, 1, 2)[row, column] = -torch.inf
            if len(keys):
                top = torch.maximum(top, scores.amax(dim=-1, keepdim=True))
            scores.sub_(top).exp_()
            of_near = (of_near - top).exp()
            total = scores.sum(dim=-1, keepdim=True) + of_near.sum(dim=-1, keepdim=True)
            if sinks is not None:
                total += (sinks[group] - top).exp()
            if value.dtype == torch.float16:  # its sums over many keys would overflow before they are divided
                scores /= total
                of_near = of_near / total
                total = torch.ones_like(total)
            from_far = product(scores.to(value.dtype).flatten(0, 2), values_of)
            from_near = of_near.to(value.dtype) @ value[some, group, None]
            output[some, group] = (from_far.view(from_near.shape) + from_near) / total
            if weights is not None:
                weights[some, group] = scores / total
    if far.read is not None and weights is not None:
        far.read(weights.flatten(1, 2))
    return output.flatten(1, 2)


def _far_scores(query: Tensor, keys: Tensor, bias: Tensor | None, how: Scores) -> Tensor:
    """Scores of far keys (P, D) for scaled queries (r, g, Q, D) of one head of keys, (r, g, Q, P).

    ``bias``: (g, Q, P).
    """
    scores = how.capped(product(query.reshape(-1, query.shape[-1]), keys)).view(*query.shape[:-1], len(keys))
    if bias is not None:
        scores += bias
    return scores


def without_future(scores: Tensor) -> Tensor:
    """Scores (…, Q, L) of the last Q of L tokens, in which no query sees a later token."""
    queries, length = scores.shape[-2:]
    future = torch.ones(queries, length, dtype=torch.bool, device=scores.device)
    return scores.masked_fill(future.triu(1 + length - queries), -torch.inf)


def _near_scores(query: Tensor, key: Tensor, near_mask: Tensor | None, how: Scores) -> Tensor:
    """Scores of near keys (R, G, L, D) for scaled queries (R, G, g, Q, D), masked, (R, G, g, Q, L)."""
    groups = query.shape[1]
    near = how.capped(query @ key[:, :, None].transpose(-1, -2))
    if near_mask is None:
        return without_future(near)
    by_head = near_mask.shape[1] > 1
    return near + (near_mask.unflatten(1, (groups, -1)) if by_head else near_mask[:, :, None])


def _attend_by_presence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    near_mask: Tensor | None,
    far: FarKeys,
    layer: int,
    how: Scores,
) -> Tensor:
    """`attend` where far keys have a presence, to which gradients flow back."""
    groups = key.shape[1]
    queries = query.shape[2]
    query = (query * how.scale).unflatten(1, (groups, -1))
    near = _near_scores(query, key, near_mask, how)
    far_keys, far_values = far.layers[layer]
    scores = how.capped(query @ far_keys[:, :, None].transpose(-1, -2))  # (R, G, g, Q, P)
    if how.far_bias is not None:
        scores = scores + how.far_bias[:, -queries:].unflatten(0, (groups, -1))
    beyond = far.beyond(how.window, queries)
    if beyond is not None:
        scores = scores.masked_fill(beyond, -torch.inf)
    scores = scores + far.visible[layer].log()[:, :, None, None]
    parts = [scores, near]
    if how.sinks is not None:
        sinks = how.sinks.float().view(groups, -1, 1, 1)
        parts.append(sinks.expand(*near.shape[:-1], 1))
    weights = torch.cat(parts, dim=-1).softmax(dim=-1).to(value.dtype)
    num_far = scores.shape[-1]
    from_far = weights[..., :num_far] @ far_values[:, :, None]
    from_near = weights[..., num_far : num_far + near.shape[-1]] @ value[:, :, None]
    return (from_far + from_near).flatten(1, 2)


# --- through the attention interface of transformers ---

IMPLEMENTATION = "olmo_sparsity_far"
"""Its name there."""
_current: list[FarKeys] = []
"""What the pass under way attends to; empty outside of `attending_to`."""


@contextmanager
def attention_of(model: Any, implementation: str) -> Iterator[None]:
    """While it runs, all parts of a model of transformers have this implementation; then each has its own again."""
    before = _implementations(model.config)
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        model.set_attn_implementation(before)


def _implementations(config: Any, of_whole: str = "eager") -> str | dict[str, Any]:
    """The implementation of a model, or of a composite one those of its parts by their names, and its own as "".

    ``of_whole``: of parts that have none.
    """
    own = config._attn_implementation or of_whole
    parts = {}
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            parts[name] = _implementations(part, own)
    return {"": own, **parts} if parts else own


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make an attention function known to transformers by this name, whatever was known by it before.

    A name that is not registered with the masks' interface, too, gets no mask at all, also where tokens are hidden by
    more than their order.
    kvpress, where it is imported, wraps all functions that are known by then and keeps them in the one instance of the
    interface that models ask first: there a function that is only registered would not replace them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    AttentionInterface.register(name, function)
    ALL_ATTENTION_FUNCTIONS[name] = function
    AttentionMaskInterface.register(name, _mask_beyond_order)


def _mask_beyond_order(*sizes: Any, allow_is_causal_skip: bool = True, **named: Any) -> Tensor | None:
    """The mask of plain ("eager") attention; None, which fills no memory, where it hides later tokens alone."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    if allow_is_causal_skip and sdpa_mask(*sizes, **named) is None:
        return None
    return eager_mask(*sizes, **named)


@contextmanager
def attending_to(model: Any, far: FarKeys) -> Iterator[None]:
    """While it runs, every layer of a model of transformers attends to these far keys too."""
    register_attention(IMPLEMENTATION, _of_transformers)
    with attention_of(model, IMPLEMENTATION):
        _current.append(far)
        try:
            yield
        finally:
            _current.pop()


def scores_of(
    module: Any,
    query: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> Scores:
    """How an attention of transformers makes scores: it hands over what it has, or keeps it in the module."""
    if softcap is None:
        softcap = getattr(module, "attn_logit_softcapping", None)
    if sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None)
    return Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=getattr(module, "sinks", None) if s_aux is None else s_aux,
        window=sliding_window,
    )


def _of_transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it."""
    if attention_mask is not None:
        attention_mask = attention_mask[..., -query.shape[2] :, -key.shape[2] :]
    how = scores_of(module, query, **named)
    output = attend(query, key, value, attention_mask, _current[-1], module.layer_idx, how)
    return output.transpose(1, 2).contiguous(), None
