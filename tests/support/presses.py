"""Presses that stand in for those of kvpress, with its interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class ScorerPress:
    """As kvpress has it."""

    compression_ratio: float = 0.0

    def compress(self, *_: Any) -> None:
        """kvpress calls it; a policy here does not."""
        raise AssertionError("it is never called")


@dataclass
class BudgetPress(ScorerPress):
    """Its scores are others at every budget, as those of CriticalKV: the first of half the budget are kept."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, *_: Any) -> Tensor:
        """(R, G, L)."""
        norms = -keys.norm(dim=-1)
        norms[..., : int(keys.shape[2] * (1 - self.compression_ratio) / 2)] = 1
        return norms


@dataclass
class PyramidPress(ScorerPress):
    """It keeps two keys more in the first layer, and two fewer in the others."""

    def score(self, module: Any, hidden_states: Any, keys: Tensor, *_: Any) -> Tensor:
        """(R, G, L)."""
        return -keys.norm(dim=-1)

    def get_layer_budget(self, module: Any, q_len: int) -> int:
        """Keys of a head."""
        kept = round(q_len * (1 - self.compression_ratio))
        return kept + (2 if module.layer_idx == 0 else -2)

    def compress(self, *_: Any) -> None:
        """One of its own, as PyramidKV has."""
        raise AssertionError("it is never called")


@dataclass
class PyramidKVPress(PyramidPress):
    """The budgets of PyramidKV, as kvpress 0.5.5 shares them out."""

    window_size: int = 64
    beta: int = 20
    num_layers: int = 3

    def get_layer_budget(self, module: Any, q_len: int) -> int:
        """Keys of a head: fewer in higher layers, or, where the highest would keep less than the window, those of
        SnapKV."""
        mean = q_len * (1 - self.compression_ratio)
        least = mean / self.beta
        most = 2 * mean - least
        if most >= q_len - self.window_size:
            most = q_len - self.window_size
            least = 2 * mean - most
        if not q_len >= most >= least >= self.window_size:
            return round(mean)
        step = (most - least) / (self.num_layers - 1)
        return round(most - module.layer_idx * step)
