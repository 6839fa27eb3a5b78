"""The long contexts of blocks of targets, and their placebos.

A *block* [ours] is B targets that follow one another and share a far context (docs/method.md, 2.1); B = 1 is a target
by itself. Shapes: n blocks, B targets of each, N long and M short context length of the first of them, F = N - M far
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.settings import ContextSettings
from analysis.texts import Texts
from olmo_sparsity.util.rng import Stream

NO_FAR = np.empty((1, 0), dtype=np.int64)
"""The empty subset of the far tokens, (1, 0): the short context alone."""
TRUE, PLACEBO = "true", "placebo"
"""The target's own far context, and that of another text."""
SAME_GROUP, SHUFFLED, OTHER_TARGET = "same-group", "shuffled", "other-target"
"""Far contexts beside the true one and the placebo: from elsewhere in the target's group; in random order; and the true
one, with the tokens that were chosen for another target of the block."""


def placebo_column(far_context: str) -> str:
    """The column of the targets that has the loss given the long context with this placebo in it."""
    return f"loss_{far_context.replace('-', '_')}_nats"


@dataclass(frozen=True)
class Contexts:
    """Long contexts of n blocks (docs/method.md, 2.1)."""

    tokens: np.ndarray
    """(n, N + B - 1) int64; the first F columns are the far context, M short ones follow, and all targets but the last.
    Target b is given the columns before N + b."""
    targets: np.ndarray
    """(n, B) int64."""
    target_id: np.ndarray
    """(n, B) int64, stable number of each target."""
    n_short: int
    """M."""
    ids: np.ndarray | None = None
    """(N + B - 1,) position ids of the columns, the same in all blocks; None: column j has the id j."""

    @property
    def position_ids(self) -> np.ndarray:
        """(N + B - 1,) position ids of the columns."""
        if self.ids is None:
            return np.arange(self.tokens.shape[1])
        return self.ids

    @property
    def targets_per_block(self) -> int:
        """B."""
        return self.targets.shape[1]

    @property
    def n_long(self) -> int:
        """N."""
        return self.tokens.shape[1] - self.targets_per_block + 1

    @property
    def n_far(self) -> int:
        """F, the number of far tokens: the candidates."""
        return self.n_long - self.n_short

    @property
    def all_far(self) -> np.ndarray:
        """The subset that is all far tokens, (1, F): the long context."""
        return np.arange(self.n_far)[None]

    @property
    def all_targets(self) -> np.ndarray:
        """Block and place in it of every target, (n * B, 2)."""
        return np.argwhere(np.ones(self.targets.shape, dtype=bool))

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: np.ndarray | slice) -> Contexts:
        """Some of the blocks."""
        return replace(
            self, tokens=self.tokens[rows], targets=self.targets[rows], target_id=self.target_id[rows]
        )

    def with_far(self, far: np.ndarray) -> Contexts:
        """The same targets and short contexts behind another far context, (n, F)."""
        tokens = np.concatenate([far, self.tokens[:, self.n_far :]], axis=1)
        return replace(self, tokens=tokens)

    def behind(self, before: np.ndarray) -> Contexts:
        """The same behind other tokens, (n, D): these are the first of the far context."""
        return replace(self, tokens=np.concatenate([before, self.tokens], axis=1))

    def with_gap(self, gap: int) -> Contexts:
        """The same with so many position ids that no token has between far and short context."""
        ids = np.arange(self.tokens.shape[1])
        ids[self.n_far :] += gap
        return replace(self, ids=ids)

    def with_other_near(self, far: np.ndarray) -> Contexts:
        """The same with the first M // 2 short ones replaced by the last tokens of other far contexts, (n, F).

        They are at the same columns for all targets of a block (docs/method.md, 2.3 [ours]).
        """
        half = self.n_short // 2
        tokens = self.tokens.copy()
        tokens[:, self.n_far : self.n_far + half] = far[:, self.n_far - half :]
        return replace(self, tokens=tokens)


def long_contexts(
    texts: Texts,
    text: np.ndarray,
    first: np.ndarray,
    first_id: np.ndarray,
    *,
    n_long: int,
    n_short: int,
    targets_per_block: int = 1,
) -> Contexts:
    """The long contexts of blocks whose first targets stand at ``first`` of ``text`` and are called ``first_id``, all
    (n,).

    Where a text ends within a block, 0 stands for what is missing; nothing before it is influenced by that.
    """
    windows = np.zeros((len(first), n_long + targets_per_block), dtype=np.int64)
    for row, (text_index, position) in enumerate(zip(text.tolist(), first.tolist(), strict=True)):
        window = texts.tokens(text_index)[position - n_long : position + targets_per_block]
        windows[row, : len(window)] = window
    target_id = np.asarray(first_id)[:, None] + np.arange(targets_per_block)
    return Contexts(windows[:, :-1], windows[:, n_long:], target_id, n_short)


def blocks_of(
    texts: Texts, targets: pd.DataFrame, lengths: ContextSettings, *, n_long: int | None = None
) -> tuple[Contexts, np.ndarray]:
    """The long contexts of the blocks that hold some targets, ascending, and where each stands in them, (m, 2).

    ``targets``: target_id, text and position; ``n_long``: N, where it is another one than that of the settings.
    """
    size = lengths.targets_per_block
    target_id = targets["target_id"].to_numpy()
    offset = target_id % size
    first_id, first, block = np.unique(target_id - offset, return_index=True, return_inverse=True)
    contexts = long_contexts(
        texts,
        targets["text"].to_numpy()[first],
        targets["position"].to_numpy()[first] - offset[first],
        first_id,
        n_long=n_long or lengths.n_long,
        n_short=lengths.n_short,
        targets_per_block=size,
    )
    return contexts, np.stack([block, offset], axis=1)


def placebo_contexts(texts: Texts, contexts: Contexts, text: np.ndarray, start: np.ndarray) -> Contexts:
    """The same targets behind the F tokens that stand at ``start`` of ``text``, (n,) (docs/method.md, 2.3 [ours])."""
    return contexts.with_far(stretches(texts, text, start, contexts.n_far))


def stretches(texts: Texts, text: np.ndarray, start: np.ndarray, length: int) -> np.ndarray:
    """The tokens that stand at ``start`` of ``text``, both (n,): (n, length) int64."""
    rows = []
    for text_index, position in zip(text.tolist(), start.tolist(), strict=True):
        tokens = texts.tokens(text_index)[position : position + length]
        rows.append(tokens.astype(np.int64))
    return np.stack(rows)


def shuffled_contexts(contexts: Contexts, seed: int) -> Contexts:
    """The same targets behind their far tokens in random order, a pure function of the seed and the block."""
    blocks = contexts.target_id[:, 0] // contexts.targets_per_block
    orders = []
    for block in blocks.tolist():
        generator = np.random.default_rng([Stream.SHUFFLED, seed, block])
        orders.append(generator.permutation(contexts.n_far))
    shuffled = np.take_along_axis(contexts.tokens, np.stack(orders), axis=1)
    return contexts.with_far(shuffled)
