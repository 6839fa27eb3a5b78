"""What every synthetic task can do, the random numbers it is made of, and the registry that names it.

A task is a frozen dataclass of its parameters. Its samples are a pure function of (split, seed, index): resuming a
run, another number of processes, or another batch size changes nothing.

Random numbers are counter-based: draw c of a row is SplitMix64's output at index c of a sequence that starts at the
row's own state (Steele, Lea and Flood, OOPSLA 2014). A row depends on nothing else in its batch.

Shapes: B samples (rows), T tokens of the longest of them, C columns drawn for each.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
from omegaconf import OmegaConf as om
from omegaconf.errors import OmegaConfBaseException

from olmo_sparsity.tasks.batch import END, TaskBatch, between
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.registry import Registry
from olmo_sparsity.util.rng import GAMMA, counters, mix, row_hashes

SPLITS = ("train", "test")
_TEST_SHARE = np.uint64(8)
"""One prompt in this many belongs to the test split."""
_MOST_DRAWS = 1024
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
        """A uniform order of the eligible columns (B, C) of each row, then the others, ascending, (B, C) int64."""
        return (np.sort(self._keys(eligible), axis=1) & _COLUMN_BITS).astype(np.int64)

    def subset(self, eligible: np.ndarray, count: np.ndarray) -> np.ndarray:
        """A uniform subset of ``count`` (B,) of the eligible columns (B, C) of each row, (B, C) bool."""
        keys = self._keys(eligible)
        last = np.take_along_axis(np.sort(keys, axis=1), np.maximum(count - 1, 0)[:, None], axis=1)
        return (keys <= last) & (count > 0)[:, None]

    def _keys(self, eligible: np.ndarray) -> np.ndarray:
        """Random keys (B, C) that end in the column, so that no two are equal; the largest where not eligible."""
        columns = eligible.shape[1]
        assert columns <= MOST_COLUMNS, "a key has 20 bits for the column"
        keys = np.where(eligible, self.words(columns) >> np.uint64(1), np.uint64(_WORD))
        return (keys & ~_COLUMN_BITS) | np.arange(columns, dtype=np.uint64)


def _word(value: int) -> np.ndarray:
    """``value`` modulo 2^64, (1,): as an array, because numpy warns where scalars overflow."""
    return np.array([value & _WORD], dtype=np.uint64)


@dataclass(frozen=True)
class Sizes:
    """How large each sample is; drawn first, and kept when a prompt is drawn again."""

    length: np.ndarray
    """(B,) int64, in the task's own unit."""
    k: np.ndarray
    """(B,) int64, the number of planted tokens, or what else the task calls k; 0 in a task without."""

    def rows(self, rows: np.ndarray) -> Sizes:
        """The sizes of some of the samples."""
        return Sizes(self.length[rows], self.k[rows])


@dataclass(frozen=True)
class Task(ABC):
    """Samples of one task, in a training and a test split whose prompts never coincide [ours].

    A fixed hash of a prompt's tokens assigns it to one split, whatever the seed and the task's parameters: 1 prompt
    in 8 to test. A sample that falls into the other split is drawn again, its length and k kept, so their
    distribution stays exact. Where a split has hardly any prompt of the smallest size, the task is refused.
    """

    train_length: tuple[int, int]
    """Shortest and longest training sample, both included, uniform; the unit is the task's own."""
    test_length: tuple[int, int]
    """Shortest and longest test sample, both included, uniform."""

    name: ClassVar[str]
    """Under which `TASKS` has it."""
    end_id: ClassVar[int | None] = END
    """The token that ends a response; None: the response is one label token, and nothing ends it."""
    tokens_per_position: ClassVar[int] = 1
    """How many tokens of the prompt a position takes that may be planted; lengths are whole multiples of it."""

    def __post_init__(self) -> None:
        self._check()
        for split in SPLITS:
            smallest = self._smallest(split)
            self._draw(split, smallest, Draws.of(0, split, np.arange(len(smallest.length))))

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """The names of the token ids, in order; their number is the vocabulary size."""

    def largest_id(self, length: int) -> int | None:
        """The largest coupled id of a sample of ``length``, without the random start; None: no coupling.

        A table of ids must have more rows than this, or it is too small for that length.
        """
        return None

    def largest_second_id(self) -> int | None:
        """Likewise of the second level, in either split; None: the task couples on one level."""
        return None

    def ks(self, split: str) -> tuple[int, ...]:
        """The k of the samples of a split, each as likely as the others; empty: the task has no k."""
        return ()

    def holds(self, length: int, k: int) -> bool:
        """Whether a sample of ``length`` can have this k."""
        return True

    @abstractmethod
    def max_tokens(self, length: int) -> int:
        """The most tokens that a sample of ``length`` has, prompt and response together."""

    def fewest_tokens(self, length: int) -> int:
        """The fewest tokens that a training sample of ``length`` has."""
        return self.max_tokens(length)

    @abstractmethod
    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        """Samples of these sizes, whatever their split."""

    def _check(self) -> None:
        """Raise `UserError` for parameters that do not go together."""
        for split in SPLITS:
            shortest, longest = self._length_range(split)
            if not 1 <= shortest <= longest <= MOST_COLUMNS:
                raise UserError(
                    f"{self.name}: {split}_length {[shortest, longest]} is no range; "
                    f"give the shortest and the longest, from 1 to {MOST_COLUMNS:,}"
                )

    def sample(self, split: str, seed: int, indices: Sequence[int] | np.ndarray) -> TaskBatch:
        """Samples ``indices`` (B,) of a split, padded to the longest of them.

        A sample does not depend on the others of the batch, up to padding. Raises `UserError` where
        the split has hardly any prompt of a size that was drawn.
        """
        assert split in SPLITS
        draws = Draws.of(seed, split, np.asarray(indices, dtype=np.int64))
        return self._draw(split, self._sizes(split, draws), draws)

    def at_length(self, length: int, k: int | None = None) -> Self:
        """The same task with all test samples of one length, and k where it has one; training stays as it is."""
        at_once: dict[str, Any] = {} if k is None else {"k_test": (k,)}  # neither alone need be possible
        return replace(self, test_length=(length, length), **at_once)

    def _length_range(self, split: str) -> tuple[int, int]:
        return self.train_length if split == "train" else self.test_length

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        """The shortest sample of a split that holds k (B,)."""
        return np.full_like(k, self._length_range(split)[0])

    def _sizes(self, split: str, draws: Draws) -> Sizes:
        """The sizes of the samples that are drawn: k first, then a length that holds it."""
        ks = np.array(self.ks(split) or (0,))
        unit = self.tokens_per_position
        k = ks[draws.named("k").integer(len(ks))]
        shortest = self._shortest(split, k)
        steps = (self._length_range(split)[1] - shortest) // unit + 1
        return Sizes(shortest + unit * draws.named("length").integer(steps), k)

    def _smallest(self, split: str) -> Sizes:
        """The smallest sizes of a split, which it may have no prompts of."""
        ks = np.unique(self.ks(split) or (0,))
        return Sizes(self._shortest(split, ks), ks)

    def _draw(self, split: str, sizes: Sizes, draws: Draws) -> TaskBatch:
        """Samples of these sizes that belong to ``split``."""
        batch = self._make(sizes, draws.named("draw 0"))
        rows = np.flatnonzero(_in_test(batch) != (split == "test"))
        for draw in range(1, _MOST_DRAWS + 1):
            if not len(rows):
                return batch
            redrawn = self._make(sizes.rows(rows), draws.rows(rows).named(f"draw {draw}"))
            batch.put(rows, redrawn)
            rows = rows[_in_test(redrawn) != (split == "test")]
        raise UserError(
            f"{self.name}: a sample of length {sizes.length[rows[0]]} has so few different prompts that "
            f"hardly any of them is left to the {split} split; raise the lower end of {split}_length"
        )


TaskType = TypeVar("TaskType", bound=type[Task])
TASKS: Registry[type[Task]] = Registry("task")


def register(name: str) -> Callable[[TaskType], TaskType]:
    """Make a task available by name."""

    def add(task: TaskType) -> TaskType:
        task.name = name
        return cast("TaskType", TASKS.register(name)(task))

    return add


def make_task(name: str, parameters: Mapping[str, Any]) -> Task:
    """The task ``name`` with these parameters, as a YAML file gives them; the others have their defaults.

    Raises `UserError` for an unknown name or parameter, a value of a wrong type, or parameters that do not go together.
    """
    schema = om.structured(TASKS[name])
    try:
        return cast(Task, om.to_object(om.merge(schema, dict(parameters))))
    except OmegaConfBaseException as error:
        raise UserError(
            f"{name}: {dict(parameters)}: {first_line(error)}; it has {', '.join(schema)}"
        ) from None


def _in_test(batch: TaskBatch) -> np.ndarray:
    """Whether each prompt belongs to the test split, (B,) bool: a hash of its tokens that padding does not change."""
    width = batch.tokens.shape[1]
    prompt = np.where(between(0, batch.response_start, width), batch.tokens + 1, 0)
    return (row_hashes(prompt) >> np.uint64(32)) < np.uint64(1 << 32) // _TEST_SHARE
