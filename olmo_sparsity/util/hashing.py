"""SplitMix64: pseudo-random 64-bit words from integers, many at once, the same on every machine."""

from __future__ import annotations

import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The step of its counter."""
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


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
