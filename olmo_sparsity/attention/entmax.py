"""Attention with exact zeros: 1.5-entmax, and ASEntmax, whose temperature depends on the length of the context."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.attention.base import Attention, Places, Shape, by_rows, masked_scores, register

_STEPS = 16
"""At most, of Newton's method: each halves the distance to the threshold at least, and near it the error squares."""
_NEAR = 1e-7
"""A step that changes the threshold, a number from -1 to 0, by no more than its rounding."""


def _search(scores: Tensor) -> tuple[Tensor]:
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
        # On a device the question would make the host wait, and a compiled graph cannot ask it: all steps there.
        if scores.is_cpu and not torch.compiler.is_compiling() and bool((step < _NEAR).all()):
            break
    return ((half - threshold).clamp_min(0) ** 2,)


class _Entmax15(torch.autograd.Function):
    """1.5-entmax over the last dimension (Peters, Niculae and Martins 2019, arXiv 1905.05702)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """See `_search`."""
        (p,) = by_rows(_search, scores)
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


@register("entmax")
class Entmax(Attention):
    """1.5-entmax of the scores."""

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        return entmax15(masked_scores(self.scores(q, k), places))


@register("asentmax")
class AdaptiveScalableEntmax(Attention):
    """ASEntmax (Vasylenko et al. 2025, arXiv 2506.16640): 1.5-entmax of the scores times 1 + β (log (n + 1))^γ.

    β = softplus(w · input) of the query's token and γ = 2 tanh(u · input), a vector w and one u for each head. The
    range of γ, the + 1 and how w and u are drawn are those of the authors' code (deep-spin/asentmax).
    """

    extras = 2
    reads_ids = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.beta_gamma = nn.Linear(shape.width, 2 * shape.heads, bias=False)

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.normal_(self.beta_gamma.weight, std=0.02)

    def per_token(self, inputs: Tensor) -> Tensor:
        """What β and γ are made of, (B, H, T, 2)."""
        return self.beta_gamma(inputs).unflatten(-1, (self.shape.heads, 2)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        own = extras[:, :, -q.shape[2] :].float()
        beta, gamma = F.softplus(own[..., :1]), 2 * own[..., 1:].tanh()
        scores = (1 + beta * places.context_length.log1p() ** gamma) * self.scores(q, k)
        return entmax15(masked_scores(scores, places))
