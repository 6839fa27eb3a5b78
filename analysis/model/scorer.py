"""Losses of a model on subsequences of contexts: batched, with shared prefixes and only the last position's logits.

A subset that keeps the first p tokens of the long context reads them exactly as the long context does: a token sees
only those before it. So their keys and values are computed once per target, and every subset reads only what comes
behind. Nothing is approximated; results differ from one forward pass per subset by rounding only.
Shapes: n targets, C subsets per target, L tokens of a subset, p of them a shared prefix, S = n * C subsets in all,
R rows of one forward pass, N tokens of long context, F far tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.model.adapters import AnalysedModel, KeyValues, TokenModel
from analysis.model.device import OnDevice
from analysis.text.contexts import Contexts
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

_WORTH_SHARING = 8  # a prefix shorter than an eighth of the subset costs more in copies than it saves
_CACHE_TOKENS = 4  # tokens of keys and values that a batch may copy, for each token that it computes
_BACKWARD_TOKENS = (
    4  # memory of a pass that keeps its activations, or its attention, over that of one that does not
)

P = ParamSpec("P")


def _smaller_when_memory_runs_out(
    method: Callable[Concatenate[Scorer, P], np.ndarray],
) -> Callable[Concatenate[Scorer, P], np.ndarray]:
    """Do it again with half the tokens in a batch, from then on, when the GPU's memory runs out."""

    @functools.wraps(method)
    def run(self: Scorer, *args: P.args, **kwargs: P.kwargs) -> np.ndarray:
        while True:
            try:
                return method(self, *args, **kwargs)
            except torch.OutOfMemoryError:
                if self.tokens_per_batch < 2:
                    raise UserError(
                        "the device has no memory for a single context; lower --n-long, or take a smaller model"
                    ) from None
                self.tokens_per_batch //= 2
            torch.cuda.empty_cache()
            log.warning("memory ran out: going on with %d tokens in a batch", self.tokens_per_batch)

    return run


@dataclass(frozen=True)
class _Subsets:
    """The subsets of one call in one list."""

    contexts: Contexts
    columns: np.ndarray
    """(S, L) columns of the context that are kept."""
    target: np.ndarray
    """(S,) row of the contexts."""
    shared: np.ndarray
    """(S,) tokens at its beginning that are read from the long context's keys and values."""

    def tokens(self, rows: np.ndarray, start: int = 0) -> np.ndarray:
        """Token ids that some subsets keep, from the ``start``-th on, (R, L - start)."""
        return self.contexts.tokens[self.target[rows][:, None], self.columns[rows, start:]]


class Scorer(OnDevice):
    """Computes loss(t | S), see docs/method.md, 2.1: the model reads only the kept tokens, each at its own position id.

    Args:
        model: what is measured; prefixes are shared where it is an `AnalysedModel`.
        device: cpu or cuda.
        bf16: run the forward passes under bf16 autocast.
        tokens_per_batch: tokens of one forward pass; by default `device.TOKENS_PER_BATCH`. On a GPU it is halved for
            good whenever memory runs out.
        share_prefixes: turn off to read every subset from its first token on (the same losses, slower).
    """

    def __init__(
        self,
        model: TokenModel,
        *,
        device: str | torch.device = "cpu",
        bf16: bool = False,
        tokens_per_batch: int | None = None,
        share_prefixes: bool = True,
    ):
        super().__init__(torch.device(device), bf16, tokens_per_batch)
        self.model = model
        self.share_prefixes = share_prefixes

    @_smaller_when_memory_runs_out
    @torch.inference_mode()
    def losses(self, contexts: Contexts, keep: np.ndarray) -> np.ndarray:
        """loss(t | S) in nats, (n, C) float64.

        ``keep``: (n, C, L) or, for the same subsets of every target, (C, L); columns of the context that are kept,
        ascending. Every subset of a call has the same number of tokens, so nothing is padded or masked.
        """
        keep = np.broadcast_to(keep, (len(contexts), *keep.shape[-2:]))
        count, number, length = keep.shape
        columns = keep.reshape(count * number, length)
        shared = self._shared_prefixes(columns, number)
        subsets = _Subsets(contexts, columns, np.repeat(np.arange(count), number), shared)
        flat = np.empty(len(columns))
        for rows in _chunks(np.flatnonzero(shared == 0), self.tokens_per_batch // max(length, 1)):
            flat[rows] = self._losses_from_the_start(subsets, rows)
        if shared.any():
            prefixes = self._prefixes(contexts, int(shared.max()))
            for rows in self._rows_with_similar_prefixes(subsets):
                flat[rows] = self._losses_behind(subsets, rows, prefixes)
        return flat.reshape(count, number)

    def _shared_prefixes(self, columns: np.ndarray, per_target: int) -> np.ndarray:
        """How many tokens each subset shares with its long context, (S,); 0 where sharing is not worth while."""
        length = columns.shape[1]
        if (
            not self.share_prefixes
            or per_target < 2
            or length < 2
            or not isinstance(self.model, AnalysedModel)
        ):
            return np.zeros(len(columns), dtype=np.int64)
        same = np.logical_and.accumulate(columns == np.arange(length), axis=1).sum(axis=1)
        shared = same.clip(max=length - 1)  # the last token is always read: its logits are what is asked for
        shared[shared * _WORTH_SHARING < length] = 0
        return shared

    def _rows_with_similar_prefixes(self, subsets: _Subsets) -> Iterator[np.ndarray]:
        """Rows of the subsets with a shared prefix, in batches; the longest prefixes come first."""
        length = subsets.columns.shape[1]
        rows = np.flatnonzero(subsets.shared)
        rows = rows[np.argsort(-subsets.shared[rows], kind="stable")]
        at_most = _CACHE_TOKENS * self.tokens_per_batch // length
        while len(rows):
            behind = length - int(subsets.shared[rows[0]])
            size = max(1, min(self.tokens_per_batch // behind, at_most))
            yield rows[:size]
            rows = rows[size:]

    def _losses_from_the_start(self, subsets: _Subsets, rows: np.ndarray) -> np.ndarray:
        with self.precision():
            logits = self.model(
                self.tensor(subsets.tokens(rows)),
                position_ids=self.tensor(subsets.columns[rows]),
                last_logits_only=True,
            ).logits[:, -1]
        return self._losses_of(logits, subsets.contexts.targets[subsets.target[rows]])

    def _prefixes(self, contexts: Contexts, length: int) -> KeyValues:
        """Keys and values of the first ``length`` tokens of every target's long context."""
        assert isinstance(self.model, AnalysedModel)
        parts = []
        for rows in _chunks(np.arange(len(contexts)), self.tokens_per_batch // length):
            with self.precision():
                parts.append(
                    self.model.key_values(
                        self.tensor(contexts.tokens[rows, :length]), self._first_ids(len(rows), length)
                    )
                )
        return [
            (torch.cat([k for k, _ in layer]), torch.cat([v for _, v in layer]))
            for layer in zip(*parts, strict=True)
        ]

    def _losses_behind(self, subsets: _Subsets, rows: np.ndarray, prefixes: KeyValues) -> np.ndarray:
        """Losses of subsets that read on behind the shortest of their prefixes."""
        assert isinstance(self.model, AnalysedModel)
        common = int(subsets.shared[rows].min())
        target = self.tensor(subsets.target[rows])
        past = [(k[:, :, :common][target], v[:, :, :common][target]) for k, v in prefixes]
        with self.precision():
            logits = self.model.logits_after(
                past, self.tensor(subsets.tokens(rows, common)), self.tensor(subsets.columns[rows])
            )
        return self._losses_of(logits, subsets.contexts.targets[subsets.target[rows]])

    @_smaller_when_memory_runs_out
    def presence_gradient(self, contexts: Contexts) -> np.ndarray:
        """-∂ loss / ∂ (presence of each far token), (n, F) nats, at full presence in the long context.

        The presence p of a token multiplies its attention weight, before normalisation, for every other query in every
        layer and head: p = 1 is the model as it is, p = 0 the token dropped (docs/method.md, 2.1), exactly [ours].
        """
        model, length = self._analysed("gradient"), contexts.n_long
        parts = []
        others = 1.0 - torch.eye(length, device=self.device)  # a dropped token's own stream is never read
        for rows in self._whole_contexts(contexts):
            log_presence = torch.zeros(len(rows), length, device=self.device, requires_grad=True)
            with self.precision():
                logits = model.biased_logits(
                    self.tensor(contexts.tokens[rows]),
                    self._first_ids(len(rows), length),
                    log_presence[:, None, :] * others,
                )
            loss = F.cross_entropy(logits.float(), self.tensor(contexts.targets[rows]), reduction="sum")
            (slope,) = torch.autograd.grad(loss, log_presence)  # at p = 1 that of log p is that of p
            parts.append(-slope[:, : contexts.n_far].double().cpu().numpy())
        return np.concatenate(parts)

    @_smaller_when_memory_runs_out
    @torch.inference_mode()
    def last_attention(self, contexts: Contexts) -> np.ndarray:
        """Attention of the long context's last position to each far token, mean over heads and layers, (n, F)."""
        model = self._analysed("attention")
        parts = []
        for rows in self._whole_contexts(contexts):
            with self.precision():
                attention = model.last_attention(
                    self.tensor(contexts.tokens[rows]), self._first_ids(len(rows), contexts.n_long)
                )
            parts.append(attention[:, : contexts.n_far].double().cpu().numpy())
        return np.concatenate(parts)

    def _whole_contexts(self, contexts: Contexts) -> Iterator[np.ndarray]:
        """Rows of the contexts, few enough for a pass that keeps what it computes on the way."""
        return _chunks(
            np.arange(len(contexts)), self.tokens_per_batch // (_BACKWARD_TOKENS * contexts.n_long)
        )

    def _analysed(self, selector: str) -> AnalysedModel:
        if not isinstance(self.model, AnalysedModel):
            raise UserError(f"this model does not offer what the selector {selector} needs; leave it out")
        return self.model

    def _losses_of(self, logits: Tensor, targets: np.ndarray) -> np.ndarray:
        """-log p(target) in nats, (R,)."""
        return F.cross_entropy(logits.float(), self.tensor(targets), reduction="none").double().cpu().numpy()

    def _first_ids(self, rows: int, length: int) -> Tensor:
        """Position ids 0 … length - 1 of every row, (rows, length)."""
        return torch.arange(length, device=self.device).expand(rows, -1)


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    size = max(1, size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def long_and_short_losses(scorer: Scorer, contexts: Contexts) -> tuple[np.ndarray, np.ndarray]:
    """(L_long, L_short) (docs/method.md, 2.1), each (n,) in nats."""
    long = scorer.losses(contexts, contexts.long_columns)[:, 0]
    short = scorer.losses(contexts, contexts.short_columns)[:, 0]
    return long, short
