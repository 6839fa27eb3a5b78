"""Losses and likeliest tokens at the end of rows: what probes read (docs/method.md, 2.5 and 2.6).

Shapes: R rows of L tokens, the last T of which are scored, V vocabulary. Losses in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.model.adapter import Adapter
from analysis.model.losses import LOGITS_PER_BATCH, retry_smaller_on_oom
from analysis.model.on_device import LOGITS_PER_SLICE, OnDevice, chunks
from olmo_sparsity.util.errors import UserError


class TokenLosses(OnDevice):
    """-log p of tokens given those before them in their row; the model is on the device."""

    def __init__(self, model: Adapter, *, device: Any = "cpu", tokens_per_batch: int | None = None):
        super().__init__(model, torch.device(device), tokens_per_batch)
        self.vocabulary = self._logits(np.zeros((1, 1)), 1).shape[-1]

    def batches(self, count: int, length: int, scored: int) -> Iterator[np.ndarray]:
        """Numbers of the rows of each forward pass, out of ``count`` rows with L = ``length`` and T = ``scored``."""
        most_by_logits = LOGITS_PER_BATCH[self.device.type] // (scored * self.vocabulary)
        most_by_tokens = self.tokens_per_batch // length
        return chunks(np.arange(count), min(most_by_tokens, most_by_logits))

    @retry_smaller_on_oom
    def last_losses(self, tokens: np.ndarray, scored: int, first_ids: np.ndarray | None = None) -> np.ndarray:
        """Losses in nats of the last T = ``scored`` tokens of each row, (R, T) float64.

        ``tokens``: (R, L + 1) ids; each scored token is given every token before it in its row. ``first_ids``: (R,)
        position id of each row's first token, those of the others follow; None: 0. Raises `UserError` where the model
        answers with something that is not finite.
        """
        losses = []
        for rows in self.batches(len(tokens), tokens.shape[1] - 1, scored):
            first = None if first_ids is None else first_ids[rows]
            logits = self._logits(tokens[rows, :-1], scored, first)
            losses.append(self._losses(logits, tokens[rows]))
        return np.concatenate(losses)

    @retry_smaller_on_oom
    def last_losses_and_likeliest(self, tokens: np.ndarray, scored: int) -> tuple[np.ndarray, np.ndarray]:
        """What `last_losses` gives, and beside it the likeliest token at each of these places, both (R, T)."""
        losses = []
        likeliest = []
        for rows in self.batches(len(tokens), tokens.shape[1] - 1, scored):
            logits = self._logits(tokens[rows, :-1], scored)
            likeliest.append(logits.argmax(dim=-1).cpu().numpy())
            losses.append(self._losses(logits, tokens[rows]))
        return np.concatenate(losses), np.concatenate(likeliest)

    @torch.inference_mode()
    def _losses(self, logits: Tensor, tokens: np.ndarray) -> np.ndarray:
        """Losses (R, T) of the last tokens of rows under their logits (R, T, V), some positions at a time."""
        rows, scored, vocabulary = logits.shape
        targets = self.tensor(tokens[:, -scored:])
        step = max(1, LOGITS_PER_SLICE // (rows * vocabulary))
        parts = []
        for first in range(0, scored, step):
            some_targets = targets[:, first : first + step]
            flat_logits = logits[:, first : first + step].float().flatten(0, 1)
            flat = F.cross_entropy(flat_logits, some_targets.flatten(), reduction="none")
            parts.append(flat.view(some_targets.shape).double())
        losses = torch.cat(parts, dim=1).cpu().numpy()
        if not np.isfinite(losses).all():
            raise UserError(
                "the model gives losses that are not finite; measure in fp32, or another checkpoint"
            )
        return losses

    @torch.inference_mode()
    def _logits(self, tokens: np.ndarray, scored: int, first_ids: np.ndarray | None = None) -> Tensor:
        """Logits at the last T positions of rows (R, L), (R, T, V); ``first_ids`` as in `last_losses`."""
        if first_ids is None:
            first_ids = np.zeros(len(tokens))
        ids = first_ids[:, None] + np.arange(tokens.shape[1])
        output = self.model(self.tensor(tokens), position_ids=self.tensor(ids), logits_to_keep=scored)
        return output.logits
