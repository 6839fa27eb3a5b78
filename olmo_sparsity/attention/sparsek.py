"""SparseK: few keys are chosen for every query, differentiably."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from olmo_sparsity.attention.base import Attention, Places, Shape, by_rows, masked_softmax, register

_HALVINGS = 30


def _search(u: Tensor, seen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """m, and where it is between 0 and 1.

    The threshold is found by halving, then solved for exactly, once it is known which m are 0 and which 1.
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
    ones = (u >= low + 1).sum(dim=-1, keepdim=True)
    count = between.sum(dim=-1, keepdim=True)
    exact = (u.where(between, 0).sum(dim=-1, keepdim=True) - (k - ones)) / count.clamp_min(1)
    few = seen.sum(dim=-1, keepdim=True) <= k
    m = torch.where(few, 1.0, (u - torch.where(count > 0, exact, low)).clamp(0, 1)) * seen
    return m, between & ~few


class _SparseK(torch.autograd.Function):
    """The projection on {m : 0 <= m <= 1, Σ m = k}; see `sparsek`."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, seen: Tensor, k: int) -> Tensor:
        """See `_search`."""
        m, between = by_rows(partial(_search, k=k), u, seen.expand(u.shape))
        ctx.save_for_backward(between)
        return m

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Free of its mean over those m between 0 and 1; 0 of the others."""
        (between,) = ctx.saved_tensors
        own = gradient * between
        mean = own.sum(dim=-1, keepdim=True) / between.sum(dim=-1, keepdim=True).clamp_min(1)
        return own - mean * between, None, None


def sparsek(u: Tensor, seen: Tensor, k: int) -> Tensor:
    """m = clip(u - τ, 0, 1) with Σ m = k over the keys that are seen, last dimension; all 1 where these are few.

    Lou et al. 2024, arXiv 2406.16747, section 3.2.
    """
    return _SparseK.apply(u, seen, k)


@register("sparsek")
class SparseK(Attention):
    """SparseK attention (Lou et al. 2024, arXiv 2406.16747): softmax over chosen and near keys, times the choice.

    A head scores every token by a vector times the layer's input; of the keys that a query sees it chooses a quarter of
    the training window by `sparsek`, and the nearest eighth besides, by ids [ours].
    """

    extras = 1
    fades = False
    reads_ids = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.score = nn.Linear(shape.width, shape.heads, bias=False)

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.normal_(self.score.weight, std=0.02)

    def per_token(self, inputs: Tensor) -> Tensor:
        """The score of every token, (B, H, T, 1)."""
        return self.score(inputs).transpose(1, 2)[..., None]

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`; they sum to 1 at most."""
        scores = self.scores(q, k)
        u = extras.float().transpose(-1, -2).expand(scores.shape)
        near = places.distance < self.shape.window // 8
        chosen = sparsek(u, places.seen & ~near, self.shape.window // 4)
        chosen = torch.where(places.seen & near, 1.0, chosen)
        return masked_softmax(scores, replace(places, seen=chosen > 0)) * chosen
