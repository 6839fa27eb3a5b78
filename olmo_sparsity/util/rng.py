"""Randomness: the streams that keep draws from one seed independent, and hashes that are the same on every machine.

Whatever is random is a function of (stream, seed, ...): ``default_rng([Stream.X, seed, ...])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique

import numpy as np


@unique
class Stream(IntEnum):
    """The first word of what a generator is seeded with. A new stream takes a number that no other has."""

    TARGETS = 1  # which targets are sampled
    PLACEBOS = 2  # contexts from other documents, in place of the target's own
    RANDOM_SELECTOR = 3  # the selector `random`
    PASSAGE_PLACEBOS = 4  # as PLACEBOS, of a passage given as text
    PLANTED_PLACEBOS = 5  # as PLACEBOS, of samples of a task
    BLOCK_OFFSETS = 8  # where in a document its blocks of targets begin
    FAR_SUBSETS = 9  # random subsets of the far context, by block of targets
    SAME_GROUP = 10  # far contexts from other documents of the target's own group, by block of targets
    SHUFFLED = 11  # orders of the true far context's tokens, by block of targets
    VERIFIED = 12  # which recorded targets are measured again
    WOVEN_NEEDLES = 13  # needles in training windows
    GIVEN_IDS = 14  # which training samples have coupled ids, and which of these are wrong
    SECOND_IDS = 15  # where the ids of a second level start
    HELDOUT_WINDOWS = 0x686C64  # which windows the held-out loss reads
    ID_TABLE = 0x696473  # weights of the id embedding and the id head; this word is XORed with the seed
    NEEDLES = 0x6E6565  # needles, and where they stand
    POSITIONS = 0x706F73  # position ids of training windows
    SEGMENTS = 0x736567  # which segments of documents are read


def generators(key: Sequence[int], indices: np.ndarray) -> list[np.random.Generator]:
    """A generator for each of the indices (B,): ``numpy.random.default_rng([*key, index])``."""
    return [np.random.default_rng([*key, index]) for index in indices.tolist()]
