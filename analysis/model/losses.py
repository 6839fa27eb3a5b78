"""What a model predicts from subsequences of contexts: batched, with shared prefixes and only the logits asked for.

A token sees only those before it. So a subset that keeps the first tokens of the long context reads them exactly as the
long context does: their keys and values are computed once per block, and every subset reads only what comes behind. And
a pass predicts every target of a block. Nothing is approximated; results differ from one forward pass per subset and
target by rounding only.
Shapes: n blocks of B targets, m targets that are asked for, C subsets of each, j far tokens that a subset keeps, S
subsets in all, R rows of one forward pass, L tokens of each and Q positions whose logits are read, N tokens of long
context, F far tokens, T scored tokens at the end of a row, V vocabulary (logits), W width. Losses are nats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.contexts import NO_FAR, Contexts
from analysis.model.adapter import Adapter
from analysis.model.far_attention import KeyValues
from analysis.model.on_device import LOGITS_PER_SLICE, OnDevice, chunks, is_out_of_memory

log = logging.getLogger(__name__)

LOGITS_PER_BATCH = {"cpu": 1 << 27, "cuda": 1 << 30}
"""Most logits of one forward pass of `TokenLosses` and `far_cache`, at 4 bytes each; one row may have more."""
_MIN_SHARED_FRACTION = 1 / 8
"""A prefix shorter than this part of the subset costs more in copies than it saves."""
CACHE_TOKENS = 4
"""Tokens of keys and values that a batch may copy, for each token that it computes, where they are not shared."""
_MAX_PADDING_RATIO = 1.1
_MAX_PADDING_TOKENS = 16
"""A row reads more where another row of its batch has a shorter prefix: at most so many times what it needs, or so many
tokens more, whichever is larger."""
BACKWARD_TOKENS = 4
"""Memory of a pass that keeps its activations, or its attention, in multiples of one that does not."""

P = ParamSpec("P")
T = TypeVar("T")
AnyOnDevice = TypeVar("AnyOnDevice", bound=OnDevice)
LogitsOf = Callable[[Tensor, Tensor, int], Tensor]
"""Logits (R, Q, V) of some inputs (R, L, …), their position ids (R, L), and Q."""
Differentiate = Callable[[Tensor, LogitsOf], tuple[Tensor, Tensor]]
"""Losses of the targets, (R,), and the gradient of log p by the inputs, (R, L, …)."""
Reduce = Callable[[Tensor, Tensor, slice], Tensor]
"""What is kept of the logits (R, Q, V) that rows give for some targets of their blocks, (R, Q, …).

Its second argument is each row's block, (R,), or (1,) where all are of one; its third the places in it.
"""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""From log p, (R or 1, Q, V), and log q, (R, Q, V), of two distributions to how far they are apart, (R, Q)."""


def retry_smaller_on_oom(
    method: Callable[Concatenate[AnyOnDevice, P], T],
) -> Callable[Concatenate[AnyOnDevice, P], T]:
    """Do it again with half the tokens in a batch when memory runs out."""

    @wraps(method)
    def run(self: AnyOnDevice, *args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return method(self, *args, **kwargs)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self.tokens_per_batch < 2:
                    raise
            self.tokens_per_batch //= 2
            torch.cuda.empty_cache()
            log.warning("memory ran out: going on with %d tokens in a batch", self.tokens_per_batch)

    return run


@dataclass(frozen=True)
class Asked:
    """Which targets of its block each row of a forward pass is asked for."""

    contexts: Contexts
    block: np.ndarray
    """(S,) row of the contexts."""
    first: np.ndarray
    """(S,) first target that is read."""
    last: np.ndarray
    """(S,) last target that is read."""


@dataclass(frozen=True)
class _Passes(Asked):
    """Rows that read a subset of the far context, the short context, and the targets before the last one asked for."""

    far: np.ndarray
    """(S, j) far columns that are kept."""
    shared: np.ndarray
    """(S,) far tokens at the beginning that are read from the long context's keys and values."""

    def length(self, rows: np.ndarray) -> int:
        """L, tokens that these rows read, padded by later tokens of the text, which earlier ones do not see."""
        return self.far.shape[1] + self.contexts.n_short + int(self.last[rows].max())

    def columns(self, rows: np.ndarray) -> np.ndarray:
        """(R, L) columns of the context."""
        behind = self.contexts.n_far + np.arange(self.length(rows) - self.far.shape[1])
        behind = np.broadcast_to(behind, (len(rows), len(behind)))
        return np.concatenate([self.far[rows], behind], axis=1)


class Scorer(OnDevice):
    """Computes loss(t | S), see docs/method.md, 2.1: the model reads only the kept tokens, each at its own position id.

    Args:
        model: what is measured.
        device: cpu or cuda, where the model is.
        tokens_per_batch: tokens of one forward pass; by default `on_device.TOKENS_PER_BATCH`. It is halved whenever
            memory runs out.
        share_prefixes: turn off to read every subset from its first token on (the same losses, slower).
    """

    def __init__(
        self,
        model: Adapter,
        *,
        device: str | torch.device = "cpu",
        tokens_per_batch: int | None = None,
        share_prefixes: bool = True,
    ):
        super().__init__(model, torch.device(device), tokens_per_batch)
        self.share_prefixes = share_prefixes
        self.on_read: Callable[[int], Any] = lambda tokens: None
        """Called with how many tokens a pass over subsets has read."""
        self.keeps_far = False
        """Whether it is inside of `keeping_far`."""
        self._kept_far: tuple[np.ndarray, KeyValues] | None = None

    @contextmanager
    def keeping_far(self) -> Iterator[None]:
        """Inside, the keys and values of the far context that was read last stay, for the next call that needs them."""
        kept_before = self.keeps_far
        self.keeps_far = True
        try:
            yield
        finally:
            self.keeps_far = kept_before
            if not kept_before:
                self._kept_far = None

    def far_key_values(self, tokens: np.ndarray) -> KeyValues:
        """`Adapter.far_key_values` of one far context, (1, F) tokens."""
        if self._kept_far is not None and np.array_equal(self._kept_far[0], tokens):
            return self._kept_far[1]
        self._kept_far = None  # before the next ones need memory
        far = self.model.far_key_values(self.tensor(tokens))
        self.on_read(tokens.size)
        if self.keeps_far:
            self._kept_far = (tokens, far)
        return far

    def losses(self, contexts: Contexts, far: np.ndarray, targets: np.ndarray | None = None) -> np.ndarray:
        """loss(t | S and the short context) in nats, (m, C) float64.

        Args:
            contexts: n blocks.
            far: the subsets S, columns of the far context, ascending: (m, C, j), or (C, j), the same for every target.
                In the second case one pass gives a subset's losses for all targets of a block.
            targets: (m, 2) block and place in it of each target; None: all targets, block by block.
        """
        measures = self.measures(contexts, far, ("loss",), targets)
        return measures[..., 0]

    @retry_smaller_on_oom
    @torch.inference_mode()
    def measures(
        self, contexts: Contexts, far: np.ndarray, names: Sequence[str], targets: np.ndarray | None = None
    ) -> np.ndarray:
        """Some `MEASURES` of the predictions from S and the short context, (m, C, number of names) float64.

        The other arguments are those of `losses`; the passes are made once for all measures. For a divergence the
        distributions of the long contexts are kept, of no more blocks at once than a pass that is differentiated reads.
        """
        assert set(names) <= set(MEASURES), names
        if targets is None:
            targets = contexts.all_targets
        if not DIVERGENCES.keys() & set(names):
            reduce = self.reduction(contexts, names, None)
            return self._of_targets(contexts, far, targets, reduce)

        values = np.empty((len(targets), far.shape[-2], len(names)))
        for blocks in self.long_parts(contexts, np.unique(targets[:, 0])):
            rows = np.isin(targets[:, 0], blocks)
            block = np.searchsorted(blocks, targets[rows, 0])
            some_targets = np.stack([block, targets[rows, 1]], axis=1)
            some_far = far
            if far.ndim == 3:
                some_far = far[rows]
            of_blocks = contexts.take(blocks)
            long, _ = self._passes(of_blocks, contexts.all_far, some_targets)
            log_long = self._run(long, log_probabilities)
            reduce = self.reduction(of_blocks, names, log_long)
            values[rows] = self._of_targets(of_blocks, some_far, some_targets, reduce)
        return values

    def reduction(self, contexts: Contexts, names: Sequence[str], log_long: Tensor | None) -> Reduce:
        """Measures of the targets; ``log_long`` is (n, B, V), log p given the long contexts, where one needs it."""
        tokens = self.tensor(contexts.targets)

        def reduce(logits: Tensor, block: Tensor, offsets: slice) -> Tensor:
            target_tokens = tokens[block, offsets].expand(len(logits), -1)
            log_q = log_probabilities(logits) if set(names) - {"correct"} else None
            values = []
            for name in names:
                if name == "correct":
                    values.append((logits.argmax(dim=-1) == target_tokens).float())
                elif name == "loss":
                    assert log_q is not None
                    values.append(-log_q.gather(-1, target_tokens[..., None])[..., 0])
                else:
                    assert log_q is not None and log_long is not None
                    values.append(DIVERGENCES[name](log_long[block, offsets], log_q))
            return torch.stack(values, dim=-1)

        return reduce

    def _of_targets(
        self, contexts: Contexts, far: np.ndarray, targets: np.ndarray, reduce: Reduce
    ) -> np.ndarray:
        """What is read off the logits of every target given each subset, (m, C, …) float64."""
        passes, group = self._passes(contexts, far, targets)
        values = self._run(passes, reduce).double().cpu().numpy()
        by_group = values.reshape(-1, far.shape[-2], *values.shape[1:])
        return by_group[group, :, targets[:, 1]]

    def _passes(self, contexts: Contexts, far: np.ndarray, targets: np.ndarray) -> tuple[_Passes, np.ndarray]:
        """Rows that read subsets ``far`` for the targets, C for each group, and every target's group, (m,).

        A group is a target, or all targets of a block where the subsets are the same for all.
        """
        block, offset = targets.T
        if far.ndim == 2:
            blocks, group = np.unique(block, return_inverse=True)
        else:
            blocks = block
            group = np.arange(len(block))
        first = np.full(len(blocks), contexts.targets_per_block)
        last = np.zeros(len(blocks), dtype=np.int64)
        np.minimum.at(first, group, offset)
        np.maximum.at(last, group, offset)
        num_subsets, num_kept = far.shape[-2:]
        far = np.broadcast_to(far, (len(blocks), num_subsets, num_kept))
        far = far.reshape(len(blocks) * num_subsets, num_kept)
        rows = np.repeat(np.arange(len(blocks)), num_subsets)
        shared = self._shared_prefixes(far, num_subsets)
        passes = _Passes(contexts, blocks[rows], first[rows], last[rows], far, shared)
        return passes, group

    def _run(self, passes: _Passes, reduce: Reduce) -> Tensor:
        """What is read off the logits of the targets, (S, B, …); the rest is undefined."""
        longest = int(passes.shared.max(initial=0))
        prefixes: KeyValues = []
        if longest:
            prefixes = self.prefixes(passes.contexts, longest)

        def logits_of(rows: np.ndarray, queries: int) -> Tensor:
            logits = self._logits(passes, rows, prefixes, queries)
            self.on_read(len(rows) * (passes.length(rows) - int(passes.shared[rows].min())))
            return logits

        return self.read_targets(passes, self._batches(passes), logits_of, reduce)

    def read_targets(
        self,
        asked: Asked,
        batches: Iterable[np.ndarray],
        logits_of: Callable[[np.ndarray, int], Tensor],
        reduce: Reduce,
    ) -> Tensor:
        """What is read off the logits of the targets that rows are asked for, (S, B, …); the rest is undefined.

        The logits of a pass are read some rows at a time, since reducing them makes copies in fp32.

        Args:
            asked: which targets.
            batches: rows, those of a forward pass together.
            logits_of: makes the pass; from rows and Q to the logits before their last Q targets, (R, Q, V).
            reduce: see `Reduce`.
        """
        values: Tensor | None = None
        for rows in batches:
            first = int(asked.first[rows].min())
            end = int(asked.last[rows].max()) + 1
            logits = logits_of(rows, end - first)
            rows_per_slice = LOGITS_PER_SLICE // logits[0].numel()
            for some in chunks(np.arange(len(rows)), rows_per_slice):
                blocks = asked.block[rows[some]]
                if (blocks == blocks[0]).all():
                    blocks = blocks[:1]  # what they share is broadcast
                block = self.tensor(blocks)
                part = reduce(logits[some[0] : some[-1] + 1], block, slice(first, end))
                if values is None:
                    shape = len(asked.block), asked.contexts.targets_per_block, *part.shape[2:]
                    values = part.new_empty(shape)
                values[self.tensor(rows[some]), first:end] = part
        assert values is not None, "no targets"
        return values

    def _shared_prefixes(self, far: np.ndarray, per_context: int) -> np.ndarray:
        """How many tokens each subset shares with its long context, (S,); 0 where sharing is not worth while."""
        kept = far.shape[1]
        if not self.share_prefixes or per_context < 2:
            return np.zeros(len(far), dtype=np.int64)
        in_prefix = np.logical_and.accumulate(far == np.arange(kept), axis=1)
        shared = in_prefix.sum(axis=1)
        shared[shared < _MIN_SHARED_FRACTION * kept] = 0
        return shared

    def _batches(self, passes: _Passes) -> Iterator[np.ndarray]:
        """Rows that are read together: those with a shared prefix apart, the longest prefixes and rows first."""
        for rows in (np.flatnonzero(passes.shared == 0), np.flatnonzero(passes.shared)):
            order = np.lexsort((-passes.last[rows], -passes.shared[rows]))
            rows = rows[order]
            while len(rows):
                length = passes.length(rows)
                prefix = int(passes.shared[rows[0]])
                computed = length - prefix
                size = self.tokens_per_batch // max(1, computed)
                if prefix:
                    in_cache = CACHE_TOKENS * self.tokens_per_batch // length
                    # every row reads what the one with the shortest prefix must
                    most = max(_MAX_PADDING_RATIO * computed, computed + _MAX_PADDING_TOKENS)
                    alike = int(np.searchsorted(-passes.shared[rows], most - length, side="right"))
                    size = min(size, in_cache, alike)
                size = max(1, size)
                yield rows[:size]
                rows = rows[size:]

    def _logits(self, passes: _Passes, rows: np.ndarray, prefixes: KeyValues, queries: int) -> Tensor:
        """(R, Q, V) logits before the last Q tokens of rows, which read on behind their shortest prefix."""
        columns = passes.columns(rows)
        block = passes.block[rows]
        common = int(passes.shared[rows].min())
        read = passes.contexts.tokens[block[:, None], columns[:, common:]]
        tokens = self.tensor(read)
        ids = self.tensor(passes.contexts.position_ids[columns])
        if not common:
            return self.model(tokens, position_ids=ids, logits_to_keep=queries).logits
        at = self.tensor(block)
        past = []
        for keys, values in prefixes:
            past.append((keys[:, :, :common][at], values[:, :, :common][at]))
        return self.model.logits_after(past, tokens, ids, queries)

    @retry_smaller_on_oom
    @torch.inference_mode()
    def prefixes(self, contexts: Contexts, length: int) -> KeyValues:
        """Keys and values of the first ``length`` tokens of every block's long context, a pair per layer."""
        parts = []
        for tokens in chunks(contexts.tokens[:, :length], self.tokens_per_batch // length):
            ids = self.ids_of(contexts, len(tokens), length)
            parts.append(self.model.key_values(self.tensor(tokens), ids))
        layers = []
        for layer in zip(*parts, strict=True):
            keys = torch.cat([k for k, _ in layer])
            values = torch.cat([v for _, v in layer])
            layers.append((keys, values))
        return layers

    def presence_gradient(self, contexts: Contexts, targets: np.ndarray) -> np.ndarray:
        """-∂ loss / ∂ (presence of each far token), (m, F) nats, at full presence in the long context.

        The presence p of a token multiplies its attention weight, before normalisation, for every other query in every
        layer and head (of entmax: log p is added to the score): p = 1 is the model as it is, p = 0 the token dropped
        (docs/method.md, 2.1), exactly [ours].
        ``targets``: (m, 2) as in `losses`.
        """

        def attribution(tokens: Tensor, differentiate: Differentiate) -> Tensor:
            # a dropped token's own stream is never read
            others = 1.0 - torch.eye(tokens.shape[1], device=self.device)

            def logits_of(log_presence: Tensor, ids: Tensor, queries: int) -> Tensor:
                bias = log_presence[:, None, :] * others
                return self.model.biased_logits(tokens, ids, bias, queries)

            full_presence = torch.zeros(tokens.shape, device=self.device)
            _, slope = differentiate(full_presence, logits_of)
            return slope  # at p = 1 the slope by log p is that by p

        return self._attributions(contexts, targets, attribution)

    def input_gradients(
        self, contexts: Contexts, targets: np.ndarray, *, times_input: bool = False
    ) -> np.ndarray:
        """L2 norm of the gradient of log p(target) by each far token's embedding in the long context, (m, F).

        ``times_input``: the norm of embedding times gradient, element by element. ``targets``: as in `losses`.
        """

        def attribution(tokens: Tensor, differentiate: Differentiate) -> Tensor:
            embeddings = self.model.embed(tokens)
            _, slope = differentiate(embeddings, self.model.embedded_logits)
            if times_input:
                slope = embeddings * slope
            return slope.norm(dim=-1)

        return self._attributions(contexts, targets, attribution)

    def integrated_gradients(
        self, contexts: Contexts, targets: np.ndarray, *, path: Sequence[tuple[float, float]]
    ) -> np.ndarray:
        """L2 norm of (x - b) Σ w ∂ p(target) / ∂ embedding, taken at b + a (x - b) for all tokens together, (m, F).

        x is a token's embedding, b that of the baseline token. ``path``: points a and weights w, each a pass forward
        and back. ``targets``: as in `losses`.
        """
        baseline = self.model.embed(torch.tensor(self.model.baseline_token, device=self.device))

        def attribution(tokens: Tensor, differentiate: Differentiate) -> Tensor:
            embeddings = self.model.embed(tokens)
            gradient = torch.zeros_like(embeddings, dtype=torch.float32)
            for point, weight in path:
                between = torch.lerp(baseline.expand_as(embeddings), embeddings, point)
                losses, slope = differentiate(between, self.model.embedded_logits)
                probability = (-losses).exp()[:, None, None]
                gradient += weight * probability * slope  # ∂ p = p ∂ log p
            integrated = (embeddings - baseline) * gradient
            return integrated.norm(dim=-1)

        return self._attributions(contexts, targets, attribution)

    @retry_smaller_on_oom
    def _attributions(
        self, contexts: Contexts, targets: np.ndarray, attribution: Callable[[Tensor, Differentiate], Tensor]
    ) -> np.ndarray:
        """What is attributed to far tokens of each target's long context, (m, F), by a function of tokens (R, L)."""
        values = np.empty((len(targets), contexts.n_far))
        latest_first = np.argsort(-targets[:, 1], kind="stable")
        for rows in self.long_parts(contexts, latest_first):
            block, offset = targets[rows].T
            tokens = self.tensor(contexts.tokens[block, : contexts.n_long + offset.max()])
            target_tokens = self.tensor(contexts.targets[block, offset])
            ids = self.ids_of(contexts, *tokens.shape)
            of_tokens = attribution(tokens, partial(self._differentiate, offset, target_tokens, ids))
            of_far = of_tokens[:, : contexts.n_far]
            values[rows] = of_far.detach().double().cpu().numpy()
        return values

    def _differentiate(
        self, offset: np.ndarray, target_tokens: Tensor, ids: Tensor, inputs: Tensor, logits_of: LogitsOf
    ) -> tuple[Tensor, Tensor]:
        """See `Differentiate`; the targets ``target_tokens``, (R,), are at these offsets in their blocks, (R,).

        ``ids``: position ids of the inputs, (R, L).
        """
        inputs = inputs.detach().requires_grad_()
        queries = int(np.ptp(offset)) + 1
        logits = logits_of(inputs, ids, queries)
        of_target = logits[torch.arange(len(offset)), self.tensor(offset - offset.min())]
        losses = F.cross_entropy(of_target.float(), target_tokens, reduction="none")
        (slope,) = torch.autograd.grad(-losses.sum(), inputs)
        return losses.detach(), slope

    @torch.inference_mode()
    def key_heads(self, contexts: Contexts) -> list[int]:
        """How many heads of keys every layer has, as two tokens of the contexts show."""
        two_tokens = self.tensor(contexts.tokens[:1, :2])
        layers_of_keys = self.model.key_values(two_tokens, self.first_ids(1, 2))
        return [keys.shape[1] for keys, _ in layers_of_keys]

    def long_parts(self, contexts: Contexts, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Rows in parts that are few enough for a pass that keeps what it computes on the way."""
        length = contexts.tokens.shape[1]
        return chunks(rows, self.tokens_per_batch // (BACKWARD_TOKENS * length))

    def first_ids(self, rows: int, length: int) -> Tensor:
        """Position ids 0 … length - 1 of every row, (rows, length)."""
        return torch.arange(length, device=self.device).expand(rows, -1)

    def ids_of(self, contexts: Contexts, rows: int, length: int) -> Tensor:
        """Position ids of the first ``length`` columns of contexts, the same for every row, (rows, length)."""
        return self.tensor(np.broadcast_to(contexts.position_ids[:length], (rows, length)))


def log_probabilities(logits: Tensor, *_: Any) -> Tensor:
    """log p of logits, float32: a `Reduce` that keeps all."""
    return logits.float().log_softmax(dim=-1)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) in nats, (R, Q), of log p, (R or 1, Q, V), and log q, (R, Q, V)."""
    return (log_p - log_q).mul_(log_p.exp()).sum(dim=-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """1/2 Σ |p - q|, (R, Q), of log p, (R or 1, Q, V), and log q, (R, Q, V)."""
    return (log_p.exp() - log_q.exp()).abs_().sum(dim=-1) / 2


DIVERGENCES: dict[str, Divergence] = {"kl": kl_divergence, "tv": total_variation}
"""From the prediction given the long context, which look at no target."""
MEASURES = ("loss", "correct", *DIVERGENCES)
"""The target's loss in nats, whether it is the likeliest token (1 or 0), KL(p_long || p) in nats, total variation."""


def long_and_short_losses(
    scorer: Scorer, contexts: Contexts, targets: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(L_long, L_short) (docs/method.md, 2.1), each (m,) in nats; ``targets`` as in `Scorer.losses`."""
    long = scorer.losses(contexts, contexts.all_far, targets)[:, 0]
    short = scorer.losses(contexts, NO_FAR, targets)[:, 0]
    return long, short
