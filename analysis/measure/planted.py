"""A model whose answer depends on known tokens, and how many of them a selector finds (METHOD 3.1, 3.2).

Shapes: n targets, R rows, L tokens, N long and M short context length, F far tokens, p planted ones, k selected ones,
K values of k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.model.adapters import KeyValues
from analysis.text.contexts import Contexts

KS = (1, 2, 4, 8, 16)
"""How many selected tokens recall is told for."""
RULES = ("sum", "all")
"""How planted tokens bear on the answer: each by itself, or only all of them together."""


class PlantedModel:
    """Predicts token 1 out of two; how surely depends on which columns of the context it can see [ours].

    Args:
        planted: columns whose tokens decide, (p,).
        n_long: N.
        rule: ``sum``: the logit is the sum of what each present planted token gives; ``all``: the planted tokens give
            something only if all are present, as an earlier match and what followed it do for a model that copies.
        strength_nats: logit that all planted tokens give together.
        noise_nats: scale of what every other token gives, alone: normal, and of either sign.
        seed: of the noise.
    """

    def __init__(
        self,
        planted: Sequence[int],
        n_long: int,
        *,
        rule: str,
        strength_nats: float = 4.0,
        noise_nats: float = 0.02,
        seed: int = 0,
    ):
        assert rule in RULES
        self.planted, self.rule, self.strength = torch.as_tensor(planted), rule, strength_nats
        noise = np.random.default_rng(seed).normal(scale=noise_nats, size=n_long)
        noise[list(planted)] = 0
        self.noise = torch.from_numpy(noise).float()

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *, last_logits_only: bool) -> Any:
        """An object whose ``logits`` are (R, 1, 2)."""
        return SimpleNamespace(logits=self._logits(self._present(position_ids))[:, None])

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Nothing is worth caching: only the position ids decide, and those come with every call."""
        empty = torch.zeros(*position_ids.shape, 1)[:, None]
        return [(empty, empty)]

    def logits_after(self, past: KeyValues, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """See `analysis.model.adapters.AnalysedModel`."""
        return self._logits(self._present(position_ids))

    def biased_logits(self, input_ids: Tensor, position_ids: Tensor, bias: Tensor) -> Tensor:
        """See `analysis.model.adapters.AnalysedModel`; a bias of log p is presence p."""
        return self._logits(bias[:, -1].exp())

    def last_attention(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """A softmax of how far each token bears on the answer, (R, L)."""
        weight = self.noise.abs().index_fill(0, self.planted, self.strength / len(self.planted))
        return weight[position_ids].softmax(dim=-1)

    def _present(self, position_ids: Tensor) -> Tensor:
        return torch.zeros(len(position_ids), len(self.noise)).scatter_(1, position_ids, 1.0)

    def _logits(self, presence: Tensor) -> Tensor:
        """(R, 2) logits from the presence, 0 to 1, of every column (R, N)."""
        planted = presence[:, self.planted]
        together = planted.mean(dim=1) if self.rule == "sum" else planted.prod(dim=1)
        logit = self.strength * together + presence @ self.noise
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


def planted_contexts(count: int, n_long: int, n_short: int) -> Contexts:
    """Contexts for `PlantedModel`, whose target is token 1; the tokens themselves say nothing."""
    return Contexts(
        tokens=np.zeros((count, n_long), dtype=np.int64),
        targets=np.ones(count, dtype=np.int64),
        target_id=np.arange(count),
        n_short=n_short,
    )


def found_at(
    selected: np.ndarray, planted: np.ndarray, ks: Sequence[int], tokens_per_place: int = 1
) -> np.ndarray:
    """Whether each planted token (n, p) is among the first k selected (n, k_max), (n, K, p) bool.

    With ``tokens_per_place`` u > 1 the columns form places 0 … u-1, u … 2u-1, …, each with one planted token at most,
    and a planted place is found by any of its tokens.
    """
    found = selected[:, :, None] // tokens_per_place == planted[:, None, :] // tokens_per_place
    return np.stack([found[:, :k].any(axis=1) for k in ks], axis=1)


def recall_at(selected: np.ndarray, planted: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Share of the planted tokens (n, p) among the first k selected (n, k_max), (n, K); chance is k / F."""
    return found_at(selected, planted, ks).mean(axis=2)


def chance_recall(k: int, n_far: int, tokens_per_place: int = 1) -> float:
    """Recall of k far tokens drawn at random: k / F; of places of u tokens 1 - C(F-u, k) / C(F, k)."""
    return 1 - math.comb(n_far - tokens_per_place, k) / math.comb(n_far, k)
