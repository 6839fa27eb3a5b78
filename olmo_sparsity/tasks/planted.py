"""Tasks whose label is decided by k planted tokens: sparse parity, planted correlations (docs/method.md 3.1, 3.2).

Shapes: B samples, l positions of the longest prompt (pairs of tokens in sparse parity), k planted tokens at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np

from olmo_sparsity.tasks.assemble import labelled_batch, letter_names
from olmo_sparsity.tasks.batch import TaskBatch, between
from olmo_sparsity.tasks.task import SPLITS, Draws, Sizes, Task, register
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, user_path


@dataclass(frozen=True)
class SparseTask(Task):
    """A prompt, then its label as a single token, predicted at the last token of the prompt.

    k is drawn first, then the length, uniformly from the range as far as it holds k: lengths too short for a k
    occur with smaller ones only [ours].
    """

    k_train: int = 4
    """K_train: a training sample has k planted tokens, k uniform on k_train_min … K_train."""
    k_train_min: int = 1
    """The smallest k of training."""
    k_test: tuple[int, ...] = (4, 6, 8, 10, 12, 14, 16)
    """A test sample has k planted tokens, k uniform on these."""

    end_id = None

    def max_tokens(self, length: int) -> int:
        """The prompt and the label."""
        return length + 1

    def ks(self, split: str) -> tuple[int, ...]:
        """k_train_min … K_train, or `k_test`."""
        return tuple(range(self.k_train_min, self.k_train + 1)) if split == "train" else self.k_test

    def holds(self, length: int, k: int) -> bool:
        """Whether it has k positions."""
        return k * self.tokens_per_position <= length

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        return np.maximum(super()._shortest(split, k), k * self.tokens_per_position)

    def _check(self) -> None:
        super()._check()
        for split in SPLITS:
            ks = self.ks(split)
            lengths = self._length_range(split)
            unit = self.tokens_per_position
            if min(ks, default=0) < 1:
                raise UserError(f"{self.name}: k of {split} {list(ks)} must be 1 or more; change k_{split}")
            if any(length % unit for length in lengths):
                raise UserError(
                    f"{self.name}: {split}_length {list(lengths)} must be multiples of {unit}, the tokens of a "
                    "position"
                )
            if not self.holds(lengths[1], max(ks)):
                raise UserError(
                    f"{self.name}: {split}_length {list(lengths)} has no room for k = {max(ks)}; lower k_{split}, or "
                    "lengthen the samples"
                )


_OFF, _ON, _ZERO = 1, 2, 3


@register("sparse_parity")
@dataclass(frozen=True)
class SparseParity(SparseTask):
    """The XOR of the k bits whose selectors are on [paper; the pairs are ours].

    A prompt of length 2l is l pairs (selector, bit). Exactly k selectors are on, a uniform subset; all bits are
    uniform. The label is a bit token in column 2l, after the prompt: it is predicted at the last token of the prompt,
    and a sample has 2l + 1 tokens. The planted columns are those of the k selected bits. Length is that of the prompt,
    2l.
    """

    train_length: tuple[int, int] = (20, 50)
    """Shortest and longest training prompt 2l in tokens, both included and even, uniform."""
    test_length: tuple[int, int] = (20, 500)
    """Shortest and longest test prompt 2l in tokens, both included and even, uniform."""
    tokens_per_position: ClassVar[int] = 2

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Padding, the two selectors, the two bits; the label is one of the bits."""
        return ("<pad>", "off", "on", "0", "1")

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        pairs = sizes.length // 2
        width = int(pairs.max(initial=0))
        selected = draws.named("selectors").subset(between(0, pairs, width), sizes.k)
        bits = draws.named("bits").integers(2, width)
        prompt = np.empty((len(pairs), 2 * width), dtype=np.int64)
        prompt[:, ::2], prompt[:, 1::2] = np.where(selected, _ON, _OFF), _ZERO + bits
        planted = np.zeros(prompt.shape, dtype=bool)
        planted[:, 1::2] = selected
        label = _ZERO + (bits * selected).sum(axis=1) % 2
        return labelled_batch(prompt, sizes.length, label, planted)


# --- planted correlations ---


@dataclass(frozen=True)
class Room:
    """The columns that planted tokens may have in each sample."""

    k: np.ndarray
    """(B,) how many there are."""
    length: np.ndarray
    """(B,) tokens of the prompt."""
    window: np.ndarray
    """(B,) how many columns they may span: min(L_local + 1, l)."""


def uniform_positions(draws: Draws, room: Room) -> np.ndarray:
    """A uniform subset of a window of L_local + 1 columns that is placed uniformly [ours]."""
    start = draws.named("window").integer(room.length - room.window + 1)
    inside = between(start, start + room.window, int(room.length.max(initial=0)))
    return draws.named("columns").subset(inside, room.k)


def adjacent_positions(draws: Draws, room: Room) -> np.ndarray:
    """k columns in a row, placed uniformly [ours]."""
    start = draws.named("window").integer(room.length - room.k + 1)
    return between(start, start + room.k, int(room.length.max(initial=0)))


def stretched_positions(draws: Draws, room: Room) -> np.ndarray:
    """As uniform, with both ends of the window planted (k > 1): the span is as long as L_local allows [ours]."""
    start = draws.named("window").integer(room.length - room.window + 1)
    last = start + room.window - 1
    width = int(room.length.max(initial=0))
    ends = between(start, start + 1, width) | (between(last, last + 1, width) & (room.k > 1)[:, None])
    inner = draws.named("columns").subset(between(start + 1, last, width), np.maximum(room.k - 2, 0))
    return ends | inner


POSITIONS: dict[str, Callable[[Draws, Room], np.ndarray]] = {
    "uniform": uniform_positions,
    "adjacent": adjacent_positions,
    "stretched": stretched_positions,
}
"""Q_pos: S* as (B, l) bool."""
LABELS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "sum": lambda values, num_planted: values.sum(axis=1) % num_planted,
    "max": lambda values, num_planted: values.max(axis=1, initial=0),
}
"""g*: a label of {0 … num_planted - 1} for each sample, (B,), from its planted values (B, k), 0 where it has fewer."""
_TEXT_OF = {"train": "train", "test": "heldout"}  # of which split of a corpus the samples of a split are


@cache
def _corpus(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The vocabulary size of a prepared corpus, and all tokens of the two splits, (n,) each.

    It is read here, because `olmo_sparsity.data` makes batches of tasks.
    """
    remedy = "prepare the corpus again, with olmo-sparsity prepare_data"
    path = user_path(folder)
    manifest = read_json(path / "manifest.json", remedy)
    texts = {}
    for split in _TEXT_OF.values():
        files = manifest["splits"].get(split, [])
        token_ids = [np.fromfile(path / file["name"], manifest["dtype"]) for file in files]
        if not files or [len(ids) for ids in token_ids] != [file["tokens"] for file in files]:
            raise UserError(f"planted: {folder} has no {split} text, or not all of it; {remedy}")
        texts[split] = np.concatenate(token_ids)
    return manifest["vocab_size"], texts


def text_background(draws: Draws, corpus: str, lengths: np.ndarray, columns: int) -> np.ndarray:
    """Consecutive tokens of a corpus, ``lengths`` (B,) of them, that begin anywhere, (B, columns).

    Training text for training, held-out text for tests. Columns past a row's length have no meaning.
    """
    text = _corpus(corpus)[1][_TEXT_OF[draws.split]]
    longest = int(lengths.max(initial=0))
    if len(text) < longest:
        raise UserError(
            f"planted: {corpus} has {len(text):,} tokens in {_TEXT_OF[draws.split]}, too few for samples of "
            f"{longest:,}; give a larger corpus, or shorten the samples"
        )
    start = draws.integer(len(text) - lengths + 1)
    return text[np.minimum(start[:, None] + np.arange(columns), len(text) - 1)].astype(np.int64)


@register("planted")
@dataclass(frozen=True)
class Planted(SparseTask):
    """k planted tokens in a background, and a label that is a function of them alone (docs/method.md 3.1 [paper]).

    A prompt of length l: S* of size k from the position distribution, tokens at S* uniform, the rest independent and
    uniform, or [ours] real text. Planted and background symbols are different ones [ours], so that a prompt by itself
    determines S* and the label. Labels are planted symbols: the label is a token in column l, predicted at the last
    token of the prompt, and a sample has l + 1 tokens. Length is that of the prompt, l.

    Coupled ids [ours]: column c has id c + 1, and a planted token has that of the label, l + 1: however far apart, they
    are together.
    """

    train_length: tuple[int, int] = (20, 50)
    """Shortest and longest training prompt l in tokens, both included, uniform."""
    test_length: tuple[int, int] = (20, 500)
    """Shortest and longest test prompt l in tokens, both included, uniform."""
    num_planted: int = 2
    """How many planted symbols there are, and labels."""
    num_background: int = 8
    """How many background symbols there are; not read where they are those of `text`."""
    text: str | None = None
    """A prepared corpus, whose text is then the background: its train split, and for tests its heldout split."""
    position_distribution: str = "uniform"
    """Q_pos: uniform, adjacent or stretched."""
    label_function: str = "sum"
    """g*: sum (modulo `num_planted`) or max."""
    locality: int | None = None
    """L_local: max S* - min S* is at most this. Null: no limit."""
    distance: tuple[int, int] | None = None
    """How many tokens before the label planted ones stand, fewest and most, both included. Null: anywhere."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Padding, the background symbols (a, b, …), the planted symbols and labels (0, 1, …)."""
        return ("<pad>", *letter_names(self._backgrounds), *map(str, range(self.num_planted)))

    @property
    def _backgrounds(self) -> int:
        return self.num_background if self.text is None else _corpus(self.text)[0]

    def largest_id(self, length: int) -> int:
        """That of the label."""
        return length + 1

    @property
    def _distance_range(self) -> tuple[int, int | None]:
        return (1, None) if self.distance is None else self.distance

    def holds(self, length: int, k: int) -> bool:
        """See `SparseTask`; at distances within `distance`."""
        nearest, farthest = self._distance_range
        return k <= min(length, farthest or length) - nearest + 1

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        return np.maximum(super()._shortest(split, k), k + self._distance_range[0] - 1)

    def _positions(self, sizes: Sizes, draws: Draws) -> np.ndarray:
        """S* as (B, l) bool."""
        nearest, farthest = self._distance_range
        first = np.zeros_like(sizes.length) if farthest is None else np.maximum(sizes.length - farthest, 0)
        available = sizes.length - nearest + 1 - first
        window = available if self.locality is None else np.minimum(self.locality + 1, available)
        chosen = POSITIONS[self.position_distribution](draws, Room(sizes.k, available, window))
        rows, columns = np.nonzero(chosen)
        moved = np.zeros((len(chosen), int(sizes.length.max(initial=0))), dtype=bool)
        moved[rows, columns + first[rows]] = True
        return moved

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        width = int(sizes.length.max(initial=0))
        largest_k = int(sizes.k.max(initial=0))
        chosen = self._positions(sizes, draws.named("positions"))
        values = draws.named("planted").integers(self.num_planted, largest_k)
        present = between(0, sizes.k, largest_k)
        label = LABELS[self.label_function](values * present, self.num_planted)
        of_background = draws.named("background")
        if self.text is None:
            prompt = 1 + of_background.integers(self.num_background, width)
        else:
            prompt = 1 + text_background(of_background, self.text, sizes.length, width)
        first_planted = 1 + self._backgrounds
        prompt[chosen] = first_planted + values[present]
        batch = labelled_batch(prompt, sizes.length, first_planted + label, chosen)
        with_label = np.pad(chosen, ((0, 0), (0, 1)))  # its column is l, so that its id is l + 1 already
        ids = np.where(with_label, sizes.length[:, None] + 1, 1 + np.arange(width + 1))
        return replace(batch, coupled_ids=np.where(between(0, batch.lengths, width + 1), ids, 0))

    def _check(self) -> None:
        super()._check()
        largest_k = max(self.k_train, *self.k_test)
        for name, choices in (("position_distribution", POSITIONS), ("label_function", LABELS)):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"planted: unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}"
                )
        if self.num_planted < 2 or self.num_background < 1:
            raise UserError("planted: num_planted must be 2 or more and num_background 1 or more; raise them")
        if self.locality is not None and self.locality + 1 < largest_k:
            raise UserError(
                f"planted: {largest_k} planted tokens do not fit in locality {self.locality}; raise it to "
                f"{largest_k - 1}"
            )
        if self._distance_range[0] < 1:
            raise UserError(
                f"planted: distance {self.distance} must be 1 or more tokens before the label; raise it"
            )
