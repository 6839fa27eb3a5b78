"""Segments: stretches of a fixed number of tokens inside texts. The probes measure on them.

Shapes: D texts, n segments, L tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

if TYPE_CHECKING:
    from analysis.texts import Texts


@dataclass(frozen=True)
class Segments:
    """Stretches of texts, ordered by text and place."""

    tokens: np.ndarray
    """(n, L) token ids, int64."""
    text: np.ndarray
    """Number of each segment's text, (n,) int64: the unit of resampling."""
    start: np.ndarray
    """Index in that text of its first token, (n,) int64."""
    texts_too_short: int
    """Texts with fewer than L tokens, which are left out."""
    is_target: np.ndarray
    """Whether each token may be a target, (n, L) bool: not those that the tokenizer calls special."""
    group: np.ndarray | None = None
    """Group of each segment's text, (n,) strings; None where the texts have no groups."""

    def __len__(self) -> int:
        return len(self.text)

    def places(self) -> dict[str, np.ndarray]:
        """Text and, where there are groups, group of each segment, as columns of a frame, (n,)."""
        return {"text": self.text} | ({} if self.group is None else {"group": self.group})


def sample_segments(texts: Texts, count: int, *, length: int, seed: int) -> Segments:
    """Draw ``count`` segments of ``length`` tokens (L), each inside one text; no two share a token.

    Stratified by text [ours]: every text that is long enough gives the same number, as far as it has room; where they
    do not divide evenly, the texts that give one more are drawn. Within a text every arrangement without overlap is
    equally likely. A pure function of the arguments; fewer are returned where the texts have room for fewer. Raises
    `UserError` where no text has so many tokens.
    """
    lengths = np.asarray(texts.lengths)
    room = lengths // length
    if not room.any():
        raise UserError(
            f"no text has {length:,} tokens, the longest has {lengths.max():,}; lower the length to at most that"
        )
    order = np.random.default_rng([Stream.SEGMENTS, seed]).permutation(np.flatnonzero(room))
    # one a round from each text, in this order, as long as it has room
    text_rank = np.repeat(np.arange(len(order)), room[order])
    turn = np.concatenate([np.arange(segments) for segments in room[order]])
    served = order[text_rank[np.lexsort((text_rank, turn))[:count]]]
    drawn, quota = np.unique(served, return_counts=True)
    rows = []
    starts = []
    for text_index, segments in zip(drawn.tolist(), quota.tolist(), strict=True):
        # taken out, the segments leave so many tokens; one draw from those and the segments is one arrangement
        left = int(lengths[text_index]) - segments * length
        generator = np.random.default_rng([Stream.SEGMENTS, seed, text_index])
        gaps = np.sort(generator.choice(left + segments, size=segments, replace=False))
        starts.append(gaps + np.arange(segments) * (length - 1))
        tokens = texts.tokens(text_index)
        rows += [tokens[start : start + length] for start in starts[-1].tolist()]
    text = np.repeat(drawn, quota)
    tokens = np.stack(rows).astype(np.int64)
    return Segments(
        tokens=tokens,
        text=text,
        start=np.concatenate(starts),
        texts_too_short=int((room == 0).sum()),
        is_target=~texts.is_special(tokens),
        group=None if texts.groups is None else texts.groups[text],
    )
