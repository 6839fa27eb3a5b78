"""Opening what is to be measured: from what a user names to `Texts`."""

from __future__ import annotations

import gzip
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.texts import Chat, Encode, Texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.text_files import group_of_url


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
                group = group_of_url(row["url"])
            text, messages = row.get("text"), row.get("messages")
            if text is None and not isinstance(messages, list):
                raise UserError(f"{path}: a line has no text and no list of messages: {str(row)[:80]}")
            yield group, messages if text is None else text
