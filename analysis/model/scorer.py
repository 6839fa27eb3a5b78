"""Losses of a model on subsequences of contexts: batched, with shared prefixes and only the logits that are asked for.

A token sees only those before it. So a subset that keeps the first tokens of the long context reads them exactly as the
long context does: their keys and values are computed once per block, and every subset reads only what comes behind. And
a pass predicts every target of a block. Nothing is approximated; results differ from one forward pass per subset and
target by rounding only.
Shapes: n blocks of B targets, m targets that are asked for, C subsets of each, j far tokens that a subset keeps, S
subsets in all, R rows of one forward pass, L tokens and Q asked positions of each, N tokens of long context, F far
tokens, V vocabulary.
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
_MORE_TOKENS = (
    1.1  # how many times as many tokens a row of a batch may read for another one's shorter prefix,
)
_MORE_ANYWAY = 16  # or how many more
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
class _Passes:
    """Rows of forward passes: each reads a subset of a block and is asked for the losses of some of its targets."""

    contexts: Contexts
    far: np.ndarray
    """(S, j) far columns that are kept; next are the short context and the targets before the last asked one."""
    block: np.ndarray
    """(S,) row of the contexts."""
    first: np.ndarray
    """(S,) first target that is asked for."""
    last: np.ndarray
    """(S,) last target that is asked for."""
    shared: np.ndarray
    """(S,) far tokens at the beginning that are read from the long context's keys and values."""

    def length(self, rows: np.ndarray) -> int:
        """L, tokens that these rows read, padded by later tokens of the text, which earlier ones do not see."""
        return self.far.shape[1] + self.contexts.n_short + int(self.last[rows].max())

    def columns(self, rows: np.ndarray) -> np.ndarray:
        """(R, L) columns of the context."""
        behind = self.contexts.n_far + np.arange(self.length(rows) - self.far.shape[1])
        return np.concatenate([self.far[rows], np.broadcast_to(behind, (len(rows), len(behind)))], axis=1)


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
    def losses(self, contexts: Contexts, far: np.ndarray, asked: np.ndarray | None = None) -> np.ndarray:
        """loss(t | S and the short context) in nats, (m, C) float64.

        Args:
            contexts: n blocks.
            far: the subsets S, columns of the far context, ascending: (m, C, j), or (C, j), the same for every target.
                In the second case one pass gives a subset's losses for all targets of a block.
            asked: (m, 2) block and place in it of each target; None: all targets, block by block.
        """
        asked = contexts.all_targets if asked is None else asked
        block, place = asked.T
        if far.ndim == 2:
            read, group = np.unique(block, return_inverse=True)
        else:
            read, group = block, np.arange(len(block))
        first = np.full(len(read), contexts.targets_per_block)
        last = np.zeros(len(read), dtype=np.int64)
        np.minimum.at(first, group, place)
        np.maximum.at(last, group, place)
        number, kept = far.shape[-2:]
        far = np.broadcast_to(far, (len(read), number, kept)).reshape(len(read) * number, kept)
        rows = np.repeat(np.arange(len(read)), number)
        shared = self._shared_prefixes(far, number)
        passes = _Passes(contexts, far, read[rows], first[rows], last[rows], shared)
        losses = self._read(passes).reshape(len(read), number, contexts.targets_per_block)
        return losses[group, :, place]

    def _read(self, passes: _Passes) -> np.ndarray:
        """Losses of the targets that are asked for, (S, B); the rest is undefined."""
        losses = np.empty((len(passes.far), passes.contexts.targets_per_block))
        longest = int(passes.shared.max(initial=0))
        prefixes = self._prefixes(passes.contexts, longest) if longest else []
        for rows in self._batches(passes):
            first, last = int(passes.first[rows].min()), int(passes.last[rows].max())
            logits = self._logits(passes, rows, prefixes, last - first + 1)
            targets = passes.contexts.targets[passes.block[rows], first : last + 1]
            losses[rows, first : last + 1] = self._losses_of(logits, targets)
        return losses

    def _shared_prefixes(self, far: np.ndarray, per_context: int) -> np.ndarray:
        """How many tokens each subset shares with its long context, (S,); 0 where sharing is not worth while."""
        kept = far.shape[1]
        if not self.share_prefixes or per_context < 2 or not isinstance(self.model, AnalysedModel):
            return np.zeros(len(far), dtype=np.int64)
        shared = np.logical_and.accumulate(far == np.arange(kept), axis=1).sum(axis=1)
        shared[shared * _WORTH_SHARING < kept] = 0
        return shared

    def _batches(self, passes: _Passes) -> Iterator[np.ndarray]:
        """Rows that are read together: those with a shared prefix apart, the longest prefixes and rows first."""
        for rows in (np.flatnonzero(passes.shared == 0), np.flatnonzero(passes.shared)):
            rows = rows[np.lexsort((-passes.last[rows], -passes.shared[rows]))]
            while len(rows):
                length, prefix = passes.length(rows), int(passes.shared[rows[0]])
                size = self.tokens_per_batch // max(1, length - prefix)
                if prefix:
                    size = min(size, _CACHE_TOKENS * self.tokens_per_batch // length)
                    # every row reads what the one with the shortest prefix must
                    most = max(_MORE_TOKENS * (length - prefix), length - prefix + _MORE_ANYWAY)
                    size = min(size, int(np.searchsorted(-passes.shared[rows], most - length, side="right")))
                yield rows[: max(1, size)]
                rows = rows[max(1, size) :]

    def _logits(self, passes: _Passes, rows: np.ndarray, prefixes: KeyValues, asked: int) -> Tensor:
        """(R, Q, V) logits before the last Q = ``asked`` tokens of rows, which read on behind their shortest prefix."""
        columns, block = passes.columns(rows), passes.block[rows]
        common = int(passes.shared[rows].min())
        tokens = self.tensor(passes.contexts.tokens[block[:, None], columns[:, common:]])
        ids = self.tensor(columns)
        with self.precision():
            if not common:
                return self.model(tokens, position_ids=ids, logits_to_keep=asked).logits
            assert isinstance(self.model, AnalysedModel)
            at = self.tensor(block)
            past = [(k[:, :, :common][at], v[:, :, :common][at]) for k, v in prefixes]
            return self.model.logits_after(past, tokens, ids, asked)

    def _prefixes(self, contexts: Contexts, length: int) -> KeyValues:
        """Keys and values of the first ``length`` tokens of every block's long context."""
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

    @_smaller_when_memory_runs_out
    def presence_gradient(self, contexts: Contexts, asked: np.ndarray | None = None) -> np.ndarray:
        """-∂ loss / ∂ (presence of each far token), (m, F) nats, at full presence in the long context.

        The presence p of a token multiplies its attention weight, before normalisation, for every other query in every
        layer and head: p = 1 is the model as it is, p = 0 the token dropped (docs/method.md, 2.1), exactly [ours].
        ``asked``: as in `losses`.
        """
        model = self._analysed("gradient")
        asked = contexts.all_targets if asked is None else asked
        slopes = np.empty((len(asked), contexts.n_far))
        for rows in self._whole_contexts(contexts, np.argsort(-asked[:, 1], kind="stable")):
            block, place = asked[rows].T
            length, first = contexts.n_long + int(place.max()), int(place.min())
            others = 1.0 - torch.eye(length, device=self.device)  # a dropped token's own stream is never read
            log_presence = torch.zeros(len(rows), length, device=self.device, requires_grad=True)
            with self.precision():
                logits = model.biased_logits(
                    self.tensor(contexts.tokens[block, :length]),
                    self._first_ids(len(rows), length),
                    log_presence[:, None, :] * others,
                    int(place.max()) - first + 1,
                )
            own = logits[torch.arange(len(rows)), self.tensor(place - first)]
            loss = F.cross_entropy(own.float(), self.tensor(contexts.targets[block, place]), reduction="sum")
            (slope,) = torch.autograd.grad(loss, log_presence)  # at p = 1 that of log p is that of p
            slopes[rows] = -slope[:, : contexts.n_far].double().cpu().numpy()
        return slopes

    @_smaller_when_memory_runs_out
    @torch.inference_mode()
    def last_attention(self, contexts: Contexts, asked: np.ndarray | None = None) -> np.ndarray:
        """Attention of the position before each target to each far token, mean over heads and layers, (m, F).

        ``asked``: as in `losses`.
        """
        model = self._analysed("attention")
        asked = contexts.all_targets if asked is None else asked
        parts = []
        for rows in self._whole_contexts(contexts, np.arange(len(contexts))):
            with self.precision():
                attention = model.last_attention(
                    self.tensor(contexts.tokens[rows]),
                    self._first_ids(len(rows), contexts.tokens.shape[1]),
                    contexts.targets_per_block,
                )
            parts.append(attention[:, :, : contexts.n_far].double().cpu().numpy())
        return np.concatenate(parts)[asked[:, 0], asked[:, 1]]

    def _whole_contexts(self, contexts: Contexts, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Rows in parts that are few enough for a pass that keeps what it computes on the way."""
        return _chunks(rows, self.tokens_per_batch // (_BACKWARD_TOKENS * contexts.tokens.shape[1]))

    def _analysed(self, selector: str) -> AnalysedModel:
        if not isinstance(self.model, AnalysedModel):
            raise UserError(f"this model does not offer what the selector {selector} needs; leave it out")
        return self.model

    def _losses_of(self, logits: Tensor, targets: np.ndarray) -> np.ndarray:
        """-log p(target) in nats, (R, Q), of logits (R, Q, V)."""
        losses = F.cross_entropy(logits.float().flatten(0, 1), self.tensor(targets.ravel()), reduction="none")
        return losses.double().cpu().numpy().reshape(targets.shape)

    def _first_ids(self, rows: int, length: int) -> Tensor:
        """Position ids 0 … length - 1 of every row, (rows, length)."""
        return torch.arange(length, device=self.device).expand(rows, -1)


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    size = max(1, size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def long_and_short_losses(
    scorer: Scorer, contexts: Contexts, asked: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(L_long, L_short) (docs/method.md, 2.1), each (m,) in nats; ``asked`` as in `Scorer.losses`."""
    long = scorer.losses(contexts, np.arange(contexts.n_far)[None], asked)[:, 0]
    short = scorer.losses(contexts, np.empty((1, 0), dtype=np.int64), asked)[:, 0]
    return long, short
