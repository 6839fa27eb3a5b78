"""Files of text, as people have them: the one reader of `prepare_data text` and of every command with ``--text``."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path
from olmo_sparsity.util.text_fields import NO_GROUPS, Fields, listed
from olmo_sparsity.util.text_rows import KINDS, check_encoding, is_plain, kind_of, read_rows, read_text

log = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
"""Of a prepared corpus, as in `olmo_sparsity.data.tokens`, which this file must not import."""
_ABOUT = re.compile(
    r"(readme|licen[sc]es?|copying|notice|changelog|authors|citation|config|tokenizer|dataset_infos?)(?![a-z])",
    re.IGNORECASE,
)
"""How names of files begin that are no text themselves: they tell of the others in a folder."""


@dataclass(frozen=True)
class TextFiles:
    """Files of text, and how they are read; `analysis.measure` takes it as ``texts``.

    Raises `UserError` where no path is named, for a field that is no name, and for an encoding that there is not.
    """

    paths: Sequence[str | Path]
    """Of files, or of folders with files of one kind; a single path is taken as well."""
    text_field: str = "text"
    """Field (JSON) or column (CSV, Parquet) that holds the text."""
    group_field: str | None = None
    """Field that names the book or site of a text; none: no groups. By default ``group``, else ``url``."""
    encoding: str = "utf-8"
    """Of all files but Parquet."""

    def __post_init__(self) -> None:
        paths = (
            list(self.paths)
            if isinstance(self.paths, Iterable) and not isinstance(self.paths, str)
            else [self.paths]
        )
        for path in paths:
            if not isinstance(path, str | Path) or "\0" in str(path):
                raise UserError(
                    f"{str(path)[:80]!r} is no path of a file; give paths only, or strings of text only"
                )
        if not paths:
            raise UserError("no file of text is named; give at least one")
        for name, value in (("text_field", self.text_field), ("group_field", self.group_field or "")):
            if not isinstance(value, str):
                raise UserError(f"{name} is the name of a field, not {value!r}")
        object.__setattr__(self, "paths", tuple(str(user_path(path)) for path in paths))
        object.__setattr__(self, "encoding", check_encoding(self.encoding))

    def __str__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{more}"

    def read(self) -> list[tuple[str | None, Any]]:
        """Group and text of every text, or messages in its place. A file that is one text is a group by itself.

        Line ends of such a file become line feeds, as Python reads text. Raises `UserError`, with file and line, for
        what cannot be read, and where there is no text at all.
        """
        fields = Fields(self.text_field, self.group_field)
        paths = expand_folders(self.paths)
        uses = Counter(Path(path).name for path in paths)
        texts: list[tuple[str | None, Any]] = []
        empty: list[str] = []
        for path in paths:
            first = len(texts)
            if is_plain(path):
                name = Path(path).name
                group = name if uses[name] == 1 else path
                text = read_text(path, self.encoding).replace("\r\n", "\n").replace("\r", "\n")
                if _begins_with_a_row(text):
                    log.warning(
                        "%s is read as one text, though its first line is a JSON object; where every line is, give it "
                        "a name that ends in .jsonl",
                        path,
                    )
                texts.append((None if self.group_field == NO_GROUPS else group, text))
            else:
                for location, row in read_rows(path, fields, self.encoding):
                    text = fields.text_of(location, row, or_messages=True)
                    texts.append((fields.group_of(location, row), text))
            if not any(text if isinstance(text, list) else text.strip() for _, text in texts[first:]):
                empty.append(path)
        if len(empty) == len(paths):
            raise UserError(f"{self}: there is no text in it; give a file that is not empty")
        if empty:
            log.warning("%s of %s files have no text: %s", len(empty), len(paths), listed(empty))
        return texts


def _begins_with_a_row(text: str) -> bool:
    """Whether the first line of a text is a JSON object."""
    line = text.lstrip().partition("\n")[0]
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def expand_folders(paths: Iterable[str | Path]) -> list[str]:
    """Paths of files, in their order: a folder stands for its files of text, see `files_of_folder`."""
    files: list[str] = []
    for path in map(user_path, paths):
        files += files_of_folder(path) if os.path.isdir(path) else [str(path)]
    return files


def files_of_folder(folder: str | Path) -> list[str]:
    """The files of text in a folder, sorted by name; they must be of one kind.

    Hidden files, files that are no text by their names, and a README or licence of another kind are left out. Raises
    `UserError` for a prepared corpus, for several kinds of files, and where there is none.
    """
    if is_corpus(folder):
        raise UserError(f"{folder} is a prepared corpus and no folder of text; name files of text")
    try:
        entries = sorted(Path(folder).iterdir())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read ({error.strerror}); name another folder, or files"
        ) from error
    shown = [path for path in entries if not path.name.startswith(".")]
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for path in shown:
        kind = kind_of(path)
        if kind is not None and not path.is_dir():  # a link that leads nowhere is refused when it is read
            by_kind[kind].append(path)
    texts = {kind: files for kind, files in by_kind.items() if not all(_ABOUT.match(p.name) for p in files)}
    if not texts:
        content = f"has only {listed([path.name for path in shown])}" if shown else "is empty"
        raise UserError(
            f"{folder} is neither a prepared corpus (it has no {MANIFEST_NAME}) nor a folder of text: it {content}; "
            f"name files, or a folder with one kind of {KINDS}"
        )
    if len(texts) > 1:
        counts = ", ".join(f"{len(files)} .{kind}" for kind, files in texts.items())
        raise UserError(
            f"{folder} has several kinds of files of text ({counts}); name those to read, such as "
            f"{folder}/*.{next(iter(texts))}"
        )
    (files,) = texts.values()
    left_out = [path.name for path in shown if path not in files and not _ABOUT.match(path.name)]
    if left_out:
        log.warning("%s: %s of its files are read; left out: %s", folder, len(files), listed(left_out))
    return [str(path) for path in files]


def is_corpus(folder: str | Path) -> bool:
    """Whether a folder is a corpus that `prepare_data` made."""
    return os.path.isfile(user_path(folder) / MANIFEST_NAME)
