"""How chosen far tokens are kept for the model (docs/method.md, 2.2a [ours]): at what level, in what unit.

As *text* the model reads the subsequence: chosen tokens are read without their neighbours (2.2). As *cache* it has read
the whole context, and only the chosen tokens' keys and values are left for the short context and the target. Between
the two, it has read the chosen tokens and the w before each, and keeps the chosen ones alone (`READ`). All of them with
the first s far tokens, the attention sinks, which are counted apart.
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
from analysis.policies.policy import Keep
from analysis.selectors import Selection
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

LEVELS = ("text", "cache")
UNITS = ("token", "word", "neighbors")
"""What one of the k is: a token; the word that it is a part of; the token with the one before and the one after it."""
WINDOWS = ("before", "behind", "ranked", "drawn")
"""Units with a number w behind a colon. What stands beside the k chosen tokens: the w tokens before each; the w behind
each; or as many as ``before`` adds, the next ones of the same ranking, or drawn ones [ours]."""
READ = {"read": "before", "read-behind": "behind", "read-ranked": "ranked", "read-drawn": "drawn"}
"""Units of a cache, also with w: the model reads chosen tokens and windows, and the chosen ones alone are kept."""
WRITTEN = "LEVEL[:SINKS][/UNIT[:W]]"
"""How a way of keeping is written."""
_FORM = re.compile(r"(?P<level>\w+)(?::(?P<sinks>\d+))?(?:/(?P<unit>[\w-]+)(?::(?P<width>\d+))?)?")
Subsets = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From rows of the targets and the far columns of each, (R, j), to their losses, (R,)."""


@dataclass(frozen=True)
class KeptAs:
    """A level, a unit and a number of sinks, written `WRITTEN`, such as ``cache:4``, ``text/word``, ``cache:4/read:2``.

    ``unit`` is one of `UNITS`, or one of `WINDOWS` or `READ` with its w, such as ``before:2``.
    """

    level: str = "text"
    unit: str = "token"
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> KeptAs:
        """Raises `UserError` where the text is none of these."""
        match = _FORM.fullmatch(text)
        unit = UNITS[0]
        if match:
            unit = match["unit"] or unit
        if match is None or match["level"] not in LEVELS or unit not in (*UNITS, *WINDOWS, *READ):
            raise UserError(
                f"{text!r} is no way to keep tokens; write {WRITTEN}, such as cache:4, text/word or text:4/before:2, "
                f"with a level of {', '.join(LEVELS)} and a unit of {', '.join(UNITS)}, or with W of "
                f"{', '.join((*WINDOWS, *READ))}"
            )
        if match["width"] is not None:
            if unit in UNITS:
                raise UserError(f"{text!r}: the unit {unit} has no number behind it; leave it out")
            unit = f"{unit}:{int(match['width'])}"
        elif unit not in UNITS:
            raise UserError(f"{text!r}: say how many tokens its windows have, such as {unit}:2")
        kept_as = cls(match["level"], unit, int(match["sinks"] or 0))
        if kept_as.level == "text" and kept_as.name in READ:
            raise UserError(
                f"{text!r}: as text all tokens that are read are kept; write {READ[kept_as.name]} in place of "
                f"{kept_as.name}, or cache in place of text"
            )
        return kept_as

    @property
    def columns(self) -> dict[str, str | int]:
        """As columns of `analysis.measurement.Measurement.choices`."""
        return {"level": self.level, "unit": self.unit, "sinks": self.sinks}

    @property
    def name(self) -> str:
        """The unit without its w."""
        return self.unit.partition(":")[0]

    @property
    def width(self) -> int:
        """w; 0 of a unit that has none."""
        return int(self.unit.partition(":")[2] or 0)

    @property
    def windows(self) -> str:
        """Which of `WINDOWS` the model reads beside the chosen tokens; empty: none."""
        if self.unit in UNITS:
            return ""
        return READ.get(self.name, self.name)

    @property
    def reads_all(self) -> bool:
        """Whether the model reads all far tokens, whatever is chosen."""
        return self.level == "cache" and self.name not in READ

    def ranks(self, k: int, n_far: int, ranked_without: int = 0) -> int:
        """How many of F far tokens a selector must rank, so that k can be kept: sinks may be among them.

        ``ranked_without``: so many sinks are no candidates of the selector.
        """
        count = k
        if self.windows == "ranked":
            count = k * (1 + self.width)
        return min(count + max(0, self.sinks - ranked_without), n_far - ranked_without)

    def first(self, choice: Selection, words: np.ndarray, count: int) -> np.ndarray:
        """The first chosen tokens that are no sinks, most influential first, (m, count); of each word only one.

        ``words``: (m, F) number of the word of every far token. Raises `UserError` where the selector scored too few.
        """
        if not self.sinks and (self.unit == "token" or self.windows):
            self._check_count(choice.columns[0], count)
            return choice.columns[:, :count]
        ranked = choice.columns
        is_open = np.arange(words.shape[1]) >= self.sinks
        is_open = np.broadcast_to(is_open, words.shape)
        if choice.scores is not None:
            scores = np.where(np.isnan(choice.scores), -np.inf, choice.scores)
            ranked = np.argsort(-scores, axis=1, kind="stable")
            is_open = is_open & ~np.isnan(choice.scores)  # screened, tokens that were not proposed have none
        tokens = []
        for row, of_words, may_be_chosen in zip(ranked, words, is_open, strict=True):
            row = row[may_be_chosen[row]]
            if self.unit == "word":
                _, first_of_word = np.unique(of_words[row], return_index=True)
                row = row[np.sort(first_of_word)]
            self._check_count(row, count)
            tokens.append(row[:count])
        return np.stack(tokens)

    def _check_count(self, tokens: np.ndarray, count: int) -> None:
        """Raise `UserError` where there are fewer tokens to choose from."""
        if len(tokens) < count:
            what = "tokens"
            if self.unit == "word":
                what = "words"
            raise UserError(
                f"the far context has no {count} {what} to choose, or the selector does not score so many; lower the "
                "largest k, or raise n_long or, of a screened selector, m"
            )

    def kept(self, first: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Which far tokens are kept with the tokens ``first``, (m, k), and the sinks, without windows: (m, F) bool."""
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

    def masks(
        self, choice: Selection, words: np.ndarray, k: int, orders: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which far tokens the model reads of the first k chosen ones, and which are kept, (m, F) bool both.

        ``words``: (m, F); ``orders``: `drawn_orders`, (m, F).
        """
        kept = self.kept(self.first(choice, words, k), words)
        read = kept
        if self.windows:
            read = self._with_windows(kept, choice, words, k, orders)
        if self.name not in READ:
            kept = read
        if self.reads_all:
            read = np.ones_like(kept)
        return read, kept

    def _with_windows(
        self, single: np.ndarray, choice: Selection, words: np.ndarray, k: int, orders: np.ndarray
    ) -> np.ndarray:
        """The tokens ``single``, (m, F), the sinks and the first k, with what stands beside them in `WINDOWS`."""
        distance = self.first(choice, words, k)[:, :, None] - np.arange(single.shape[1])
        if self.windows == "behind":
            distance = -distance
        inside = (distance >= 0) & (distance <= self.width)
        in_windows = single | inside.any(axis=1)
        if self.windows in ("before", "behind"):
            return in_windows
        as_many = single.copy()
        added = in_windows.sum(axis=1) - single.sum(axis=1)
        if self.windows == "ranked":
            orders = self.first(choice, words, k + int(added.max()))
        for row, order, count in zip(as_many, orders, added, strict=True):
            others = order[~row[order]]
            row[others[:count]] = True
        return as_many

    def token_counts(
        self,
        contexts: Contexts,
        targets: np.ndarray,
        choice: Selection,
        words: np.ndarray,
        ks: Sequence[int],
        seed: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """How many far tokens the model reads, and how many are kept, sinks included, (m, K) both.

        The arguments are those of `losses`.
        """
        orders = drawn_orders(contexts, targets, seed)
        read_counts = []
        kept_counts = []
        for k in ks:
            read, kept = self.masks(choice, words, k, orders)
            read_counts.append(read.sum(axis=1))
            kept_counts.append(kept.sum(axis=1))
        return np.stack(read_counts, axis=1), np.stack(kept_counts, axis=1)

    def losses(
        self,
        scorer: Scorer,
        contexts: Contexts,
        targets: np.ndarray,
        choice: Selection,
        words: np.ndarray,
        ks: Sequence[int],
        seed: int = 0,
    ) -> np.ndarray:
        """L_k = loss(t | C_short and the first k chosen), (m, K) nats, at this level.

        ``targets``: (m, 2) as in `Scorer.losses`; ``words``: (m, F); ``seed``: of what ``drawn`` draws.
        """
        if self.level == "cache" and self.unit == "token" and choice.by_head is not None:
            if choice.keep is not None:
                by_k = [self._kept_by_head(choice.by_head, choice.keep, k) for k in ks]
                return far_cache.losses_of_masks(scorer, contexts, by_k, targets)
            open_to_choice = choice.by_head.copy()  # (m, G, F)
            open_to_choice[..., : self.sinks] = -np.inf
            ranked = np.argsort(-open_to_choice, axis=-1, kind="stable")
            sinks = np.broadcast_to(np.arange(self.sinks), (*ranked.shape[:-1], self.sinks))
            by_k = [np.concatenate([sinks, ranked[..., :k]], axis=-1) for k in ks]
            return far_cache.losses_by_head(scorer, contexts, by_k, targets)
        orders = drawn_orders(contexts, targets, seed)
        masks = [self.masks(choice, words, k, orders) for k in ks]
        if self.reads_all:
            visible = np.stack([kept for _, kept in masks], axis=1)
            return far_cache.measures(scorer, contexts, visible, ("loss",), targets)[..., 0]

        def as_text(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
            return scorer.losses(contexts, far[:, None], targets[rows])[:, 0]

        losses = []
        for read, kept in masks:
            if self.level == "text":
                losses.append(_by_count(kept, as_text))
                continue
            columns = np.nonzero(kept)[1].reshape(len(targets), -1)  # as many of every target

            def in_part_read(rows: np.ndarray, far: np.ndarray, columns: np.ndarray = columns) -> np.ndarray:
                return far_cache.part_read_losses(scorer, contexts, far, columns[rows], targets[rows])

            losses.append(_by_count(read, in_part_read))
        return np.stack(losses, axis=1)

    def _kept_by_head(self, by_head: np.ndarray, keep: Keep, k: int) -> np.ndarray:
        """Which far keys heads keep beside the sinks, k in the mean, (m, G, F) bool."""
        kept = np.ones(by_head.shape, dtype=bool)
        kept[..., self.sinks :] = keep(by_head[..., self.sinks :], k)
        return kept

    def base_losses(self, scorer: Scorer, contexts: Contexts, targets: np.ndarray) -> np.ndarray:
        """Loss with the sinks alone, k = 0, (m,) nats; without sinks L_short. ``targets``: as in `losses`."""
        sinks = np.arange(self.sinks)
        if self.reads_all and self.sinks:
            visible = far_cache.subset_masks(sinks[None], contexts.n_far)
            return far_cache.measures(scorer, contexts, visible, ("loss",), targets)[:, 0, 0]
        return scorer.losses(contexts, sinks[None], targets)[:, 0]


def drawn_orders(contexts: Contexts, targets: np.ndarray, seed: int) -> np.ndarray:
    """A random order of the far tokens for each target, (m, F), a pure function of (seed, target)."""
    block, offset = targets.T
    orders = []
    for target in contexts.target_id[block, offset]:
        generator = np.random.default_rng([Stream.DRAWN_TOKENS, seed, target])
        orders.append(generator.permutation(contexts.n_far))
    return np.stack(orders)


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
