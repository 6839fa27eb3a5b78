"""The sources a corpus can be made from, and the settings of making one.

A source says what identifies its text (so that a finished corpus is recognised) and which units it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.data.corpora import Unit, check_files, file_units, hub_units
from olmo_sparsity.data.docstrings import docs_packages, write_documents
from olmo_sparsity.data.tokenizers import (
    EOS_TOKEN,
    MAX_BPE_VOCAB_SIZE,
    MIN_BPE_VOCAB_SIZE,
    find_eos,
    load_tokenizer,
    tokenizer_file,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file

MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class PrepareSettings:
    """What corpus to make. A setting that the source does not use must stay at its default."""

    source: str
    """docs, text or c4."""
    files: Sequence[str] = ()
    """text: files of the training split, and of the held-out one where `heldout_files` names none."""
    heldout_files: Sequence[str] = ()
    """text: files of the held-out split."""
    packages: Sequence[str] = ()
    """docs: packages to read, `python` for the standard library; none: Python and all this project needs."""
    dataset: str = "allenai/c4"
    """c4: data set on the Hugging Face hub, or a folder of the same layout."""
    dataset_config: str = "en"
    """c4: its configuration."""
    limit_documents: int | None = None
    """c4: at most this many training documents."""
    limit_tokens: int | None = None
    """c4: about this many training tokens; whole documents, so a few more."""
    heldout_documents: int = 5000
    """c4: at most this many documents of the validation split."""
    heldout_fraction: float = 0.1
    """docs, text: share of the documents that is held out, chosen by a hash of seed and text."""
    seed: int = 0
    """Another seed holds out other documents."""
    tokenizer: str | None = None
    """bpe (trained on the training split), olmo, or path of a tokenizer.json; None: olmo for c4, else bpe."""
    vocab_size: int = 4096
    """bpe: number of ids."""
    tokenizer_sample_mb: float = 20.0
    """bpe: text to train it on, in millions of characters."""
    eos_token: str | None = None
    """The token that ends a document; None: the usual names are tried."""
    decontaminate: bool = True
    """Remove held-out paragraphs that also stand in a training document."""
    decontaminate_min_characters: int = 0
    """Leave shorter paragraphs alone: headings and one-word answers say nothing about the document."""

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, or the source's own choice."""
        return self.tokenizer or find_source(self.source).tokenizer

    def check(self) -> None:
        """Raise one `UserError` with everything that is wrong."""
        problems = []
        own = {name for source in SOURCES.values() for name in source.settings}
        for name in sorted(own - set(find_source(self.source).settings)):
            if getattr(self, name) != getattr(PrepareSettings, name):
                problems.append(f"--{name.replace('_', '-')} is not for source {self.source}")
        if not 0 < self.heldout_fraction < 1:
            problems.append(f"--heldout-fraction {self.heldout_fraction:g} must lie between 0 and 1")
        if self.tokenizer_name != "bpe":
            try:
                find_eos(load_tokenizer(tokenizer_file(self.tokenizer_name)), self.eos_token)
            except UserError as error:
                problems.append(str(error))
        elif self.eos_token not in (None, EOS_TOKEN):
            problems.append(f"--eos-token is not for --tokenizer bpe, which ends documents with {EOS_TOKEN}")
        elif not MIN_BPE_VOCAB_SIZE <= self.vocab_size <= MAX_BPE_VOCAB_SIZE:
            problems.append(
                f"--vocab-size {self.vocab_size} must be at least {MIN_BPE_VOCAB_SIZE} (all bytes and EOS) and at most "
                f"{MAX_BPE_VOCAB_SIZE:,}"
            )
        for name in ("limit_documents", "limit_tokens", "heldout_documents", "tokenizer_sample_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(f"--{name.replace('_', '-')} {value:g} must be positive and finite")
        for name in ("seed", "decontaminate_min_characters"):
            if not 0 <= getattr(self, name) <= MAX_INTEGER:
                problems.append(f"--{name.replace('_', '-')} must be from 0 to {MAX_INTEGER}")
        if problems:
            raise UserError("; ".join(problems))

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
        return request | {"decontaminate_min_characters": self.decontaminate_min_characters}


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
    """What the text is: names, sizes, versions. Quick; refuses what is missing."""
    corpus: Callable[[PrepareSettings, Path, int], Corpus]
    """Its units, given a work folder and a number of processes."""
    tokenizer: str
    """Used where none is asked for."""
    settings: Sequence[str]
    """Names of the settings that not every source has."""
    heldout_is_apart: Callable[[PrepareSettings], bool]
    """Whether the held-out documents are named, not chosen among the training documents."""


def find_source(name: str) -> Source:
    """The source of that name. Raises `UserError` with the choices."""
    if name not in SOURCES:
        raise UserError(f"unknown source {name!r}; choose one of {', '.join(SOURCES)}")
    return SOURCES[name]


def _identify_docs(settings: PrepareSettings) -> dict[str, Any]:
    return {"packages": docs_packages(settings.packages), "heldout_fraction": settings.heldout_fraction}


def _docs_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    folder = work / "text"
    if not folder.is_dir():
        write_documents(folder, list(docs_packages(settings.packages)), workers)
    return Corpus(file_units(sorted(map(str, folder.glob("*.jsonl")))))


def _identify_text(settings: PrepareSettings) -> dict[str, Any]:
    check_files(settings.files, settings.heldout_files)
    fraction = None if settings.heldout_files else settings.heldout_fraction
    described = {"files": _describe(settings.files), "heldout_files": _describe(settings.heldout_files)}
    return described | {"heldout_fraction": fraction}


def _describe(files: Sequence[str]) -> list[dict[str, Any]]:
    """Names without folders: a manifest may be published, and a corpus copied together with its text."""
    stats = [(Path(path).name, Path(path).stat()) for path in files]
    return [{"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns} for name, stat in stats]


def _text_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    return Corpus(file_units(settings.files), file_units(settings.heldout_files))


def _identify_c4(settings: PrepareSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in C4_SETTINGS}


def _c4_corpus(settings: PrepareSettings, work: Path, workers: int) -> Corpus:
    where = settings.dataset, settings.dataset_config
    train, limit_tokens = hub_units(*where, "train", settings.limit_documents, settings.limit_tokens)
    heldout, _ = hub_units(*where, "validation", settings.heldout_documents)
    return Corpus(train, heldout, "shards", limit_tokens)


C4_SETTINGS = ("dataset", "dataset_config", "limit_documents", "limit_tokens", "heldout_documents")

SOURCES = {
    "docs": Source(_identify_docs, _docs_corpus, "bpe", ("packages", "heldout_fraction"), lambda _: False),
    "text": Source(
        _identify_text,
        _text_corpus,
        "bpe",
        ("files", "heldout_files", "heldout_fraction"),
        lambda settings: bool(settings.heldout_files),
    ),
    "c4": Source(_identify_c4, _c4_corpus, "olmo", C4_SETTINGS, lambda _: True),
}
