"""Many random generators seeded at once, each as NumPy seeds one. Shapes: B generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_WORD = (1 << 32) - 1
_POOL_SIZE, _HALF_WORD = 4, np.uint32(16)


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
