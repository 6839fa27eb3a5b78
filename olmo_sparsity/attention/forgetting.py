"""FoX: a forget gate in softmax attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from olmo_sparsity.attention.base import Attention, Places, Shape, masked_softmax, register


@register("fox")
class Forgetting(Attention):
    """Forgetting Transformer (Lin et al. 2025, arXiv 2503.02130): scores plus Σ log f(l), key j < l <= query i.

    f(l) = sigmoid(w · input(l) + b), a number for each token and head. A token that a query does not see has no gate
    for it either [ours]: so a token that is hidden is the same as one that is dropped.
    """

    extras = 1
    fades = False

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

    def weights(self, q: Tensor, k: Tensor, extras: Tensor, places: Places) -> Tensor:
        """See `Attention`."""
        log_gates = extras.float().transpose(-1, -2) * places.seen  # (B, H, Q, K)
        behind = log_gates.flip(-1).cumsum(-1).flip(-1) - log_gates
        return masked_softmax(self.scores(q, k) + behind, places)
