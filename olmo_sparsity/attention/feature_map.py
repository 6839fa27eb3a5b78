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
    not see, before either convolution [ours]: a token that is dropped leaves a gap, as one that is hidden does.
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
        follows = (places.key_ids.diff(dim=-1) == 1)[:, None, None]  # (B or 1, 1, 1, K - 1)
        map_ = F.leaky_relu(self._convolved(self.first, scores * places.seen, follows))
        return masked_softmax(scores + self._convolved(self.second, map_ * places.seen, follows), places)

    @staticmethod
    def _convolved(layer: nn.Linear, scores: Tensor, follows: Tensor) -> Tensor:
        """(B, H, Q, K) of the same: each key with its neighbours, where ``follows`` says that the next key is one."""
        before = F.pad(scores[..., :-1] * follows, (1, 0))
        behind = F.pad(scores[..., 1:] * follows, (0, 1))
        read = torch.cat([before, scores, behind], dim=1)
        return torch.einsum("gh,bhqk->bgqk", layer.weight, read) + layer.bias[:, None, None]
