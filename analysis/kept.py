"""How chosen far tokens are kept for the model (docs/method.md, 2.2a [ours]): at what level, in what unit.

As *text* the model reads the subsequence: chosen tokens are read without their neighbours (2.2). As *cache* it has read
the whole context, and only the chosen tokens' keys and values are left for the short context and the target. Either
with the first s far tokens, the attention sinks, which are counted apart.
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
        far_cache: KeyValues = []
        if self.level == "cache":
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

        def subset_losses(rows: np.ndarray, far: np.ndarray) -> np.ndarray:
            if self.level == "cache":
                return cache_losses(scorer, contexts, far_cache, far, targets[rows])
            return scorer.losses(contexts, far[:, None], targets[rows])[:, 0]

        first = self.first(choice, words, ks[-1])
        for k in ks:
            kept = self.kept(first[:, :k], words)
            losses.append(_by_count(kept, subset_losses))
        return np.stack(losses, axis=1)


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
