"""Opening what is to be measured: from what a user names to `Texts`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.texts import Chat, Encode, Texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.text_files import TextFiles, is_corpus


def open_texts(texts: Any, encode: Encode, *, chat: Chat = None, split: str = "heldout") -> Texts:
    """The texts that a measurement is to read.

    Args:
        texts: strings; ``{group: strings}``; one or more paths of files (also as strings, where there is such a file);
            `TextFiles`, which says how files are read; the folder of a prepared corpus, or one with files of one kind;
            or `Texts`. A row of a .jsonl, .json, .csv, .tsv or .parquet file has ``text`` and maybe ``group`` or
            ``url``, whose site or work is the group; any other file is one text, and a group by itself. In JSON for
            ``text``, and for a string, there may be ``messages``, a list of dicts.
        encode: token ids of a string, without special tokens.
        chat: what writes messages as a string.
        split: of a prepared corpus.

    Raises `UserError` where there is no such file, or no text in it.
    """
    if isinstance(texts, Texts):
        return texts
    if isinstance(texts, TextFiles):
        return _open_files(texts, encode, chat, split)
    if isinstance(texts, str | Path):
        if os.path.isdir(texts):
            return _open_files(TextFiles([texts]), encode, chat, split)
        if not _is_file(texts):
            raise UserError(
                f"{str(texts)[:80]!r} is no prepared corpus and no file; give one of these, or a list of strings"
            )
        texts = [texts]
    if isinstance(texts, Mapping):
        strings = {group: [own] if isinstance(own, str) else own for group, own in texts.items()}
        pairs = [(group, text) for group, own in strings.items() for text in own]
    elif any(map(_is_file, texts := list(texts))):
        return _open_files(TextFiles(texts), encode, chat, split)
    else:
        pairs = [(None, text) for text in texts]
    return Texts(encode, pairs, "a text" if len(pairs) == 1 else f"{len(pairs):,} texts", chat)


def _is_file(text: Any) -> bool:
    return isinstance(text, Path) or (isinstance(text, str) and os.path.isfile(text))


def _open_files(files: TextFiles, encode: Encode, chat: Chat, split: str) -> Texts:
    """The texts of files, or the prepared corpus where its folder is all that is named."""
    first, *others = files.paths
    if others or not is_corpus(first):
        return Texts(encode, files.read(), str(files), chat)
    if files != TextFiles([first]):
        raise UserError(
            f"{first} is a prepared corpus, which has neither fields nor an encoding; leave out --text-field, "
            "--group-field and --encoding"
        )
    prepared: Texts = importlib.import_module("analysis.ours").PreparedTexts(first, split)
    return prepared
