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
    """Draw ``count`` segments of ``length`` tokens (L), each inside one text; no two share a token.

    Stratified by text [ours]: every text that is long enough gives the same number, as far as it has room; where they
    do not divide evenly, the texts that give one more are drawn. Within a text every arrangement without overlap is
    equally likely. At most ``max_texts`` texts, drawn at random, give any. A pure function of the arguments; fewer are
    returned where the texts have room for fewer. Raises `UserError` where no text has so many tokens.
    """
    lengths = np.asarray(texts.lengths)
    room = lengths // length
    if not room.any():
        raise UserError(
            f"no text has {length:,} tokens, the longest has {lengths.max():,}; lower the length to at most that"
        )
    order = np.random.default_rng([Stream.SEGMENTS, seed]).permutation(np.flatnonzero(room))[:max_texts]
    # one a round from each text, in this order, as long as it has room
    place = np.repeat(np.arange(len(order)), room[order])
    turn = np.concatenate([np.arange(segments) for segments in room[order]])
    served = order[place[np.lexsort((place, turn))[:count]]]
    drawn, quota = np.unique(served, return_counts=True)
    starts = []
    for number, segments in zip(drawn.tolist(), quota.tolist(), strict=True):
        # taken out, the segments leave so many tokens; one draw from those and the segments is one arrangement
        left = int(lengths[number]) - segments * length
        generator = np.random.default_rng([Stream.SEGMENTS, seed, number])
        places = np.sort(generator.choice(left + segments, size=segments, replace=False))
        starts.append(places + np.arange(segments) * (length - 1))
    text = np.repeat(drawn, quota)
    return Segments(
        text=text,
        start=np.concatenate(starts),
        length=length,
        texts_too_short=int((room == 0).sum()),
        group=None if texts.groups is None else texts.groups[text],
    )
