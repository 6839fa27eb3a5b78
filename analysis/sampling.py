"""Where blocks of targets and their placebos stand in texts.

A *block* [ours] is B targets that follow one another and share a far context (docs/method.md, 2.1); B = 1 is a target
by itself. Shapes: D texts of T tokens each, n blocks, B targets of each, N long and M short context length of the first
of them, F = N - M far tokens.
"""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd

from analysis.texts import Texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

log = logging.getLogger(__name__)


def sample_targets(
    texts: Texts,
    count: int,
    *,
    n_long: int,
    n_short: int,
    seed: int,
    targets_per_block: int = 1,
    same_group: bool = False,
    placebo: bool = True,
    n_text: int | None = None,
    before: int = 0,
) -> pd.DataFrame:
    """Draw ``count`` targets in whole blocks, each with its N context tokens in its text, and their placebos.

    ``n_text``: how many tokens of its text stand before a block, where that is more than N. ``before``: how many tokens
    of another text are drawn to stand before the long context.

    Stratified by text [ours]: every text that offers a block gives the same number, as far as it has so many; blocks do
    not overlap and are drawn without replacement. The placebo of a block is a stretch of F tokens at a uniform place of
    another uniformly drawn text, of another group where there are groups. Where only one text has so many, it is from
    far away in that (`_placebos_of_itself`). Drawn targets that may be none (`Texts.may_be_target`) are dropped, and
    blocks without others with them: there are fewer than ``count`` then. A pure function of the arguments.

    Returns a row for each target, those of a block one behind the other; fewer where the texts offer fewer. Columns as
    in `Measurement.targets`: ``target_id``; ``text`` (its number) and ``position`` (in it) of it;
    ``placebo_text`` and ``placebo_start``; where there are groups, ``group`` and ``placebo_group``; where near copies
    of training text were looked for, ``near_copy``; if asked for, ``same_group_text`` and ``same_group_start`` (-1:
    there is none); ``before_text`` and ``before_start``, where tokens are to stand before. Without ``placebo`` the
    columns of placebos are left out. Raises `UserError` where N, a length or B must be smaller, and where there is no
    placebo, no text to stand before or no target left.
    """
    size = targets_per_block
    n_far = n_long - n_short
    groups = texts.groups
    n_text = n_long if n_text is None else n_text
    offered = _offered(texts, n_text, n_long, size)
    text, block_in_text = _stratified(offered // size, -(-count // size), seed)
    # the blocks of a text begin at a uniform place among the targets that whole blocks leave over
    generator = np.random.default_rng([Stream.BLOCK_OFFSETS, seed])
    offsets = generator.integers(0, offered % size, endpoint=True)
    first = n_text + size * block_in_text + offsets[text]
    columns = {"text": text, "position": first, "text_tokens": texts.lengths[text]}
    placebo_text = np.full(len(text), -1)
    if placebo:
        placebo_text, placebo_start = _placebos(texts, text, first, n_text, n_long, n_far, size, seed)
        columns |= {"placebo_text": placebo_text, "placebo_start": placebo_start}
    if before:
        drawn = texts_before(texts, text, placebo_text, before, seed)
        columns |= {"before_text": drawn[:, 0], "before_start": drawn[:, 1]}
    if groups is not None:
        columns["group"] = groups[text]
        if placebo:
            columns["placebo_group"] = groups[placebo_text]
    if same_group:
        drawn = same_group_elsewhere(
            texts, text, first, n_long=n_text, n_far=n_far, targets_per_block=size, seed=seed
        )
        columns |= {"same_group_text": drawn[:, 0], "same_group_start": drawn[:, 1]}
    sampled = pd.DataFrame({name: np.repeat(column, size) for name, column in columns.items()})
    sampled.insert(0, "target_id", np.arange(len(sampled)))
    sampled["position"] += sampled["target_id"] % size
    sampled = _without_no_targets(texts, sampled, size)
    near_copy = texts.in_near_copy(sampled["text"].to_numpy(), sampled["position"].to_numpy())
    if near_copy is not None:
        sampled = sampled.assign(near_copy=near_copy)
    return sampled


def _offered(texts: Texts, n_text: int, n_long: int, size: int) -> np.ndarray:
    """How many targets each text offers, with ``n_text`` tokens before. Raises `UserError` where none has a block."""
    offered = np.maximum(texts.lengths - n_text, 0)
    if not (offered >= size).any():
        length = f"N = {n_long}"
        lower = "N"
        if n_text != n_long:
            length = f"{n_text:,}"
            lower = "lengths"
        raise UserError(
            f"no text offers B = {size} targets in a row with {length} tokens before: the longest has "
            f"{texts.lengths.max()} tokens; lower {lower} or B, or give longer texts"
        )
    return offered


def _placebos(
    texts: Texts,
    text: np.ndarray,
    first: np.ndarray,
    n_text: int,
    n_long: int,
    n_far: int,
    targets_per_block: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Text and start of every block's placebo, (n,) each; ``text`` and ``first``: where the block's first target is."""
    if np.count_nonzero(texts.lengths >= n_far) <= 1:
        longest = int(texts.lengths.max())
        return text, _placebos_of_itself(first, longest, n_text, n_long, n_far, targets_per_block, seed)
    if _is_one_divided_text(texts):
        log.warning("all documents are of one text: placebos are of other documents in it")
    return _placebos_of_others(text, texts.lengths, n_far, seed, _groups_of_others(texts))


def _is_one_divided_text(texts: Texts) -> bool:
    """Whether all texts are documents of one text, which is their group."""
    return bool(texts.divided) and texts.groups is not None and len(set(texts.groups)) == 1


def _groups_of_others(texts: Texts) -> np.ndarray | None:
    """The groups that other texts are to be of, (D,); None: none, any other text will do."""
    return None if _is_one_divided_text(texts) else texts.groups


def texts_before(
    texts: Texts, text: np.ndarray, placebo_text: np.ndarray, before: int, seed: int
) -> np.ndarray:
    """Text and start of the D = ``before`` tokens before the long context of each block, (n, 2) (docs/method.md, 2.1b).

    A uniform place of another uniformly drawn text, of another group where there are groups, and not the text that the
    placebo is from. A pure function of the seed and the block. Raises `UserError` where a block has no such text.

    Args:
        texts: that are drawn from.
        text: of each block, (n,).
        placebo_text: of each block, (n,); -1: it has no placebo.
        before: D.
        seed: of the draws.
    """
    groups = _groups_of_others(texts)
    group = np.arange(len(texts.lengths)) if groups is None else groups
    long_enough = np.flatnonzero(texts.lengths >= before)
    drawn = []
    for block, (text_index, placebo_index) in enumerate(zip(text, placebo_text, strict=True)):
        others = long_enough[(group[long_enough] != group[text_index]) & (long_enough != placebo_index)]
        if not len(others):
            of = "" if groups is None else f" of another group than {groups[text_index]}"
            raise UserError(
                f"before = {before:,} needs a text of so many tokens{of} that is not the placebo's; give more or "
                "longer texts, or lower before"
            )
        generator = np.random.default_rng([Stream.BEFORE, seed, block])
        other = generator.choice(others)
        drawn.append((other, generator.integers(texts.lengths[other] - before + 1)))
    return np.array(drawn)


def _without_no_targets(texts: Texts, drawn_targets: pd.DataFrame, targets_per_block: int) -> pd.DataFrame:
    """The drawn targets that may be some (`Texts.may_be_target`), with ids of blocks that follow one another.

    Raises `UserError` where none is left.
    """
    allowed = texts.may_be_target(drawn_targets["text"].to_numpy(), drawn_targets["position"].to_numpy())
    if allowed.all():
        return drawn_targets
    left_out = f"{int((~allowed).sum()):,}"
    drawn = f"{len(allowed):,}"
    log.info("%s of %s drawn targets are special tokens or of a chat template: left out", left_out, drawn)
    drawn_targets = drawn_targets[allowed]
    if drawn_targets.empty:
        raise UserError(
            "every drawn target is a special token or one of a chat template; give more targets, or longer texts"
        )
    block, _ = pd.factorize(drawn_targets["target_id"] // targets_per_block)
    offset = drawn_targets["target_id"] % targets_per_block
    drawn_targets = drawn_targets.assign(target_id=block * targets_per_block + offset)
    return drawn_targets.reset_index(drop=True)


def _stratified(offered: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(text, number in it) of each block; the last, partial round over the texts takes a random subset of them."""
    quota = np.zeros_like(offered)
    generator = np.random.default_rng([Stream.TARGETS, seed])
    left = min(count, int(offered.sum()))
    while left:
        not_full = np.flatnonzero(quota < offered)
        share = max(1, left // len(not_full))
        if left < len(not_full):
            not_full = generator.choice(not_full, size=left, replace=False)
        grant = np.minimum(share, offered[not_full] - quota[not_full])
        quota[not_full] += grant
        left -= int(grant.sum())
    texts = np.flatnonzero(quota)
    numbers = []
    for text in texts:
        of_text = np.random.default_rng([Stream.TARGETS, seed, text])
        drawn = of_text.choice(offered[text], size=quota[text], replace=False)
        numbers.append(np.sort(drawn))
    return np.repeat(texts, quota[texts]), np.concatenate(numbers)


def _placebos_of_others(
    text: np.ndarray, lengths: np.ndarray, n_far: int, seed: int, groups: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Text and start of each placebo. Without groups (``groups`` is (D,)) every text is one by itself."""
    group = np.arange(len(lengths))
    if groups is not None:
        _, group = np.unique(groups, return_inverse=True)
    long_enough = np.flatnonzero(lengths >= n_far)
    by_group = np.argsort(group[long_enough], kind="stable")
    long_enough = long_enough[by_group]
    if len(np.unique(group[long_enough])) < 2:
        of = ""
        if groups is not None:
            of = f" of another group than {groups[long_enough[0]]}"
        raise UserError(
            f"the placebo needs a second text of at least {n_far} tokens{of}; give more texts, or lower N "
            "(a corpus prepared with --group-field none has no groups)"
        )
    # Drawing among the others: skip the target's group, which is one stretch of the list, by shifting what lies
    # behind it.
    first = np.searchsorted(group[long_enough], group[text], "left")
    end = np.searchsorted(group[long_enough], group[text], "right")
    generator = np.random.default_rng([Stream.PLACEBOS, seed])
    drawn = generator.integers(0, len(long_enough) - (end - first))
    drawn += np.where(drawn >= first, end - first, 0)
    chosen = long_enough[drawn]
    return chosen, generator.integers(0, lengths[chosen] - n_far, endpoint=True)


def _placebos_of_itself(
    first: np.ndarray,
    length: int,
    n_text: int,
    n_long: int,
    n_far: int,
    targets_per_block: int,
    seed: int,
) -> np.ndarray:
    """Start of each placebo in the only text of F tokens or more, (n,): at least N tokens before what is read before
    its block, or behind the block [ours].

    It is nearer in subject than another text, so that net recovery comes out lower. Raises `UserError` where a block
    has no room for it.
    """
    log.warning(
        "only one text has %s tokens or more: placebos are from it, at least N tokens away; give others for better "
        "ones",
        f"{n_far:,}",
    )
    starts = []
    for position in first.tolist():
        generator = np.random.default_rng([Stream.PASSAGE_PLACEBOS, seed, position])
        near_first = position - n_text - n_long
        near_end = position + targets_per_block + n_long
        starts.append(_start_outside(near_first, near_end, length, n_far, generator))
    if min(starts) < 0:
        raise UserError(
            f"the text has {length:,} tokens, too few for placebos from it; give a second text of {n_far:,}, or one "
            f"of at least {n_text + 2 * n_long + 2 * n_far + targets_per_block:,} tokens"
        )
    return np.array(starts)


def _start_outside(first: int, end: int, length: int, n_far: int, generator: np.random.Generator) -> int:
    """A uniform place of F tokens in a text outside its tokens ``first`` to ``end`` - 1; -1 where there is none."""
    room_before = max(0, first - n_far + 1)
    offered = room_before + max(0, length - n_far + 1 - end)
    if not offered:
        return -1
    start = int(generator.integers(offered))
    if start < room_before:
        return start
    return end + start - room_before


def same_group_elsewhere(
    texts: Texts,
    text: np.ndarray,
    first: np.ndarray,
    *,
    n_long: int,
    n_far: int,
    targets_per_block: int,
    seed: int,
) -> np.ndarray:
    """Text and start of F tokens from elsewhere in the group of each block, (n, 2) (docs/method.md, 2.3 [ours]).

    The first targets of the blocks stand at ``first`` of ``text``, both (n,); ``n_long`` tokens before them are read.

    They stand at a uniform place of another uniformly drawn text of the group; where there is none of F tokens, of the
    block's text, outside of what the block reads; -1 where that leaves no F tokens either. A pure function of the seed
    and the block.
    """
    long_enough = np.flatnonzero(texts.lengths >= n_far)
    group = np.arange(len(texts.lengths))
    if texts.groups is not None:
        group = texts.groups
    by_group = {}
    for name in set(group[text].tolist()):
        by_group[name] = long_enough[group[long_enough] == name]
    drawn = []
    for block, (text_index, position) in enumerate(zip(text, first, strict=True)):
        generator = np.random.default_rng([Stream.SAME_GROUP, seed, block])
        others = by_group[group[text_index]]
        others = others[others != text_index]
        if len(others):
            other = generator.choice(others)
            drawn.append((other, generator.integers(texts.lengths[other] - n_far + 1)))
        else:
            end = position + targets_per_block
            start = _start_outside(position - n_long, end, texts.lengths[text_index], n_far, generator)
            if start < 0:
                drawn.append((-1, -1))
            else:
                drawn.append((text_index, start))
    return np.array(drawn)
