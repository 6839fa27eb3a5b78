"""Tasks whose label is decided by k planted tokens: sparse parity, planted correlations (docs/method.md 3.1, 3.2).

Shapes: B samples, l places of the longest prompt (pairs of tokens in sparse parity), k planted tokens at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from olmo_sparsity.tasks.samples import TaskBatch, between, labelled_batch, letter_names
from olmo_sparsity.tasks.task import SPLITS, Draws, Sizes, Task, register
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json
from olmo_sparsity.util.hashing import row_hashes


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
        """Whether it has k places."""
        return k * self.tokens_per_place <= length

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        return np.maximum(super()._shortest(split, k), k * self.tokens_per_place)

    def _check(self) -> None:
        super()._check()
        if not 1 <= self.k_train_min <= self.k_train:
            raise UserError(
                f"{self.name}: k_train_min {self.k_train_min} is not in 1 … k_train {self.k_train}; change one of them"
            )
        for split, name in (("train", "k_train"), ("test", "k_test")):
            ks, given, unit = self.ks(split), self._length_range(split), self.tokens_per_place
            if not ks or min(ks) < 1:
                raise UserError(f"{self.name}: {name} {getattr(self, name)} must be 1 or more; raise it")
            if any(length % unit for length in given):
                raise UserError(
                    f"{self.name}: {split}_length {list(given)} must be multiples of {unit}, the tokens of one place"
                )
            if (most := max(ks)) * unit > given[1]:
                raise UserError(
                    f"{self.name}: k = {most} of {name} needs {most * unit} tokens, more than "
                    f"{split}_length {list(given)} allows; lower it or lengthen the samples"
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
    tokens_per_place: ClassVar[int] = 2

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Padding, the two selectors, the two bits; the label is one of the bits."""
        return ("<pad>", "off", "on", "0", "1")

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        places = sizes.length // 2
        width = int(places.max(initial=0))
        selected = draws.named("selectors").subset(between(0, places, width), sizes.k)
        bits = draws.named("bits").integers(2, width)
        prompt = np.empty((len(places), 2 * width), dtype=np.int64)
        prompt[:, ::2], prompt[:, 1::2] = np.where(selected, _ON, _OFF), _ZERO + bits
        planted = np.zeros(prompt.shape, dtype=bool)
        planted[:, 1::2] = selected
        label = _ZERO + (bits * selected).sum(axis=1) % 2
        return labelled_batch(prompt, sizes.length, label, planted)


@dataclass(frozen=True)
class Room:
    """Where planted tokens may stand in each sample."""

    k: np.ndarray
    """(B,) how many there are."""
    length: np.ndarray
    """(B,) tokens of the prompt."""
    window: np.ndarray
    """(B,) how many columns they may span: min(L_local + 1, l)."""


Positions = Callable[[Draws, Room], np.ndarray]
"""Q_pos: S* as (B, l) bool."""
Symbols = Callable[[Draws, int, int], np.ndarray]
"""Q_voc or the background: (B, columns) of {0 … number-1}, given the number of symbols and of columns."""
LabelFunction = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""g*: (B,) of {0 … number-1}, of the planted values (B, k) by column, where they are present (B, k), their number."""

# --- Q_pos: which columns are planted ---


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
    last, width = start + room.window - 1, int(room.length.max(initial=0))
    ends = between(start, start + 1, width) | (between(last, last + 1, width) & (room.k > 1)[:, None])
    inner = draws.named("columns").subset(between(start + 1, last, width), np.maximum(room.k - 2, 0))
    return ends | inner


# --- Q_voc and the background: which symbols stand there ---


def uniform_symbols(draws: Draws, number: int, columns: int) -> np.ndarray:
    """Independent, each symbol equally likely."""
    return draws.integers(number, columns)


def zipf_symbols(draws: Draws, number: int, columns: int) -> np.ndarray:
    """Independent, symbol r = 1, 2, … with a probability in proportion to 1/r."""
    weights = 1 / np.arange(1, number + 1)
    shares = np.cumsum(weights)[:-1] / weights.sum()
    return np.searchsorted(shares, draws.integers(1 << 31, columns) / (1 << 31), side="right")


def distinct_symbols(draws: Draws, number: int, columns: int) -> np.ndarray:
    """A uniform choice without repetition."""
    return draws.order(np.ones((len(draws.states), number), dtype=bool))[:, :columns]


# --- g*: what they decide ---


def sum_label(values: np.ndarray, present: np.ndarray, number: int) -> np.ndarray:
    """The sum modulo the number of symbols; the parity where there are two."""
    return (values * present).sum(axis=1) % number


def max_label(values: np.ndarray, present: np.ndarray, number: int) -> np.ndarray:
    """The largest value."""
    return np.where(present, values, 0).max(axis=1)


def first_label(values: np.ndarray, present: np.ndarray, number: int) -> np.ndarray:
    """The value that stands first."""
    return values[:, 0]


def random_label(values: np.ndarray, present: np.ndarray, number: int) -> np.ndarray:
    """The last value plus one fixed random function of those before it, in their order, modulo the number [ours].

    So every value decides, and of uniform values every label is equally likely.
    """
    last = present.sum(axis=1, keepdims=True) - 1
    before = np.arange(values.shape[1]) < last
    of_rest = row_hashes(np.where(before, values + 1, 0)) % np.uint64(number)
    return (np.take_along_axis(values, last, axis=1)[:, 0] + of_rest.astype(np.int64)) % number


# --- real text as the background ---

_TEXT_OF = {"train": "train", "test": "heldout"}
"""Which split of a corpus the samples of a split are drawn from."""


def _manifest(corpus: str) -> dict[str, Any]:
    """What a prepared corpus says of itself; read here, because `olmo_sparsity.data` makes batches of tasks."""
    return read_json(Path(corpus) / "manifest.json", "prepare the corpus again, with scripts/prepare_data.py")


@cache
def _vocabulary_size(corpus: str) -> int:
    return _manifest(corpus)["vocab_size"]


@cache
def _text(corpus: str, split: str) -> np.ndarray:
    """All tokens of a split of a prepared corpus, (n,)."""
    manifest = _manifest(corpus)
    files = manifest["splits"].get(_TEXT_OF[split], [])
    parts = [np.fromfile(Path(corpus, file["name"]), manifest["dtype"]) for file in files]
    if not files or [len(part) for part in parts] != [file["tokens"] for file in files]:
        raise UserError(
            f"planted: {corpus} has no {_TEXT_OF[split]} text, or not all of it; prepare it again"
        )
    return np.concatenate(parts)


def text_background(draws: Draws, corpus: str, lengths: np.ndarray, columns: int) -> np.ndarray:
    """Stretches of a corpus of ``lengths`` (B,) tokens that begin anywhere, (B, columns).

    Training text for training, held-out text for tests. What stands past a row's length is of no meaning.
    """
    text, longest = _text(corpus, draws.split), int(lengths.max(initial=0))
    if len(text) < longest:
        raise UserError(
            f"planted: {corpus} has {len(text):,} tokens in {_TEXT_OF[draws.split]}, too few for samples of "
            f"{longest:,}; give a larger corpus, or shorten the samples"
        )
    start = draws.integer(len(text) - lengths + 1)
    return text[np.minimum(start[:, None] + np.arange(columns), len(text) - 1)].astype(np.int64)


POSITIONS: dict[str, Positions] = {
    "uniform": uniform_positions,
    "adjacent": adjacent_positions,
    "stretched": stretched_positions,
}
BACKGROUNDS: dict[str, Symbols] = {"uniform": uniform_symbols, "zipf": zipf_symbols}
PLANTED: dict[str, Symbols] = {**BACKGROUNDS, "distinct": distinct_symbols}
LABELS: dict[str, LabelFunction] = {
    "sum": sum_label,
    "max": max_label,
    "first": first_label,
    "random": random_label,
}


@register("planted")
@dataclass(frozen=True)
class Planted(SparseTask):
    """k planted tokens in a background, and a label that is a function of them alone (docs/method.md 3.1 [paper]).

    A prompt of length l: S* of size k from the position distribution, tokens at S* from the planted distribution on
    V^k, the rest independent from the background, or [ours] real text. Planted and background symbols are different
    ones [ours], so that a prompt by itself tells S* and the label. Labels are planted symbols: the label is a token in
    column l, predicted at the last token of the prompt, and a sample has l + 1 tokens. Length is that of the prompt, l.

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
    planted_distribution: str = "uniform"
    """Q_voc: uniform, zipf or distinct."""
    background_distribution: str = "uniform"
    """The background: uniform or zipf."""
    label_function: str = "sum"
    """g*: sum (modulo `num_planted`), max, first or random."""
    locality: int | None = None
    """L_local: max S* - min S* is at most this. Null: no limit."""
    distance: tuple[int, int] | None = None
    """How many tokens before the label planted ones stand, fewest and most, both included. Null: anywhere."""
    decoys: float = 0.0
    """
    Which share of the background shows planted symbols that decide nothing, each alone between others [ours]: adjacent
    planted tokens are told by standing together, and not by what they are. Two decoys that would meet are one.
    """

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Padding, the background symbols (a, b, …), the planted symbols and labels (0, 1, …)."""
        return ("<pad>", *letter_names(self._backgrounds), *map(str, range(self.num_planted)))

    @property
    def _backgrounds(self) -> int:
        return self.num_background if self.text is None else _vocabulary_size(self.text)

    def largest_id(self, length: int) -> int:
        """That of the label."""
        return length + 1

    @property
    def _near_far(self) -> tuple[int, int | None]:
        return (1, None) if self.distance is None else self.distance

    def holds(self, length: int, k: int) -> bool:
        """See `SparseTask`; at the distances that are asked for."""
        near, far = self._near_far
        return k <= min(length, far or length) - near + 1

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        return np.maximum(super()._shortest(split, k), k + self._near_far[0] - 1)

    def _positions(self, sizes: Sizes, draws: Draws) -> np.ndarray:
        """S* as (B, l) bool."""
        near, far = self._near_far
        first = np.zeros_like(sizes.length) if far is None else np.maximum(sizes.length - far, 0)
        places = sizes.length - near + 1 - first
        reach = places if self.locality is None else np.minimum(self.locality + 1, places)
        chosen = POSITIONS[self.position_distribution](draws, Room(sizes.k, places, reach))
        rows, columns = np.nonzero(chosen)
        moved = np.zeros((len(chosen), int(sizes.length.max(initial=0))), dtype=bool)
        moved[rows, columns + first[rows]] = True
        return moved

    def _decoys(self, chosen: np.ndarray, sizes: Sizes, draws: Draws) -> np.ndarray:
        """Which columns show a planted symbol that decides nothing, (B, l) bool."""
        drawn = draws.integers(1 << 31, chosen.shape[1]) < self.decoys * (1 << 31)
        meets = chosen.copy()
        meets[:, 1:] |= chosen[:, :-1] | drawn[:, :-1]
        meets[:, :-1] |= chosen[:, 1:]
        return drawn & ~meets & between(0, sizes.length, chosen.shape[1])

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        width, most = int(sizes.length.max(initial=0)), int(sizes.k.max(initial=0))
        chosen = self._positions(sizes, draws.named("positions"))
        values = PLANTED[self.planted_distribution](draws.named("planted"), self.num_planted, most)
        present = between(0, sizes.k, most)
        label = LABELS[self.label_function](values, present, self.num_planted)
        of_background = draws.named("background")
        if self.text is None:
            prompt = 1 + BACKGROUNDS[self.background_distribution](of_background, self.num_background, width)
        else:
            prompt = 1 + text_background(of_background, self.text, sizes.length, width)
        first_planted = 1 + self._backgrounds
        if self.decoys:
            decoys = self._decoys(chosen, sizes, draws.named("decoys"))
            symbols = first_planted + draws.named("of decoys").integers(self.num_planted, width)
            prompt[decoys] = symbols[decoys]
        prompt[chosen] = first_planted + values[present]
        batch = labelled_batch(prompt, sizes.length, first_planted + label, chosen)
        with_label = np.pad(chosen, ((0, 0), (0, 1)))  # its column is l, so that its id is l + 1 already
        ids = np.where(with_label, sizes.length[:, None] + 1, 1 + np.arange(width + 1))
        return replace(batch, coupled_ids=np.where(between(0, batch.lengths, width + 1), ids, 0))

    def _check(self) -> None:
        super()._check()
        most = max(self.k_train, *self.k_test)
        for name, choices in (
            ("position_distribution", POSITIONS),
            ("planted_distribution", PLANTED),
            ("background_distribution", BACKGROUNDS),
            ("label_function", LABELS),
        ):
            if getattr(self, name) not in choices:
                raise UserError(
                    f"planted: unknown {name} {getattr(self, name)!r}; choose one of {', '.join(choices)}"
                )
        if self.num_planted < 2 or self.num_background < 1:
            raise UserError("planted: num_planted must be 2 or more and num_background 1 or more; raise them")
        if self.planted_distribution == "distinct" and self.num_planted < most:
            raise UserError(
                f"planted: {most} distinct planted tokens need as many symbols; raise num_planted {self.num_planted}"
            )
        self._check_distance(most)
        alone = min(*self.ks("train"), *self.k_test) == 1
        if not 0 <= self.decoys < 1 or (self.decoys and (alone or self.position_distribution != "adjacent")):
            raise UserError(
                f"planted: decoys {self.decoys} is a share below 1, for position_distribution adjacent and every k 2 "
                "or more, which tell planted tokens from decoys; set k_train_min and k_test so, or decoys to 0"
            )
        if self.locality is not None and self.locality + 1 < most:
            raise UserError(
                f"planted: {most} planted tokens do not fit in locality {self.locality}; raise it to {most - 1}"
            )

    def _check_distance(self, most: int) -> None:
        """Raise `UserError` where it is no range, or where not all of ``most`` planted tokens have a place in it."""
        given = list(self.distance or (1, most))
        if len(given) != 2 or not 1 <= given[0] <= given[1] - most + 1:
            raise UserError(
                f"planted: distance {given} is no range of tokens before the label with room for {most}; give the "
                "fewest and the most"
            )
        for split in SPLITS:
            longest, k = self._length_range(split)[1], max(self.ks(split))
            if not self.holds(longest, k):
                raise UserError(
                    f"planted: the longest prompt of {split}_length, {longest}, has no room for {k} planted tokens at "
                    f"distance {given}; lower it or lengthen the samples"
                )
