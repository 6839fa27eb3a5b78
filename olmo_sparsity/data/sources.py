"""Where documents come from: docstrings of installed packages, local files, and data sets on the Hugging Face hub.

A source says what identifies its text, so that a finished corpus is recognised, and cuts it into units, each of which
becomes a token file: a unit can be read again, in any process, and gives the same documents in the same order.

Local files are not read by `datasets`: its reader of text changes line ends, that of JSON takes numbers for text, and
zstandard would need another package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from olmo_sparsity.data.docstrings import docs_packages, write_documents
from olmo_sparsity.data.groups import group_of_url
from olmo_sparsity.data.text import Document, find_eos
from olmo_sparsity.data.tokens import load_tokenizer, tokenizer_file
from olmo_sparsity.util.arguments import argument, whole_number, whole_number_or_zero
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import sha256_file

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.zst")
PARQUET_SUFFIX = ".parquet"
ROW_LAYOUT = (
    'each line must be one JSON object with a string "text", as in C4 (Parquet: each row); mend or remove it'
)
URL_FIELD, GROUP_FIELD, NO_GROUPS = "url", "group", "none"
READ_BYTES, PARQUET_ROWS = 1 << 20, 64
"""Read at once: row groups of Parquet may be larger than memory."""
TEXT_UNIT_BYTES = 16 << 20
"""Consecutive .txt files are put together up to this size: training windows do not cross token files."""
HUB_UNIT_TOKENS = 25_000_000
"""With a limit on tokens, shards are put together in units of about this size."""
LEFT_OUT_WHERE_OFF = ("group_field", "near_copy_tokens")
"""Of a request, so that it equals that of corpora which were made before there were such."""


# --- settings ---


def _option(
    default: Any, about: str, *sources: str, parse: Callable[[str], int | float] | None = None
) -> Any:
    """A setting and its command-line option, see `argument`.

    ``sources`` are those that use it (none: all do); ``parse`` reads a number from text, and refuses one out of range.
    """
    options: dict[str, Any] = {"type": parse, "metavar": "N"} if parse else {}
    if isinstance(default, tuple):
        options["nargs"] = "+"
    return field(default=default, metadata=argument(about, **options) | {"sources": sources})


@dataclass(frozen=True)
class PrepareSettings:
    """What corpus to make. A setting that the source does not use must stay at its default."""

    source: str
    """docs, text or c4."""
    files: tuple[str, ...] = _option((), "training files; none: a corpus to evaluate on only", "text")
    heldout_files: tuple[str, ...] = _option(
        (), "held-out files, instead of a share of the documents", "text"
    )
    packages: tuple[str, ...] = _option((), "only these; python: standard library", "docs")
    dataset: str = _option("allenai/c4", "name on the hub, or a folder of its layout or of its files", "c4")
    dataset_config: str = _option("en", "its configuration", "c4")
    limit_tokens: int | None = _option(
        None, "about this many training tokens, in whole documents", "c4", parse=whole_number
    )
    heldout_documents: int = _option(
        5000, "at most this many documents of the validation split", "c4", parse=whole_number
    )
    heldout_fraction: float = _option(
        0.1,
        "share of the documents to hold out, in whole groups, by a hash of seed and group (without groups: text)",
        "docs",
        "text",
        parse=float,
    )
    group_field: str | None = _option(
        None,
        "field that names the book, site or package that a document is a part of; none: no groups (default: url, "
        "of documents that have one: its site, or the work that its #fragment numbers parts of; of docs the package)",
    )
    seed: int = _option(0, "another seed holds out other documents", parse=whole_number_or_zero)
    tokenizer: str | None = _option(
        None,
        "bpe (trained on the training split; default for docs and text), olmo (50,280 ids; default for c4), the path "
        "of a tokenizer.json or of a model's folder with one, or the id of a model on the Hugging Face Hub",
    )
    vocab_size: int = _option(4096, "bpe: number of ids", parse=whole_number)
    tokenizer_sample_mb: float = _option(
        20.0, "bpe: text to train it on, in millions of characters", parse=float
    )
    eos_token: str | None = _option(None, "token that ends a document (default: the usual names are tried)")
    decontaminate: bool = _option(True, "remove held-out paragraphs that also stand in a training document")
    near_copy_tokens: int = _option(
        32,
        "mark held-out tokens in runs of so many that also stand in the training text, which is read once more for it; "
        "0: do not look",
        parse=whole_number_or_zero,
    )

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, or the source's own choice."""
        return self.tokenizer or SOURCES[self.source].tokenizer

    @property
    def groups(self) -> GroupField | None:
        """The field of groups: the named one, which every row must have, or the url of those that have one."""
        if self.group_field is None:
            return GroupField(URL_FIELD)
        return None if self.group_field == NO_GROUPS else GroupField(self.group_field, is_needed=True)

    def check(self) -> None:
        """Raise `UserError` for settings that do not go together."""
        if self.source not in SOURCES:
            raise UserError(f"unknown source {self.source!r}; choose one of {', '.join(SOURCES)}")
        for option in fields(self)[1:]:
            sources, value = option.metadata["sources"], getattr(self, option.name)
            if sources and self.source not in sources and value != option.default:
                raise UserError(f"--{option.name.replace('_', '-')} is not for source {self.source}")
        if self.tokenizer_name != "bpe":
            find_eos(load_tokenizer(tokenizer_file(self.tokenizer_name)), self.eos_token)
        elif self.heldout_files and not self.files:
            raise UserError(
                "without --files there is no text to train a tokenizer on; name that of the model to evaluate with "
                "--tokenizer (olmo, or the tokenizer.json of the corpus that it was trained on)"
            )

    def request(self) -> dict[str, Any]:
        """What the token files depend on, for the manifest: equal requests make the same corpus."""
        request: dict[str, Any] = {"source": self.source, "seed": self.seed}
        request |= SOURCES[self.source].identify(self)
        request["tokenizer"] = self.tokenizer_name if self.tokenizer_name in ("bpe", "olmo") else "file"
        if self.tokenizer_name == "bpe":
            request |= {"vocab_size": self.vocab_size, "tokenizer_sample_mb": self.tokenizer_sample_mb}
        else:
            request["tokenizer_file_sha256"] = sha256_file(tokenizer_file(self.tokenizer_name))
        names = ("eos_token", "decontaminate", "near_copy_tokens")
        request |= {name: getattr(self, name) for name in names}
        return {name: value for name, value in request.items() if value or name not in LEFT_OUT_WHERE_OFF}


# --- units ---


class Unit(Protocol):
    """A part of a corpus that becomes one token file."""

    def documents(self) -> Iterator[Document]:
        """Its documents, no text empty. Raises `UserError` for unreadable input."""
        ...


class Corpus(NamedTuple):
    """The units of a corpus."""

    train: Sequence[Unit]
    heldout: Sequence[Unit] = ()
    """None: a share of the documents of `train` is held out."""
    limit_tokens: int | None = None
    """How many tokens each training unit may give."""


@dataclass(frozen=True)
class GroupField:
    """The field of a row that names the group of its document."""

    name: str
    is_needed: bool = False
    """Every row must have it; else a row without it stands by itself."""

    def read(self, row: Mapping[str, Any], where: str) -> str | None:
        """The group of a row; ``where`` names the row in messages."""
        value = row.get(self.name)
        if value not in (None, ""):
            group = well_formed(value if isinstance(value, str) else json.dumps(value, default=str))
            return group_of_url(group) if self.name == URL_FIELD else group
        if self.is_needed:
            raise UserError(
                f"{where} has no {self.name} to name its group; name a field that all have with --group-field, or "
                f"{NO_GROUPS}"
            )
        return None


def document_of_row(row: Any, where: str, group_field: GroupField | None) -> Document:
    """The document of a row, an object with a ``text``. Raises `UserError`, which says ``where``, for any other."""
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f"{where} has no text; {ROW_LAYOUT}")
    return Document(well_formed(row["text"]), group_field.read(row, where) if group_field else None)


def well_formed(text: str) -> str:
    """``text`` with lone surrogates (half an emoji; legal in JSON, not in UTF-8) replaced by question marks."""
    return text if text.isascii() else text.encode("utf8", "replace").decode("utf8")


@dataclass(frozen=True)
class TextFiles:
    """Local files: rows with a ``text`` (JSON lines as C4, Parquet), or one document each; read piece by piece."""

    paths: tuple[str, ...]
    group_field: GroupField | None = None

    def documents(self) -> Iterator[Document]:
        """All files in order. Raises `UserError` with file and line for what cannot be read."""
        from pyarrow import ArrowException

        for path in self.paths:
            try:
                for document in self._read(path):
                    if document.text.strip():
                        yield document
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
            except (OSError, ArrowException) as error:
                raise UserError(
                    f"{path} cannot be read, or is truncated or damaged ({first_line(error)}); put it back whole"
                ) from error

    def _read(self, path: str) -> Iterator[Document]:
        if path.endswith(TEXT_SUFFIXES):
            with _unpacked(path) as file:
                yield Document(file.read().decode("utf-8-sig"))
            return
        rows = _parquet_rows(path, self.group_field) if path.endswith(PARQUET_SUFFIX) else _json_rows(path)
        for number, row in rows:
            yield document_of_row(row, f"{path}:{number}", self.group_field)


@contextmanager
def _unpacked(path: str) -> Iterator[IO[bytes]]:
    """The file at ``path``, which Python opens: pyarrow's own errors do not say what the system refused."""
    with open(path, "rb") as file:
        if packing := {".gz": "gzip", ".zst": "zstd"}.get(Path(path).suffix):
            import pyarrow

            yield BufferedReader(pyarrow.CompressedInputStream(file, packing), READ_BYTES)
        else:
            yield file


def _json_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers, from 1."""
    with _unpacked(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{number} is not JSON ({first_line(error)}); {ROW_LAYOUT}") from error
            yield number, row


def _parquet_rows(path: str, group_field: GroupField | None) -> Iterator[tuple[int, Any]]:
    """The same of Parquet, of which no other column is read."""
    from pyarrow.parquet import ParquetFile

    columns = ["text", *([group_field.name] if group_field else [])]
    with open(path, "rb") as raw:
        opened = ParquetFile(raw, buffer_size=READ_BYTES, pre_buffer=False)  # else it reads whole row groups
        parts = opened.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False)
        yield from enumerate((row for part in parts for row in part.to_pylist()), start=1)


def check_files(files: Sequence[str]) -> None:
    """Raise `UserError` for files that are missing, of an unknown kind or named twice."""
    known = (*JSON_SUFFIXES, *TEXT_SUFFIXES, PARQUET_SUFFIX)
    if not files:
        raise UserError("no input files; name them with --files")
    for path in files:
        if not Path(path).is_file():
            raise UserError(f"input file {path} is {'a folder' if Path(path).is_dir() else 'missing'}")
        if not path.endswith(known):
            raise UserError(f"{path} is of an unknown kind; use one of {', '.join(known)}")
    if len({Path(path).resolve() for path in files}) < len(files):
        raise UserError(f"a file is named twice among {', '.join(files)}")


def file_units(files: Sequence[str], group_field: GroupField | None = None) -> list[TextFiles]:
    """Units of local files: each file of rows, and each run of plain text files of about 16 MB."""
    units: list[TextFiles] = []
    room = 0  # bytes left in the unit of text files at the end
    for path in files:
        is_text, size = path.endswith(TEXT_SUFFIXES), Path(path).stat().st_size
        if is_text and room > 0:
            units[-1] = TextFiles((*units[-1].paths, path))
            room -= size
        else:
            units.append(TextFiles((path,), None if is_text else group_field))
            room = TEXT_UNIT_BYTES - size if is_text else 0
    return units


@dataclass(frozen=True)
class HubShards:
    """Part ``index`` of ``count`` of a data set's split, streamed from the hub or a copy of its folder."""

    dataset: str
    """Name on the hub, or path of a folder of the same layout, or of its files."""
    config: str
    split: str
    index: int
    count: int
    limit_documents: int | None
    group_field: GroupField | None

    def documents(self) -> Iterator[Document]:
        """Those of at most ``limit_documents`` rows. Raises `UserError` where the connection is lost."""
        where = f"{self.dataset} ({self.split})"
        stream = _open_stream(self.dataset, self.config, self.split).shard(self.count, self.index)
        try:
            for row in islice(stream, self.limit_documents):
                document = document_of_row(row, where, self.group_field)
                if document.text.strip():
                    yield document
        except UserError:
            raise
        except Exception as error:  # of datasets, pyarrow, zlib and httpx
            raise UserError(
                f"{where} can no longer be read ({first_line(error)}); see to the connection, or to the folder, and "
                "run the same command again: what is finished is kept"
            ) from error


@lru_cache(maxsize=4)
def _open_stream(dataset: str, config: str, split: str) -> Any:
    from datasets import load_dataset

    name = f"c4-{split}.*.json.gz"
    try:
        for folder in (Path(dataset, config), Path(dataset)):
            if any(folder.glob(name)):  # copied without the README.md that names the files
                files = {split: str(folder / name)}
                return load_dataset("json", data_files=files, split=split, streaming=True)
        return load_dataset(dataset, config, split=split, streaming=True)
    except Exception as error:  # of many kinds
        raise UserError(
            f"{dataset}, config {config}, split {split} cannot be opened ({first_line(error)}); without a network, "
            "copy the data set's folder here and name it with --dataset"
        ) from error


# --- sources ---


class Source(NamedTuple):
    """A kind of text."""

    identify: Callable[[PrepareSettings], dict[str, Any]]
    """What the text is: names, sizes, versions. Quick; refuses what is missing. A `heldout_fraction` in it says that
    held-out documents are chosen among the training documents."""
    corpus: Callable[[PrepareSettings, Path, int], Corpus]
    """Its units, given a work folder and a number of processes."""
    tokenizer: str
    """Used where none is asked for."""


def _identify_docs(settings: PrepareSettings) -> dict[str, Any]:
    if settings.group_field not in (None, NO_GROUPS):
        raise UserError(f"--group-field {settings.group_field}: of docs it is the package, or {NO_GROUPS}")
    return {
        "packages": docs_packages(settings.packages),
        "heldout_fraction": settings.heldout_fraction,
        "group_field": None if settings.group_field == NO_GROUPS else "package",
    }


def _docs_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    folder = work / "text"
    if not folder.is_dir():
        write_documents(folder, list(docs_packages(settings.packages)), workers)
    groups = None if settings.group_field == NO_GROUPS else GroupField(GROUP_FIELD)
    return Corpus(file_units(sorted(map(str, folder.glob("*.jsonl"))), groups))


def _identify_text(settings: PrepareSettings) -> dict[str, Any]:
    files, groups = [*settings.files, *settings.heldout_files], settings.groups
    check_files(files)
    has_rows = not all(path.endswith(TEXT_SUFFIXES) for path in files)
    return {
        "files": _describe(settings.files),
        "heldout_files": _describe(settings.heldout_files),
        "heldout_fraction": None if settings.heldout_files else settings.heldout_fraction,
        "group_field": groups.name if groups and has_rows else None,
    }


def _describe(files: Sequence[str]) -> list[dict[str, Any]]:
    """Names without folders: a manifest may be published, and a corpus copied together with its text."""
    stats = [(Path(path).name, Path(path).stat()) for path in files]
    return [{"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats]


def _text_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    groups = settings.groups
    return Corpus(file_units(settings.files, groups), file_units(settings.heldout_files, groups))


def _identify_c4(settings: PrepareSettings) -> dict[str, Any]:
    names = ("dataset", "dataset_config", "limit_tokens", "heldout_documents")
    request = {name: getattr(settings, name) for name in names}
    return request | {"group_field": settings.groups and settings.groups.name}


def _c4_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    """Without a limit each shard is a unit; with one, the units are as few as keep their size reasonable, and have
    equal parts of it: a taste need not open a thousand files."""
    where, limit = (settings.dataset, settings.dataset_config), settings.limit_tokens
    count = _open_stream(*where, "train").num_shards
    if limit is not None:
        count = min(count, -(-limit // HUB_UNIT_TOKENS))
        limit = -(-limit // count)
    train = [HubShards(*where, "train", index, count, None, settings.groups) for index in range(count)]
    heldout = [HubShards(*where, "validation", 0, 1, settings.heldout_documents, settings.groups)]
    return Corpus(train, heldout, limit)


SOURCES = {
    "docs": Source(_identify_docs, _docs_corpus, "bpe"),
    "text": Source(_identify_text, _text_corpus, "bpe"),
    "c4": Source(_identify_c4, _c4_corpus, "olmo"),
}
