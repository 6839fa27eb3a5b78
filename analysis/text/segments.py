"""Segments: stretches of a fixed number of tokens inside documents. Loss by position and LongPPL are measured on them.

Shapes: D documents of the split, n segments, L tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream


@dataclass(frozen=True)
class Segments:
    """Where the sampled segments stand in the split, ordered by document and place."""

    document: np.ndarray
    """Number of each segment's document, (n,) int64: the unit of resampling."""
    start: np.ndarray
    """Index in that document of its first token, (n,) int64."""
    length: int
    """L."""
    documents_too_short: int
    """Documents of the split with fewer than L tokens, which are left out."""
    group: np.ndarray | None = None
    """Group of each segment's document, (n,) strings; None where the corpus has no groups."""

    def __len__(self) -> int:
        return len(self.document)

    def read(self, tokens: TokenFiles) -> np.ndarray:
        """Their token ids, (n, L), in the type of the token files; no end-of-text id is among them."""
        places = zip(self.document, self.start, strict=True)
        return np.stack([tokens.document(d)[s : s + self.length] for d, s in places])


def sample_segments(
    tokens: TokenFiles, count: int, *, length: int, seed: int, option: str, documents: int | None = None
) -> Segments:
    """Draw ``count`` segments of ``length`` tokens, each inside one document; no two share a token.

    Stratified by document [ours]: every document that is long enough gives the same number, as far as it has room;
    where they do not divide evenly, the documents that give one more are drawn. Within a document every arrangement
    without overlap is equally likely. A pure function of (seed, split, length, count, documents); fewer are returned
    where the split has room for fewer.

    Args:
        tokens: of the split.
        count: segments asked for.
        length: L.
        seed: of the draws.
        option: of the command line that gives ``length``, for the error message.
        documents: from how many documents, drawn at random, the segments come at most; None: from all.

    Raises `UserError` where no document has so many tokens.
    """
    lengths = np.diff(tokens.document_bounds[:, 1:], axis=1)[:, 0]
    room = lengths // length
    if not room.any():
        raise UserError(
            f"no held-out document has {length:,} tokens, the longest has {lengths.max():,}; lower {option} to at "
            f"most {lengths.max():,}"
        )
    order = np.random.default_rng([Stream.SEGMENTS, seed]).permutation(np.flatnonzero(room))
    quota = _quotas(room, order[:documents], count)
    given = np.flatnonzero(quota)
    starts = [
        _places(int(lengths[d]), int(quota[d]), length, np.random.default_rng([Stream.SEGMENTS, seed, d]))
        for d in given
    ]
    document = np.repeat(given, quota[given])
    return Segments(
        document=document,
        start=np.concatenate(starts),
        length=length,
        documents_too_short=int((room == 0).sum()),
        group=tokens.groups_of(document),
    )


def _quotas(room: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Segments of each document, (D,): one a round from each in ``order`` that has room left, ``count`` in all."""
    document = np.repeat(order, room[order])
    rank = np.repeat(np.arange(len(order)), room[order])
    turn = np.concatenate([np.arange(places) for places in room[order]])
    served = document[np.lexsort((rank, turn))[:count]]
    return np.bincount(served, minlength=len(room))


def _places(tokens: int, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Starts, ascending, of ``number`` segments that do not overlap in a document of so many tokens, (number,)."""
    # Taken out, the segments leave so many tokens; one draw from those and the segments is one arrangement.
    left = tokens - number * length
    drawn = np.sort(generator.choice(left + number, size=number, replace=False))
    return drawn + np.arange(number) * (length - 1)
