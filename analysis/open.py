"""Opening what is to be measured: from what a user names to `Texts`."""

from __future__ import annotations

import gzip
import importlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.texts import TextReader, Texts
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r".*\.(txt|md|jsonl?|csv|tsv|parquet)(\.(gz|zst))?", re.IGNORECASE)
"""How a string ends that is meant as a path."""
_LONGEST_PATH = 4096
_GROUP_FIELDS = ("group", "url")


def open_texts(texts: Any, reader: TextReader, *, split: str = "heldout") -> Texts:
    """The texts that a measurement is to read.

    Args:
        texts: strings; ``{group: strings}``; a table with a column ``text`` and maybe ``group`` or ``url`` (a
            DataFrame, a `datasets.Dataset`, a list of dicts); one or more paths of files; the folder of a prepared
            corpus; or `Texts`. A string in one line that names a file is its path. For a text there may be
            ``messages``, a list of dicts.
        reader: how the model reads them.
        split: of a prepared corpus.

    Raises `UserError` where there is no such file, no text in it, or something that is no text.
    """
    if isinstance(texts, Texts):
        return texts
    if isinstance(texts, str | Path) and os.path.isdir(path := Path(texts).expanduser()):
        prepared: Texts = importlib.import_module("analysis.ours").PreparedTexts(path, split, reader.special)
        opened = prepared
    else:
        paths: list[Path] = []
        rows = list(_rows(texts, paths))
        name = "a text" if len(rows) == 1 else f"{len(rows):,} texts"
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            name = f"{paths[0]}{more}"
        opened = Texts(reader, rows, name)
    if met := opened.special_tokens():
        into = f"; they divide {opened.divided:,} texts into documents" if opened.divided else ""
        log.info(
            "%s special tokens stand in the texts: they are read, and are no targets%s", f"{met:,}", into
        )
    return opened


Row = tuple[Any, Any]
"""Group, and string or messages."""


def _rows(texts: Any, paths: list[Path]) -> Iterator[Row]:
    """Group and text of everything that a caller may hand over; ``paths`` becomes the files among it."""
    if isinstance(texts, str | os.PathLike):
        if (path := _path_of(texts)) is None:
            raise UserError(
                f"{str(texts)[:80]!r} is no file and no prepared corpus; give the path of one, or a list of strings"
            )
        paths.append(path)
        yield from _texts_of_file(path, path.name)
    elif isinstance(texts, Mapping) and not _is_table(texts):
        for group, of_group in texts.items():
            items = [of_group] if isinstance(of_group, str | os.PathLike) else _items(of_group)
            for _, text in _rows_of_items(items, f"group {group!r}, text", paths):
                yield group, text
    else:
        rows = _table(texts) if _is_table(texts) else _items(texts)
        yield from _rows_of_items(rows, "text", paths)


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
    return (
        column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    )  # Arrow's values are no strings


def _items(texts: Any) -> list[Any]:
    """What is in a list, an array, a Series or a generator of texts."""
    if isinstance(texts, bytes) or hasattr(texts, "read") or not isinstance(texts, Iterable):
        raise UserError(
            f"texts cannot be a {type(texts).__name__}; give a list of strings, the path of a file, or a DataFrame "
            "with a column text"
        )
    return list(texts)


def _rows_of_items(items: Sequence[Any], what: str, paths: list[Path]) -> Iterator[Row]:
    """Group and text of each item of a list: a string, a path, a row of a table, or messages."""
    of_items = [_path_of(item) if isinstance(item, str | os.PathLike) else None for item in items]
    names = [path.name for path in of_items if path is not None]
    for number, (item, path) in enumerate(zip(items, of_items, strict=True)):
        if path is not None:
            paths.append(path)
            yield from _texts_of_file(path, path.name if names.count(path.name) == 1 else str(path))
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
    return importlib.import_module("olmo_sparsity.data.groups").group_of_url(str(url))


def _path_of(text: str | os.PathLike[str]) -> Path | None:
    """The file that a string or path names; None for a string that is a text.

    Raises `UserError` where there is no file of that name: for a path, and for a line that ends as one does.
    """
    if isinstance(text, str) and ("\n" in text or len(text) > _LONGEST_PATH or not text.strip()):
        return None
    try:
        path = Path(text).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL byte, no such user
        pass
    if not isinstance(text, str) or _FILE_NAME.fullmatch(text):
        raise UserError(
            f"there is no file {str(text)!r}; mend the path, or, where it is a text, end it with a line break"
        )
    return None


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
