"""Random numbers that are a pure function of (seed, split, sample index), for whole batches without a loop.

Counter-based: draw c of a row is SplitMix64's output at place c of a sequence that starts at the row's own state
(Steele, Lea and Flood, OOPSLA 2014). A row depends on nothing else in its batch.

Shapes: B samples (rows), C columns drawn for each of them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.util.rng import GAMMA, counters, mix

_HALF = np.uint64(32)
MOST_COLUMNS = (1 << 20) - 1
"""Of what is put into a random order."""
_COLUMN_BITS = np.uint64(MOST_COLUMNS)
"""Of a random key, those that hold its column."""
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Draws:
    """The random numbers of B samples. The same call twice gives the same numbers; `named` gives others."""

    states: np.ndarray
    """(B,) uint64, where the sequence of each sample starts."""
    split: str
    """Whose samples they are: train or test."""

    @classmethod
    def of(cls, seed: int, split: str, indices: np.ndarray) -> Draws:
        """The draws of samples ``indices`` (B,); different indices of one seed and split never share a state."""
        start = mix(mix(_word(seed)) ^ _word(zlib.crc32(split.encode())))
        return cls(mix(start + indices.astype(np.uint64) * GAMMA), split)

    def named(self, purpose: str) -> Draws:
        """Draws that are independent of those for any other purpose."""
        return Draws(mix(self.states ^ _word(zlib.crc32(purpose.encode()))), self.split)

    def rows(self, rows: np.ndarray) -> Draws:
        """The draws of some of the samples, given their rows."""
        return Draws(self.states[rows], self.split)

    def words(self, columns: int) -> np.ndarray:
        """Uniform 64-bit words, (B, C) uint64."""
        return mix(self.states[:, None] + counters(columns))

    def integers(self, bound: int | np.ndarray, columns: int) -> np.ndarray:
        """Uniform on {0 … bound-1}, (B, C) int64; ``bound`` below 2^32, a number or one for each row (B,).

        The upper half of a word times the bound: no value is likelier than another by more than bound / 2^32.
        """
        bounds = np.broadcast_to(np.asarray(bound, dtype=np.uint64), self.states.shape)[:, None]
        return (((self.words(columns) >> _HALF) * bounds) >> _HALF).astype(np.int64)

    def integer(self, bound: int | np.ndarray) -> np.ndarray:
        """One uniform number of {0 … bound-1} for each sample, (B,) int64."""
        return self.integers(bound, 1)[:, 0]

    def order(self, eligible: np.ndarray) -> np.ndarray:
        """A uniform order of the eligible columns (B, C) of each row, then the others in theirs, (B, C) int64."""
        return (np.sort(self._keys(eligible), axis=1) & _COLUMN_BITS).astype(np.int64)

    def subset(self, eligible: np.ndarray, count: np.ndarray) -> np.ndarray:
        """A uniform subset of ``count`` (B,) of the eligible columns (B, C) of each row, (B, C) bool."""
        keys = self._keys(eligible)
        last = np.take_along_axis(np.sort(keys, axis=1), np.maximum(count - 1, 0)[:, None], axis=1)
        return (keys <= last) & (count > 0)[:, None]

    def _keys(self, eligible: np.ndarray) -> np.ndarray:
        """Random keys (B, C) that end in the column, so that no two are equal; the largest where not eligible."""
        columns = eligible.shape[1]
        assert columns <= MOST_COLUMNS, "the task was checked"
        keys = np.where(eligible, self.words(columns) >> np.uint64(1), np.uint64(_WORD))
        return (keys & ~_COLUMN_BITS) | np.arange(columns, dtype=np.uint64)


def _word(value: int) -> np.ndarray:
    """``value`` modulo 2^64, (1,): as an array, because numpy warns where scalars overflow."""
    return np.array([value & _WORD], dtype=np.uint64)
