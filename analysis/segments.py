"""Segments: stretches of a fixed number of tokens inside texts. The probes measure on them.

Shapes: D texts, n segments, L tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream

if TYPE_CHECKING:
    from analysis.contexts import Texts


@dataclass(frozen=True)
class Segments:
    """Where the sampled segments stand in the texts, ordered by text and place."""

    text: np.ndarray
    """Number of each segment's text, (n,) int64: the unit of resampling."""
    start: np.ndarray
    """Index in that text of its first token, (n,) int64."""
    length: int
    """L."""
    texts_too_short: int
    """Texts with fewer than L tokens, which are left out."""
    group: np.ndarray | None = None
    """Group of each segment's text, (n,) strings; None where the texts have no groups."""

    def __len__(self) -> int:
        return len(self.text)

    def read(self, texts: Texts) -> np.ndarray:
        """Their token ids, (n, L)."""
        places = zip(self.text.tolist(), self.start.tolist(), strict=True)
        return np.stack([texts.tokens(text)[start : start + self.length] for text, start in places])


def sample_segments(
    texts: Texts, count: int, *, length: int, seed: int, max_texts: int | None = None
) -> Segments:
    """Draw ``count`` segments of ``length`` tokens, each inside one text; no two share a token.

    Stratified by text [ours]: every text that is long enough gives the same number, as far as it has room; where they
    do not divide evenly, the texts that give one more are drawn. Within a text every arrangement without overlap is
    equally likely. A pure function of the arguments; fewer are returned where the texts have room for fewer.

    Args:
        texts: that segments are drawn from.
        count: of segments.
        length: L.
        seed: of the draws.
        max_texts: from how many texts, drawn at random, the segments come at most; None: from all.

    Raises `UserError` where no text has so many tokens.
    """
    lengths = np.asarray(texts.lengths)
    room = lengths // length
    if not room.any():
        raise UserError(
            f"no text has {length:,} tokens, the longest has {lengths.max():,}; lower the length to at most that"
        )
    order = np.random.default_rng([Stream.SEGMENTS, seed]).permutation(np.flatnonzero(room))
    quota = _quotas(room, order[:max_texts], count)
    drawn = np.flatnonzero(quota)
    starts = [
        _places(int(lengths[d]), int(quota[d]), length, np.random.default_rng([Stream.SEGMENTS, seed, d]))
        for d in drawn
    ]
    text = np.repeat(drawn, quota[drawn])
    return Segments(
        text=text,
        start=np.concatenate(starts),
        length=length,
        texts_too_short=int((room == 0).sum()),
        group=None if texts.groups is None else texts.groups[text],
    )


def _quotas(room: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Segments of each text, (D,): one a round from each in ``order`` that has room left, ``count`` in all."""
    text = np.repeat(order, room[order])
    rank = np.repeat(np.arange(len(order)), room[order])
    turn = np.concatenate([np.arange(places) for places in room[order]])
    served = text[np.lexsort((rank, turn))[:count]]
    return np.bincount(served, minlength=len(room))


def _places(tokens: int, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Starts, ascending, of ``number`` segments that do not overlap in a text of so many tokens, (number,)."""
    # Taken out, the segments leave so many tokens; one draw from those and the segments is one arrangement.
    left = tokens - number * length
    drawn = np.sort(generator.choice(left + number, size=number, replace=False))
    return drawn + np.arange(number) * (length - 1)
