"""Text to a prepared corpus: token files, tokenizer and manifest in one folder.

    text ──► held-out documents and their paragraphs ──► tokenizer ──► train-*.npy ──► heldout ──► manifest

What is finished is kept in the folder, with the state of unfinished work in `.partial`, so that a run that
was killed goes on where it stopped.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.encode import (
    EncodedUnit,
    EncodeJob,
    Encoding,
    HeldoutJob,
    HoldOutJob,
    encode_heldout,
    encode_unit,
    hold_out,
    is_held_out,
)
from olmo_sparsity.data.sources import Corpus, PrepareSettings, TextFiles, find_source
from olmo_sparsity.data.text import SplitRule, Unit
from olmo_sparsity.data.tokenizers import find_eos, id_range, load_tokenizer, tokenizer_file, train_bpe
from olmo_sparsity.data.tokens import MANIFEST_NAME, TOKENIZER_NAME, CorpusManifest
from olmo_sparsity.data.workers import StoppedEarly, available_cores, run_jobs
from olmo_sparsity.data.workspace import (
    REQUEST_NAME,
    SHARDS_NAME,
    WORK_NAME,
    claim,
    finished_corpus,
    has_nothing_finished,
    is_whole,
    join,
    locked,
    refuse_missing,
    remove_outputs,
    remove_temporaries,
    remove_temporaries_of,
    remove_work,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, read_json, remove, sha256_file, write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.shard import Shard

PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""


@dataclass(frozen=True)
class Prepared:
    """A finished corpus and what this run did for it."""

    manifest: CorpusManifest
    seconds: float
    tokens_written: int
    """By this run; 0 where the corpus was there already."""


def prepare(
    settings: PrepareSettings,
    out: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    merge: bool = False,
) -> Prepared:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. With
    ``merge`` every training unit must be there already, made by `prepare_shard`. Raises `UserError` for bad
    input, leaving nothing behind, and for a folder that holds another corpus, leaving that alone unless
    ``overwrite``.
    """
    start = time.monotonic()
    out, workers = Path(out), _processes(workers)
    settings.check()
    request = _request(settings)
    if not overwrite and (finished := finished_corpus(out, request)) is not None:
        remove_work(out)
        return Prepared(finished, time.monotonic() - start, 0)
    if merge and not (out / WORK_NAME / REQUEST_NAME).is_file():
        raise UserError(f"{out} has nothing to merge; make its parts with --shard 1/n … n/n first")
    with locked(out):
        manifest, written = _prepare(settings, request, out, workers, overwrite, merge)
    return Prepared(manifest, time.monotonic() - start, written)


def _prepare(
    settings: PrepareSettings, request: dict[str, Any], out: Path, workers: int, overwrite: bool, merge: bool
) -> tuple[CorpusManifest, int]:
    """Do the work of `prepare` in a folder that is locked; where it fails, keep what is worth it."""
    if not overwrite and (finished := finished_corpus(out, request)) is not None:
        return finished, 0  # another process made it in the meantime
    claim(out, request, settings, overwrite)
    try:
        corpus = find_source(settings.source).corpus(settings, out / WORK_NAME, workers)
        manifest, written = _make(settings, request, corpus, out, workers, merge)
    except BaseException as error:
        remove_temporaries(out)  # of workers that were stopped in the middle
        of_shards = (
            merge or (out / WORK_NAME / SHARDS_NAME).is_file()
        )  # the work of many tasks is not thrown away
        bad_input = isinstance(error, UserError) and not isinstance(error, StoppedEarly) and not of_shards
        if bad_input or has_nothing_finished(out):
            remove_outputs(out)
        raise
    remove(out / WORK_NAME)
    return manifest, written


def prepare_shard(
    settings: PrepareSettings, out: str | Path, shard: Shard, *, workers: int | None = None
) -> PreparedShard:
    """Make one share of the training units; other shares may be made in the same folder at the same time.

    `prepare` with ``merge`` then makes the corpus whole, with the bytes that it would have had in one go. Raises
    `UserError` for bad input, and for settings that need a look at all the text; finished units are kept.
    """
    start = time.monotonic()
    out, workers = Path(out), _processes(workers)
    settings.check()
    check_shardable(settings)
    request = _request(settings)
    if (out / MANIFEST_NAME).is_file():
        if finished_corpus(out, request) is None:
            raise UserError(f"{out} is finished but damaged; run the command without --shard to mend it")
        return PreparedShard(shard, 0, 0, 0, time.monotonic() - start, 0, corpus_is_ready=True)
    with locked(out, part=f"{shard.number}-of-{shard.count}"):
        units, written = _prepare_shard(settings, request, out, shard, workers)
    documents, tokens = sum(u.file.documents for u in units), sum(u.file.tokens for u in units)
    return PreparedShard(shard, len(units), documents, tokens, time.monotonic() - start, written)


def _prepare_shard(
    settings: PrepareSettings, request: dict[str, Any], out: Path, shard: Shard, workers: int
) -> tuple[list[EncodedUnit], int]:
    """Do the work of `prepare_shard` in a folder of which this share is locked."""
    join(out, request, settings, shard)
    try:
        corpus = find_source(settings.source).corpus(settings, out / WORK_NAME, workers)
        rule = SplitRule(settings.seed, 0.0)
        _, paragraphs = _hold_out(corpus, rule, settings, out / WORK_NAME, workers)
        encoding, _ = _make_tokenizer(settings, corpus, rule, out)
        hashes = paragraphs if settings.decontaminate else None
        return _encode_training(corpus, rule, encoding, hashes, out, workers, shard=shard)
    except BaseException:
        remove_temporaries_of(out, shard)
        raise


def _processes(workers: int | None) -> int:
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    return workers or available_cores()


def _request(settings: PrepareSettings) -> dict[str, Any]:
    """What the corpus depends on, as JSON gives it back."""
    return json.loads(json.dumps({"pipeline": PIPELINE_VERSION, **settings.request()}))


def _make(
    settings: PrepareSettings, request: dict[str, Any], corpus: Corpus, out: Path, workers: int, merge: bool
) -> tuple[CorpusManifest, int]:
    """All stages; returns the saved manifest and the number of tokens written by this run."""
    rule = SplitRule(settings.seed, 0.0 if corpus.heldout else settings.heldout_fraction)
    heldout, paragraphs = _hold_out(corpus, rule, settings, out / WORK_NAME, workers)
    encoding, vocab_size = _make_tokenizer(settings, corpus, rule, out)
    units, written = _encode_training(
        corpus, rule, encoding, paragraphs if settings.decontaminate else None, out, workers, merge=merge
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
            work / f"heldout-{index:05d}.json",
            settings.decontaminate_min_characters,
        )
        for index, unit in enumerate(units)
    ]
    todo = [job for job in jobs if not is_held_out(job)]
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
    path, file = work / "paragraphs.npy", BytesIO()
    np.save(file, np.unique(np.concatenate([np.load(job.paragraphs) for job in jobs])))
    if (
        not path.is_file() or path.read_bytes() != file.getbuffer()
    ):  # where it is whole, another shard may read it
        with atomic_path(path) as temporary:
            temporary.write_bytes(file.getbuffer())
    return [TextFiles((str(job.documents),)) for job in jobs], path


def _make_tokenizer(
    settings: PrepareSettings, corpus: Corpus, rule: SplitRule, out: Path
) -> tuple[Encoding, int]:
    """Write tokenizer.json, unless an earlier run did; returns how to encode, and the vocabulary size."""
    path = out / TOKENIZER_NAME
    record = out / WORK_NAME / "tokenizer.json"
    if not _has_tokenizer(path, record, settings):
        with atomic_path(path) as temporary:
            if settings.tokenizer_name == "bpe":
                texts = _sample(corpus, rule, settings.tokenizer_sample_mb * 1e6)
                trained = train_bpe(texts, settings.vocab_size)
                temporary.write_text(trained.to_str(pretty=True), encoding="utf8")
            else:
                temporary.write_bytes(tokenizer_file(settings.tokenizer_name).read_bytes())
        write_json(record, {"sha256": sha256_file(path)})
    tokenizer = load_tokenizer(path)
    vocab_size = id_range(tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    return Encoding(str(path), find_eos(tokenizer, settings.eos_token), dtype), vocab_size


def _has_tokenizer(path: Path, record: Path, settings: PrepareSettings) -> bool:
    """Whether an earlier run, or another shard, wrote it, and it is as it was written."""
    if not path.is_file():
        return False
    if settings.tokenizer_name != "bpe":
        return sha256_file(path) == sha256_file(tokenizer_file(settings.tokenizer_name))
    try:
        return sha256_file(path) == read_json(record, "").get("sha256")
    except UserError:
        return False


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
    corpus: Corpus,
    rule: SplitRule,
    encoding: Encoding,
    paragraphs: Path | None,
    out: Path,
    workers: int,
    *,
    shard: Shard | None = None,
    merge: bool = False,
) -> tuple[list[EncodedUnit], int]:
    """Token files of the training split in the order of the units, and how many tokens this run wrote.

    Only those of ``shard`` where one is given; with ``merge`` all of them must be there.
    """
    jobs = []
    for index, unit in enumerate(corpus.train):
        if shard is not None and not shard.has(index):
            continue
        name = f"train-{index:05d}"
        output, record = out / f"{name}.npy", out / WORK_NAME / f"{name}.json"
        jobs.append(EncodeJob(unit, rule, encoding, output, record, paragraphs, corpus.limit_tokens))
    records = {job.record: EncodedUnit.load(job.record) for job in jobs}
    done = {path: old for path, old in records.items() if old and is_whole(out, old.file)}
    todo = [job for job in jobs if job.record not in done]
    if merge:
        refuse_missing(
            out / WORK_NAME, [i for i, job in enumerate(jobs) if job.record not in done], len(jobs)
        )
    new = run_jobs(
        encode_unit, todo, workers=workers, description="tokenizing", unit=corpus.unit_name, done=len(done)
    )
    done |= {job.record: unit for job, unit in zip(todo, new, strict=True)}
    return [done[job.record] for job in jobs], sum(unit.file.tokens for unit in new)


@dataclass(frozen=True)
class PreparedShard:
    """What a finished share of a corpus holds, and what this run did for it."""

    shard: Shard
    units: int
    documents: int
    tokens: int
    seconds: float
    tokens_written: int
    """By this run; the rest was there already."""
    corpus_is_ready: bool = False
    """All shares were merged already; nothing was left to do."""


def check_shardable(settings: PrepareSettings) -> None:
    """Refuse what needs a look at the whole text before the first token is written."""
    problems = []
    if settings.tokenizer_name == "bpe":
        problems.append(
            "--shard needs a tokenizer that is there already, and bpe is trained on all the text; pass "
            "--tokenizer olmo, or a tokenizer.json made by an earlier run without --shard"
        )
    apart = find_source(settings.source).heldout_is_apart(settings)
    if not apart:
        problems.append(
            f"--shard needs held-out text of its own, and {settings.source} would be searched as a whole for "
            "documents to hold out; name --heldout-files, or run without --shard"
        )
    if problems:
        raise UserError("; ".join(problems))
