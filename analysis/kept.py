"""How chosen far tokens are kept for the model (docs/method.md, 2.2a [ours]): at what level, in what unit.

As *text* the model reads the subsequence: chosen tokens are read without their neighbours (2.2). As *cache* it has read
the whole context, and only the chosen tokens' keys and values are left for the short context and the target. Either
with the first s far tokens, the attention sinks, which are counted apart.
Shapes: n blocks of B targets, m targets, N long and M short context length, F far tokens, j of them kept, K values of
k.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.contexts import Contexts
from analysis.model import far_cache
from analysis.model.losses import Scorer
from analysis.selectors import Selection
from olmo_sparsity.util.errors import UserError

LEVELS = ("text", "cache")
UNITS = ("token", "word", "neighbors")
"""What one of the k is: a token; the word that it is a part of; the token with the one before and the one after it."""
Subsets = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From rows of the targets and the far columns of each, (R, j), to their losses, (R,)."""


@dataclass(frozen=True)
class KeptAs:
    """A level, a unit and a number of sinks, written ``LEVEL[:SINKS][/UNIT]``, such as ``cache:4`` or ``text/word``."""

    level: str = "text"
    unit: str = "token"
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> KeptAs:
        """Raises `UserError` where the text is none of these."""
        match = re.fullmatch(r"(\w+)(?::(\d+))?(?:/(\w+))?", text)
        if match:
            level, sinks, unit = match.groups()
            if level in LEVELS and unit in (None, *UNITS):
                return cls(level, unit or UNITS[0], int(sinks or 0))
        raise UserError(
            f"{text!r} is no way to keep tokens; write LEVEL[:SINKS][/UNIT], such as cache:4 or text/word, "
            f"with a level of {', '.join(LEVELS)} and a unit of {', '.join(UNITS)}"
        )

    @property
    def columns(self) -> dict[str, str | int]:
        """As columns of `analysis.measurement.Measurement.choices`."""
        return {"level": self.level, "unit": self.unit, "sinks": self.sinks}

    def first(self, choice: Selection, words: np.ndarray, count: int) -> np.ndarray:
        """The first chosen tokens that are no sinks, most influential first, (m, count); of each word only one.

        ``words``: (m, F) number of the word of every far token.
        """
        if self.unit == "token" and not self.sinks:
            return choice.columns[:, :count]
        ranked = choice.columns
        if choice.scores is not None:
            scores = np.where(np.isnan(choice.scores), -np.inf, choice.scores)
            ranked = np.argsort(-scores, axis=1, kind="stable")
        tokens = []
        for row, of_words in zip(ranked, words, strict=True):
            row = row[row >= self.sinks]
            if self.unit == "word":
                _, first_of_word = np.unique(of_words[row], return_index=True)
                row = row[np.sort(first_of_word)]
            if len(row) < count:
                raise UserError(
                    f"the far context has no {count} {self.unit}s to choose; lower the largest k, or raise n_long"
                )
            tokens.append(row[:count])
        return np.stack(tokens)

    def kept(self, first: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Which far tokens are kept with the tokens ``first``, (m, k), and the sinks, (m, F) bool."""
        kept = np.zeros(words.shape, dtype=bool)
        np.put_along_axis(kept, first, True, axis=1)
        if self.unit == "word":
            for row, of_words, tokens in zip(kept, words, first, strict=True):
                row[np.isin(of_words, of_words[tokens])] = True
        elif self.unit == "neighbors":
            alone = kept.copy()
            kept[:, 1:] |= alone[:, :-1]
            kept[:, :-1] |= alone[:, 1:]
        kept[:, : self.sinks] = True
        return kept

    def losses(
        self,
        scorer: Scorer,
        contexts: Contexts,
        targets: np.ndarray,
        choice: Selection,
        words: np.ndarray,
        ks: Sequence[int],
    ) -> np.ndarray:
        """L_k = loss(t | C_short and the first k chosen), (m, K) nats, at this level.

        ``targets``: (m, 2) as in `Scorer.losses`; ``words``: (m, F).
        """
        if self.level == "cache" and self.unit == "token" and choice.by_head is not None:
            open_to_choice = choice.by_head.copy()  # (m, layers, heads, F)
            open_to_choice[..., : self.sinks] = -np.inf
            ranked = np.argsort(-open_to_choice, axis=-1, kind="stable")
            sinks = np.broadcast_to(np.arange(self.sinks), (*ranked.shape[:-1], self.sinks))
            by_k = [np.concatenate([sinks, ranked[..., :k]], axis=-1) for k in ks]
            return far_cache.losses_by_head(scorer, contexts, by_k, targets)
        first = self.first(choice, words, ks[-1])
        masks = [self.kept(first[:, :k], words) for k in ks]
        if self.level == "cache":
            visible = np.stack(masks, axis=1)
            return far_cache.measures(scorer, contexts, visible, ("loss",), targets)[..., 0]

        def as_text(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
            return scorer.losses(contexts, far[:, None], targets[rows])[:, 0]

        return np.stack([_by_count(kept, as_text) for kept in masks], axis=1)


def _by_count(kept: np.ndarray, losses: Subsets) -> np.ndarray:
    """Losses (m,) of subsets (m, F) bool, those of the same number of tokens together."""
    values = np.empty(len(kept))
    count = kept.sum(axis=1)
    for kept_count in np.unique(count):
        rows = np.flatnonzero(count == kept_count)
        _, columns = np.nonzero(kept[rows])
        values[rows] = losses(rows, columns.reshape(len(rows), kept_count))
    return values


def word_numbers(pieces: Sequence[str]) -> np.ndarray:
    """Number of the word that each piece of a text is a part of, (L,): one is a run of letters and digits [ours].

    A piece without text of its own, such as a part of a character, belongs to the word before it.
    """
    starts = []
    previous = ""
    for piece in pieces:
        goes_on = piece[:1].isalnum() and previous[-1:].isalnum()
        starts.append(bool(piece) and not goes_on)
        previous = piece or previous
    return np.cumsum(starts)
