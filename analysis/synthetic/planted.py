"""Recall of tokens that a prediction is known to depend on, and models built by hand that depend on them.

    token recall(k)   share of the p planted columns among the first k selected; chance is k / F
    place recall(k)   [ours] share of the planted places with a token among the first k selected

Shapes: n samples, R rows, L tokens, N long and M short context length, F = N - M far tokens, p planted tokens of each
sample, k_max selected tokens, K values of k.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.adapter import Adapter, KeyValues, ReadAttention, mean_over_heads
from analysis.model.losses import Scorer
from analysis.selectors import SelectorInput, check_selector, find_selector
from olmo_sparsity.util.errors import UserError

KS = (1, 2, 4, 8, 16)
"""Numbers of selected tokens for which recall is given."""
HAND_PLANTED = (1, 2, 4, 8)
"""Numbers of planted tokens of models built by hand."""
RULES = ("sum", "all")
"""How planted tokens bear on the answer: each by itself, or only all of them together."""

_SUBSET_ELEMENTS = 1 << 22  # columns of all subsets of one call: 32 MiB of int64


class PlantedModel(Adapter):
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

    vocabulary_size, max_positions = 2, None
    baseline_token = -1  # a token that is not there

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
        super().__init__()
        self.planted, self.rule, self.strength = torch.as_tensor(planted), rule, strength_nats
        noise = np.random.default_rng(seed).normal(scale=noise_nats, size=n_long)
        noise[list(planted)] = 0
        self.noise = torch.from_numpy(noise).float()

    def forward(self, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        """An object whose ``logits`` are (R, 1, 2)."""
        return SimpleNamespace(logits=self._logits(self._present(position_ids))[:, None])

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """Nothing is worth caching: only the position ids decide, and those come with every call."""
        empty = torch.zeros(*position_ids.shape, 1)[:, None]
        return [(empty, empty)]

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        return self._logits(self._present(position_ids))[:, None]

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`; a bias of log p is presence p."""
        return self._logits(bias[:, -1].exp())[:, None]

    def embed(self, input_ids: Tensor) -> Tensor:
        """The presence of each token, (R, L, 1): all that the model reads of it."""
        return (input_ids >= 0).float()[..., None]

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`."""
        return self._logits(self._present(position_ids, embeddings[..., 0]))[:, None]

    def last_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> Tensor:
        """A softmax of how far each token bears on the answer, of one head, (R, 1, L)."""
        weight = self.noise.abs().index_fill(0, self.planted, self.strength / len(self.planted))
        return read(weight[position_ids].softmax(dim=-1)[:, None, None])

    def _present(self, position_ids: Tensor, presence: Tensor | float = 1.0) -> Tensor:
        """(R, N) presence of every column, that of tokens (R, L) or of what is read."""
        given = torch.as_tensor(presence).expand(position_ids.shape)
        return torch.zeros(len(position_ids), len(self.noise)).scatter(1, position_ids, given)

    def _logits(self, presence: Tensor) -> Tensor:
        """(R, 2) logits from the presence, 0 to 1, of every column (R, N)."""
        planted = presence[:, self.planted]
        together = planted.mean(dim=1) if self.rule == "sum" else planted.prod(dim=1)
        logit = self.strength * together + presence @ self.noise
        return torch.stack([torch.zeros_like(logit), logit], dim=1)


def planted_context(n_long: int, n_short: int) -> Contexts:
    """The one for `PlantedModel`, whose target is token 1; the tokens themselves say nothing."""
    return Contexts(
        tokens=np.zeros((1, n_long), dtype=np.int64),
        targets=np.ones((1, 1), dtype=np.int64),
        target_id=np.zeros((1, 1), dtype=np.int64),
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


def chance_recall(k: int, n_far: int, tokens_per_place: int = 1) -> float:
    """Recall of k far tokens drawn at random: k / F; of places of u tokens 1 - C(F-u, k) / C(F, k)."""
    return 1 - math.comb(n_far - tokens_per_place, k) / math.comb(n_far, k)


def selected_columns(
    name: str,
    scorer: Scorer,
    contexts: Contexts,
    seed: int,
    k_max: int,
    advance: Callable[[int], None] = lambda count: None,
) -> np.ndarray:
    """The far columns that a selector chooses, most influential first, (n, k_max)."""
    size = max(1, _SUBSET_ELEMENTS // (contexts.n_far * contexts.n_long))
    chosen = []
    for first in range(0, len(contexts), size):
        some = contexts.take(slice(first, first + size))
        chosen.append(find_selector(name)(SelectorInput(scorer, some, seed, k_max)).columns)
        advance(len(some))
    return np.concatenate(chosen)


def recall_of_hand_built(
    selectors: Sequence[str], *, n_long: int = 128, n_short: int = 16, models: int = 20, seed: int = 0
) -> pd.DataFrame:
    """Mean recall over models built by hand, each with its planted tokens: rule, planted (p), selector, k, value.

    Raises `UserError` where the far context is too short.
    """
    n_far = n_long - n_short
    if not 0 < n_short < n_long - max(KS):
        raise UserError(f"--n-long must exceed --n-short by more than {max(KS)}, the largest k")
    for name in selectors:
        check_selector(name, k_max=max(KS), n_far=n_far)
    contexts, rows = planted_context(n_long, n_short), []
    for rule, planted in itertools.product(RULES, HAND_PLANTED):
        generator = np.random.default_rng([seed, planted])
        recalls: dict[str, list[np.ndarray]] = {name: [] for name in selectors}
        for number in range(models):
            columns = np.sort(generator.choice(n_far, planted, replace=False))
            scorer = Scorer(PlantedModel(columns.tolist(), n_long, rule=rule, seed=number))
            for name in selectors:
                chosen = selected_columns(name, scorer, contexts, seed + number, max(KS))
                recalls[name].append(found_at(chosen, columns[None], KS).mean(axis=2)[0])
        for name, of_models in recalls.items():
            values = zip(KS, np.mean(of_models, axis=0).tolist(), strict=True)
            rows += [
                {"rule": rule, "planted": planted, "selector": name, "k": k, "value": v} for k, v in values
            ]
    return pd.DataFrame(rows)
