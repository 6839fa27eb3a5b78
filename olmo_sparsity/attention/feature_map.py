"""DAPE v2: the scores of all heads as a feature map, convolved."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.attention.base import Attention, Places, Shape, masked_softmax, register


@register("dape-v2")
class FeatureMap(Attention):
    """DAPE v2 (Zheng et al. 2024, arXiv 2410.04798): the scores plus two convolutions over heads and three keys.

    The neighbours of a key are those whose ids are one less and one more, and the map is 0 at keys that the query does
    not see, before either convolution [ours]: a token that is dropped leaves a gap, as one that is hidden does. Between
    the convolutions there are as many channels as heads, and a bias of ALiBi is added after them [ours].
    """

    fades = False
    reads_ids = True

    def __init__(self, shape: Shape):
        super().__init__(shape)
        # heads of the map, heads of the scores, the key before, the key itself, the key behind
        self.first = nn.Linear(3 * shape.heads, shape.heads)
        self.second = nn.Linear(3 * shape.heads, shape.heads)

    def reset_parameters(self) -> None:
        """See `Attention`; the map is 0 at first."""
        nn.init.normal_(self.first.weight, std=(3 * self.shape.heads) ** -0.5)
        for zeros in (self.first.bias, self.second.weight, self.second.bias):
            nn.init.zeros_(zeros)

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        scores = self.scores(q, k)
        if q.shape[2] == k.shape[2]:
            return masked_softmax(scores + self._added(scores, places.key_ids, places.seen), places)
        # Padding of prompts that were decoded together stands between neighbours: what is hidden goes to the front.
        order = places.seen[:, :, -1:].int().argsort(dim=-1, stable=True)  # (B or 1, 1, 1, K)
        key_ids = torch.take_along_dim(places.key_ids, order[:, 0, 0], dim=-1)
        moved, seen = (torch.take_along_dim(each, order, dim=-1) for each in (scores, places.seen))
        added = torch.take_along_dim(self._added(moved, key_ids, seen), order.argsort(dim=-1), dim=-1)
        return masked_softmax(scores + added, places)

    def _added(self, scores: Tensor, key_ids: Tensor, seen: Tensor) -> Tensor:
        """What the convolutions add to scores (B, H, Q, K), where neighbours are next to each other, of that shape."""
        follows = (key_ids.diff(dim=-1) == 1)[:, None, None]  # (B or 1, 1, 1, K - 1)
        map_ = F.leaky_relu(self._convolved(self.first, scores * seen, follows))
        return self._convolved(self.second, map_ * seen, follows)

    @staticmethod
    def _convolved(layer: nn.Linear, scores: Tensor, follows: Tensor) -> Tensor:
        """(B, H, Q, K) of the same: each key with its neighbours, where ``follows`` says that the next key is one."""
        before = F.pad(scores[..., :-1] * follows, (1, 0))
        behind = F.pad(scores[..., 1:] * follows, (0, 1))
        read = torch.cat([before, scores, behind], dim=1)
        return torch.einsum("gh,bhqk->bgqk", layer.weight, read) + layer.bias[:, None, None]
