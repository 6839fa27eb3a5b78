"""Opening what is to be measured: from what a user names to `Texts`."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.texts import TextReader, Texts
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path
from olmo_sparsity.util.text_fields import URL_FIELD, group_of_url
from olmo_sparsity.util.text_files import TextFiles, is_corpus
from olmo_sparsity.util.text_rows import kind_of

log = logging.getLogger(__name__)

_LONGEST_PATH = 4096
_GROUP_FIELDS = ("group", URL_FIELD)
_FIELDS = ("text", "messages", *_GROUP_FIELDS)


def open_texts(texts: Any, reader: TextReader, *, split: str = "heldout") -> Texts:
    """The texts that a measurement is to read.

    Args:
        texts: strings; ``{group: strings}``; a table with a column ``text`` and maybe ``group`` or ``url``, whose site
            or work is the group (a DataFrame, a `datasets.Dataset`, a list of dicts, a dict of columns, one row); in
            ``{group: table}`` the key is the group of all its rows; paths of files, or of a folder with files of one
            kind; `TextFiles`, which says how files are read; the folder of a prepared corpus; or `Texts`. A string in
            one line that names a file is its path. For a text there may be ``messages``, a list of dicts. None, NaN
            and "" name no group. What has no order, a set or what ``Path.glob`` gives, is sorted.
        reader: how the model reads them.
        split: of a prepared corpus.

    Raises `UserError` where there is no such file, no text in it, or something that is no text.
    """
    if isinstance(texts, Texts):
        return texts
    if files := files_named(texts):
        opened = _open_files(files, reader, split)
    else:
        rows = list(_rows(texts))
        opened = Texts(reader, rows, "a text" if len(rows) == 1 else f"{len(rows):,} texts")
    if opened.divided:
        count = f"{len(opened.lengths):,}"
        log.info("tokens that end or begin a document divide the texts into %s documents", count)
    if met := opened.special_tokens():
        log.info("%s special tokens stand in the texts: they are read, and are no targets", f"{met:,}")
    return opened


def files_named(texts: Any) -> TextFiles | None:
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
        opened = Texts(reader, files.read(), str(files))
        _, *options = dataclasses.fields(files)
        named = {option.name: getattr(files, option.name) for option in options}
        opened.read_with = {name: value for name, value in named.items() if value != getattr(TextFiles, name)}
        return opened
    if files != TextFiles([first]):
        raise UserError(
            f"{first} is a prepared corpus, which has neither fields nor an encoding; leave out --text-field, "
            "--group-field and --encoding"
        )
    from analysis.project import PreparedTexts  # not above: texts are read without the packages that it needs

    return PreparedTexts(first, split, reader.special)


Row = tuple[Any, Any]
"""Group, and string or messages."""


def _rows(texts: Any) -> Iterator[Row]:
    """Group and text of everything that a caller may hand over and that is not files alone."""
    if not isinstance(texts, Mapping) or _column_names(texts) is not None:
        yield from _rows_of_items(_items(texts, "texts"), "text")
    elif (rows := _rows_of_fields(texts)) is not None:
        yield from _rows_of_items(rows, "text")
    else:
        for group, of_group in texts.items():
            name = None if _names_nothing(group) else group
            is_item = isinstance(of_group, str | os.PathLike | Mapping) and _column_names(of_group) is None
            items = [of_group] if is_item else _items(of_group, f"group {group!r}")
            for _, text in _rows_of_items(items, f"group {group!r}, text"):
                yield name, text


def _rows_of_fields(texts: Mapping[Any, Any]) -> list[Any] | None:
    """The rows of a dict whose keys are fields: one row, or columns; None where they are groups of texts."""
    names = [name for name in _FIELDS if name in texts]
    has_text = "text" in names or "messages" in names
    has_group = any(name in names for name in _GROUP_FIELDS)
    if isinstance(texts.get("text"), str):
        return [texts] if has_group else None
    lengths = {len(column) if _is_column(column) else None for column in texts.values()}
    if has_text and len(texts) > 1 and len(lengths) == 1 and None not in lengths:
        if not has_group:
            others = ", ".join(str(name) for name in texts if name not in names)
            log.warning(
                "the dict is read as a table, of which %s is taken and not %s; where they are groups, rename %s",
                *(names[0], others, names[0]),
            )
        return _table(texts)
    if has_text and has_group and _is_column(texts[names[0]]):
        raise UserError(
            f"the {type(texts).__name__} has {' and '.join(names)}, but not a list of one length for each column; fix "
            "it, or give groups of texts other names"
        )
    return None


def _is_column(value: Any) -> bool:
    return (
        isinstance(value, Sized)
        and not isinstance(value, str | bytes | Mapping)
        and _column_names(value) is None
    )


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
    fields = [name for name in _FIELDS if name in names]
    if twice := [name for name in fields if names.count(name) > 1]:
        raise UserError(f"the {type(texts).__name__} has the column {twice[0]} twice; rename or drop one")
    columns = [_values(texts[name]) for name in fields]
    return [dict(zip(fields, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    # Arrow's values are no strings
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _items(texts: Any, what: str) -> list[Any]:
    """The rows of a table, or what is in a list, an array, a Series or a generator of texts."""
    if _column_names(texts) is not None:
        return _table(texts)
    if isinstance(texts, pd.Series) and "text" in texts.index:  # a row of a DataFrame
        return [texts.to_dict()]
    try:
        items = None if isinstance(texts, bytes) or hasattr(texts, "read") else iter(texts)
    except TypeError:
        items = None
    if items is None:
        raise UserError(
            f"{what} cannot be a {type(texts).__name__}; give a list of strings, the path of a file, or a DataFrame "
            "with a column text"
        )
    listed = list(items)
    is_glob = isinstance(texts, Iterator) and all(isinstance(item, os.PathLike) for item in listed)
    # in another process they may come in another order, which a list has on purpose
    return sorted(listed, key=str) if isinstance(texts, set | frozenset) or is_glob else listed


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
    return bool(pd.api.types.is_scalar(value) and pd.isna(value))


def _names_nothing(group: Any) -> bool:
    return _is_missing(group) or (isinstance(group, str) and not group)


def _group_of(row: Mapping[str, Any]) -> Any:
    """The group of a row, or the site or work of its url; None for neither."""
    group, url = (None if _names_nothing(row.get(name)) else row[name] for name in _GROUP_FIELDS)
    return group_of_url(str(url)) if group is None and url is not None else group


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
    except PermissionError as error:
        raise UserError(
            f"{str(text)!r} cannot be read ({error.strerror}); fix the path or its rights, or, where it is a text, "
            "end it with a line break"
        ) from error
    except (OSError, ValueError):  # too long a name, a NUL byte
        pass
    if not isinstance(text, str) or kind_of(text):
        raise UserError(
            f"there is no file {str(text)!r}; fix the path, or, where it is a text, end it with a line break"
        )
    return None
