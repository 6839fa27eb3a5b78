"""Needles in held-out text: does a model find, at any depth, what it has read once (METHOD 2.6)?

A *needle of k tokens* [ours] is a random key of q tokens and behind it a random value of k. It stands at some depth of
a stretch of text of one document; the context ends with the key again, and the model is to go on with the value:

    text[:p]  key  value  text[p:]  key  ->  value         (L tokens before the first one that is predicted)

The tokens of a needle are drawn without replacement from those that occur in the split and not in the stretch, so that
neither the text nor knowledge of the world helps, and the earlier key is the only match. Depth is p over the tokens of
text: 0 puts the needle first, 1 right before the second key. The control, *absent*, has text in the needle's place.

All checkpoints read the same needles in the same stretches, and a needle is the same at every length and depth.
Teacher-forced: each value token is given the true ones before it. All of them likeliest is what a model that writes
greedily and reads itself needs to be right, so exact match is the same for it.
Shapes: n samples, L tokens of context, q of the key, k of the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.model.token_losses import TokenLosses
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream


@dataclass(frozen=True)
class Cell:
    """What kind of context is measured."""

    value_tokens: int
    """k."""
    length: int
    """L."""
    depth: float | None
    """0 … 1; None: the needle is absent."""


@dataclass(frozen=True)
class Needles:
    """n stretches of text with a needle for each."""

    segments: Segments
    """Where the stretches stand; as long as the largest context."""
    text: np.ndarray
    """(n, largest L) token ids."""
    key: np.ndarray
    """(n, q) token ids."""
    value: np.ndarray
    """(n, largest k) token ids; a needle of fewer tokens has the first of them."""
    vocabulary: int
    """Different tokens of the split, of which those are drawn that a stretch does not have."""

    def __len__(self) -> int:
        return len(self.text)

    def start(self, cell: Cell) -> int:
        """p: column of the needle's first token."""
        assert cell.depth is not None
        room = cell.length - 2 * self.key.shape[1] - cell.value_tokens
        return round(cell.depth * room)

    def contexts(self, cell: Cell) -> np.ndarray:
        """Context and value of every sample, (n, L + k)."""
        q, value = self.key.shape[1], self.value[:, : cell.value_tokens]
        if cell.depth is None:
            return np.concatenate([self.text[:, : cell.length - q], self.key, value], axis=1)
        place = self.start(cell)
        text = self.text[:, : cell.length - 2 * q - cell.value_tokens]
        return np.concatenate([text[:, :place], self.key, value, text[:, place:], self.key, value], axis=1)


def draw_needles(
    tokens: TokenFiles, count: int, *, lengths: Sequence[int], ks: Sequence[int], key_tokens: int, seed: int
) -> Needles:
    """Up to ``count`` stretches and needles, a pure function of the arguments and the split.

    Raises `UserError` where a context does not hold its needle, no document is long enough, or the split has too few
    different tokens.
    """
    needed = 2 * key_tokens + max(ks) + 1
    if min(key_tokens, *ks) < 1:
        raise UserError("--key-tokens and --ks take 1 or more")
    if lengths[0] < needed:
        raise UserError(
            f"a context of {lengths[0]} tokens does not hold a needle of {max(ks)} with its key of {key_tokens} twice "
            f"and text; raise --lengths to at least {needed}"
        )
    segments = sample_segments(tokens, count, length=lengths[-1], seed=seed, option="--lengths")
    text = segments.read(tokens).astype(np.int64)
    vocabulary = _tokens_that_occur(tokens)
    needles = []
    for number, row in enumerate(text):
        others = np.setdiff1d(vocabulary, row)
        if len(others) < key_tokens + max(ks):
            raise UserError(
                f"only {len(others)} tokens of the split do not occur in a stretch of {lengths[-1]:,} tokens; lower "
                "--ks or --lengths"
            )
        generator = np.random.default_rng([Stream.NEEDLES, seed, number])
        needles.append(generator.choice(others, key_tokens + max(ks), replace=False))
    drawn = np.array(needles)
    return Needles(segments, text, drawn[:, :key_tokens], drawn[:, key_tokens:], len(vocabulary))


def _tokens_that_occur(tokens: TokenFiles) -> np.ndarray:
    """Ids of the split, ascending, without end-of-text."""
    found = np.unique(np.concatenate([np.unique(np.asarray(array)) for array in tokens.arrays]))
    return found[found != tokens.eos_token_id].astype(np.int64)


def cells_of(ks: Sequence[int], lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """Every kind of context, the control last for each k and length."""
    return [Cell(k, length, depth) for k in ks for length in lengths for depth in (*depths, None)]


def measure_needles(
    losses: TokenLosses, needles: Needles, cells: Sequence[Cell]
) -> Iterator[tuple[Cell, np.ndarray, np.ndarray]]:
    """Of each cell the mean loss of the k value tokens [nats per token], and whether all are likeliest, both (n,)."""
    for cell in cells:
        rows = needles.contexts(cell)
        k = cell.value_tokens
        loss, exact = np.empty(len(rows)), np.empty(len(rows), dtype=bool)
        for some in losses.batches(len(rows), rows.shape[1] - 1, k):
            of_tokens, likeliest = losses.last_losses_and_likeliest(rows[some], k)
            loss[some] = of_tokens.mean(axis=1)
            exact[some] = (likeliest == rows[some, -k:]).all(axis=1)
        yield cell, loss, exact
