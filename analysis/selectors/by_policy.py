"""Eviction policies as selectors, each defined in `analysis.policies`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from analysis.policies.policy import POLICIES, Policy, first_of_each_head
from analysis.selectors.registry import BLIND, register
from analysis.selectors.selector import Selection, SelectorInput, most_influential


@dataclass(frozen=True)
class ByPolicy:
    """The selector of an eviction policy: heads keep tokens of their own, and as text the mean over heads chooses."""

    policy: Policy

    def __call__(self, inputs: SelectorInput) -> Selection:
        """S_k, by head."""
        from analysis.policies.seen import Seen  # the names of selectors are known without torch

        seen = Seen.of(
            inputs.scorer,
            inputs.contexts,
            inputs.target_index,
            blind=self.policy.blind,
            encode=inputs.encode,
        )
        by_head = self.policy.scores(seen)
        keep = self.policy.keeping(seen)
        chosen = most_influential(inputs, inputs.at_candidates(by_head.mean(axis=1)))
        if inputs.columns is not None:  # screened: no head keeps what was not proposed
            proposed = np.zeros((len(by_head), seen.n_far), dtype=bool)
            np.put_along_axis(proposed, inputs.columns, True, axis=1)
            by_head = np.where(proposed[:, None], by_head, -np.inf)
        return replace(chosen, by_head=by_head, keep=None if keep is first_of_each_head else keep)


for _name, _policy in POLICIES.items():
    register(_name, BLIND)(_policy)
