"""Where documents come from: docstrings of installed packages, local files, and data sets on the Hugging Face hub.

The settings say what identifies the text, so that a finished corpus is recognised, and cut it into units, each of which
becomes a token file: a unit can be read again, in any process, and gives the same documents in the same order.

Local files are not read by `datasets`: its reader of text changes line ends, that of JSON takes numbers for text, and
zstandard would need another package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import Any

from olmo_sparsity.data.docstrings import docs_packages, write_documents
from olmo_sparsity.data.groups import group_of_url
from olmo_sparsity.data.text import Document, find_eos
from olmo_sparsity.data.tokens import load_tokenizer, tokenizer_file
from olmo_sparsity.util.arguments import argument, whole_number_or_zero
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import sha256_file

KIND = re.compile(r"\.(jsonl|json|txt)(\.gz|\.zst)?$|\.parquet$")
PLAIN_TEXT = re.compile(r"\.txt(\.gz|\.zst)?$")
ROW_LAYOUT = 'each line (Parquet: row) must be one JSON object with a string "text"; mend or remove it'
URL_FIELD, NO_GROUPS = "url", "none"
READ_BYTES, PARQUET_ROWS = 1 << 20, 64
"""Read at once: row groups of Parquet may be larger than memory."""
TEXT_UNIT_BYTES = 16 << 20
"""Consecutive .txt files are put together up to this size: training windows do not cross token files."""
HUB_UNIT_TOKENS = 25_000_000
"""With a limit on tokens, shards are put together in units of about this size."""
SOURCES = {
    "docs": ("packages", "heldout_fraction"),
    "text": ("files", "heldout_files", "heldout_fraction"),
    "c4": ("dataset", "dataset_config", "limit_tokens", "heldout_documents"),
}
"""Kinds of text, each with the settings that not all of them have."""

Unit = Callable[[], Iterator[Document]]
"""A part of a corpus that becomes one token file: gives its documents, no text empty, or raises `UserError`."""


# --- units ---


def read_rows(path: str, group_field: str | None = NO_GROUPS) -> Iterator[tuple[str, Any]]:
    """Rows of a file, each after its place (file and number), read piece by piece; plain text is one row.

    Of Parquet the text and the groups are read alone. Raises `UserError` for what cannot be read.
    """
    from pyarrow import ArrowException, CompressedInputStream

    number = 1
    try:
        with open(path, "rb") as raw:  # by Python: pyarrow's own errors do not say what the system refused
            packing = {".gz": "gzip", ".zst": "zstd"}.get(Path(path).suffix)
            file = BufferedReader(CompressedInputStream(raw, packing), READ_BYTES) if packing else raw
            if path.endswith(".parquet"):
                from pyarrow.parquet import ParquetFile

                columns = ["text", *([] if group_field == NO_GROUPS else [group_field or URL_FIELD])]
                # with its own defaults it reads whole row groups
                opened = ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
                parts = opened.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False)
                for number, row in enumerate((row for part in parts for row in part.to_pylist()), start=1):
                    yield f"{path}:{number}", row
            elif PLAIN_TEXT.search(path):
                yield path, {"text": file.read().decode("utf-8-sig")}
            else:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"{path}:{number}", json.loads(line)
    except (OSError, ArrowException) as error:
        why = f"({first_line(error)}); put it back whole"
        raise UserError(f"{path} cannot be read, or is truncated or damaged {why}") from error
    except (ValueError, RecursionError) as error:
        if PLAIN_TEXT.search(path):
            raise UserError(f"{path} is not UTF-8 text ({first_line(error)}); save it as such") from error
        why = f"({first_line(error)}); {ROW_LAYOUT}"
        raise UserError(f"{path}:{number} is not JSON, or not UTF-8 {why}") from error


def documents_of(rows: Iterable[tuple[str, Any]], group_field: str | None) -> Iterator[Document]:
    """Documents of rows, objects with a ``text``, each after its place, which the `UserError` for any other row names.

    ``group_field`` is that of `PrepareSettings`: each row must have the one that is named.
    """
    name = group_field or URL_FIELD
    for where, row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise UserError(f"{where} has no text; {ROW_LAYOUT}")
        group, value = None, None if group_field == NO_GROUPS else row.get(name)
        if value not in (None, ""):
            group = _well_formed(value if isinstance(value, str) else json.dumps(value, default=str))
            group = group_of_url(group) if name == URL_FIELD else group
        elif group_field not in (None, NO_GROUPS):
            remedy = f"name a field that all have with --group-field, or {NO_GROUPS}"
            raise UserError(f"{where} has no {name} to name its group; {remedy}")
        if row["text"].strip():
            yield Document(_well_formed(row["text"]), group)


def _well_formed(text: str) -> str:
    """``text`` with lone surrogates (half an emoji; legal in JSON, not in UTF-8) replaced by question marks."""
    return text if text.isascii() else text.encode("utf8", "replace").decode("utf8")


def read_files(paths: Sequence[str], group_field: str | None = NO_GROUPS) -> Iterator[Document]:
    """Documents of local files, rows with a ``text`` (JSON lines as C4, Parquet) or plain text, in their order."""
    return documents_of(chain.from_iterable(read_rows(path, group_field) for path in paths), group_field)


def file_units(files: Sequence[str], group_field: str | None = NO_GROUPS) -> list[Unit]:
    """Units of local files: each file of rows, and each run of plain text files of about 16 MB."""
    runs: list[list[str]] = []
    room = 0  # bytes left in the run of text files at the end
    for path in files:
        is_text, size = PLAIN_TEXT.search(path), Path(path).stat().st_size
        if is_text and room > 0:
            runs[-1].append(path)
            room -= size
        else:
            runs.append([path])
            room = TEXT_UNIT_BYTES - size if is_text else 0
    return [partial(read_files, run, NO_GROUPS if PLAIN_TEXT.search(run[0]) else group_field) for run in runs]


def read_shard(
    dataset: str, config: str, group_field: str | None, split: str, index: int, count: int, limit: int | None
) -> Iterator[Document]:
    """Documents of part ``index`` of ``count`` of a data set's split, of at most ``limit`` rows.

    ``dataset`` is its name on the hub, or a folder of the same layout, or of its files. Raises `UserError` where the
    connection is lost.
    """
    where = f"{dataset} ({split})"
    stream = open_stream(dataset, config, split).shard(count, index)

    def rows() -> Iterator[tuple[str, Any]]:
        try:
            for row in islice(stream, limit):
                yield where, row
        except Exception as error:  # of datasets, pyarrow, zlib and httpx
            why = f"({first_line(error)}); see to the connection and run the same command again"
            raise UserError(f"{where} can no longer be read {why}: what is finished is kept") from error

    return documents_of(rows(), group_field)


@lru_cache(maxsize=4)
def open_stream(dataset: str, config: str, split: str) -> Any:
    """A split of a data set, read while it comes. Raises `UserError` where there is none."""
    from datasets import load_dataset

    name = f"c4-{split}.*.json.gz"
    try:
        for folder in (Path(dataset, config), Path(dataset)):
            if any(folder.glob(name)):  # copied without the README.md that names the files
                files = {split: str(folder / name)}
                return load_dataset("json", data_files=files, split=split, streaming=True)
        return load_dataset(dataset, config, split=split, streaming=True)
    except Exception as error:  # of many kinds
        why = f"({first_line(error)}); without a network, copy its folder here and name it with --dataset"
        raise UserError(f"{dataset}, config {config}, split {split} cannot be opened {why}") from error


# --- settings ---


def _option(default: Any, about: str, type: Callable[[str], Any] | None = None) -> Any:
    """A setting and its command-line option, see `argument`; ``type`` reads it from text."""
    how = {"nargs": "+"} if isinstance(default, tuple) else {"type": type} if type else {}
    return field(default=default, metadata=argument(about, **how))


@dataclass(frozen=True)
class PrepareSettings:
    """What corpus to make. A setting that the source does not use must stay at its default."""

    source: str
    """docs, text or c4."""
    files: tuple[str, ...] = _option((), "text: training files; none: a corpus to evaluate on only")
    heldout_files: tuple[str, ...] = _option((), "text: held-out files, instead of a share of the documents")
    packages: tuple[str, ...] = _option((), "docs: only these; python: standard library")
    dataset: str = _option("allenai/c4", "c4: name on the hub, or a folder of its layout or of its files")
    dataset_config: str = _option("en", "c4: its configuration")
    limit_tokens: int | None = _option(None, "c4: about this many training tokens, in whole documents")
    heldout_documents: int = _option(5000, "c4: at most this many documents of the validation split")
    heldout_fraction: float = _option(0.1, "docs, text: share of documents to hold out, in whole groups")
    group_field: str | None = _option(
        None,
        "field that names the book or site of a document; none: no groups (default: the site, or the work whose parts "
        "its #fragment numbers, of the url of those that have one; of docs the package)",
    )
    seed: int = _option(0, "another seed holds out other documents", whole_number_or_zero)
    tokenizer: str | None = _option(
        None,
        "bpe (trained on the training split; default for docs and text), olmo (50,280 ids; default for c4), the path "
        "of a tokenizer.json or of a model's folder with one, or the id of a model on the Hugging Face Hub",
    )
    vocab_size: int = _option(4096, "bpe: number of ids")
    tokenizer_sample_mb: float = _option(20.0, "bpe: text to train it on, in millions of characters")
    eos_token: str | None = _option(None, "token that ends a document (default: the usual names are tried)")
    decontaminate: bool = _option(True, "remove held-out paragraphs that also stand in a training document")
    near_copy_tokens: int = _option(
        32, "mark held-out runs of so many tokens that training text has too; 0: none", whole_number_or_zero
    )

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, or the source's own choice."""
        return self.tokenizer or ("olmo" if self.source == "c4" else "bpe")

    @property
    def chooses_heldout(self) -> bool:
        """Whether held-out documents are chosen among the training documents."""
        return self.source != "c4" and not self.heldout_files

    def check(self, *, in_shards: bool = False) -> None:
        """Raise `UserError` for settings that do not go together, or that shards cannot share."""
        if self.source not in SOURCES:
            raise UserError(f"unknown source {self.source!r}; choose one of {', '.join(SOURCES)}")
        for name in chain.from_iterable(SOURCES.values()):
            if name not in SOURCES[self.source] and getattr(self, name) != getattr(PrepareSettings, name):
                raise UserError(f"--{name.replace('_', '-')} is not for source {self.source}")
        if self.source == "text" and not (self.files or self.heldout_files):
            raise UserError("no input files; name them with --files")
        if self.tokenizer_name != "bpe":
            find_eos(load_tokenizer(tokenizer_file(self.tokenizer_name)), self.eos_token)
        elif self.source == "text" and not self.files:
            remedy = "name that of the model to evaluate with --tokenizer (olmo, or a tokenizer.json)"
            raise UserError(f"without --files there is no text to train a tokenizer on; {remedy}")
        if in_shards and (self.tokenizer_name == "bpe" or self.chooses_heldout):
            remedy = "pass --tokenizer olmo, or a tokenizer.json, and name --heldout-files, or leave it out"
            raise UserError(f"--shard needs a tokenizer and held-out text that are there already; {remedy}")

    def request(self) -> dict[str, Any]:
        """What the token files depend on, for the manifest: equal requests make the same corpus.

        Names, sizes, versions. Quick; raises `UserError` for what is missing.
        """
        request: dict[str, Any] = {"source": self.source, "seed": self.seed}
        groups = None if self.group_field == NO_GROUPS else self.group_field or URL_FIELD
        if self.source == "docs":
            if self.group_field not in (None, NO_GROUPS):
                raise UserError(f"--group-field {groups}: of docs it is the package, or {NO_GROUPS}")
            request["packages"] = docs_packages(self.packages)
            groups = groups and "package"
        elif self.source == "text":
            files = (*self.files, *self.heldout_files)
            if len({Path(path).resolve() for path in files}) < len(files):
                raise UserError(f"a file is named twice among {', '.join(files)}")
            request |= {"files": _describe(self.files), "heldout_files": _describe(self.heldout_files)}
            groups = None if all(map(PLAIN_TEXT.search, files)) else groups
        else:
            request |= {name: getattr(self, name) for name in SOURCES["c4"]}
        if self.source != "c4":
            request["heldout_fraction"] = self.heldout_fraction if self.chooses_heldout else None
        if groups:
            request["group_field"] = groups
        request["tokenizer"] = self.tokenizer_name if self.tokenizer_name in ("bpe", "olmo") else "file"
        if self.tokenizer_name == "bpe":
            request |= {"vocab_size": self.vocab_size, "tokenizer_sample_mb": self.tokenizer_sample_mb}
        else:
            request["tokenizer_file_sha256"] = sha256_file(tokenizer_file(self.tokenizer_name))
        request |= {"eos_token": self.eos_token, "decontaminate": self.decontaminate}
        return request | ({"near_copy_tokens": self.near_copy_tokens} if self.near_copy_tokens else {})

    def units(self, work: Path, workers: int) -> tuple[list[Unit], list[Unit]]:
        """Units to train on, and held-out ones: none where held-out documents are chosen among the others.

        ``work`` is a folder for what is made on the way. With a limit on tokens, the units of a data set are as few as
        keep their size reasonable, and have equal parts of it: a taste need not open a thousand files.
        """
        if self.source == "docs":
            folder = work / "text"
            if not folder.is_dir():
                write_documents(folder, list(docs_packages(self.packages)), workers)
            return file_units(sorted(map(str, folder.glob("*.jsonl"))), self.group_field or "group"), []
        if self.source == "text":
            return file_units(self.files, self.group_field), file_units(self.heldout_files, self.group_field)
        shard = partial(read_shard, self.dataset, self.dataset_config, self.group_field)
        count = open_stream(self.dataset, self.dataset_config, "train").num_shards
        if self.limit_tokens is not None:
            count = min(count, -(-self.limit_tokens // HUB_UNIT_TOKENS))
        train: list[Unit] = [partial(shard, "train", index, count, None) for index in range(count)]
        return train, [partial(shard, "validation", 0, 1, self.heldout_documents)]


def _describe(files: Sequence[str]) -> list[dict[str, Any]]:
    """Names without folders: a manifest may be published, and a corpus copied together with its text."""
    for path in files:
        if not KIND.search(path) or not Path(path).is_file():
            kinds = ".jsonl, .json or .txt, each also as .gz or .zst, nor .parquet"
            raise UserError(f"input file {path} is missing, or neither {kinds}")
    stats = [(Path(path).name, Path(path).stat()) for path in files]
    return [{"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats]
