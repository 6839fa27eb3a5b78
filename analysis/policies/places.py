"""A policy that goes by where a token stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.parameters import at_least_0
from analysis.policies.policy import POLICIES, Policy

if TYPE_CHECKING:
    from analysis.policies.seen import Seen


@POLICIES.register("streaming-llm")
@dataclass(frozen=True)
class StreamingLLM(Policy):
    """The first tokens, then the last ones: StreamingLLM (Xiao et al., arXiv 2309.17453).

    Keys stay rotated by the ids of their tokens; the authors number what is in the cache anew.
    """

    sinks: int = at_least_0(4)
    """First tokens that are never dropped."""

    blind = True

    def scores(self, seen: Seen) -> np.ndarray:
        """The later the higher, and the sinks above all, the first first."""
        places = np.arange(seen.n_far)
        order = np.where(places < self.sinks, 2 * seen.n_far - places, places).astype(float)
        return np.broadcast_to(order, (len(seen.targets), sum(seen.key_heads), seen.n_far))
