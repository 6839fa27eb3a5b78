"""A policy that goes by what the model attends to when it repeats the context.

Shapes: m choices, G heads of keys in all layers, F far tokens, Q tokens that are read behind them, q in a slice, R
rows, H heads of queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from analysis.parameters import at_least_0
from analysis.policies.policy import POLICIES, Keep, Policy, by_layer, highest_together

if TYPE_CHECKING:
    from torch import Tensor

    from analysis.policies.seen import Seen

_WHOLE = "\n\nRepeat the previous context exactly."
_PART = "\n\nRepeat the part of the previous context exactly, starting with"
_BEHIND_THE_PROMPT = "\n"
_LAST_OF_PART = 8
"""Tokens of the part before by which the prompt says where the next one starts."""


@POLICIES.register("kvzip")
@dataclass(frozen=True)
class KVzip(Policy):
    """The most attention that a key gets while the model reads the context again: KVzip (Kim et al., arXiv 2505.23416).

    A prompt and the far context are read behind the far context. Keys of all layers and heads share the budget. It is
    blind by its idea. Prompts are the authors', without a chat template.
    """

    chunk: int = 2048
    """Tokens that are repeated at a time; attention is among them, the sinks and what is read again."""
    sinks: int = at_least_0(4)
    """First tokens that are never dropped."""
    layerwise: bool = False
    """Whether every layer has the same budget, so that heads of one layer share it."""

    blind = True

    def scores(self, seen: Seen) -> np.ndarray:
        """(m, G, F). Raises `UserError` without a tokenizer, and where the model cannot read the far context twice."""
        scores = np.empty((len(seen.targets), sum(seen.key_heads), seen.n_far))
        tokens = seen.contexts.tokens
        for start in range(0, seen.n_far, self.chunk):
            end = min(start + self.chunk, seen.n_far)
            prompt = seen.encoded(_PART if start else _WHOLE, "kvzip")
            behind = seen.encoded(_BEHIND_THE_PROMPT, "kvzip")
            parts = [
                np.tile(prompt, (len(tokens), 1)),
                tokens[:, max(0, start - _LAST_OF_PART) : start],
                np.tile(behind, (len(tokens), 1)),
                tokens[:, start:end],
            ]
            further = np.concatenate(parts, axis=1)
            most = partial(
                self._most, queries=further.shape[1], prefix=seen.prefix_length, start=start, end=end
            )
            scores[..., start:end] = seen.attention_of_further(further, most)
        scores[..., : self.sinks] = scores.max(axis=(1, 2), keepdims=True) + 1
        return scores

    def _most(
        self, attention: Iterable[Tensor], *, queries: int, prefix: int, start: int, end: int
    ) -> Tensor:
        """The most that a query pays to each token of a chunk, (R, H, chunk), of slices (R, H, q, p + F + Q).

        Counted again among the prefix, the sinks, the chunk and what is read again; a chunk of everything is not.
        """
        most: Tensor | None = None
        for weights in attention:
            n_far = weights.shape[3] - prefix - queries
            of_chunk = weights[..., prefix + start : prefix + end]
            if end - start < n_far:
                sinks = prefix + min(self.sinks, start)
                total = weights[..., :sinks].sum(dim=-1) + weights[..., -queries:].sum(dim=-1)
                total = total + of_chunk.sum(dim=-1)
                total = total.clamp_min(1e-30)  # of a query that attends elsewhere alone
                of_chunk = of_chunk / total[..., None]
            of_slice = of_chunk.amax(dim=2)
            most = of_slice if most is None else most.maximum(of_slice)
        assert most is not None
        return most

    def keeping(self, seen: Seen) -> Keep:
        """See `Policy`."""
        if self.layerwise:
            return partial(_by_layer, key_heads=seen.key_heads)
        return highest_together


def _by_layer(scores: np.ndarray, count: int, *, key_heads: Sequence[int]) -> np.ndarray:
    layers = [highest_together(of_layer, count) for of_layer in by_layer(scores, key_heads)]
    return np.concatenate(layers, axis=1)
