"""Policies that go by the attention that a token has got.

Aware of the near tokens, the last of these observe: they are the short context and the targets of the block before the
one that is next. Blind, the last far tokens do.
Shapes: m choices, G heads of keys in all layers, F far tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from analysis.policies.policy import (
    POLICIES,
    Keep,
    Policy,
    by_layer,
    check_at_most_1,
    highest,
    highest_together,
)
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from analysis.policies.seen import Seen


@POLICIES.register("h2o")
@dataclass(frozen=True)
class H2O(Policy):
    """Attention that a key has got from all tokens so far: H2O (Zhang et al., arXiv 2306.14048).

    Its heavy hitters; beside them it keeps the recent tokens, here the near ones.
    """

    mean: bool = False
    """Divide by the number of tokens that saw the key, as ObservedAttention of kvpress does."""
    blind: bool = False

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        received = seen.accumulated_attention()
        if self.mean:
            observers = seen.lengths[:, None] - np.arange(seen.n_far)
            received = received / observers[:, None]
        return received


@POLICIES.register("snapkv")
@dataclass(frozen=True)
class SnapKV(Policy):
    """Attention that a key and its neighbors get from the last tokens: SnapKV (Li et al., arXiv 2404.14469).

    The mean over ``pool`` tokens of the sum over the last ``window``. Defaults are the authors'.
    """

    window: int = 32
    """Tokens that observe; the near ones where these are fewer. Blind, they are kept first."""
    pool: int = 5
    """Tokens of the average pooling, an odd number."""
    blind: bool = False

    def __post_init__(self) -> None:
        if self.pool % 2 == 0:
            raise UserError(f"pool={self.pool}: give an odd number, so that a token stands in the middle")

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F)."""
        observed = seen.accumulated_attention(self.window)
        if not self.blind:
            return _pooled(observed, self.pool)
        window = min(self.window, seen.n_far)
        pooled = _pooled(observed[..., : seen.n_far - window], self.pool)
        return with_observers(pooled, window, seen.key_heads)


@POLICIES.register("ada-snapkv")
@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """SnapKV whose heads share the budget of their layer: Ada-KV (Feng et al., arXiv 2407.11550).

    The keys of the highest scores in all heads of a layer are kept, so that heads keep unequal numbers.
    """

    safe: float = 0.2
    """Share of its equal part of the budget that every head keeps, whatever the others score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most_1("ada-snapkv:safe", self.safe)

    def keeping(self, seen: Seen) -> Keep:
        """See `Policy`."""
        return partial(_by_layer_safely, key_heads=seen.key_heads, safe=self.safe)


@POLICIES.register("tova")
@dataclass(frozen=True)
class TOVA(Policy):
    """Attention that a key gets from the last token, mean over the layer: TOVA (Oren et al., arXiv 2401.06104)."""

    blind: bool = False

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F), the same in all heads of a layer; blind, the last far token is kept first."""
        observed = seen.accumulated_attention(window=1)
        layers = []
        for of_layer in by_layer(observed, seen.key_heads):
            layers.append(np.broadcast_to(of_layer.mean(axis=1, keepdims=True), of_layer.shape))
        scores = np.concatenate(layers, axis=1)
        if self.blind:
            scores = with_observers(scores[..., :-1], 1, seen.key_heads)
        return scores


def with_observers(scores: np.ndarray, count: int, key_heads: Sequence[int]) -> np.ndarray:
    """(m, G, F): scores (m, G, F - count) and, above the layer's others, those of the observers, the last highest."""
    layers = []
    for of_layer in by_layer(scores, key_heads):
        top = of_layer.max(axis=(1, 2), initial=0.0, keepdims=True) + 1
        later = np.arange(count) / count
        observers = np.broadcast_to(top + later, (*of_layer.shape[:2], count))
        layers.append(np.concatenate([of_layer, observers], axis=-1))
    return np.concatenate(layers, axis=1)


def _pooled(observed: np.ndarray, pool: int) -> np.ndarray:
    """The mean over neighbors; nothing stands beyond the ends, as in the authors' pooling."""
    margin = pool // 2
    padded = np.pad(observed, [(0, 0), (0, 0), (margin, margin)])
    if padded.shape[-1] < pool:
        return observed
    windows = np.lib.stride_tricks.sliding_window_view(padded, pool, axis=-1)
    return windows.mean(axis=-1)


def _by_layer_safely(scores: np.ndarray, count: int, *, key_heads: Sequence[int], safe: float) -> np.ndarray:
    """The highest of every layer together, once each head has a share of its equal part."""
    of_each_head = int(count * safe)
    if safe > 0 and count > 0:
        of_each_head = max(1, of_each_head)
    layers = []
    for of_layer in by_layer(scores, key_heads):
        open_to_choice = of_layer.copy()
        open_to_choice[highest(of_layer, of_each_head)] = np.inf
        layers.append(highest_together(open_to_choice, count))
    return np.concatenate(layers, axis=1)
