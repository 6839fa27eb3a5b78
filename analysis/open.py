"""Opening what is to be measured: from what a user names to `Texts`."""

from __future__ import annotations

import importlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.texts import TextReader, Texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path
from olmo_sparsity.util.text_fields import group_of_url
from olmo_sparsity.util.text_files import TextFiles, is_corpus
from olmo_sparsity.util.text_rows import kind_of

log = logging.getLogger(__name__)

_LONGEST_PATH = 4096
_GROUP_FIELDS = ("group", "url")


def open_texts(texts: Any, reader: TextReader, *, split: str = "heldout") -> Texts:
    """The texts that a measurement is to read.

    Args:
        texts: strings; ``{group: strings}``; a table with a column ``text`` and maybe ``group`` or ``url``, whose site
            or work is the group (a DataFrame, a `datasets.Dataset`, a list of dicts); paths of files, or of a folder
            with files of one kind; `TextFiles`, which says how files are read; the folder of a prepared corpus; or
            `Texts`. A string in one line that names a file is its path. For a text there may be ``messages``, a list
            of dicts.
        reader: how the model reads them.
        split: of a prepared corpus.

    Raises `UserError` where there is no such file, no text in it, or something that is no text.
    """
    if isinstance(texts, Texts):
        return texts
    if files := _as_files(texts):
        opened = _open_files(files, reader, split)
    else:
        rows = list(_rows(texts))
        opened = Texts(reader, rows, "a text" if len(rows) == 1 else f"{len(rows):,} texts")
    if met := opened.special_tokens():
        into = f"; they divide {opened.divided:,} texts into documents" if opened.divided else ""
        met_text = f"{met:,} special tokens stand in the texts: they are read, and are no targets"
        log.info("%s%s", met_text, into)
    return opened


def _as_files(texts: Any) -> TextFiles | None:
    """The files that a path or a list of nothing but paths names; None for anything else."""
    if isinstance(texts, TextFiles):
        return texts
    if isinstance(texts, str | os.PathLike):
        path = _path_of(texts)
        if path is None:
            raise UserError(
                f"{str(texts)[:80]!r} is no file and no prepared corpus; give the path of one, or a list of strings"
            )
        return TextFiles([path])
    if isinstance(texts, Sequence) and texts and all(isinstance(item, str | os.PathLike) for item in texts):
        paths = [path for item in texts if (path := _path_of(item)) is not None]
        if len(paths) == len(texts):
            return TextFiles(paths)
    return None


def _open_files(files: TextFiles, reader: TextReader, split: str) -> Texts:
    """The texts of files, or the prepared corpus where its folder is all that is named."""
    first, *others = files.paths
    if others or not is_corpus(first):
        return Texts(reader, files.read(), str(files))
    if files != TextFiles([first]):
        raise UserError(
            f"{first} is a prepared corpus, which has neither fields nor an encoding; leave out --text-field, "
            "--group-field and --encoding"
        )
    prepared: Texts = importlib.import_module("analysis.ours").PreparedTexts(first, split, reader.special)
    return prepared


Row = tuple[Any, Any]
"""Group, and string or messages."""


def _rows(texts: Any) -> Iterator[Row]:
    """Group and text of everything that a caller may hand over and that is not files alone."""
    if isinstance(texts, Mapping) and not _is_table(texts):
        for group, of_group in texts.items():
            items = [of_group] if isinstance(of_group, str | os.PathLike) else _items(of_group)
            for _, text in _rows_of_items(items, f"group {group!r}, text"):
                yield group, text
    else:
        rows = _table(texts) if _is_table(texts) else _items(texts)
        yield from _rows_of_items(rows, "text")


def _is_table(texts: Any) -> bool:
    """Whether it has named columns: a DataFrame, a `datasets.Dataset`, a table of Arrow, or columns in a dict."""
    if _column_names(texts) is not None:
        return True
    if not isinstance(texts, Mapping):
        return False
    # {"text": […], "url": […]}, as Dataset.to_dict() gives it, and no groups of texts, one of them called text
    of_lists = all(isinstance(column, list) for column in texts.values())
    return "text" in texts and len(texts) > 1 and of_lists and len(set(map(len, texts.values()))) == 1


def _column_names(texts: Any) -> list[str] | None:
    for attribute in ("column_names", "columns"):
        names = getattr(texts, attribute, None)
        if isinstance(names, Mapping):  # a DatasetDict
            splits = ", ".join(map(str, names))
            raise UserError(f"the {type(texts).__name__} has the splits {splits}; give one of them")
        if names is not None and not callable(names):
            return [str(name) for name in names]
    return None


def _table(texts: Any) -> list[dict[str, Any]]:
    """The rows of a table, each with its text or messages, and its group or url where it has one."""
    names = list(texts) if isinstance(texts, Mapping) else _column_names(texts) or []
    if "text" not in names and "messages" not in names:
        raise UserError(
            f"the {type(texts).__name__} has no column text, only {', '.join(names)[:200]}; rename the column, or give "
            "its strings as a list"
        )
    wanted = [name for name in ("text", "messages", *_GROUP_FIELDS) if name in names]
    columns = [_values(texts[name]) for name in wanted]
    return [dict(zip(wanted, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    # Arrow's values are no strings
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _items(texts: Any) -> list[Any]:
    """What is in a list, an array, a Series or a generator of texts."""
    if isinstance(texts, bytes) or hasattr(texts, "read") or not isinstance(texts, Iterable):
        raise UserError(
            f"texts cannot be a {type(texts).__name__}; give a list of strings, the path of a file, or a DataFrame "
            "with a column text"
        )
    return list(texts)


def _rows_of_items(items: Sequence[Any], what: str) -> Iterator[Row]:
    """Group and text of each item of a list: a string, a path, a row of a table, or messages."""
    paths = [_path_of(item) if isinstance(item, str | os.PathLike) else None for item in items]
    names = [path.name for path in paths if path is not None]
    for number, (item, path) in enumerate(zip(items, paths, strict=True)):
        if path is not None:
            for group, text in TextFiles([path]).read():
                is_shared = group == path.name and names.count(path.name) > 1
                yield str(path) if is_shared else group, text
        elif isinstance(item, Mapping) and ("text" in item or "messages" in item):
            text = item.get("messages") if _is_missing(item.get("text")) else item["text"]
            yield _group_of(item), _checked(text, f"{what} {number}")
        else:
            yield None, _checked(item, f"{what} {number}")


def _checked(text: Any, where: str) -> Any:
    """A string or messages. Raises `UserError`, which names where it stands, for anything else."""
    if isinstance(text, str):
        # half an emoji is legal in JSON and in Python's strings, and is no text
        return str(text) if text.isascii() else text.encode("utf8", "replace").decode("utf8")
    if isinstance(text, list) and text and all(isinstance(message, Mapping) for message in text):
        return text
    if _is_missing(text):
        raise UserError(f"{where} is missing ({text}); drop what is empty, such as with dropna()")
    raise UserError(f"{where} is a {type(text).__name__} ({str(text)[:60]}), no text; give strings")


def _is_missing(value: Any) -> bool:
    return (
        value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA or value is pd.NaT
    )


def _group_of(row: Mapping[str, Any]) -> Any:
    """The group of a row, or the site or work of its url; None for neither."""
    group, url = row.get("group"), row.get("url")
    if not _is_missing(group):
        return group
    if _is_missing(url) or not url:
        return None
    return group_of_url(str(url))


def _path_of(text: str | os.PathLike[str]) -> Path | None:
    """The file that a string or path names; None for a string that is a text.

    Raises `UserError` where there is no file of that name: for a path, and for a line that ends as one does.
    """
    if isinstance(text, str) and ("\n" in text or len(text) > _LONGEST_PATH or not text.strip()):
        return None
    try:
        path = user_path(text)
        if path.exists():
            return path
    except (OSError, ValueError):  # too long a name, a NUL byte
        pass
    if not isinstance(text, str) or kind_of(text):
        raise UserError(
            f"there is no file {str(text)!r}; mend the path, or, where it is a text, end it with a line break"
        )
    return None
