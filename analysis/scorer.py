"""Losses of a model on subsequences of contexts, in batches, with only the last position's logits.

Shapes: n targets, C subsets per target, L tokens of a subset, R rows of one forward pass, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.contexts import Contexts

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 262_144}
"""Tokens of one forward pass: enough to keep the cores busy, few enough to stay in cache."""


class TokenModel(Protocol):
    """What a model must offer: logits at the last position for tokens at explicit position ids."""

    def __call__(self, input_ids: Tensor, position_ids: Tensor, *, last_logits_only: bool) -> Any:
        """An object whose ``logits`` are (R, 1, V)."""


class Scorer:
    """Computes loss(t | S) of METHOD 2.1: the model reads the kept tokens only, each at its original position id."""

    def __init__(
        self,
        model: TokenModel,
        *,
        device: str = "cpu",
        bf16: bool = False,
        tokens_per_batch: int | None = None,
    ):
        self.model = model
        self.device = torch.device(device)
        self.bf16 = bf16
        self.tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH[self.device.type]

    def losses(self, contexts: Contexts, keep: np.ndarray) -> np.ndarray:
        """loss(t | S) in nats, (n, C) float64.

        ``keep``: (n, C, L) or, for the same subsets of every target, (C, L); columns of the context that are kept,
        ascending. Every subset of a call has the same number of tokens, so nothing is padded or masked.
        """
        keep = np.broadcast_to(keep, (len(contexts), *keep.shape[-2:]))
        count, subsets, length = keep.shape
        rows = max(1, self.tokens_per_batch // max(length, 1))
        flat = np.empty(count * subsets)
        for start in range(0, len(flat), rows):
            number = np.arange(start, min(start + rows, len(flat)))
            target, subset = np.divmod(number, subsets)
            columns = keep[target, subset]
            flat[number] = self._forward(
                contexts.tokens[target[:, None], columns], columns, contexts.targets[target]
            )
        return flat.reshape(count, subsets)

    @torch.inference_mode()
    def _forward(self, tokens: np.ndarray, position_ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """-log p(target) in nats after reading tokens (R, L) at their position ids (R, L); (R,)."""
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()
        with autocast:
            output = self.model(
                self._tensor(tokens), position_ids=self._tensor(position_ids), last_logits_only=True
            )
        loss = F.cross_entropy(output.logits[:, -1].float(), self._tensor(targets), reduction="none")
        return loss.double().cpu().numpy()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)


def long_columns(contexts: Contexts) -> np.ndarray:
    """C_long as one subset, (1, N)."""
    return np.arange(contexts.n_long)[None]


def short_columns(contexts: Contexts) -> np.ndarray:
    """C_short as one subset, (1, M)."""
    return np.arange(contexts.n_far, contexts.n_long)[None]


def long_and_short_losses(scorer: Scorer, contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
    """(L_long, L_short) of METHOD 2.1, each (n,) in nats."""
    long = scorer.losses(contexts, long_columns(contexts))[:, 0]
    short = scorer.losses(contexts, short_columns(contexts))[:, 0]
    return long, short
