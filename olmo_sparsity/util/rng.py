"""Randomness: the streams that keep draws from one seed independent, and many generators seeded at once.

Whatever is random is a function of (stream, seed, ...): ``default_rng([Stream.X, seed, ...])``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_WORD = (1 << 32) - 1
_POOL_SIZE, _HALF_WORD = 4, np.uint32(16)


class Stream(IntEnum):
    """The first word of what a generator is seeded with. A new stream takes a number that no other has.

    Members with the same number are one stream to Python. Two are 4 and two are 5 for historical reasons; committed
    results depend on them, so they stay. It is harmless because none of those that share a number bears on another's
    result: examples decide of which targets a record keeps the text, passage placebos are the
    notebook's, which writes no record; planted placebos belong to tasks, made-up targets to a benchmark.
    """

    TARGETS = 1
    """Which targets are sampled."""
    PLACEBOS = 2
    """Contexts from other documents, in place of the target's own."""
    RANDOM_SELECTOR = 3
    """The selector `random`."""
    PASSAGE_PLACEBOS = 4
    """As `PLACEBOS`, of a passage given as text."""
    PLANTED_PLACEBOS = 5
    """As `PLACEBOS`, of samples of a task."""
    BENCHMARK_TARGETS = 5
    """Made-up targets of the benchmark of influence."""
    BLOCK_OFFSETS = 8
    """Where in a document its blocks of targets begin."""
    FAR_SUBSETS = 9
    """Random subsets of the far context, by block of targets."""
    SAME_GROUP = 10
    """Far contexts from other documents of the target's own group, by block of targets."""
    SHUFFLED = 11
    """Orders of the true far context's tokens, by block of targets."""
    VERIFIED = 12
    """Which recorded targets are measured again."""
    WOVEN_NEEDLES = 13
    """Needles in training windows."""
    GIVEN_IDS = 14
    """Which training samples have coupled ids, and which of these are wrong."""
    SECOND_IDS = 15
    """Where the ids of a second level start."""
    HELDOUT_WINDOWS = 0x686C64
    """Which windows the held-out loss reads."""
    ID_TABLE = 0x696473
    """Weights of the id embedding and the id head; this word is XORed with the seed."""
    NEEDLES = 0x6E6565
    """Needles, and where they stand."""
    POSITIONS = 0x706F73
    """Position ids of training windows."""
    SEGMENTS = 0x736567
    """Which segments of documents are read."""


# --- many generators seeded at once, each as NumPy seeds one; shapes: B generators ---


def generators(key: Sequence[int], indices: np.ndarray) -> list[np.random.Generator]:
    """``numpy.random.default_rng([*key, index])`` for each of the indices (B,), bit for bit.

    ``key``: three numbers or more, none negative.
    """
    if indices.max(initial=0) > _WORD:
        return [np.random.default_rng([*key, index]) for index in indices.tolist()]
    constants = [word for value in key for word in _words(value)]
    entropy = [np.full(len(indices), word, dtype=np.uint32) for word in constants]
    seeds = _seed_sequences([*entropy, indices.astype(np.uint32)])
    # NumPy takes any ISeedSequence; its type stubs know one only.
    return [np.random.Generator(np.random.PCG64(_Seeded(row))) for row in seeds]  # type: ignore[arg-type]


class _Seeded(ISeedSequence):
    """A `numpy.random.SeedSequence` whose state was computed before."""

    def __init__(self, state: np.ndarray):
        self.state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        """The numbers that PCG64 starts from, (4,) uint64; it asks for nothing else."""
        return self.state


def _words(value: int) -> list[int]:
    """The 32-bit words of a number, the lowest first."""
    return [value & _WORD, *(_words(value >> 32) if value > _WORD else [])]


def _seed_sequences(entropy: list[np.ndarray]) -> np.ndarray:
    """``SeedSequence(words).generate_state(4, np.uint64)`` of B lists of 4 or more words, (B, 4) uint64.

    ``entropy`` holds a word of each, (B,) uint32. It is O'Neill's seed_seq_fe, which NumPy promises not to change.
    """
    hashed = _hash(0x43B0D7E5, 0x931E8875)

    def mix_in(target: int, words: np.ndarray) -> None:
        mixed = pool[target] * np.uint32(0xCA01F9DD) - hashed(words) * np.uint32(0x4973F715)
        pool[target] = mixed ^ (mixed >> _HALF_WORD)

    pool = [hashed(words) for words in entropy[:_POOL_SIZE]]
    for source in range(_POOL_SIZE):
        for target in range(_POOL_SIZE):
            if target != source:
                mix_in(target, pool[source])
    for words in entropy[_POOL_SIZE:]:
        for target in range(_POOL_SIZE):
            mix_in(target, words)
    of_state = _hash(0x8B51F9DD, 0x58F38DED)
    state = np.stack([of_state(pool[i % _POOL_SIZE]) for i in range(8)], axis=1)
    return state.astype("<u4").view("<u8").astype(np.uint64)


def _hash(constant: int, multiplier: int) -> Callable[[np.ndarray], np.ndarray]:
    """A hash of 32-bit words (B,) whose constant changes with every call."""

    def hashed(words: np.ndarray) -> np.ndarray:
        nonlocal constant
        words = words ^ np.uint32(constant)
        constant = constant * multiplier & _WORD
        words = words * np.uint32(constant)
        return words ^ (words >> _HALF_WORD)

    return hashed
