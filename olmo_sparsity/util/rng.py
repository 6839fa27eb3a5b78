"""Randomness: the streams that keep draws from one seed independent, and SplitMix64, a hash of integers, many at once.

Whatever is random is a function of (stream, seed, ...): ``default_rng([Stream.X, seed, ...])``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, unique

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The step of its counter."""
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


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
    DRAWN_TOKENS = 16  # far tokens that are kept in place of windows, by target
    RANDOM_EVICTION = 17  # far keys that the control `random` keeps, by block of targets
    HALVES = 18  # which blocks choose the best policy, and which measure it
    BEFORE = 19  # tokens of other documents before the long context, by block of targets
    RANDOM_EVICTION_BY_HEAD = 20  # the same of `random-by-head`, in each head
    HELDOUT_WINDOWS = 0x686C64  # which windows the held-out loss reads
    ID_TABLE = 0x696473  # weights of the id embedding and the id head; this word is XORed with the seed
    NEEDLES = 0x6E6565  # needles, and where they stand
    POSITIONS = 0x706F73  # position ids of training windows
    SEGMENTS = 0x736567  # which segments of documents are read


def generators(key: Sequence[int], indices: np.ndarray) -> list[np.random.Generator]:
    """A generator for each of the indices (B,): ``numpy.random.default_rng([*key, index])``."""
    return [np.random.default_rng([*key, index]) for index in indices.tolist()]


def mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's output function: a bijection of 64-bit words that changes every bit, any shape."""
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return words ^ (words >> _SHIFTS[2])


def counters(count: int) -> np.ndarray:
    """SplitMix64's first ``count`` steps from 0, (count,) uint64, all different."""
    return np.arange(1, count + 1, dtype=np.uint64) * GAMMA


def row_hashes(rows: np.ndarray) -> np.ndarray:
    """A hash of each row of unsigned integers, (n, width) to (n,) uint64, which trailing zeros do not change."""
    return mix((rows.astype(np.uint64) * mix(counters(rows.shape[1]))).sum(axis=1, dtype=np.uint64))
