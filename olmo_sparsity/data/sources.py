"""Where documents come from, and the settings of making a corpus of them.

Sources: docstrings of installed packages, local files, and data sets on the Hugging Face hub. A source says what
identifies its text, so that a finished corpus is recognised, and cuts it into units, see `Unit`.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from io import BufferedIOBase, BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

from olmo_sparsity.data.docstrings import docs_packages, write_documents
from olmo_sparsity.data.groups import group_of_url
from olmo_sparsity.data.text import GROUP_FIELD, Document, Unit
from olmo_sparsity.data.tokenizers import (
    EOS_TOKEN,
    MAX_BPE_VOCAB_SIZE,
    MIN_BPE_VOCAB_SIZE,
    find_eos,
    load_tokenizer,
    tokenizer_file,
)
from olmo_sparsity.util.arguments import (
    argument,
    positive_number,
    seed_number,
    share_of_one,
    whole_number,
    whole_number_or_zero,
)
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import sha256_file
from olmo_sparsity.util.workers import StoppedEarly

log = logging.getLogger(__name__)

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
TEXT_SUFFIXES = (".txt", ".txt.gz", ".txt.zst")
PARQUET_SUFFIX = ".parquet"
ROW_LAYOUT = (
    'each line must be one JSON object with a string "text", as in C4 (Parquet: each row); mend or remove it'
)
URL_FIELD, NO_GROUPS = "url", "none"
READ_BYTES, PARQUET_ROWS = 1 << 20, 64
"""Read at once: row groups of Parquet may be larger than memory."""
TEXT_UNIT_BYTES = 16 << 20
"""Consecutive .txt files are put together up to this size: training windows do not cross token files."""
HUB_UNIT_DOCUMENTS = 50_000
HUB_UNIT_TOKENS = 25_000_000
"""With a limit on documents or tokens, shards are put together in units of about this size."""
SHARD_NAME = re.compile(r"^(.*?)(\d{5})-of-(\d{5})")
HUB_TIMEOUT_SECONDS = 10.0
LEFT_OUT_WHERE_OFF = ("group_field", "near_copy_tokens")
"""Of a request, so that it equals that of corpora which were made before there were such."""


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
    limit_documents: int | None = _option(
        None, "at most this many training documents", "c4", parse=whole_number
    )
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
        parse=share_of_one,
    )
    group_field: str | None = _option(
        None,
        "field that names the book, site or package that a document is a part of; none: no groups (default: url, "
        "of documents that have one: its site, or the work that its #fragment numbers parts of; of docs the package)",
    )
    seed: int = _option(0, "another seed holds out other documents", parse=seed_number)
    tokenizer: str | None = _option(
        None,
        "bpe (trained on the training split; default for docs and text), olmo (50,280 ids; default for c4), the path "
        "of a tokenizer.json or of a model's folder with one, or the id of a model on the Hugging Face Hub",
    )
    vocab_size: int = _option(4096, "bpe: number of ids", parse=whole_number)
    tokenizer_sample_mb: float = _option(
        20.0, "bpe: text to train it on, in millions of characters", parse=positive_number
    )
    eos_token: str | None = _option(None, "token that ends a document (default: the usual names are tried)")
    decontaminate: bool = _option(True, "remove held-out paragraphs that also stand in a training document")
    decontaminate_min_characters: int = _option(
        0, "keep shorter ones: headings and one-word answers", parse=whole_number_or_zero
    )
    near_copy_tokens: int = _option(
        32,
        "mark held-out tokens in runs of so many that also stand in the training text, which is read once more for it; "
        "0: do not look",
        parse=whole_number_or_zero,
    )

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, or the source's own choice."""
        return self.tokenizer or find_source(self.source).tokenizer

    def check(self) -> None:
        """Raise one `UserError` with everything that is wrong."""
        find_source(self.source)
        problems = [
            problem for each in fields(self)[1:] if (problem := self._problem(each.name, each.metadata))
        ]
        if self.tokenizer_name != "bpe":
            try:
                find_eos(load_tokenizer(tokenizer_file(self.tokenizer_name)), self.eos_token)
            except UserError as error:
                problems.append(str(error))
        elif self.heldout_files and not self.files:
            problems.append(
                "without --files there is no text to train a tokenizer on; name that of the model to evaluate with "
                "--tokenizer (olmo, or the tokenizer.json of the corpus that it was trained on)"
            )
        elif self.eos_token not in (None, EOS_TOKEN):
            problems.append(f"--eos-token is not for --tokenizer bpe, which ends documents with {EOS_TOKEN}")
        elif not MIN_BPE_VOCAB_SIZE <= self.vocab_size <= MAX_BPE_VOCAB_SIZE:
            problems.append(
                f"--vocab-size {self.vocab_size} must be at least {MIN_BPE_VOCAB_SIZE} (all bytes and EOS) and at most "
                f"{MAX_BPE_VOCAB_SIZE:,}"
            )
        if problems:
            raise UserError("; ".join(problems))

    @property
    def has_groups(self) -> bool:
        """Whether groups are asked for."""
        return self.group_field != NO_GROUPS

    def _problem(self, name: str, about: Mapping[str, Any]) -> str | None:
        """What is wrong with one setting, whatever the others are."""
        value, option = getattr(self, name), f"--{name.replace('_', '-')}"
        is_foreign = about["sources"] and self.source not in about["sources"]
        if is_foreign and value != getattr(PrepareSettings, name):
            return f"{option} is not for source {self.source}"
        return None

    def request(self) -> dict[str, Any]:
        """What the token files depend on, for the manifest: equal requests make the same corpus."""
        request: dict[str, Any] = {"source": self.source, "seed": self.seed}
        request |= find_source(self.source).identify(self)
        request["tokenizer"] = self.tokenizer_name if self.tokenizer_name in ("bpe", "olmo") else "file"
        if self.tokenizer_name == "bpe":
            request |= {"vocab_size": self.vocab_size, "tokenizer_sample_mb": self.tokenizer_sample_mb}
        else:
            request["tokenizer_file_sha256"] = sha256_file(tokenizer_file(self.tokenizer_name))
        request |= {"eos_token": self.eos_token, "decontaminate": self.decontaminate}
        request["near_copy_tokens"] = self.near_copy_tokens
        request["decontaminate_min_characters"] = self.decontaminate_min_characters
        return {name: value for name, value in request.items() if value or name not in LEFT_OUT_WHERE_OFF}


@dataclass(frozen=True)
class Corpus:
    """The units of a corpus."""

    train: Sequence[Unit]
    heldout: Sequence[Unit] = ()
    """None: a share of the documents of `train` is held out."""
    unit_name: str = "files"
    limit_tokens: int | None = None
    """How many tokens each training unit may give."""


@dataclass(frozen=True)
class Source:
    """A kind of text."""

    identify: Callable[[PrepareSettings], dict[str, Any]]
    """What the text is: names, sizes, versions. Quick; refuses what is missing. A `heldout_fraction` in it says that
    held-out documents are chosen among the training documents."""
    corpus: Callable[[PrepareSettings, Path, int], Corpus]
    """Its units, given a work folder and a number of processes."""
    tokenizer: str
    """Used where none is asked for."""


def find_source(name: str) -> Source:
    """The source of that name. Raises `UserError` with the choices."""
    if name not in SOURCES:
        raise UserError(f"unknown source {name!r}; choose one of {', '.join(SOURCES)}")
    return SOURCES[name]


# --- docs: docstrings of installed packages ---


def _identify_docs(settings: PrepareSettings) -> dict[str, Any]:
    if settings.group_field not in (None, NO_GROUPS):
        raise UserError(f"--group-field {settings.group_field}: of docs it is the package, or {NO_GROUPS}")
    return {
        "packages": docs_packages(settings.packages),
        "heldout_fraction": settings.heldout_fraction,
        "group_field": "package" if settings.has_groups else None,
    }


def _docs_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    folder = work / "text"
    if not folder.is_dir():
        write_documents(folder, list(docs_packages(settings.packages)), workers)
    field = GroupField(GROUP_FIELD) if settings.has_groups else None
    return Corpus(file_units(sorted(map(str, folder.glob("*.jsonl"))), field))


# --- text: local files ---


def _identify_text(settings: PrepareSettings) -> dict[str, Any]:
    files, field = [*settings.files, *settings.heldout_files], _groups_of_rows(settings)
    check_files(files)
    has_rows = not all(path.endswith(TEXT_SUFFIXES) for path in files)
    return {
        "files": _describe(settings.files),
        "heldout_files": _describe(settings.heldout_files),
        "heldout_fraction": None if settings.heldout_files else settings.heldout_fraction,
        "group_field": field.name if field and has_rows else None,
    }


def _groups_of_rows(settings: PrepareSettings) -> GroupField | None:
    """The field of groups: the named one, which every row must have, or the url of those that have one."""
    if settings.group_field is None:
        return GroupField(URL_FIELD)
    return GroupField(settings.group_field, is_needed=True) if settings.has_groups else None


def _describe(files: Sequence[str]) -> list[dict[str, Any]]:
    """Names without folders: a manifest may be published, and a corpus copied together with its text."""
    stats = [(Path(path).name, Path(path).stat()) for path in files]
    return [{"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats]


def _text_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    field = _groups_of_rows(settings)
    return Corpus(file_units(settings.files, field), file_units(settings.heldout_files, field))


@dataclass(frozen=True)
class GroupField:
    """The field of a row that names the group of its document."""

    name: str
    is_needed: bool = False
    """Every row must have it; else a row without it stands by itself."""

    def read(self, row: Mapping[str, Any], where: str) -> str | None:
        """The group of a row; ``where`` names the row in messages."""
        value = row.get(self.name)
        if value in (None, ""):
            if self.is_needed:
                raise UserError(
                    f"{where} has no {self.name} to name its group; name a field that all have with --group-field, or "
                    f"{NO_GROUPS}"
                )
            return None
        group = well_formed(value if isinstance(value, str) else json.dumps(value, default=str))
        return group_of_url(group) if self.name == URL_FIELD else group


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
                for document in _read_file(Path(path), self.group_field):
                    if document.text.strip():
                        yield document
            except UserError:
                raise
            except UnicodeDecodeError as error:
                raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
            except (EOFError, zlib.error, OSError, ArrowException) as error:
                if isinstance(error, OSError) and error.errno is not None:  # else it is of gzip or pyarrow
                    raise StoppedEarly(
                        f"{path} cannot be read ({error.strerror}); put it back and run the same command again: what "
                        "is finished is kept"
                    ) from error
                raise UserError(
                    f"{path} is truncated or damaged ({first_line(error)}); fetch it again"
                ) from error


def _read_file(path: Path, group_field: GroupField | None) -> Iterator[Document]:
    with _unpacked(path) as file:
        if path.name.endswith(TEXT_SUFFIXES):
            yield Document(file.read().decode("utf-8-sig"))
            return
        rows = _parquet_rows(file, group_field) if path.suffix == PARQUET_SUFFIX else _json_rows(file, path)
        for number, row in rows:
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise UserError(f"{path}:{number} has no text; {ROW_LAYOUT}")
            yield _document(row, f"{path}:{number}", group_field)


@contextmanager
def _unpacked(path: Path) -> Iterator[BufferedIOBase]:
    """The file at ``path``, which Python opens: pyarrow's own errors do not say what the system refused."""
    with open(path, "rb") as file:
        if path.suffix == ".gz":
            yield gzip.GzipFile(fileobj=file)
        elif path.suffix == ".zst":
            import pyarrow

            yield BufferedReader(pyarrow.CompressedInputStream(file, "zstd"), READ_BYTES)
        else:
            yield file


def _json_rows(file: BufferedIOBase, path: Path) -> Iterator[tuple[int, Any]]:
    """Rows with their numbers, from 1."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{number} is not JSON ({first_line(error)}); {ROW_LAYOUT}") from error
        yield number, row


def _parquet_rows(file: BufferedIOBase, group_field: GroupField | None) -> Iterator[tuple[int, Any]]:
    """The same of Parquet, of which no other column is read."""
    from pyarrow.parquet import ParquetFile

    columns = ["text", *([group_field.name] if group_field else [])]
    opened = ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)  # else it reads whole row groups
    parts = opened.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False)
    return enumerate((row for part in parts for row in part.to_pylist()), start=1)


def _document(row: Mapping[str, Any], where: str, group_field: GroupField | None) -> Document:
    return Document(well_formed(row["text"]), group_field.read(row, where) if group_field else None)


def well_formed(text: str) -> str:
    """``text`` with lone surrogates (half an emoji; legal in JSON, not in UTF-8) replaced by question marks."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError:
        return text.encode("utf8", "replace").decode("utf8")
    return text


def check_files(files: Sequence[str]) -> None:
    """Refuse files that are missing, of an unknown kind or named twice; all of them in one `UserError`."""
    problems, known = [], (*JSON_SUFFIXES, *TEXT_SUFFIXES, PARQUET_SUFFIX)
    if not files:
        problems.append("no input files; name them with --files")
    for path in files:
        if not Path(path).is_file():
            what = "a folder; name its files" if Path(path).is_dir() else "missing"
            problems.append(f"input file {path} is {what}")
        elif not path.endswith(known):
            problems.append(f"{path} is of an unknown kind; use one of {', '.join(known)}")
    resolved = [Path(path).resolve() for path in files]
    problems += [f"{path} is named twice" for path in sorted({p for p in resolved if resolved.count(p) > 1})]
    if problems:
        raise UserError("; ".join(problems))


def file_units(files: Sequence[str], group_field: GroupField | None = None) -> list[Unit]:
    """Units of local files: each file of rows, and each run of plain text files of about 16 MB."""
    units: list[Unit] = []
    together: list[str] = []
    total_bytes = 0
    for path in files:
        is_text = path.endswith(TEXT_SUFFIXES)
        if together and (not is_text or total_bytes >= TEXT_UNIT_BYTES):
            units.append(TextFiles(tuple(together)))
            together, total_bytes = [], 0
        if is_text:
            together.append(path)
            total_bytes += Path(path).stat().st_size
        else:
            units.append(TextFiles((path,), group_field))
    return [*units, TextFiles(tuple(together))] if together else units


# --- c4: a data set on the hub, or a copy of its folder ---


@dataclass(frozen=True)
class HubShards:
    """Part ``index`` of ``count`` of a data set's split, streamed from the hub or a copy of its folder."""

    dataset: str
    """Name on the hub, or path of a folder of the same layout, or of its files."""
    config: str
    split: str
    index: int
    count: int
    limit_documents: int | None = None
    group_field: GroupField | None = None

    def documents(self) -> Iterator[Document]:
        """Those of at most ``limit_documents`` rows. Raises `StoppedEarly` where the connection is lost."""
        import httpx
        from datasets.exceptions import DatasetsError

        where = f"{self.dataset} ({self.split})"
        try:
            stream = _open_stream(self.dataset, self.config, self.split).shard(self.count, self.index)
            for row in islice(stream, self.limit_documents):
                if not isinstance(row.get("text"), str):
                    raise UserError(f"{where} has a row without text; mend or remove it")
                if row["text"].strip():
                    yield _document(row, where, self.group_field)
        except UserError:
            raise
        except (EOFError, zlib.error, gzip.BadGzipFile, DatasetsError, ValueError) as error:
            raise UserError(f"{where} cannot be read: {first_line(error)}") from error
        except (OSError, httpx.HTTPError) as error:
            raise StoppedEarly(
                f"{self.dataset} can no longer be read ({first_line(error)}); see to the connection, or to the folder, "
                "and run the same command again: what is finished is kept"
            ) from error


def hub_units(
    dataset: str, config: str, split: str, limit_documents: int | None = None, limit_tokens: int | None = None
) -> tuple[list[HubShards], int | None]:
    """Units of one split, and how many tokens each may give (None: no limit).

    Without limits each shard is a unit. With them, the shards are divided into as few units as keep each
    one's size reasonable, every one with an equal part of the limit: a taste need not open a thousand files.
    Raises `UserError` for an unknown data set, config or split, and `StoppedEarly` within seconds where there
    is no network.
    """
    if not Path(dataset).exists():
        _check_hub(dataset)
    try:
        count = _open_stream(dataset, config, split).num_shards
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError) as error:
        raise UserError(
            f"{dataset}, config {config}, has no readable split {split}: {first_line(error)}"
        ) from error
    if missing := missing_shards(Path(dataset), split):
        log.warning(
            "%s is a copy that lacks %d shards of %s (%s); they are left out: copy them too to have all of it",
            *(dataset, len(missing), split, ", ".join(missing[:5]) + ", …" * (len(missing) > 5)),
        )
    if limit_documents is not None:
        count = min(count, -(-limit_documents // HUB_UNIT_DOCUMENTS))
    if limit_tokens is not None:
        count = min(count, -(-limit_tokens // HUB_UNIT_TOKENS))
    units = []
    for index in range(count):
        share = None if limit_documents is None else (limit_documents + count - 1 - index) // count
        units.append(HubShards(dataset, config, split, index, count, share))
    return units, None if limit_tokens is None else -(-limit_tokens // count)


def missing_shards(folder: Path, split: str) -> list[str]:
    """Names of the shards, "00003-of-01024", that a local copy of a split lacks beside those that it has."""
    found: dict[tuple[Path, str, int], set[int]] = {}
    for path in folder.rglob("*-of-*") if folder.is_dir() else ():
        match = SHARD_NAME.search(path.name)
        if match and split in match[1]:
            found.setdefault((path.parent, match[1], int(match[3])), set()).add(int(match[2]))
    return [
        f"{number:05d}-of-{count:05d}"
        for (_, _, count), numbers in sorted(found.items())
        for number in sorted(set(range(count)) - numbers)
    ]


def _check_hub(dataset: str) -> None:
    """Ask the hub once, with a short time limit: `load_dataset` alone retries for half a minute or more."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        HfApi().dataset_info(dataset, timeout=HUB_TIMEOUT_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"there is no data set {dataset} on the hub and no folder of that name") from error
    except (OSError, httpx.HTTPError, HfHubHTTPError) as error:
        raise StoppedEarly(
            f"the Hugging Face hub cannot be reached ({first_line(error)}); run this where there is a network "
            "(a login node), or copy the data set's folder here and name it with --dataset, or use local "
            "files: prepare_data.py text --files"
        ) from error


@lru_cache(maxsize=4)
def _open_stream(dataset: str, config: str, split: str) -> Any:
    from datasets import load_dataset

    name = f"c4-{split}.*.json.gz"
    for folder in (Path(dataset, config), Path(dataset)):  # copied without the README.md that names the files
        if any(folder.glob(name)):
            files = {split: str(folder / name)}
            return load_dataset("json", data_files=files, split=split, streaming=True)
    return load_dataset(dataset, config, split=split, streaming=True)


def _identify_c4(settings: PrepareSettings) -> dict[str, Any]:
    names = [each.name for each in fields(settings)[1:] if each.metadata["sources"] == ("c4",)]
    field = _groups_of_rows(settings)
    return {name: getattr(settings, name) for name in names} | {"group_field": field.name if field else None}


def _c4_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    where = settings.dataset, settings.dataset_config
    train, limit_tokens = hub_units(*where, "train", settings.limit_documents, settings.limit_tokens)
    heldout, _ = hub_units(*where, "validation", settings.heldout_documents)
    field = _groups_of_rows(settings)
    train, heldout = ([replace(unit, group_field=field) for unit in units] for units in (train, heldout))
    return Corpus(train, heldout, "shards", limit_tokens)


SOURCES = {
    "docs": Source(_identify_docs, _docs_corpus, "bpe"),
    "text": Source(_identify_text, _text_corpus, "bpe"),
    "c4": Source(_identify_c4, _c4_corpus, "olmo"),
}
