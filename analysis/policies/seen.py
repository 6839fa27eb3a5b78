"""What an eviction policy may see before it chooses, read off the model.

Aware, it sees the far context and the near tokens: the short context and the targets of the block before the one that
is next. Blind, it sees the far context alone. It never sees the target that is next, or what comes behind it. The
prefix is read before the far context; its keys are always kept, and get no scores.
Shapes: n blocks, m choices, L tokens that are seen behind p of the prefix, G heads of keys in all layers, F far tokens,
R rows, H heads of queries, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.adapter import ReduceAttention, with_prefix
from analysis.model.attention_to_far import accumulated_attention
from analysis.model.check import limits
from analysis.model.layer_states import LayerStates, Rotation, rotate, unrotate
from analysis.model.losses import Scorer, retry_smaller_on_oom
from olmo_sparsity.util.errors import UserError

ScoreLayer = Callable[[LayerStates], Tensor]
"""From the states of the tokens that are seen to scores of all of them, (R, G, L)."""
_TRIED, _SHIFT = 8, 5
"""Tokens that are read at two places to see how queries are rotated, and how far these are apart."""
_ALIKE = 0.1
"""Relative distance of queries that are the same but for rounding; other ones are about 1 apart."""
_UNSEEN = -1
"""In the place of every target's token."""


@dataclass(frozen=True)
class Seen:
    """What a policy sees before each of m choices."""

    scorer: Scorer
    contexts: Contexts
    """n blocks; of a blind policy without near tokens, so that the far ones are all there is. No target is in
    ``targets``, and behind the last choice of a block ``tokens`` has its last seen token again."""
    targets: np.ndarray
    """(m, 2) block, and place in it of the target that comes next."""
    encode: Callable[[str], np.ndarray] | None = None
    """Token ids of a text, for policies that read a prompt; None: there is no tokenizer."""

    @classmethod
    def of(
        cls,
        scorer: Scorer,
        contexts: Contexts,
        targets: np.ndarray | None = None,
        *,
        blind: bool = False,
        encode: Callable[[str], np.ndarray] | None = None,
    ) -> Seen:
        """What is seen before some targets, (m, 2); None: before the first one of every block, once a block.

        ``blind``: see `Policy.blind`.
        """
        if targets is None:
            targets = np.stack([np.arange(len(contexts)), np.zeros(len(contexts), dtype=np.int64)], axis=1)
        contexts = _without_what_comes(contexts, targets)
        if blind:
            far = contexts.tokens[:, : contexts.n_far]
            contexts = Contexts(far, contexts.targets[:, :1], contexts.target_id[:, :1], n_short=0)
            targets = np.stack([targets[:, 0], np.zeros(len(targets), dtype=np.int64)], axis=1)
        return cls(scorer, contexts, targets, encode)

    @property
    def n_far(self) -> int:
        """F."""
        return self.contexts.n_far

    @property
    def lengths(self) -> np.ndarray:
        """L, how many tokens are seen before each choice, (m,)."""
        return self.contexts.n_long + self.targets[:, 1]

    @property
    def prefix_length(self) -> int:
        """p."""
        return len(self.scorer.model.prefix)

    @cached_property
    def key_heads(self) -> list[int]:
        """How many heads of keys every layer has; their sum is G."""
        return self.scorer.key_heads(self.contexts)

    def of_layers(self, score: ScoreLayer, *, with_prefix: bool = False) -> np.ndarray:
        """Scores of the far keys, (m, G, F), by a function of one layer.

        ``with_prefix``: the states are those of prefix and tokens, (p + L); its scores, too, and are left away.
        """
        return _of_layers(self.scorer, self, score, with_prefix)

    def accumulated_attention(self, window: int | None = None) -> np.ndarray:
        """`attention_to_far.accumulated_attention`, (m, G, F): of the last ``window`` tokens, by default of all."""
        return accumulated_attention(self.scorer, self.contexts, self.targets, window)

    def attention_of_further(self, further: np.ndarray, reduce: ReduceAttention) -> np.ndarray:
        """The most that heads of queries which share keys say of far keys, by head of keys, (m, G, …).

        Args:
            further: tokens that are read behind those of every block, (n, Q).
            reduce: from their attention to all before them and themselves, slices of (R, H, Q, p + L + Q), to
                (R, H, …).
        """
        model = self.scorer.model
        length = self.contexts.tokens.shape[1] + further.shape[1]
        limit, what = min(limits(model, drops_tokens=False), default=(None, ""))
        if limit is not None and self.prefix_length + length > limit:
            raise UserError(
                f"the far context is read twice, {length:,} tokens, which is beyond the {limit:,} {what} of the model; "
                "lower N, or leave kvzip out"
            )
        return _attention_of_further(self.scorer, self, further, reduce)

    def encoded(self, text: str, name: str) -> np.ndarray:
        """Token ids of a text that the policy ``name`` reads. Raises `UserError` without a tokenizer."""
        if self.encode is None:
            raise UserError(f"{name} reads a prompt, which needs the tokenizer; give it, or leave {name} out")
        return np.asarray(self.encode(text), dtype=np.int64)

    def rotations(self, count: int) -> Rotations:
        """How queries are rotated, and the next ``count`` positions behind those that are seen.

        Raises `UserError` for a model without RoPE, or with one that does not pair a half of the dimensions with the
        other.
        """
        return Rotations.of(self, count)


@dataclass(frozen=True)
class Rotations:
    """How the layers of a model rotate queries."""

    tables: list[Rotation | None]
    """Of every layer, at the positions from ``first`` on, each (positions, d); None: it does not rotate."""
    first: int
    count: int
    """Positions ahead that are averaged."""

    @classmethod
    def of(cls, seen: Seen, count: int) -> Rotations:
        """See `Seen.rotations`."""
        is_rotated = _rotated_layers(seen.scorer, seen.contexts.tokens)
        first = int(seen.lengths.min())
        last = int(seen.lengths.max()) + count
        # behind a gap in position ids there are more ids than tokens
        last_id = int(seen.contexts.position_ids[-1])
        further_ids = last_id + 1 - seen.contexts.tokens.shape[1]
        ids = further_ids + torch.arange(first, last, device=seen.scorer.device)[None]
        tokens = torch.full_like(ids, int(seen.contexts.tokens[0, 0]))
        p = seen.prefix_length

        def tables_of(layer: LayerStates) -> Tensor:
            if not is_rotated[layer.number]:
                return layer.keys.new_empty(0)
            assert layer.rotation is not None
            cosine, sine = layer.rotation
            return torch.stack([cosine[0, p:], sine[0, p:]]).float()

        with torch.inference_mode():
            stacked = seen.scorer.model.layers(tokens, ids, tables_of)
        tables: list[Rotation | None] = []
        for table in stacked:
            tables.append((table[0], table[1]) if len(table) else None)
        return cls(tables, first, count)

    def undone(self, layer: LayerStates) -> Tensor:
        """The queries as they were before, (R, H, L, D) float32."""
        if self.tables[layer.number] is None:
            return layer.queries.float()
        assert layer.rotation is not None
        return unrotate(layer.queries, layer.rotation)

    def mean_ahead(self, vectors: Tensor, layer: LayerStates) -> Tensor:
        """Vectors (…, D) as the mean rotation of the next positions turns them."""
        table = self.tables[layer.number]
        if table is None:
            return vectors
        start = layer.keys.shape[2] - self.first
        ahead = slice(start, start + self.count)
        return rotate(vectors, (table[0][ahead].mean(dim=0), table[1][ahead].mean(dim=0)))


@torch.inference_mode()
def _rotated_layers(scorer: Scorer, tokens: np.ndarray) -> list[bool]:
    """Whether each layer rotates its queries: these are the same at any place, but for that."""
    model = with_prefix(scorer.model, ())
    some = scorer.tensor(tokens[:1, :_TRIED]).expand(2, -1)
    ids = torch.arange(some.shape[1], device=scorer.device)
    ids = torch.stack([ids, ids + _SHIFT])

    def distances(layer: LayerStates) -> Tensor:
        plain = _distance(layer.queries.float())
        if layer.rotation is None:
            return torch.stack([plain, plain.new_tensor(torch.inf)])
        return torch.stack([plain, _distance(unrotate(layer.queries, layer.rotation))])

    plain, turned_back = torch.stack(model.layers(some, ids, distances)).cpu().numpy().T
    rotated = turned_back <= plain
    if (np.minimum(plain, turned_back) > _ALIKE).any() or not rotated.any():
        raise UserError(
            "expected-attention turns queries back as RoPE rotates halves of their dimensions, and this model has "
            "other positions; leave expected-attention out"
        )
    return rotated.tolist()


def _without_what_comes(contexts: Contexts, targets: np.ndarray) -> Contexts:
    """The contexts as they are known before some targets, (m, 2): no target, and nothing behind the last choice.

    Shapes stay, so that a pass reads what is seen to the last bit as it did.
    """
    tokens = contexts.tokens.copy()
    for block in range(len(contexts)):
        places = targets[targets[:, 0] == block, 1]
        seen = contexts.n_long + places.max(initial=0)
        tokens[block, seen:] = tokens[block, seen - 1]
    return replace(contexts, tokens=tokens, targets=np.full_like(contexts.targets, _UNSEEN))


def _distance(queries: Tensor) -> Tensor:
    """Relative distance of the queries of two rows."""
    return (queries[0] - queries[1]).norm() / queries[0].norm()


@retry_smaller_on_oom
@torch.inference_mode()
def _of_layers(scorer: Scorer, seen: Seen, score: ScoreLayer, with_prefix: bool) -> np.ndarray:
    """See `Seen.of_layers`."""
    contexts = seen.contexts
    p = seen.prefix_length
    places, place = np.unique(seen.targets[:, 1], return_inverse=True)

    def scores_of(states: LayerStates) -> Tensor:
        """(R, G, places, F)."""
        of_places = []
        for number in places.tolist():
            end = p + contexts.n_long + number
            part = states.part(slice(0 if with_prefix else p, end))
            scores = score(part)
            expected = tuple(part.keys.shape[:3])
            if tuple(scores.shape) != expected:
                raise UserError(
                    f"scores of a layer have the shape {tuple(scores.shape)}, not {expected}: rows, heads of keys, "
                    "tokens; mend them, or leave the policy out"
                )
            if with_prefix:
                scores = scores[..., p:]
            of_places.append(scores[..., : contexts.n_far].float())
        return torch.stack(of_places, dim=2)

    parts = []
    for tokens in scorer.long_parts(contexts, contexts.tokens):
        ids = scorer.ids_of(contexts, *tokens.shape)
        layers = scorer.model.layers(scorer.tensor(tokens), ids, scores_of)
        if [layer.shape[1] for layer in layers] != seen.key_heads:
            raise UserError(
                "layers of this model share keys, so that a policy cannot score them layer by layer; leave it out"
            )
        parts.append(torch.cat(layers, dim=1).double().cpu().numpy())
    return np.concatenate(parts)[seen.targets[:, 0], :, place]


@retry_smaller_on_oom
@torch.inference_mode()
def _attention_of_further(
    scorer: Scorer, seen: Seen, further: np.ndarray, reduce: ReduceAttention
) -> np.ndarray:
    """See `Seen.attention_of_further`."""
    tokens = np.concatenate([seen.contexts.tokens, further], axis=1)
    parts = []
    for some in scorer.long_parts(seen.contexts, tokens):
        ids = scorer.first_ids(*some.shape)
        layers = scorer.model.attention(scorer.tensor(some), ids, further.shape[1], reduce)
        of_keys = []
        for layer, count in zip(layers, seen.key_heads, strict=True):
            by_key_head = layer.unflatten(1, (count, -1))
            of_keys.append(by_key_head.amax(dim=2))
        parts.append(torch.cat(of_keys, dim=1).double().cpu().numpy())
    return np.concatenate(parts)[seen.targets[:, 0]]
