"""Texts as token ids, and blocks of targets in them with their long contexts and placebos.

A *block* [ours] is B targets that follow one another and share a far context (docs/method.md, 2.1); B = 1 is a target
by itself. Shapes: D texts of T tokens each, n blocks, B targets of each, N long and M short context length of the first
of them, F = N - M far tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

log = logging.getLogger(__name__)

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or none yet."""
_REMEMBERED = 1 << 17
NO_FAR = np.empty((1, 0), dtype=np.int64)
"""The empty subset of the far tokens, (1, 0): the short context alone."""
SAME_GROUP, SHUFFLED = "same-group", "shuffled"
"""Far contexts beside the true one and the placebo: from elsewhere in the target's group, and in random order."""

Encode = Callable[[str], np.ndarray]
"""Token ids of a text, (T,), without special tokens."""
Chat = Callable[[list[dict[str, Any]]], tuple[str, list[bool]]] | None
"""Messages as text, and whether each of its tokens lies in one, (T,). None: messages are refused."""


# --- texts ---


class Texts:
    """Texts as token ids, by number. `open_texts` makes them; a prepared corpus is `analysis.ours.PreparedTexts`.

    Args:
        encode: token ids of a string.
        texts: pairs of group and string or messages; None is the group of a text that stands by itself.
        name: where they are from, in words or as a path.
        chat: what writes messages as a string.
    """

    name: str
    sha256: str
    """Of what was tokenized; of a prepared corpus, of its manifest."""
    lengths: np.ndarray
    """Tokens of each text, (D,) int64."""
    groups: np.ndarray | None = None
    """Name of the group of each text, (D,) strings: its book, site or package. None where there are no groups."""
    in_message: dict[int, np.ndarray] | None = None
    """Of each conversation, by number: which tokens lie in a message and may be targets, (T,) bool."""

    def __init__(self, encode: Encode, texts: Sequence[tuple[Any, Any]], name: str, chat: Chat = None):
        if not texts:
            raise UserError(f"{name}: there is no text; give at least one")
        if chat is None and not all(isinstance(text, str) for _, text in texts):
            raise UserError(f"{name}: only `influence` reads messages; write them out as text")
        read = [(g, *chat(text)) if chat and not isinstance(text, str) else (g, text) for g, text in texts]
        self.name = name
        self.sha256 = hashlib.sha256(json.dumps(read).encode()).hexdigest()
        self._tokens = [encode(row[1]) for row in read]
        self.in_message = {n: np.array(row[2]) for n, row in enumerate(read) if len(row) > 2} or None
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        if any(group is not None for group, _ in texts):
            names = [f"text {n} by itself" if own is None else str(own) for n, (own, _) in enumerate(texts)]
            self.groups = np.array(names, dtype=object)

    def tokens(self, number: int) -> np.ndarray:
        """Token ids of a text, (T,), without special tokens."""
        return self._tokens[number]

    def in_near_copy(self, text: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy of training text, (n,) bool; None where they were not looked for."""
        return None


def open_texts(texts: Any, encode: Encode, *, chat: Chat = None, split: str = "heldout") -> Texts:
    """The texts that a measurement is to read.

    Args:
        texts: strings; ``{group: strings}``; one or more paths of files (also as strings, where there is such a file);
            the folder of a prepared corpus; or `Texts`. Lines of a .json or .jsonl file, maybe with .gz, are JSON with
            ``text`` and maybe ``group`` or ``url``, whose site or work is the group; any other file is one text, and a
            group by itself. For ``text`` and for a string there may be ``messages``, a list of dicts.
        encode: token ids of a string, without special tokens.
        chat: what writes messages as a string.
        split: of a prepared corpus.

    Raises `UserError` where there is no such file, or no text in it.
    """
    if isinstance(texts, Texts):
        return texts
    if isinstance(texts, str | Path):
        if os.path.isdir(texts):
            prepared: Texts = importlib.import_module("analysis.ours").PreparedTexts(texts, split)
            return prepared
        if not _is_file(texts):
            raise UserError(
                f"{str(texts)[:80]!r} is no prepared corpus and no file; give one of these, or a list of strings"
            )
        texts = [texts]
    if isinstance(texts, Mapping):
        strings = {group: [own] if isinstance(own, str) else own for group, own in texts.items()}
        pairs = [(group, text) for group, own in strings.items() for text in own]
    elif any(map(_is_file, texts := list(texts))):
        return _open_files(texts, encode, chat)
    else:
        pairs = [(None, text) for text in texts]
    return Texts(encode, pairs, "a text" if len(pairs) == 1 else f"{len(pairs):,} texts", chat)


def _is_file(text: Any) -> bool:
    return isinstance(text, Path) or (isinstance(text, str) and os.path.isfile(text))


def _open_files(paths: Sequence[str | Path], encode: Encode, chat: Chat) -> Texts:
    names = [Path(path).name for path in paths]
    pairs: list[tuple[str | None, Any]] = []
    for path, name in zip(paths, names, strict=True):
        pairs += _texts_of_file(path, name if names.count(name) == 1 else str(path))
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Texts(encode, pairs, f"{paths[0]}{more}", chat)


def _texts_of_file(path: str | Path, name: str) -> Iterator[tuple[str | None, Any]]:
    """Group and text or messages of each text of a file; ``name``: the group of one that is a single text."""
    with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
        if not str(path).lower().removesuffix(".gz").endswith((".json", ".jsonl")):
            yield name, file.read()
            return
        for row in map(json.loads, filter(str.strip, file)):
            group = row.get("group")
            if group is None and row.get("url"):  # the site or work, as `prepare_data` has it
                group = importlib.import_module("olmo_sparsity.data.groups").group_of_url(row["url"])
            text, messages = row.get("text"), row.get("messages")
            if text is None and not isinstance(messages, list):
                raise UserError(f"{path}: a line has no text and no list of messages: {str(row)[:80]}")
            yield group, messages if text is None else text


# --- the text of token ids, for any tokenizer: all that it must be able to do is decode ---


class TextDecoder:
    """Splits the text of a token sequence into one piece per token.

    No offsets are read, which many tokenizers do not have: the text of a token is what it adds to the decoded text of
    those before it.

    Args:
        decode: the text of a list of token ids, special tokens included and spaces as they are.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = lambda ids: decode(list(ids))
        # Text is mostly pairs of tokens that were met before; decoding is what costs.
        self._decode_few = lru_cache(maxsize=_REMEMBERED)(self._decode)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per token; joined they are the decoded text of the whole sequence.

        Special tokens are shown by their own text. A character whose bytes are spread over several tokens belongs to
        the token that completes it, and the others get "" for it. Bytes that never become a character, as at the two
        ends of a window that cuts one, are shown as `BROKEN`, as the tokenizer's decoder shows them, at the first
        token that has some of them.
        """
        whole = tuple(map(int, ids))
        pieces: list[str] = []
        # A few tokens at a time, so that a long sequence costs no more per token than a short one. A group is the
        # tokens that complete a character together, mostly a single one. It is seen behind the group before it,
        # because decoders treat the first token apart (they drop its leading space).
        before = start = 0
        for end in range(1, len(whole) + 1):
            is_open = self._decode_few(whole[before:end]).endswith(BROKEN)
            if end == len(whole) or not is_open:
                pieces += _additions(self._decode_few, whole[before:end])[start - before :]
                before, start = start, end
        if "".join(pieces) == self._decode(whole):
            return pieces
        # Some decoders let a token change text far before it: a run of byte tokens that is cut at its end loses all
        # its characters. Each token is then seen behind all those before it, at quadratic cost.
        return _additions(self._decode, whole)


def _additions(decode: Callable[[tuple[int, ...]], str], ids: tuple[int, ...]) -> list[str]:
    """What each token adds to the text: the part of it that stands once the token is there, and not before."""
    text = decode(ids)
    standing = [0]
    for end in range(1, len(ids)):
        common = os.path.commonprefix([decode(ids[:end]), text])  # noqa: RUF071 (of characters, as it is meant here)
        standing.append(max(standing[-1], len(common)))
    return [text[start:end] for start, end in pairwise([*standing, len(text)])]


# --- where targets and placebos stand ---


def sample_targets(
    texts: Texts,
    count: int,
    *,
    n_long: int,
    n_short: int,
    seed: int,
    targets_per_block: int = 1,
    same_group: bool = False,
) -> pd.DataFrame:
    """Draw ``count`` targets in whole blocks, each with its N context tokens in its text, and their placebos.

    Stratified by text [ours]: every text that offers a block gives the same number, as far as it has so many; blocks do
    not overlap and are drawn without replacement. The placebo of a block is a stretch of F tokens at a uniform place of
    another uniformly drawn text, of another group where there are groups. Where there is one text only, it is from far
    away in that (`_placebos_of_itself`). Of a conversation the drawn targets that lie in no message are dropped, and
    blocks without others with them: there are fewer than ``count`` then. A pure function of the arguments.

    Returns a row for each target, those of a block one behind the other; fewer where the texts offer fewer. Columns as
    in `analysis.result.Result.targets`: ``target_id``; ``text`` (its number) and ``position`` (in it) of the target;
    ``placebo_text`` and ``placebo_start``; where there are groups, ``group`` and ``placebo_group``; where near copies
    of training text were looked for, ``near_copy``; if asked for, ``same_group_text`` and ``same_group_start`` (-1:
    there is none). Raises `UserError` where N or B must be smaller, and where there is no placebo or no target left.
    """
    size, n_far, groups = targets_per_block, n_long - n_short, texts.groups
    offered = np.maximum(texts.lengths - n_long, 0)
    if not (offered >= size).any():
        raise UserError(
            f"no text offers B = {size} targets in a row with N = {n_long} tokens before: the longest has "
            f"{texts.lengths.max()} tokens; lower N or B, or give longer texts"
        )
    text, number = _stratified(offered // size, -(-count // size), seed)
    # the blocks of a text begin at a uniform place among the targets that whole blocks leave over
    offsets = np.random.default_rng([Stream.BLOCK_OFFSETS, seed]).integers(0, offered % size, endpoint=True)
    first = n_long + size * number + offsets[text]
    if len(texts.lengths) > 1:
        placebo_text, placebo_start = _placebos_of_others(text, texts.lengths, n_far, seed, groups)
    else:
        placebo_text = text
        placebo_start = _placebos_of_itself(first, int(texts.lengths[0]), n_long, n_far, size, seed)
    columns = {"text": text, "position": first, "placebo_text": placebo_text, "placebo_start": placebo_start}
    if groups is not None:
        columns |= {"group": groups[text], "placebo_group": groups[placebo_text]}
    if same_group:
        drawn = same_group_elsewhere(
            texts, text, first, n_long=n_long, n_far=n_far, targets_per_block=size, seed=seed
        )
        columns |= {"same_group_text": drawn[:, 0], "same_group_start": drawn[:, 1]}
    places = pd.DataFrame({name: np.repeat(column, size) for name, column in columns.items()})
    places.insert(0, "target_id", np.arange(len(places)))
    places["position"] += places["target_id"] % size
    if own := texts.in_message:
        where = zip(places["text"], places["position"], strict=True)
        places = places[[text not in own or bool(own[text][position]) for text, position in where]]
        if places.empty:
            raise UserError("no drawn target lies in a message; give more targets, or longer messages")
        block = pd.factorize(places["target_id"] // size)[0]
        places = places.assign(target_id=block * size + places["target_id"] % size).reset_index(drop=True)
    near_copy = texts.in_near_copy(places["text"].to_numpy(), places["position"].to_numpy())
    return places if near_copy is None else places.assign(near_copy=near_copy)


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
        numbers.append(np.sort(of_text.choice(offered[text], size=quota[text], replace=False)))
    return np.repeat(texts, quota[texts]), np.concatenate(numbers)


def _placebos_of_others(
    text: np.ndarray, lengths: np.ndarray, n_far: int, seed: int, groups: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Text and start of each placebo. Without groups (``groups`` is (D,)) every text is one by itself."""
    group = np.arange(len(lengths)) if groups is None else np.unique(groups, return_inverse=True)[1]
    long_enough = np.flatnonzero(lengths >= n_far)
    long_enough = long_enough[np.argsort(group[long_enough], kind="stable")]
    if len(np.unique(group[long_enough])) < 2:
        of = "" if groups is None else f" of another group than {groups[long_enough[0]]}"
        raise UserError(
            f"the placebo needs a second text of at least {n_far} tokens{of}; give more texts, or lower N "
            "(a corpus prepared with --group-field none has no groups)"
        )
    # Drawing among the others: skip the target's group, which is one stretch of the list, by shifting what lies
    # behind it.
    first, end = (np.searchsorted(group[long_enough], group[text], side) for side in ("left", "right"))
    generator = np.random.default_rng([Stream.PLACEBOS, seed])
    drawn = generator.integers(0, len(long_enough) - (end - first))
    drawn += np.where(drawn >= first, end - first, 0)
    chosen = long_enough[drawn]
    return chosen, generator.integers(0, lengths[chosen] - n_far, endpoint=True)


def _placebos_of_itself(
    first: np.ndarray, length: int, n_long: int, n_far: int, targets_per_block: int, seed: int
) -> np.ndarray:
    """Start of each placebo in the only text, (n,): at least N tokens before the long context of its block, or behind
    the block [ours].

    It is nearer in subject than another text, so that net recovery comes out lower. Raises `UserError` where a block
    has no room for it.
    """
    log.warning(
        "there is one text only: placebos are from it, at least N tokens away; give others for better ones"
    )
    starts = []
    for position in first.tolist():
        generator = np.random.default_rng([Stream.PASSAGE_PLACEBOS, seed, position])
        near = position - 2 * n_long, position + targets_per_block + n_long
        starts.append(_start_outside(*near, length, n_far, generator))
    if min(starts) < 0:
        raise UserError(
            f"the text has {length:,} tokens, too few for placebos from it; give a second text, or one of at least "
            f"{3 * n_long + 2 * n_far + targets_per_block:,} tokens"
        )
    return np.array(starts)


def _start_outside(first: int, end: int, length: int, n_far: int, generator: np.random.Generator) -> int:
    """A uniform place of F tokens in a text outside its tokens ``first`` to ``end`` - 1; -1 where there is none."""
    before = max(0, first - n_far + 1)
    offered = before + max(0, length - n_far + 1 - end)
    if not offered:
        return -1
    place = int(generator.integers(offered))
    return place if place < before else end + place - before


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

    The first targets of the blocks stand at ``first`` of ``text``, both (n,).

    They stand at a uniform place of another uniformly drawn text of the group; where there is none of F tokens, of the
    block's text, outside of what the block reads; -1 where that leaves no F tokens either. A pure function of the seed
    and the block.
    """
    long_enough = np.flatnonzero(texts.lengths >= n_far)
    group = np.arange(len(texts.lengths)) if texts.groups is None else texts.groups
    by_group = {name: long_enough[group[long_enough] == name] for name in set(group[text].tolist())}
    drawn = []
    for block, (own, position) in enumerate(zip(text, first, strict=True)):
        generator = np.random.default_rng([Stream.SAME_GROUP, seed, block])
        others = by_group[group[own]]
        others = others[others != own]
        if len(others):
            other = generator.choice(others)
            drawn.append((other, generator.integers(texts.lengths[other] - n_far + 1)))
        else:
            read = position - n_long, position + targets_per_block
            start = _start_outside(*read, texts.lengths[own], n_far, generator)
            drawn.append((own if start >= 0 else -1, start))
    return np.array(drawn)


# --- their contexts ---


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

    def with_far(self, far: np.ndarray) -> Contexts:
        """The same targets and short contexts behind another far context, (n, F)."""
        return replace(self, tokens=np.concatenate([far, self.tokens[:, self.n_far :]], axis=1))


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
    for row, (number, position) in enumerate(zip(text.tolist(), first.tolist(), strict=True)):
        window = texts.tokens(number)[position - n_long : position + targets_per_block]
        windows[row, : len(window)] = window
    target_id = np.asarray(first_id)[:, None] + np.arange(targets_per_block)
    return Contexts(windows[:, :-1], windows[:, n_long:], target_id, n_short)


def placebo_contexts(texts: Texts, contexts: Contexts, text: np.ndarray, start: np.ndarray) -> Contexts:
    """The same targets behind the F tokens that stand at ``start`` of ``text``, (n,) (docs/method.md, 2.3 [ours])."""
    far = [
        texts.tokens(number)[place : place + contexts.n_far].astype(np.int64)
        for number, place in zip(text.tolist(), start.tolist(), strict=True)
    ]
    return contexts.with_far(np.stack(far))


def shuffled_contexts(contexts: Contexts, seed: int) -> Contexts:
    """The same targets behind their far tokens in random order, a pure function of the seed and the block."""
    blocks = contexts.target_id[:, 0] // contexts.targets_per_block
    orders = [
        np.random.default_rng([Stream.SHUFFLED, seed, block]).permutation(contexts.n_far)
        for block in blocks.tolist()
    ]
    return contexts.with_far(np.take_along_axis(contexts.tokens, np.stack(orders), axis=1))
