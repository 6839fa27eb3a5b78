"""Softmax of scores that are sharpened with the length of the context, or with the distance of a key."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from olmo_sparsity.attention.base import Attention, Places, Shape, masked_softmax, register


@register("ssmax")
class ScalableSoftmax(Attention):
    """SSMax (Nakanishi 2025, arXiv 2501.19399): the scores times s log n, s learned by each head.

    s is 1 / log(window) plus a bias that is 0 at first [ours], so that an untrained model has the usual scores at the
    end of its window.
    """

    reads_ids = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.s_bias = nn.Parameter(torch.empty(shape.heads))

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.zeros_(self.s_bias)

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        s = 1 / math.log(self.shape.window) + self.s_bias.float()
        scale = s[:, None, None] * places.context_length.log()
        return masked_softmax(scale * self.scores(q, k), places)


@register("log-n")
class LogLengthTemperature(Attention):
    """The scores times max(1, log n / log window): the usual softmax inside the window (Su 2021, and others since)."""

    reads_ids = True

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        scale = (places.context_length.log() / math.log(self.shape.window)).clamp_min(1)
        return masked_softmax(scale * self.scores(q, k), places)


_TAU = 10.0


@register("scale-invariant")
class ScaleInvariant(Attention):
    """Scale-invariant attention (Anson et al. 2025, arXiv 2505.17083): a times the scores, plus 1 - a².

    a² = 2 log(t / τ + 1) + 1 at a distance of t tokens, with τ = 10 as there: of scores that are Gaussian, keys at 10
    to 100 tokens then weigh together as much as those at 100 to 1,000.
    """

    reads_ids = True

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        squared = 2 * (places.distance.clamp_min(0) / _TAU).log1p() + 1
        scores = squared.sqrt() * self.scores(q, k) + 1 - squared
        return masked_softmax(scores, places)
