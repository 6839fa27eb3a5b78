"""Queries, keys and values of one layer after the other, as eviction policies read them while a pass runs.

The attention that is made of them is never all there at once: (R, H, L, L) of a long context would fill the memory.
Shapes: R rows, L tokens, q of them in a slice, H heads of queries, G heads of keys, D head dimension of keys and E of
values, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.model.far_attention import Scores, attention_of, register_attention, scores_of, without_future

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of RoPE, each (R or 1, L, d), d ≤ D; the second half of d repeats the first."""
WEIGHTS_PER_SLICE = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Weights (R, H, q, L) that are computed at once; on a CPU 16 MB, for which no new memory is asked every time."""


@dataclass(frozen=True)
class LayerStates:
    """What one layer makes of tokens that stand at ids 0, 1, …"""

    number: int
    """Of the layer, from 0."""
    queries: Tensor
    """(R, H, L, D), rotated, if they are."""
    keys: Tensor
    """(R, G, L, D), rotated, if they are."""
    values: Tensor
    """(R, G, L, E)."""
    scores: Scores
    mask: Tensor | None
    """(R or 1, H or 1, L, L), added to the scores; None: causal."""
    rotation: Rotation | None
    """What they were rotated by; None: nothing is known of it."""
    module: Any = None
    """The attention of transformers that made them."""
    hidden: Tensor | None = None
    """What it read, (R, L, W)."""

    def part(self, tokens: slice) -> LayerStates:
        """Those of some tokens."""
        rotation = self.rotation
        if rotation is not None:
            rotation = (rotation[0][:, tokens], rotation[1][:, tokens])
        mask = None if self.mask is None else self.mask[..., tokens, tokens]
        return replace(
            self,
            mask=mask,
            queries=self.queries[:, :, tokens],
            keys=self.keys[:, :, tokens],
            values=self.values[:, :, tokens],
            rotation=rotation,
            hidden=None if self.hidden is None else self.hidden[:, tokens],
        )

    def attention(self) -> Tensor:
        """Weights (R, H, L, L) of the softmax, float32; sinks of a head take their share."""
        return torch.cat(list(self.attention_slices()), dim=2)

    def attention_slices(self, queries: int | None = None) -> Iterator[Tensor]:
        """`attention` of the last tokens, by default of all, a few (R, H, q, L) after the others."""
        length = self.queries.shape[2]
        for some in self._slices(length if queries is None else queries):
            yield F.pad(self._weights(some), (0, length - some.stop))

    def output(self) -> Tensor:
        """What the tokens attend to, (R, H, L, E)."""
        values = self._for_each_query_head(self.values)
        if self.scores.softcap is None and self.scores.sinks is None:
            # keys are repeated: on a GPU, shared keys and a mask at once would take (L, L) of memory
            return F.scaled_dot_product_attention(
                self.queries,
                self._keys,
                values,
                self.mask,
                is_causal=self.mask is None,
                scale=self.scores.scale,
            )
        parts = []
        for some in self._slices(values.shape[2]):
            weights = self._weights(some).to(values.dtype)
            parts.append(weights @ values[:, :, : some.stop])
        return torch.cat(parts, dim=2)

    def _slices(self, queries: int) -> Iterator[slice]:
        """Of the last tokens, as many as have their weights computed at once."""
        rows, heads, length = self.queries.shape[:3]
        size = max(1, WEIGHTS_PER_SLICE[self.queries.device.type] // (rows * heads * length))
        for start in range(length - queries, length, size):
            yield slice(start, min(start + size, length))

    def _weights(self, some: slice) -> Tensor:
        """Weights of the softmax of some tokens over those up to the last of them, float32."""
        keys = self._keys[:, :, : some.stop]
        queries = self.queries[:, :, some] * self.scores.scale
        scores = self.scores.capped(queries @ keys.transpose(-1, -2))
        scores = without_future(scores) if self.mask is None else scores + self.mask[..., some, : some.stop]
        if self.scores.sinks is not None:
            sinks = self.scores.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return scores.softmax(dim=-1)[..., : some.stop]

    @cached_property
    def _keys(self) -> Tensor:
        """(R, H, L, D)."""
        return self._for_each_query_head(self.keys)

    def _for_each_query_head(self, of_keys: Tensor) -> Tensor:
        """(R, H, L, …) of the keys or values (R, G, L, …) that heads of queries share."""
        return of_keys.repeat_interleave(self.queries.shape[1] // of_keys.shape[1], dim=1)


ReadLayer = Callable[[LayerStates], Tensor]
"""What is kept of a layer."""


def rotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Vectors (…, D) rotated by cosines and sines (…, d): each pair is an element of d's first half and its second."""
    cosine, sine = rotation
    dim = cosine.shape[-1]
    turned = vectors[..., :dim]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([turned, vectors[..., dim:]], dim=-1)


def unrotate(vectors: Tensor, rotation: Rotation) -> Tensor:
    """Vectors (R, H, L, D) as they were before `rotate`, which may have multiplied them, too."""
    cosine, sine = (table[:, None].float() for table in rotation)
    square = cosine.square() + sine.square()
    return rotate(vectors.float(), (cosine / square, -sine / square))


# --- through the attention interface of transformers ---

IMPLEMENTATION = "olmo_sparsity_states"
"""Its name there."""


@contextmanager
def reading_layers(model: Any, read: ReadLayer) -> Iterator[list[Tensor]]:
    """While it runs, what ``read`` gives of every layer of a model of transformers is appended to the list."""
    given: dict[nn.Module, tuple[Any, Any]] = {}
    read_of_layers: list[Tensor] = []

    def keep_inputs(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Remember what an attention is given; it keeps neither for itself."""
        hidden = named.get("hidden_states", positional[0] if positional else None)
        given[module] = (hidden, named.get("position_embeddings"))

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        """An attention function as transformers calls it."""
        hidden, rotation = given.pop(module, (None, None))
        how = scores_of(module, query, **named)
        number = len(read_of_layers)
        layer = LayerStates(number, query, key, value, how, attention_mask, rotation, module, hidden)
        read_of_layers.append(read(layer))
        return layer.output().transpose(1, 2).contiguous(), None

    register_attention(IMPLEMENTATION, record)
    hooks = []
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            hooks.append(module.register_forward_pre_hook(keep_inputs, with_kwargs=True))
    try:
        with attention_of(model, IMPLEMENTATION):
            yield read_of_layers
    finally:
        for hook in hooks:
            hook.remove()
