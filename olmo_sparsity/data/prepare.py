"""Text to a prepared corpus: token files, tokenizer and manifest in one folder.

    text ──► held-out documents and their paragraphs ──► tokenizer ──► train-*.npy ──► heldout ──► manifest

What is finished is kept in the folder, with the state of unfinished work in `.partial`, so that a run that
was killed goes on where it stopped.
"""

from __future__ import annotations

import errno
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.corpora import TextFiles, Unit
from olmo_sparsity.data.encode import (
    EncodedUnit,
    EncodeJob,
    Encoding,
    HeldoutJob,
    HoldOutJob,
    encode_heldout,
    encode_unit,
    hold_out,
)
from olmo_sparsity.data.sources import Corpus, PrepareSettings, find_source
from olmo_sparsity.data.text import SplitRule
from olmo_sparsity.data.tokenizers import find_eos, id_range, load_tokenizer, tokenizer_file, train_bpe
from olmo_sparsity.data.tokens import DTYPES, MANIFEST_NAME, TOKENIZER_NAME, CorpusManifest, TokenFile
from olmo_sparsity.data.workers import StoppedEarly, available_cores, run_jobs
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import atomic_path, remove, sha256_file, write_json
from olmo_sparsity.progress import progress

WORK_NAME = ".partial"
REQUEST_NAME = "request.json"
PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""
OUTPUT_PATTERNS = (MANIFEST_NAME, TOKENIZER_NAME, "train-*.npy", "heldout-*.npy", WORK_NAME)


@dataclass(frozen=True)
class Prepared:
    """A finished corpus and what this run did for it."""

    manifest: CorpusManifest
    seconds: float
    tokens_written: int
    """By this run; 0 where the corpus was there already."""


def prepare(
    settings: PrepareSettings, out: str | Path, *, workers: int | None = None, overwrite: bool = False
) -> Prepared:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. Raises
    `UserError` for bad input, leaving nothing behind, and for a folder that holds another corpus, leaving
    that alone unless ``overwrite``.
    """
    start = time.monotonic()
    out = Path(out)
    source = find_source(settings.source)
    settings.check()
    request = json.loads(json.dumps({"pipeline": PIPELINE_VERSION, **settings.request()}))
    if not overwrite and (finished := _finished(out, request)) is not None:
        remove(out / WORK_NAME)  # left there by a run that was killed at its very end
        return Prepared(finished, time.monotonic() - start, 0)
    _claim(out, request, settings, overwrite)
    try:
        corpus = source.corpus(settings, out / WORK_NAME, workers or available_cores())
        manifest, written = _make(settings, request, corpus, out, workers or available_cores())
    except BaseException as error:
        _remove_temporaries(out)  # of workers that were stopped in the middle
        bad_input = isinstance(error, UserError) and not isinstance(error, StoppedEarly)
        if bad_input or [path.name for path in (out / WORK_NAME).iterdir()] == [REQUEST_NAME]:
            _remove_outputs(out)
            _remove_if_empty(out)
        raise
    remove(out / WORK_NAME)
    return Prepared(manifest, time.monotonic() - start, written)


def _make(
    settings: PrepareSettings, request: dict[str, Any], corpus: Corpus, out: Path, workers: int
) -> tuple[CorpusManifest, int]:
    """All stages; returns the saved manifest and the number of tokens written by this run."""
    rule = SplitRule(settings.seed, 0.0 if corpus.heldout else settings.heldout_fraction)
    heldout, paragraphs = _hold_out(corpus, rule, settings, out / WORK_NAME, workers)
    encoding, vocab_size = _make_tokenizer(settings, corpus, rule, out)
    units, written = _encode_training(
        corpus, rule, encoding, paragraphs if settings.decontaminate else None, out, workers
    )
    train = [unit.file for unit in units if unit.file.tokens]
    if not train:
        raise UserError("no training documents are left; lower --heldout-fraction or give more text")
    contaminated = frozenset(digest for unit in units for digest in unit.contaminated)
    job = HeldoutJob(heldout, encoding, out / "heldout-00000.npy", contaminated)
    [(heldout_file, removed)] = run_jobs(
        encode_heldout, [job], workers=1, description="held-out split", unit="files"
    )
    if not heldout_file.tokens:
        raise UserError(
            "every held-out paragraph also stands in the training text; hold out other documents "
            "(--heldout-files, --seed) or keep them as they are (--no-decontaminate)"
        )
    manifest = CorpusManifest(
        corpus=settings.source,
        tokenizer_sha256=sha256_file(out / TOKENIZER_NAME),
        vocab_size=vocab_size,
        eos_token_id=encoding.eos_token_id,
        dtype=encoding.dtype,
        splits={"train": train, "heldout": [heldout_file]},
        settings={
            **request,
            "decontamination": removed,
            "versions": {"python": platform.python_version(), "tokenizers": version("tokenizers")},
        },
    )
    manifest.save(out)
    return manifest, written + heldout_file.tokens


def _hold_out(
    corpus: Corpus, rule: SplitRule, settings: PrepareSettings, work: Path, workers: int
) -> tuple[list[Unit], Path]:
    """Held-out documents as units, and the file of the hashes of all their paragraphs, (P,) uint64."""
    units = corpus.heldout or corpus.train
    jobs = [
        HoldOutJob(
            unit,
            None if corpus.heldout else rule,
            work / f"heldout-{index:05d}.npy",
            work / f"heldout-{index:05d}.jsonl",
            settings.decontaminate_min_characters,
        )
        for index, unit in enumerate(units)
    ]
    todo = [job for job in jobs if not job.documents.is_file()]
    description = "choosing held-out documents"
    counts = run_jobs(
        hold_out,
        todo,
        workers=workers,
        description=description,
        unit=corpus.unit_name,
        done=len(jobs) - len(todo),
    )
    if not any(job.documents.stat().st_size for job in jobs):
        if not sum(counts):
            raise UserError("the input has no documents, or only empty ones; give files with text")
        raise UserError(
            f"none of {sum(counts):,} documents is held out; raise --heldout-fraction (now "
            f"{settings.heldout_fraction:g}), give more text, or name held-out files with --heldout-files"
        )
    path = work / "paragraphs.npy"
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, np.unique(np.concatenate([np.load(job.paragraphs) for job in jobs])))
    return [TextFiles((str(job.documents),)) for job in jobs], path


def _make_tokenizer(
    settings: PrepareSettings, corpus: Corpus, rule: SplitRule, out: Path
) -> tuple[Encoding, int]:
    """Write tokenizer.json, unless an earlier run did; returns how to encode, and the vocabulary size."""
    path = out / TOKENIZER_NAME
    if not path.is_file():
        with atomic_path(path) as temporary:
            if settings.tokenizer_name == "bpe":
                texts = _sample(corpus, rule, settings.tokenizer_sample_mb * 1e6)
                train_bpe(texts, settings.vocab_size).save(str(temporary))
            else:
                temporary.write_bytes(tokenizer_file(settings.tokenizer_name).read_bytes())
    tokenizer = load_tokenizer(path)
    vocab_size = id_range(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    return Encoding(str(path), find_eos(tokenizer, settings.eos_token), dtype), vocab_size


def _sample(corpus: Corpus, rule: SplitRule, characters: float) -> Iterator[str]:
    """Training documents from the start of every unit, about ``characters`` in all."""
    with progress("training the tokenizer", len(corpus.train), corpus.unit_name) as advance:
        for unit in corpus.train:
            left = characters / len(corpus.train)
            for text in unit.documents():
                if not rule.is_heldout(text):
                    yield text[: int(left) + 1]
                    left -= len(text)
                if left <= 0:
                    break
            advance()


def _encode_training(
    corpus: Corpus, rule: SplitRule, encoding: Encoding, paragraphs: Path | None, out: Path, workers: int
) -> tuple[list[EncodedUnit], int]:
    """Token files of the training split in the order of the units, and how many tokens this run wrote."""
    jobs = []
    for index, unit in enumerate(corpus.train):
        name = f"train-{index:05d}"
        output, record = out / f"{name}.npy", out / WORK_NAME / f"{name}.json"
        jobs.append(EncodeJob(unit, rule, encoding, output, record, paragraphs, corpus.limit_tokens))
    records = {job.record: EncodedUnit.load(job.record) for job in jobs}
    done = {path: old for path, old in records.items() if old and _is_whole(out, old.file, encoding.dtype)}
    todo = [job for job in jobs if job.record not in done]
    new = run_jobs(
        encode_unit, todo, workers=workers, description="tokenizing", unit=corpus.unit_name, done=len(done)
    )
    done |= {job.record: unit for job, unit in zip(todo, new, strict=True)}
    return [done[job.record] for job in jobs], sum(unit.file.tokens for unit in new)


def _finished(out: Path, request: dict[str, Any]) -> CorpusManifest | None:
    """The manifest where ``out`` holds this corpus, whole. Raises `UserError` where it holds another one."""
    if not (out / MANIFEST_NAME).is_file():
        return None
    manifest = CorpusManifest.load(out)
    _refuse_other(out, manifest.settings, request)
    files = [file for split in manifest.splits.values() for file in split]
    tokenizer_is_there = (out / TOKENIZER_NAME).is_file()
    return (
        manifest
        if tokenizer_is_there and all(_is_whole(out, file, manifest.dtype) for file in files)
        else None
    )


def _is_whole(out: Path, file: TokenFile, dtype: str) -> bool:
    path = out / file.name
    size = path.stat().st_size if path.is_file() else 0
    return size == file.tokens * np.dtype(DTYPES[dtype]).itemsize


def _refuse_other(out: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    differing = [key for key, value in request.items() if earlier.get(key) != value]
    if differing:
        raise UserError(
            f"{out} holds a corpus made with other settings ({', '.join(differing)}); choose another --out, "
            "or pass --overwrite to replace it"
        )


def _claim(out: Path, request: dict[str, Any], settings: PrepareSettings, overwrite: bool) -> None:
    """Make ``out`` ready for work: new, to be gone on with, or cleared. Raises `UserError` for another's."""
    path = out / WORK_NAME / REQUEST_NAME
    if (
        settings.tokenizer_name != "bpe"
        and tokenizer_file(settings.tokenizer_name).resolve() == (out / TOKENIZER_NAME).resolve()
    ):
        raise UserError(
            f"--tokenizer names the file that would be written, {out / TOKENIZER_NAME}; choose another --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        resumable = path.is_file() and not (out / MANIFEST_NAME).is_file()
        if overwrite or (out / MANIFEST_NAME).is_file():
            _remove_outputs(
                out
            )  # in the second case it is this corpus, damaged: `_finished` refused any other
        elif resumable:
            _refuse_other(out, json.loads(path.read_text(encoding="utf8")), request)
        elif foreign := [file.name for pattern in OUTPUT_PATTERNS for file in out.glob(pattern)]:
            raise UserError(
                f"{out} has {foreign[0]} but no record of how it was made; choose another --out, or pass "
                "--overwrite to replace it"
            )
        _remove_temporaries(out)
        write_json(path, request)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise UserError(f"cannot write to {out} ({error.strerror}); choose another --out") from error


def _remove_outputs(out: Path) -> None:
    for pattern in OUTPUT_PATTERNS:
        for path in out.glob(pattern):
            remove(path)


def _remove_temporaries(out: Path) -> None:
    for folder in (out, out / WORK_NAME):
        for path in folder.glob(".*.tmp-*"):
            remove(path)


def _remove_if_empty(out: Path) -> None:
    if not any(out.iterdir()):
        out.rmdir()
