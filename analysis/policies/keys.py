"""Policies that look at keys alone.

Shapes: R rows, G heads of keys, L tokens that were seen, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.policies.policy import POLICIES, Policy

if TYPE_CHECKING:
    from torch import Tensor

    from analysis.model.layer_states import LayerStates
    from analysis.policies.seen import Seen


@POLICIES.register("knorm")
@dataclass(frozen=True)
class Knorm(Policy):
    """The smaller the L2 norm of a key, the longer it is kept (Devoto et al., arXiv 2406.11430).

    A key's norm is the same whatever comes behind it, so that the policy is blind.
    """

    blind = True

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        return seen.of_layers(_minus_norm)


@POLICIES.register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Policy):
    """The less a key is like the mean of the keys, the longer it is kept: KeyDiff (Park et al., arXiv 2504.15364).

    Keys of all tokens that are seen make the mean, those of the far context alone where it is blind. The authors go on
    block by block where memory is short; here one choice is made.
    """

    blind: bool = False

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        return seen.of_layers(_minus_likeness)


def _minus_norm(layer: LayerStates) -> Tensor:
    """(R, G, L)."""
    return -layer.keys.float().norm(dim=-1)


def _minus_likeness(layer: LayerStates) -> Tensor:
    """Minus the cosine of each key with the mean of all, each of length 1, (R, G, L)."""
    keys = layer.keys.float()
    unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    anchor = unit.mean(dim=2, keepdim=True)
    anchor = anchor / anchor.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return -(unit * anchor).sum(dim=-1)
