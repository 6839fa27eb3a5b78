"""Blocks of targets with their long contexts: which are measured, and the placebo that stands in for the far part.

A *block* [ours] is B targets that follow one another and share a far context (docs/method.md, 2.1); B = 1 is a target
by itself. Shapes: n blocks, B targets of each, N long and M short context length of the first of them, F = N - M far
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from olmo_sparsity.corpus.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream

NO_FAR = np.empty((1, 0), dtype=np.int64)
"""The empty subset of the far tokens, (1, 0): the short context alone."""


class Documents(Protocol):
    """Texts as token ids, by number."""

    def document(self, number: int) -> np.ndarray:
        """Token ids of one text, (T,)."""


@dataclass(frozen=True)
class Contexts:
    """Long contexts of n blocks (docs/method.md, 2.1). The token at column j has position id j, always."""

    tokens: np.ndarray
    """(n, N + B - 1) int64; the first F columns are the far context, M short ones follow, and all targets but the last.
    Target b is given the columns before N + b."""
    targets: np.ndarray
    """(n, B) int64."""
    target_id: np.ndarray
    """(n, B) int64, stable number of each target."""
    n_short: int
    """M."""

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

    def alone(self, block: int, place: int) -> Contexts:
        """One target as a block of its own, with the same far context and the longer short one."""
        rows, places = slice(block, block + 1), slice(place, place + 1)
        return Contexts(
            self.tokens[rows, : self.n_long + place],
            self.targets[rows, places],
            self.target_id[rows, places],
            self.n_short + place,
        )

    def with_far(self, far: np.ndarray) -> Contexts:
        """The same targets and short contexts behind another far context, (n, F)."""
        return replace(self, tokens=np.concatenate([far, self.tokens[:, self.n_far :]], axis=1))


@dataclass(frozen=True)
class SampledTargets:
    """Where the sampled targets and their placebo far contexts stand in the split; every array is (n * B,) int64, the
    targets of a block one behind the other."""

    document: np.ndarray
    position: np.ndarray
    placebo_document: np.ndarray
    placebo_start: np.ndarray
    document_group: np.ndarray | None = None
    """Name of the group of `document`, strings; None where the corpus has no groups."""
    placebo_group: np.ndarray | None = None
    near_copy: np.ndarray | None = None
    """Whether the target lies in a near copy of training text; None where the corpus does not say it."""
    same_group_document: np.ndarray | None = None
    """Where the far context from the same group stands; -1: there is none, None: none was drawn."""
    same_group_start: np.ndarray | None = None


def sample_targets(
    tokens: TokenFiles, count: int, *, n_long: int, n_short: int, seed: int, targets_per_block: int = 1
) -> SampledTargets:
    """Draw ``count`` targets in whole blocks, each with its N context tokens in its own document, and their placebos.

    Stratified by document [ours]: every document that offers a block gives the same number, as far as it has so many;
    blocks do not overlap and are drawn without replacement. The placebo of a block is a stretch of F tokens at a
    uniform place of another uniformly drawn document, of another group where the corpus has groups. A pure function of
    (seed, split, N, M, B, count); fewer are returned where the split offers fewer. Raises `UserError` where N or B must
    be smaller, and where there is no other group.
    """
    if not 0 < n_short < n_long:
        raise UserError(f"N = {n_long} must be larger than M = {n_short}; raise --n-long or lower --n-short")
    lengths = np.diff(tokens.document_bounds[:, 1:], axis=1)[:, 0]
    offered = np.maximum(lengths - n_long, 0)
    if not (offered >= targets_per_block).any():
        block = (
            "a target" if targets_per_block == 1 else f"{targets_per_block} targets that follow one another"
        )
        most = lengths.max() - targets_per_block
        remedy = "hold out longer documents" if targets_per_block == 1 else "lower --targets-per-block"
        if most > n_short:
            remedy = f"lower --n-long to at most {most}"
        raise UserError(
            f"no held-out document offers {block} with N = {n_long} tokens before: the longest has "
            f"{lengths.max()} tokens; {remedy}"
        )
    blocks = -(-count // targets_per_block)
    document, number = _stratified(offered // targets_per_block, blocks, seed)
    first = n_long + targets_per_block * number + _offsets(offered, targets_per_block, seed)[document]
    placebo_document, placebo_start = _draw_placebos(document, lengths, n_long - n_short, seed, tokens.groups)
    blocks = np.stack([document, first, placebo_document, placebo_start])
    document, first, placebo_document, placebo_start = np.repeat(blocks, targets_per_block, axis=1)
    position = first + np.tile(np.arange(targets_per_block), len(first) // targets_per_block)
    return SampledTargets(
        document,
        position,
        placebo_document,
        placebo_start,
        tokens.groups_of(document),
        tokens.groups_of(placebo_document),
        tokens.in_near_copy(document, position),
    )


def _offsets(offered: np.ndarray, targets_per_block: int, seed: int) -> np.ndarray:
    """Where the blocks of each document begin, uniform among the targets that whole blocks leave over."""
    left_over = offered % targets_per_block
    generator = np.random.default_rng([Stream.BLOCK_OFFSETS, seed])
    return generator.integers(0, left_over, endpoint=True)


def _stratified(offered: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(document, number in it) of each block; the last, partial round over documents takes a random subset of them."""
    quota = np.zeros_like(offered)
    generator = np.random.default_rng([Stream.TARGETS, seed])
    left = min(count, int(offered.sum()))
    while left:
        open_documents = np.flatnonzero(quota < offered)
        each = max(1, left // len(open_documents))
        if left < len(open_documents):
            open_documents = generator.choice(open_documents, size=left, replace=False)
        grant = np.minimum(each, offered[open_documents] - quota[open_documents])
        quota[open_documents] += grant
        left -= int(grant.sum())
    documents = np.flatnonzero(quota)
    numbers = [
        np.sort(
            np.random.default_rng([Stream.TARGETS, seed, d]).choice(offered[d], size=quota[d], replace=False)
        )
        for d in documents
    ]
    return np.repeat(documents, quota[documents]), np.concatenate(numbers)


def _draw_placebos(
    document: np.ndarray, lengths: np.ndarray, n_far: int, seed: int, groups: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Document and start of each placebo. Without groups (``groups`` is (D,)) every document is one by itself."""
    group = np.arange(len(lengths)) if groups is None else np.unique(groups, return_inverse=True)[1]
    able = np.flatnonzero(lengths >= n_far)
    able = able[np.argsort(group[able], kind="stable")]
    generator = np.random.default_rng([Stream.PLACEBOS, seed])
    if len(np.unique(group[able])) < 2:
        if groups is None:
            raise UserError(
                f"the placebo needs a second held-out document of at least {n_far} tokens; hold out more documents "
                "or lower --n-long"
            )
        raise UserError(
            f"the placebo needs a held-out document of another group than {groups[able[0]]}, which all of at least "
            f"{n_far} tokens are of; hold out text of another group, lower --n-long, or prepare the corpus with "
            "--group-field none to draw placebos from other documents of the same one"
        )
    # Drawing among the others: skip the target's own group, which is one stretch of the list, by shifting what lies
    # behind it.
    first, end = (np.searchsorted(group[able], group[document], side) for side in ("left", "right"))
    drawn = generator.integers(0, len(able) - (end - first))
    drawn += np.where(drawn >= first, end - first, 0)
    chosen = able[drawn]
    return chosen, generator.integers(0, lengths[chosen] - n_far, endpoint=True)


def with_same_group(
    sampled: SampledTargets,
    tokens: TokenFiles,
    *,
    n_long: int,
    n_short: int,
    seed: int,
    targets_per_block: int = 1,
) -> SampledTargets:
    """The same targets, each block with a stretch of F tokens of its own group elsewhere (docs/method.md, 2.3 [ours]).

    It stands at a uniform place of another uniformly drawn document of the group; where there is none of F tokens, of
    the block's own document, outside of what the block reads; -1 where that leaves no F tokens either. A pure function
    of the seed and the block.
    """
    lengths = np.diff(tokens.document_bounds[:, 1:], axis=1)[:, 0]
    n_far = n_long - n_short
    places = np.maximum(lengths - n_far + 1, 0)
    group = np.arange(len(lengths)) if tokens.groups is None else tokens.groups
    able = np.flatnonzero(places)
    able_of_group = {each: able[group[able] == each] for each in np.unique(group[sampled.document])}
    found = []
    for block, row in enumerate(range(0, len(sampled.document), targets_per_block)):
        generator = np.random.default_rng([Stream.SAME_GROUP, seed, block])
        document, first = sampled.document[row], sampled.position[row]
        others = able_of_group[group[document]]
        others = others[others != document]
        if len(others):
            document = generator.choice(others)
            found.append((document, generator.integers(places[document])))
            continue
        before, end = max(0, first - n_long - n_far + 1), first + targets_per_block
        offered = before + max(0, places[document] - end)
        if offered:
            drawn = generator.integers(offered)
            found.append((document, drawn if drawn < before else end + drawn - before))
        else:
            found.append((-1, -1))
    document, start = np.repeat(np.array(found), targets_per_block, axis=0).T
    return replace(sampled, same_group_document=document, same_group_start=start)


def shuffled_contexts(contexts: Contexts, seed: int) -> Contexts:
    """The same targets behind their far tokens in random order, a pure function of the seed and the block."""
    blocks = contexts.target_id[:, 0] // contexts.targets_per_block
    orders = [
        np.random.default_rng([Stream.SHUFFLED, seed, block]).permutation(contexts.n_far)
        for block in blocks.tolist()
    ]
    return contexts.with_far(np.take_along_axis(contexts.tokens, np.stack(orders), axis=1))


def long_contexts(
    documents: Documents,
    document: np.ndarray,
    first: np.ndarray,
    first_id: np.ndarray,
    *,
    n_long: int,
    n_short: int,
    targets_per_block: int = 1,
) -> Contexts:
    """The long contexts of blocks whose first targets stand at ``first`` of ``document`` and are called ``first_id``.

    Where a document ends within a block, 0 stands for what is missing; nothing before it is influenced by that.
    """
    windows = np.zeros((len(first), n_long + targets_per_block), dtype=np.int64)
    for row, (d, t) in enumerate(zip(document, first, strict=True)):
        window = documents.document(int(d))[t - n_long : t + targets_per_block]
        windows[row, : len(window)] = window
    target_id = np.asarray(first_id)[:, None] + np.arange(targets_per_block)
    return Contexts(windows[:, :-1], windows[:, n_long:], target_id, n_short)


def placebo_contexts(
    documents: Documents, contexts: Contexts, document: np.ndarray, start: np.ndarray
) -> Contexts:
    """The same targets behind the F tokens that stand at ``start`` of ``document`` (docs/method.md, 2.3 [ours])."""
    far = [
        documents.document(int(d))[s : s + contexts.n_far].astype(np.int64)
        for d, s in zip(document, start, strict=True)
    ]
    return contexts.with_far(np.stack(far))
