"""Attention with exact zeros: 1.5-entmax, ASEntmax, whose temperature depends on the context's length, and SparseK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.attention.attention import ATTENTIONS, Attention, AttentionMask, Shape
from olmo_sparsity.attention.softmax import masked_scores, masked_softmax

_STEPS = 16
"""At most, of Newton's method: each halves the distance to the threshold at least, and near it the error squares."""
_NEAR = 1e-7
"""A step that changes the threshold, a number from -1 to 0, by no more than its rounding."""
_HALVINGS = 30
"""Of the interval that holds SparseK's threshold."""
_BLOCK = 2**16
"""How many numbers `by_rows` searches at a time: 256 KB, so that more than one block fits a core's cache."""


def by_rows(search: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The results of ``search`` for tensors of one shape; each row, the last dimension, is searched by itself.

    A search reads its rows many times: on a CPU it gets a few rows at a time, which stay in the cache. On a device, and
    in a compiled graph, whose kernels do that by themselves, it gets all of them at once.
    """
    if not tensors[0].is_cpu or torch.compiler.is_compiling():
        return search(*tensors)
    *outer, width = tensors[0].shape
    blocks = zip(*(tensor.flatten(0, -2).split(max(1, _BLOCK // width)) for tensor in tensors), strict=True)
    results = zip(*(search(*block) for block in blocks), strict=True)
    return tuple(torch.cat(chunks).unflatten(0, outer) for chunks in results)


def _entmax_search(scores: Tensor) -> tuple[Tensor]:
    """p = max(scores / 2 - threshold, 0)², the threshold such that each row of p sums to 1.

    The sum is convex in the threshold, and at least 1 where the largest score alone has p = 1: from there Newton's
    steps never go too far. Unlike the authors' algorithm it sorts nothing, which is most of the time.
    """
    # Halved first, for a masked score is the lowest number that there is.
    half = scores / 2 - scores.amax(dim=-1, keepdim=True) / 2
    threshold = -torch.ones_like(half[..., :1])
    for _ in range(_STEPS):
        root = (half - threshold).clamp_min(0)
        step = (root.square().sum(-1, keepdim=True) - 1) / (2 * root.sum(-1, keepdim=True))
        threshold = threshold + step
        # On a device this test would make the host wait, and a compiled graph cannot branch on it: all steps there.
        if scores.is_cpu and not torch.compiler.is_compiling() and bool((step < _NEAR).all()):
            break
    return ((half - threshold).clamp_min(0) ** 2,)


class _Entmax15(torch.autograd.Function):
    """1.5-entmax over the last dimension (Peters, Niculae and Martins 2019, arXiv 1905.05702)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """See `_entmax_search`."""
        (p,) = by_rows(_entmax_search, scores)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Jacobian diag(s) - s sᵀ / Σ s with s = sqrt(p)."""
        (p,) = ctx.saved_tensors
        root = p.sqrt()
        weighted = gradient * root
        return weighted - root * weighted.sum(dim=-1, keepdim=True) / root.sum(dim=-1, keepdim=True)


def entmax15(scores: Tensor) -> Tensor:
    """1.5-entmax over the last dimension: 0 of most that are far below the largest."""
    return _Entmax15.apply(scores)


@ATTENTIONS.register("entmax")
class Entmax(Attention):
    """1.5-entmax of the scores."""

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        return entmax15(masked_scores(self.scores(q, k), mask))


@ATTENTIONS.register("asentmax")
class AdaptiveScalableEntmax(Attention):
    """ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640): 1.5-entmax of the scores times 1 + β (log (n + 1))^γ.

    β = softplus(w · input) of the query's token and γ = 2 tanh(u · input), a vector w and one u for each head. The
    range of γ, the + 1 and how w and u are drawn are those of the authors' code (deep-spin/asentmax).
    """

    cached_dims = 2
    ids_are_positions = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.beta_gamma = nn.Linear(shape.width, 2 * shape.heads, bias=False)

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.normal_(self.beta_gamma.weight, std=0.02)

    def per_token(self, inputs: Tensor) -> Tensor:
        """What β and γ are made of, (B, H, T, 2)."""
        return self.beta_gamma(inputs).unflatten(-1, (self.shape.heads, 2)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        of_queries = cached[:, :, -q.shape[2] :].float()
        beta = F.softplus(of_queries[..., :1])
        gamma = 2 * of_queries[..., 1:].tanh()
        scores = (1 + beta * mask.context_length.log1p() ** gamma) * self.scores(q, k)
        return entmax15(masked_scores(scores, mask))


def _sparsek_search(u: Tensor, seen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """m, and where it is between 0 and 1.

    Bisection brackets the threshold; it is then solved for exactly, as it is known which m are 0 and which 1.
    """
    largest = torch.finfo(u.dtype).max
    low = u.masked_fill(~seen, largest).amin(dim=-1, keepdim=True) - 1
    u = u.masked_fill(~seen, -largest)  # so that m is 0 at every threshold
    high = u.amax(dim=-1, keepdim=True)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = (u - middle).clamp(0, 1).sum(dim=-1, keepdim=True) >= k
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    between = (u > low) & (u < low + 1)
    num_ones = (u >= low + 1).sum(dim=-1, keepdim=True)
    count = between.sum(dim=-1, keepdim=True)
    exact = (u.where(between, 0).sum(dim=-1, keepdim=True) - (k - num_ones)) / count.clamp_min(1)
    few = seen.sum(dim=-1, keepdim=True) <= k
    m = torch.where(few, 1.0, (u - torch.where(count > 0, exact, low)).clamp(0, 1)) * seen
    return m, between & ~few


class _SparseK(torch.autograd.Function):
    """The projection on {m : 0 <= m <= 1, Σ m = k}; see `sparsek`."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, seen: Tensor, k: int) -> Tensor:
        """See `_sparsek_search`."""
        m, between = by_rows(partial(_sparsek_search, k=k), u, seen.expand(u.shape))
        ctx.save_for_backward(between)
        return m

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Free of its mean over those m between 0 and 1; 0 of the others."""
        (between,) = ctx.saved_tensors
        inside = gradient * between
        mean = inside.sum(dim=-1, keepdim=True) / between.sum(dim=-1, keepdim=True).clamp_min(1)
        return inside - mean * between, None, None


def sparsek(u: Tensor, seen: Tensor, k: int) -> Tensor:
    """m = clip(u - τ, 0, 1) with Σ m = k over the keys that are seen, last dimension; all 1 where these are few.

    Lou et al. 2024, arXiv 2406.16747, section 3.2.
    """
    return _SparseK.apply(u, seen, k)


@ATTENTIONS.register("sparsek")
class SparseK(Attention):
    """SparseK attention (Lou et al. 2024, arXiv 2406.16747): softmax over chosen and near keys, times the choice.

    A head scores every token by a vector times the layer's input; of the keys that a query sees it chooses a quarter of
    the training window by `sparsek`, and the nearest eighth besides, by ids [ours].
    """

    cached_dims = 1
    supports_presence = False
    ids_are_positions = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.score = nn.Linear(shape.width, shape.heads, bias=False)

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.normal_(self.score.weight, std=0.02)

    def per_token(self, inputs: Tensor) -> Tensor:
        """The score of every token, (B, H, T, 1)."""
        return self.score(inputs).transpose(1, 2)[..., None]

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`; they sum to 1 at most."""
        scores = self.scores(q, k)
        u = cached.float().transpose(-1, -2).expand(scores.shape)
        near = mask.distance < self.shape.window_length // 8
        chosen = sparsek(u, mask.seen & ~near, self.shape.window_length // 4)
        chosen = torch.where(mask.seen & near, 1.0, chosen)
        return masked_softmax(scores, replace(mask, seen=chosen > 0)) * chosen
