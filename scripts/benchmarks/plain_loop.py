"""The selectors as a plain loop: one forward pass per candidate, no batch, nothing shared, the logits of all positions.

This is what the engine (`analysis.model.scorer`) is compared with, so it shares no code with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from analysis.measure.selectors import Selection
from analysis.text.contexts import Contexts
from benchmarks.timing import Json

Ranked = list[tuple[int, float]]
"""Columns of far tokens with their influence in nats, most influential first."""


class PlainLoop:
    """One target after the other, one subset after the other. Definitions: docs/method.md 2.1 and 2.2."""

    def __init__(self, model: Any, device: str, contexts: Contexts, row: int):
        self.model, self.device = model, device
        self.tokens, self.target = contexts.tokens[row], int(contexts.targets[row, 0])
        self.long = list(range(contexts.n_long))
        self.far, self.short = self.long[: contexts.n_far], self.long[contexts.n_far :]

    @torch.inference_mode()
    def loss_nats(self, kept: list[int]) -> float:
        """loss(t | kept): the kept tokens alone, each at its original position id."""
        position_ids = torch.tensor([kept], device=self.device)
        input_ids = torch.tensor([self.tokens[kept].tolist()], device=self.device)
        logits = self.model(input_ids, position_ids=position_ids, logits_to_keep=0).logits[0, -1]
        return F.cross_entropy(logits.float(), torch.tensor(self.target, device=self.device)).item()

    def leave_one_out(self, k: int) -> Ranked:
        """loss(t | C_long without i) - L_long."""
        long_nats = self.loss_nats(self.long)
        return _first(k, {i: self.loss_nats([j for j in self.long if j != i]) - long_nats for i in self.far})

    def leave_one_in(self, k: int) -> Ranked:
        """L_short - loss(t | C_short and i)."""
        short_nats = self.loss_nats(self.short)
        return _first(k, {i: short_nats - self.loss_nats([i, *self.short]) for i in self.far})

    def greedy(self, k: int) -> Ranked:
        """Each round adds the token that lowers the loss most; its influence is what it took off."""
        chosen: Ranked = []
        before = self.loss_nats(self.short)
        for _ in range(k):
            kept = [i for i, _ in chosen]
            losses = {
                i: self.loss_nats([*sorted([*kept, i]), *self.short]) for i in self.far if i not in kept
            }
            best = min(losses, key=losses.__getitem__)
            chosen.append((best, before - losses[best]))
            before = losses[best]
        return chosen


def _first(k: int, influence: dict[int, float]) -> Ranked:
    """The k of largest influence; equal ones keep the order of the text (Python sorts stably)."""
    return sorted(influence.items(), key=lambda item: -item[1])[:k]


PLAIN_SELECTORS = {
    "leave-one-out": PlainLoop.leave_one_out,
    "leave-one-in": PlainLoop.leave_one_in,
    "greedy": PlainLoop.greedy,
}


def plain_selection(name: str, model: Any, device: str, k: int, contexts: Contexts) -> Selection:
    """The k far tokens that the selector ``name`` puts first."""
    rows = [PLAIN_SELECTORS[name](PlainLoop(model, device, contexts, row), k) for row in range(len(contexts))]
    ranked = np.array(rows)
    return Selection(ranked[..., 0].astype(np.int64), ranked[..., 1])


def compare_selections(plain: Sequence[Selection], engine: Sequence[Selection], k: int) -> Json:
    """Shares of targets whose first k tokens are the same, as a set and in order, over all rounds.

    The largest difference of influence [nats] is over every token that both rank, also where they rank it differently.
    """
    same_set, same_order, differences = [], [], [0.0]
    for a, b in zip(plain, engine, strict=True):
        for row in range(len(a.columns)):
            x, y = a.columns[row], b.columns[row]
            same_order.append(np.array_equal(x[:k], y[:k]))
            same_set.append(set(x[:k].tolist()) == set(y[:k].tolist()))
            _, at_x, at_y = np.intersect1d(x, y, assume_unique=True, return_indices=True)
            apart = np.abs(a.influence[row][at_x] - b.influence[row][at_y])
            differences.append(float(apart.max(initial=0.0)))
    return {
        "same_set": statistics.mean(map(float, same_set)),
        "same_order": statistics.mean(map(float, same_order)),
        "largest_influence_difference_nats": max(differences),
    }
