"""Softmax of other scores: sharpened with the length of the context or with distance, with a forget gate, convolved."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.attention.attention import ATTENTIONS, Attention, AttentionMask, Shape


def masked_scores(scores: Tensor, mask: AttentionMask) -> Tensor:
    """Scores with their bias, the lowest number where a key is not seen."""
    scores = scores + mask.bias.float()
    return scores.masked_fill(~mask.seen, torch.finfo(scores.dtype).min)


def masked_softmax(scores: Tensor, mask: AttentionMask) -> Tensor:
    """Softmax over the keys that are seen; 0 of the others."""
    return masked_scores(scores, mask).softmax(dim=-1)


@ATTENTIONS.register("ssmax")
class ScalableSoftmax(Attention):
    """SSMax (Nakanishi 2025, arXiv 2501.19399): the scores times s log n, s learned by each head.

    s is 1 / log T, of the training window's length T, plus a bias that is 0 at first [ours], so that an untrained model
    has the usual scores at the end of its window.
    """

    ids_are_positions = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.s_bias = nn.Parameter(torch.empty(shape.heads))

    def reset_parameters(self) -> None:
        """See `Attention`."""
        nn.init.zeros_(self.s_bias)

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        s = 1 / math.log(self.shape.window_length) + self.s_bias.float()
        scale = s[:, None, None] * mask.context_length.log()
        return masked_softmax(scale * self.scores(q, k), mask)


@ATTENTIONS.register("log-n")
class LogLengthTemperature(Attention):
    """The scores times max(1, log n / log T): the usual softmax up to the training window's length T.

    Su 2021, and others since.
    """

    ids_are_positions = True

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        scale = (mask.context_length.log() / math.log(self.shape.window_length)).clamp_min(1)
        return masked_softmax(scale * self.scores(q, k), mask)


_TAU = 10.0


@ATTENTIONS.register("scale-invariant")
class ScaleInvariant(Attention):
    """Scale-invariant attention (Anson et al. 2025, arXiv 2505.17083): a times the scores, plus 1 - a².

    a² = 2 log(t / τ + 1) + 1 at a distance of t tokens, with τ = 10 as there: of scores that are Gaussian, keys at 10
    to 100 tokens then weigh together as much as those at 100 to 1,000.
    """

    ids_are_positions = True

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        squared = 2 * (mask.distance.clamp_min(0) / _TAU).log1p() + 1
        scores = squared.sqrt() * self.scores(q, k) + 1 - squared
        return masked_softmax(scores, mask)


@ATTENTIONS.register("fox")
class Forgetting(Attention):
    """Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130): scores plus Σ log f(l), key j < l <= query i.

    f(l) = sigmoid(w · input(l) + b), a number for each token and head. A token that a query does not see has no gate
    for it either [ours]: so a token that is hidden is the same as one that is dropped.
    """

    cached_dims = 1
    supports_presence = False

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.gate = nn.Linear(shape.width, shape.heads)

    def reset_parameters(self) -> None:
        """See `Attention`; as the authors draw them, so that every gate is about a half at first."""
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.zeros_(self.gate.bias)

    def per_token(self, inputs: Tensor) -> Tensor:
        """log f, (B, H, T, 1)."""
        return F.logsigmoid(self.gate(inputs).float()).transpose(1, 2)[..., None]

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        log_gates = cached.float().transpose(-1, -2) * mask.seen  # (B, H, Q, K)
        sum_of_later = log_gates.flip(-1).cumsum(-1).flip(-1) - log_gates
        return masked_softmax(self.scores(q, k) + sum_of_later, mask)


@ATTENTIONS.register("dape-v2")
class FeatureMap(Attention):
    """DAPE v2 (Zheng et al. 2024, arXiv 2410.04798): the scores plus two convolutions over heads and three keys.

    The neighbours of a key are those whose ids are one less and one more, and the map is 0 at keys that the query does
    not see, before either convolution [ours]: a token that is dropped leaves a gap, as one that is hidden does. Between
    the convolutions there are as many channels as heads, and a bias of ALiBi is added after them [ours].
    """

    supports_presence = False
    ids_are_positions = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        # heads of the map x heads of the scores, of the previous key, the key itself and the next key
        self.first = nn.Linear(3 * shape.heads, shape.heads)
        self.second = nn.Linear(3 * shape.heads, shape.heads)

    def reset_parameters(self) -> None:
        """See `Attention`; the map is 0 at first."""
        nn.init.normal_(self.first.weight, std=(3 * self.shape.heads) ** -0.5)
        for zeros in (self.first.bias, self.second.weight, self.second.bias):
            nn.init.zeros_(zeros)

    def weights(self, q: Tensor, k: Tensor, cached: Tensor, mask: AttentionMask) -> Tensor:
        """See `Attention`."""
        scores = self.scores(q, k)
        if q.shape[2] == k.shape[2]:
            return masked_softmax(scores + self._added(scores, mask.key_ids, mask.seen), mask)
        # Padding of prompts that were decoded together stands between neighbours: what is hidden goes to the front.
        order = mask.seen[:, :, -1:].int().argsort(dim=-1, stable=True)  # (B or 1, 1, 1, K)
        key_ids = torch.take_along_dim(mask.key_ids, order[:, 0, 0], dim=-1)
        moved, seen = (torch.take_along_dim(of_keys, order, dim=-1) for of_keys in (scores, mask.seen))
        added = torch.take_along_dim(self._added(moved, key_ids, seen), order.argsort(dim=-1), dim=-1)
        return masked_softmax(scores + added, mask)

    def _added(self, scores: Tensor, key_ids: Tensor, seen: Tensor) -> Tensor:
        """What the convolutions add to scores (B, H, Q, K), where neighbours are next to each other, of that shape."""
        follows = (key_ids.diff(dim=-1) == 1)[:, None, None]  # (B or 1, 1, 1, K - 1)
        map_ = F.leaky_relu(self._convolved(self.first, scores * seen, follows))
        return self._convolved(self.second, map_ * seen, follows)

    @staticmethod
    def _convolved(layer: nn.Linear, scores: Tensor, follows: Tensor) -> Tensor:
        """(B, H, Q, K) of the same: each key with its neighbours, where ``follows`` says that the next key is one."""
        previous = F.pad(scores[..., :-1] * follows, (1, 0))
        following = F.pad(scores[..., 1:] * follows, (0, 1))
        inputs = torch.cat([previous, scores, following], dim=1)
        return torch.einsum("gh,bhqk->bgqk", layer.weight, inputs) + layer.bias[:, None, None]
