"""A policy that goes by the attention that later tokens will pay, as far as the queries so far say.

Shapes: R rows, H heads of queries, G heads of keys, L tokens that were seen, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from analysis.parameters import at_least_0
from analysis.policies.policy import POLICIES, Policy
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from analysis.model.layer_states import LayerStates
    from analysis.policies.seen import Rotations, Seen


@POLICIES.register("expected-attention")
@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Attention that a key can expect: Expected Attention (Devoto et al., arXiv 2510.00636).

    Queries are taken to be normal, with mean and covariance of those so far before they were rotated, and rotated by
    the mean rotation of the next positions. The expectation of exp(score) is that of a log-normal variable.
    """

    future: int = 512
    """Positions that are looked ahead."""
    sinks: int = at_least_0(4)
    """First tokens that are never dropped, whose queries count nothing."""
    covariance: bool = True
    """Whether it counts how queries spread, not their mean alone."""
    values: bool = True
    """Whether the attention is multiplied by the norm of the value."""
    epsilon: float = 0.0
    """Is added to the attention before it is."""
    blind: bool = False

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F). Raises `UserError` for models without RoPE, or with one of another form."""
        if min(seen.lengths) <= self.sinks:
            raise UserError(
                f"expected-attention:sinks={self.sinks}: all that it sees are sinks; lower sinks, or raise n_long"
            )
        return seen.of_layers(partial(self._of_layer, seen.rotations(self.future)))

    def _of_layer(self, rotations: Rotations, layer: LayerStates) -> Tensor:
        """(R, G, L)."""
        queries = rotations.undone(layer)[:, :, self.sinks :]
        keys = layer.keys[:, :, self.sinks :].float()
        values = layer.values[:, :, self.sinks :].float()
        heads = keys.shape[1]
        mean = queries.mean(dim=2, keepdim=True)
        spread = queries - mean
        mean = rotations.mean_ahead(mean, layer)
        mean = mean.unflatten(1, (heads, -1))  # (R, G, g, 1, D)
        keys = keys[:, :, None]
        scale = layer.scores.scale
        expected = (mean * keys).sum(dim=-1) * scale  # (R, G, g, L)
        if self.covariance:
            spread = rotations.mean_ahead(spread, layer).unflatten(1, (heads, -1))
            covariance = spread.transpose(-1, -2) @ spread / spread.shape[-2]
            expected = expected + (keys @ covariance * keys).sum(dim=-1) * scale**2 / 2
        shares = expected.softmax(dim=-1).mean(dim=2)
        if self.values:
            shares = (shares + self.epsilon) * values.norm(dim=-1)
        scores = shares.new_empty(*shares.shape[:2], layer.keys.shape[2])
        scores[..., self.sinks :] = shares
        scores[..., : self.sinks] = shares.amax(dim=(1, 2), keepdim=True) + 1
        return scores
