"""How chosen far tokens are kept for the model (docs/method.md, 2.2a [ours]): at what level, in what unit.

As *text* the model reads the subsequence: chosen tokens are read without their neighbours (2.2). As *cache* it has read
the whole context, and only the chosen tokens' keys and values are left for the short context and the target. Between
the two, it has read the chosen tokens and the w before each, and keeps the chosen ones alone (`READ`). All of them with
the first s far tokens, the attention sinks, which are counted apart.
Shapes: n blocks of B targets, m targets, N long and M short context length, F far tokens, j of them kept, K values of
k, R rows of one pass, G heads of keys and values, D head dimension.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.contexts import Contexts
from analysis.model.adapter import KeyValues
from analysis.model.losses import CACHE_TOKENS, Scorer, retry_smaller_on_oom
from analysis.model.on_device import chunks
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

    def ranks(self, k: int, n_far: int) -> int:
        """How many of F far tokens a selector must rank, so that k can be kept: sinks may be among them."""
        count = k
        if self.windows == "ranked":
            count = k * (1 + self.width)
        return min(count + self.sinks, n_far)

    def first(self, choice: Selection, words: np.ndarray, count: int) -> np.ndarray:
        """The first chosen tokens that are no sinks, most influential first, (m, count); of each word only one.

        ``words``: (m, F) number of the word of every far token.
        """
        if not self.sinks and (self.unit == "token" or self.windows):
            self._check_count(choice.columns[0], count)
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
                f"the far context has no {count} {what} to choose; lower the largest k, or raise n_long"
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
        far_cache: KeyValues = []
        if self.reads_all:
            far_cache = far_key_values(scorer, contexts)
        losses = []
        if self.level == "cache" and self.unit == "token" and choice.by_head is not None:
            open_to_choice = choice.by_head.copy()  # (m, layers, heads, F)
            open_to_choice[..., : self.sinks] = -np.inf
            ranked = np.argsort(-open_to_choice, axis=-1, kind="stable")
            sinks = np.broadcast_to(np.arange(self.sinks), (*ranked.shape[:-1], self.sinks))
            for k in ks:
                kept = np.concatenate([sinks, ranked[..., :k]], axis=-1)
                kept.sort(axis=-1)
                losses.append(cache_losses(scorer, contexts, far_cache, kept, targets))
            return np.stack(losses, axis=1)

        def as_text(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
            return scorer.losses(contexts, far[:, None], targets[rows])[:, 0]

        def in_cache(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
            return cache_losses(scorer, contexts, far_cache, far, targets[rows])

        orders = drawn_orders(contexts, targets, seed)
        for k in ks:
            read, kept = self.masks(choice, words, k, orders)
            if self.level == "text":
                losses.append(_by_count(kept, as_text))
            elif self.reads_all:
                losses.append(_by_count(kept, in_cache))
            else:
                losses.append(read_losses(scorer, contexts, read, kept, targets))
        return np.stack(losses, axis=1)

    def base_losses(self, scorer: Scorer, contexts: Contexts, targets: np.ndarray) -> np.ndarray:
        """Loss with the sinks alone, k = 0, (m,) nats; without sinks L_short. ``targets``: as in `losses`."""
        sinks = np.arange(self.sinks)
        if self.reads_all and self.sinks:
            kept = np.tile(sinks, (len(targets), 1))
            return cache_losses(scorer, contexts, far_key_values(scorer, contexts), kept, targets)
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


def read_losses(
    scorer: Scorer, contexts: Contexts, read: np.ndarray, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """-log p of each target where a part of the far tokens is read, and a part of these left in the cache, (m,) nats.

    What is read is one subsequence, every token at its own position id. The short context sees what is kept.

    Args:
        scorer: computes them.
        contexts: n blocks.
        read: which far tokens are read, (m, F) bool.
        kept: which of these are kept, (m, F) bool, as many for every target.
        targets: (m, 2) block and place in it of each target.
    """
    _, kept_columns = np.nonzero(kept)
    kept_columns = kept_columns.reshape(len(targets), -1)

    def of_some(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
        return _part_read_losses(scorer, contexts, far, kept_columns[rows], targets[rows])

    return _by_count(read, of_some)


@retry_smaller_on_oom
@torch.inference_mode()
def _part_read_losses(
    scorer: Scorer, contexts: Contexts, read: np.ndarray, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """`read_losses` of far columns that are read, (m, j), and kept, (m, i), both ascending."""
    losses = np.empty(len(targets))
    rows_by_tokens = scorer.tokens_per_batch // read.shape[1]
    rows_by_cache = CACHE_TOKENS * scorer.tokens_per_batch // contexts.n_far
    for rows in chunks(np.arange(len(targets)), min(rows_by_tokens, rows_by_cache)):
        block, offset = targets[rows].T
        tokens = scorer.tensor(contexts.tokens[block[:, None], read[rows]])
        ids = scorer.tensor(read[rows])
        far_cache = []
        for keys, values in scorer.model.key_values(tokens, ids):
            keys = _at_columns(keys, ids, contexts.n_far)
            values = _at_columns(values, ids, contexts.n_far)
            far_cache.append((keys, values))
        # every target has a far cache, as if it were a block by itself
        places = np.stack([np.arange(len(rows)), offset], axis=1)
        losses[rows] = cache_losses(scorer, contexts.take(block), far_cache, kept[rows], places)
    return losses


def _at_columns(values: Tensor, columns: Tensor, n_far: int) -> Tensor:
    """Keys or values (R, G, j, D) at their far columns (R, j), zeros at the others, (R, G, F, D)."""
    rows, heads, _, size = values.shape
    index = columns[:, None, :, None].expand_as(values)
    return values.new_zeros(rows, heads, n_far, size).scatter(2, index, values)


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


# --- what is left in the cache ---


@retry_smaller_on_oom
@torch.inference_mode()
def far_key_values(scorer: Scorer, contexts: Contexts) -> KeyValues:
    """Keys and values of all far tokens of every block, each (n, G, F, D), a pair per layer."""
    return scorer.prefixes(contexts, contexts.n_far)


@retry_smaller_on_oom
@torch.inference_mode()
def cache_losses(
    scorer: Scorer, contexts: Contexts, far_cache: KeyValues, kept: np.ndarray, targets: np.ndarray
) -> np.ndarray:
    """-log p of each target where j far tokens are left in the cache, (m,) nats.

    Args:
        scorer: computes them.
        contexts: n blocks.
        far_cache: `far_key_values` of them.
        kept: columns of the far context: (m, j), ascending, the same in every layer and head; or (m, layers, G, j).
        targets: (m, 2) block and place in it of each target.

    Raises `UserError` where every head has columns of its own and the model's cached keys need their position ids.
    """
    by_head = kept.ndim > 2
    if by_head and not scorer.model.caches_rotated_keys:
        raise UserError(
            "this model rotates keys when they are read, so heads cannot keep tokens of their own; convert it with "
            "olmo-sparsity export_hf, or leave the eviction policies out"
        )
    losses = np.empty(len(targets))
    count = kept.shape[-1]
    longest = contexts.n_short + contexts.targets_per_block
    rows_by_tokens = scorer.tokens_per_batch // longest
    rows_by_cache = CACHE_TOKENS * scorer.tokens_per_batch // (longest + count)
    order = np.argsort(targets[:, 1], kind="stable")
    for rows in chunks(order, min(rows_by_tokens, rows_by_cache)):
        block, offset = targets[rows].T
        behind = contexts.n_far + np.arange(contexts.n_short + offset.max())
        kept_ids = kept[rows]
        if by_head:
            # heads differ, and the ids of cached tokens are not read
            kept_ids = np.zeros((len(rows), count), dtype=np.int64)
        ids = np.concatenate([kept_ids, np.broadcast_to(behind, (len(rows), len(behind)))], axis=1)
        past = _kept_key_values(far_cache, scorer.tensor(block), scorer.tensor(kept[rows]))
        tokens = scorer.tensor(contexts.tokens[block[:, None], behind])
        queries = int(np.ptp(offset)) + 1
        logits = scorer.model.logits_after(past, tokens, scorer.tensor(ids), queries)
        of_target = logits[torch.arange(len(rows)), scorer.tensor(offset - offset.min())].float()
        target_tokens = scorer.tensor(contexts.targets[block, offset])
        of_rows = F.cross_entropy(of_target, target_tokens, reduction="none")
        losses[rows] = of_rows.double().cpu().numpy()
    return losses


def _kept_key_values(far_cache: KeyValues, block: Tensor, kept: Tensor) -> KeyValues:
    """The keys and values of the kept columns, (R, j) or (R, layers, G, j), of the far contexts of some blocks (R,)."""
    first_keys, _ = far_cache[0]
    key_heads = first_keys.shape[1]
    if kept.ndim == 2:
        kept = kept[:, None, None]
    kept = kept.expand(-1, len(far_cache), key_heads, -1)
    rows = block[:, None, None]
    heads = torch.arange(key_heads, device=block.device)[:, None]
    layers = []
    for layer, (keys, values) in enumerate(far_cache):
        columns = kept[:, layer]
        layers.append((keys[rows, heads, columns], values[rows, heads, columns]))
    return layers
