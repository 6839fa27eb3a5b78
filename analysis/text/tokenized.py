"""A text as tokens, and where the placebos of its targets come from: what `analysis.notebook` reads.

Shapes: T tokens of a text, n targets, N long and M short context length, F = N - M far tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.text.contexts import SampledTargets
from analysis.text.decode import TextDecoder
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream


@dataclass(frozen=True)
class Passage:
    """A text as tokens."""

    ids: np.ndarray
    """(T,) int64."""
    special: np.ndarray
    """(T,) whether each is a special token of the tokenizer."""
    pieces: list[str]
    """Text of each, T strings."""

    @property
    def plain(self) -> np.ndarray:
        """Positions, ascending, of the tokens that are not special."""
        return np.flatnonzero(~self.special)

    @property
    def bounds(self) -> tuple[int, int]:
        """First token, and one past the last, without special tokens around the text."""
        plain = self.plain
        return (int(plain[0]), int(plain[-1]) + 1) if len(plain) else (0, 0)


@dataclass(frozen=True)
class Passages:
    """Texts by number, as `analysis.text.contexts.Documents`."""

    passages: list[Passage]

    def document(self, number: int) -> np.ndarray:
        """Token ids of one text, (T,)."""
        return self.passages[number].ids


def read_passage(tokenizer: Any, text: Any, what: str, *, add_special_tokens: bool) -> Passage:
    """Tokenize a text, whole, with a tokenizer of transformers; ``what`` names the text in messages.

    No offsets are asked for, which slow tokenizers do not have. Raises `UserError` where either is something else.
    """
    if not isinstance(text, str):
        raise UserError(f"{what} is a {type(text).__name__}; give one string")
    if not (callable(tokenizer) and hasattr(tokenizer, "all_special_ids")):
        raise UserError(
            f"tokenizer is a {type(tokenizer).__name__}, not one of transformers; load it with "
            "AutoTokenizer.from_pretrained, or wrap it in PreTrainedTokenizerFast"
        )
    # not verbose: that a text is longer than the model's window is no mistake here
    encoded = tokenizer(
        text, add_special_tokens=add_special_tokens, truncation=False, padding=False, verbose=False
    )
    ids = np.array(encoded["input_ids"], dtype=np.int64)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(token for token, about in added.items() if about.special)}
    return Passage(
        ids, np.isin(ids, list(special)), TextDecoder.from_transformers(tokenizer).pieces(ids.tolist())
    )


@dataclass(frozen=True)
class Placebos:
    """The placebo far contexts: from another text, or from far away in the same one."""

    passage: Passage
    other: Passage | None
    n_long: int
    n_far: int
    targets_per_block: int
    seed: int

    def __post_init__(self) -> None:
        first, end = self.source.bounds
        if self.other is not None and end - first < self.n_far:
            raise UserError(
                f"placebo_text has {end - first:,} tokens, and a placebo takes {self.n_far:,}; give a "
                "longer one, or lower n_long"
            )

    @property
    def source(self) -> Passage:
        """The text that placebos come from."""
        return self.passage if self.other is None else self.other

    def starts(self, positions: np.ndarray) -> np.ndarray:
        """Where the placebo of each target begins in `source`, (n,); -1 where there is no room for one [ours].

        Blocks of B targets follow one another from the first target that there can be, and share their placebo.
        """
        first, end = self.source.bounds
        begins, block = np.unique(
            positions - (positions - self.n_long) % self.targets_per_block, return_inverse=True
        )
        starts = np.full(len(begins), -1)
        for row, position in enumerate(begins.tolist()):
            places = np.arange(first, end - self.n_far + 1)
            if self.other is None:
                before = places + self.n_far + 2 * self.n_long <= position
                behind = places >= position + self.targets_per_block + self.n_long
                places = places[before | behind]
            if len(places):
                starts[row] = np.random.default_rng([Stream.PASSAGE_PLACEBOS, self.seed, position]).choice(
                    places
                )
        return starts[block]

    def sample(self, positions: np.ndarray) -> SampledTargets:
        """Targets at these positions of text 0, whose placebos come from it or from text 1."""
        zeros = np.zeros_like(positions)
        return SampledTargets(zeros, positions, zeros + (self.other is not None), self.starts(positions))

    def pieces(self, start: int) -> list[str]:
        """Text of one of them."""
        return self.source.pieces[start : start + self.n_far]

    def describe(self, *, found: bool) -> str:
        """Where placebos come from, or why there are none."""
        if self.other is not None:
            return "placebo_text"
        if found:
            return f"the text itself, at least {self.n_long:,} tokens away from target and long context"
        first, end = self.passage.bounds
        around = len(self.passage.ids) - (end - first)
        # a block of targets in the middle needs room on one side of it
        enough = 3 * self.n_long + 2 * self.n_far + self.targets_per_block - 1 + around
        return (
            f"none: the text has {len(self.passage.ids):,} tokens, with too few of them far enough away from some "
            f"targets; give placebo_text, or a text of at least {enough:,} tokens"
        )
