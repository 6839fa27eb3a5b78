"""Rotary embedding, ALiBi bias and learned embedding that read explicit position ids instead of the tensor index.

Shapes: B batch, T tokens, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from olmo.config import ModelConfig
from olmo.model import RotaryEmbedding, causal_attention_bias
from torch import Tensor, nn


class Scaling(Protocol):
    """What a trained model is measured with beyond its length: a `RopeScaling` of `rope_scaling.py`."""

    def apply(self, inverse_frequencies: Tensor, base: float) -> tuple[Tensor, float]:
        """See `RopeScaling.apply`."""

    def of_queries(self, ids: Tensor) -> Tensor | None:
        """See `RopeScaling.of_queries`."""


class CurrentPositions:
    """The position ids of the forward pass under way, shared by all layers, and the tables made from them.

    OLMo's blocks call ``self.rotary_emb(q, k)`` and take no position ids, so these do not travel with the activations.
    Activation checkpointing runs a layer again in the backward pass, when the model may have processed another batch:
    `holding` restores the ids of the layer's own forward pass.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # (B or 1, T)
        self.sin_cos: tuple[Tensor, Tensor] | None = None  # each (B or 1, 1, T, D), float32
        self.of_queries: Tensor | None = None  # (B or 1, 1, T, 1), float32: multiplies rotated queries

    @contextmanager
    def holding(self, ids: Tensor | None, sin_cos: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        """Make these the current positions while the block runs."""
        previous = self.ids, self.sin_cos
        self.ids = ids
        self.sin_cos = sin_cos
        try:
            yield
        finally:
            self.ids, self.sin_cos = previous


class PositionedRotaryEmbedding(RotaryEmbedding):
    """OLMo's rotary embedding, rotating by the current position ids; one sine table serves all layers."""

    def __init__(self, config: ModelConfig, current: CurrentPositions):
        nn.Module.__init__(self)  # OLMo's own constructor would build its table of indices
        self.config = config
        self.current = current

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both rotated; the queries (B, H, Q, D) are those of the last Q ids."""
        tables = self.current.sin_cos
        assert tables is not None and tables[0].shape[-2] == k.shape[-2]
        return self._rotated(q, tables, self.current.of_queries), self._rotated(k, tables, None)

    def _rotated(self, x: Tensor, tables: tuple[Tensor, Tensor], factor: Tensor | None) -> Tensor:
        full = x.float() if self.config.rope_full_precision else x
        last = slice(-x.shape[-2], None)
        with torch.autocast(x.device.type, enabled=False):
            sin, cos = (table[:, :, last].type_as(full) for table in tables)
            rotated = _Rotation.apply(full, sin, cos).to(x.dtype)
        return rotated if factor is None else (rotated * factor[:, :, last]).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """RoPE of (…, D) by sines and cosines of D, of which the second half repeats the first (RoFormer).

    Its gradient is the rotation back, and written so: derived from the forward pass it is pieces and their sums, of
    which PyTorch's compiler makes a kernel eleven times as slow as the forward one (150M on an H200).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        ctx.save_for_backward(sin, cos)
        return x * cos + _rotate_half(x) * sin

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        sin, cos = ctx.saved_tensors
        return upstream * cos - _rotate_half(upstream) * sin, None, None


def _rotate_half(x: Tensor) -> Tensor:
    """Each pair (a, b), a of the first half of D and b of the second, becomes (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Unrotated(nn.Module):
    """Stands where OLMo rotates queries and keys, and leaves them as they are: a layer of NoPE."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Both, as they are."""
        return q, k


def rotary_sin_cos(config: ModelConfig, ids: Tensor, scaling: Scaling | None = None) -> tuple[Tensor, Tensor]:
    """Sines and cosines of the rotation angles of ``ids`` (B, T), each (B, 1, T, D) float32 (RoFormer, as in OLMo).

    With ``scaling`` by other frequencies, and multiplied, as it says.
    """
    dim = config.d_model // config.n_heads
    exponents = torch.arange(0, dim, 2, device=ids.device, dtype=torch.float) / dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    multiplied_by = 1.0
    if scaling is not None:
        inverse_frequencies, multiplied_by = scaling.apply(inverse_frequencies, config.rope_theta)
    return sin_cos_of(ids, inverse_frequencies, multiplied_by)


@torch.library.custom_op("olmo_sparsity::sin_cos", mutates_args=())
def sin_cos_of(ids: Tensor, inverse_frequencies: Tensor, multiplied_by: float) -> tuple[Tensor, Tensor]:
    """As `rotary_sin_cos` of (B, T) and (D / 2,).

    A custom operator, so that a compiled model has them in memory once. PyTorch's compiler would compute sines, cosines
    and the powers in them again in every layer, forward and backward, for each element of queries and keys.
    """
    with torch.autocast(ids.device.type, enabled=False):
        angles = ids.to(torch.float)[:, None, :, None] * inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.sin() * multiplied_by, angles.cos() * multiplied_by


@sin_cos_of.register_fake
def _(ids: Tensor, inverse_frequencies: Tensor, multiplied_by: float) -> tuple[Tensor, Tensor]:
    shape = ids.shape[0], 1, ids.shape[1], 2 * len(inverse_frequencies)
    sin, cos = (torch.empty(shape, device=ids.device, dtype=torch.float) for _ in range(2))
    return sin, cos


def alibi_slopes(config: ModelConfig, device: torch.device) -> Tensor:
    """By what each head multiplies a distance, (H,) float32 (Press et al. 2021; as in OLMo)."""
    heads = torch.arange(1, config.n_heads + 1, dtype=torch.float, device=device)
    return 2.0 ** -(heads * (config.alibi_bias_max / config.n_heads))


def alibi_causal_bias(config: ModelConfig, ids: Tensor) -> Tensor:
    """Causal mask plus ALiBi bias by distance of ids, (B, H, T, T) float32 (Press et al. 2021)."""
    slopes = alibi_slopes(config, ids.device)
    distance = (ids[:, :, None] - ids[:, None, :]).abs().to(torch.float)
    bias = -slopes[None, :, None, None] * distance[:, None]
    return torch.minimum(bias, causal_attention_bias(ids.shape[-1], ids.device))


class PositionedEmbedding(nn.Embedding):
    """Learned absolute position embedding that looks up the current ids instead of the index it is given."""

    current: CurrentPositions

    def forward(self, index: Tensor) -> Tensor:
        """Embeddings of the current ids of as many tokens as ``index`` (1, T) has, (B or 1, T, d_model)."""
        assert self.current.ids is not None
        return super().forward(self.current.ids[:, -index.shape[-1] :])


class NoPositionEmbedding(nn.Module):
    """Stands where OLMo puts a learned position embedding, and adds nothing: NoPE."""

    def forward(self, index: Tensor) -> Tensor:
        """Zeros that broadcast over (B, T, d_model)."""
        return torch.zeros(1, 1, 1, device=index.device)
