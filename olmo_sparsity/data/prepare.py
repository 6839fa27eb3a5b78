"""Text to a prepared corpus: token files, tokenizer and manifest in one folder.

    text ──► held-out documents and their paragraphs ──► tokenizer ──► train-*.npy ──► heldout ──► manifest

Every file is written whole or not at all, and the manifest last: a folder without one is unfinished. State of
unfinished work, the request that it answers among it, is in `.partial`; what is there is not made again, so that a run
that was killed goes on where it stopped. Shards, on any machines that share the folder, make a part of train-*.npy
each; what all of them need (tokenizer, held-out documents) each makes if it is not there, with the same bytes.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.groups import SplitRule, choose_buckets, read_groups, write_groups
from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.near_copies import find_near_copies, write_near_copies
from olmo_sparsity.data.sources import PrepareSettings, Unit, read_rows
from olmo_sparsity.data.text import Document, Encoder, decontaminated, paragraph_hashes, train_bpe, write_rows
from olmo_sparsity.data.tokens import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CorpusManifest,
    TokenFile,
    TokenFiles,
    check_sum,
    tokenizer_file,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, folder_lock, read_json, remove, sha256_file, write_json
from olmo_sparsity.util.provenance import available_cores

PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""
WORK_NAME = ".partial"
OUTPUT_NAME = re.compile(r"tokenizer\.json|(train|heldout)-\d{5,}\.(npy|groups\.jsonl\.gz|near-copies)")
OTHER_FOLDER = "choose another --out, or remove it"
Job = tuple[Unit, Path]
"""A unit, and the file to make of it, in the work folder: whole or not at all."""


def prepare(
    settings: PrepareSettings,
    out: str | Path,
    *,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
) -> CorpusManifest | None:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. With ``shard``
    (i, n) only the i-th of n shares of the training files is made, at the same time as others if need be; None is
    returned. Raises `UserError` for bad input, and for a folder that holds another corpus.
    """
    settings.check(in_shards=shard is not None)
    # as a manifest gives it back
    request = json.loads(json.dumps({"pipeline": PIPELINE_VERSION, **settings.request()}))
    out = Path(out)
    finished = (out / MANIFEST_NAME).is_file()  # then it may be on a disk that cannot be written to
    with nullcontext() if finished else folder_lock(out, part=shard and f"{shard[0]}-of-{shard[1]}"):
        if manifest := _claim(out, request):
            return manifest
        try:
            return _make(settings, out, request, workers or available_cores(), shard)
        finally:
            if shard is None:  # else other shards may be at work
                _tidy(out)


# --- the folder ---


def _claim(out: Path, request: dict[str, Any]) -> CorpusManifest | None:
    """The corpus that ``out`` holds; where it is not finished, ``out`` is to be worked in from now on.

    Raises `UserError` where ``out`` holds another corpus, finished or not, or a damaged one.
    """
    manifest = CorpusManifest.load(out) if (out / MANIFEST_NAME).is_file() else None
    record = out / WORK_NAME / "request.json"
    if not manifest and not record.is_file():
        for path in _outputs(out):
            raise UserError(f"{out} has {path.name} but no record of how it was made; {OTHER_FOLDER}")
        write_json(record, request)
    earlier = manifest.settings if manifest else read_json(record, OTHER_FOLDER)
    names = dict.fromkeys([*request, "group_field", "near_copy_tokens"])  # left out where they are off
    if differing := [name for name in names if earlier.get(name) != request.get(name)]:
        what = f"a corpus, or the beginning of one, made with other settings ({', '.join(differing)})"
        raise UserError(f"{out} holds {what}; {OTHER_FOLDER}")
    if manifest:
        for split in manifest.splits:
            TokenFiles.of_split(out, split)
        check_sum(out / TOKENIZER_NAME, manifest.tokenizer_sha256)
    return manifest


def _tidy(out: Path) -> None:
    """Remove what no later run needs: of a finished corpus its state, of one without training files all of it."""
    work, finished, begun = out / WORK_NAME, (out / MANIFEST_NAME).is_file(), any(out.glob("train-*.npy"))
    left = [work] if finished else [] if begun else [*_outputs(out), work]  # the request last
    for path in [*out.glob(".*.tmp-*"), *work.glob(".*.tmp-*"), *left]:
        remove(path)  # temporaries are of workers that were stopped in the middle


def _outputs(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if OUTPUT_NAME.fullmatch(path.name)]


# --- the stages ---


def _make(
    settings: PrepareSettings, out: Path, request: dict[str, Any], workers: int, shard: tuple[int, int] | None
) -> CorpusManifest | None:
    """Run all stages; of a shard, those up to its training files. What an earlier run finished is not made again."""
    work = out / WORK_NAME

    def of_each(
        units: dict[int, Unit], name: str, description: str, write: Callable[[Job], None]
    ) -> list[Path]:
        """The files that ``write`` makes of units, named by their numbers."""
        jobs = [(unit, work / name.format(number)) for number, unit in units.items()]
        run_jobs(write, [job for job in jobs if not job[1].is_file()], workers, description)
        return [path for _, path in jobs]

    units, given = (dict(enumerate(each)) for each in settings.units(work, workers))
    rule = SplitRule(settings.seed, settings.heldout_fraction if settings.chooses_heldout else 0.0)
    if settings.chooses_heldout and request.get("group_field"):
        documents: Counter[int] = Counter()
        for path in of_each(units, "groups-{:05d}.json", "counting groups", partial(_count_groups, rule)):
            documents.update({int(bucket): count for bucket, count in read_json(path, "remove it").items()})
        rule = replace(rule, heldout_buckets=choose_buckets(documents, rule.heldout_fraction))
    hold_out = partial(_hold_out, rule if settings.chooses_heldout else None)
    heldout = of_each(given or units, "heldout-{:05d}.jsonl", "holding out", hold_out)
    if not any(path.stat().st_size for path in heldout):
        remedy = "give more text, raise --heldout-fraction"
        remedy += f" (now {settings.heldout_fraction:g}), or name --heldout-files with text"
        raise UserError(f"no document is held out; {remedy}")
    if not (out / TOKENIZER_NAME).is_file():
        _make_tokenizer(settings, out / TOKENIZER_NAME, list(units.values()), rule)
    encoder = Encoder(out / TOKENIZER_NAME, settings.eos_token)
    texts = (document.text for document in _read_back(heldout if settings.decontaminate else []))
    hashes = frozenset(chain.from_iterable(map(paragraph_hashes, texts)))
    limit = None if settings.limit_tokens is None else -(-settings.limit_tokens // len(units))
    number, count = shard or (1, 1)
    share = dict([*units.items()][number - 1 :: count])  # dealt out as cards are
    _forget_damaged(out, encoder)
    encode = partial(_encode_unit, encoder, rule, hashes, limit)
    records = of_each(share, "train-{:05d}.json", "tokenizing", encode)
    if shard is not None:
        return None
    made = [read_json(path, "remove it") for path in records]
    return _finish(settings, out, request, encoder, made, heldout, workers)


def _count_groups(rule: SplitRule, job: Job) -> None:
    unit, path = job
    write_json(path, Counter(rule.bucket(group) for _, group in unit() if group is not None))


def _hold_out(rule: SplitRule | None, job: Job) -> None:
    """Copy the documents of a unit that ``rule`` holds out, or all, to a file of JSON lines."""
    unit, path = job
    with atomic_path(path) as temporary:
        write_rows(temporary, filter(rule.is_heldout if rule else None, unit()))


def _read_back(paths: Iterable[Path]) -> Iterator[Document]:
    return (Document(**row) for path in paths for _, row in read_rows(str(path)))


def _make_tokenizer(settings: PrepareSettings, path: Path, units: list[Unit], rule: SplitRule) -> None:
    """Copy the tokenizer, or train it on documents from the start of every unit, `tokenizer_sample_mb` in all."""

    def sample() -> Iterator[str]:
        for unit in units:
            left = settings.tokenizer_sample_mb * 1e6 / len(units)
            for document in filterfalse(rule.is_heldout, unit()):
                yield document.text[: int(left) + 1]
                left -= len(document.text)
                if left <= 0:
                    break

    with atomic_path(path) as temporary:
        if settings.tokenizer_name == "bpe":
            train_bpe(sample(), settings.vocab_size).save(str(temporary))
        else:
            temporary.write_bytes(tokenizer_file(settings.tokenizer_name).read_bytes())


def _forget_damaged(out: Path, encoder: Encoder) -> None:
    """Remove each record of a token file that does not have the size that it says: it is made again."""
    for record in (out / WORK_NAME).glob("train-*.json"):
        file = TokenFile(**read_json(record, "remove it")["file"])
        path, size = out / file.name, file.tokens * np.dtype(encoder.dtype).itemsize
        if (path.stat().st_size if path.is_file() else 0) != size:
            record.unlink()


def _encode_unit(
    encoder: Encoder, rule: SplitRule, of_heldout: frozenset[int], limit: int | None, job: Job
) -> None:
    """Write the training documents of a unit as a token file and, last, a record of it."""
    unit, record = job
    output, documents = record.parents[1] / f"{record.stem}.npy", filterfalse(rule.is_heldout, unit())
    file, contaminated = _write_tokens(output, encoder, documents, of_heldout, limit)
    write_json(record, {"file": asdict(file), "contaminated": sorted(contaminated)})


def _write_tokens(
    output: Path,
    encoder: Encoder,
    documents: Iterable[Document],
    of_heldout: frozenset[int] = frozenset(),
    limit: int | None = None,
) -> tuple[TokenFile, set[int]]:
    """Write the ids of documents, until there are ``limit``, and their groups into a file beside it, if any has one.

    Also returns which of the hashes ``of_heldout`` are of their paragraphs. Without documents there is no file: a token
    file must not be empty.
    """
    groups: list[str | None] = []
    tokens, contaminated = 0, set[int]()
    with atomic_path(output) as temporary:
        with open(temporary, "wb") as file:
            for document, ids in encoder.encode(documents):
                file.write(ids.data)
                groups.append(document.group)
                tokens += len(ids)
                if of_heldout:
                    contaminated.update(of_heldout.intersection(paragraph_hashes(document.text)))
                if limit is not None and tokens >= limit:
                    break
        if not tokens:
            temporary.unlink()
    sha256 = sha256_file(output) if tokens else ""
    return TokenFile(output.name, tokens, len(groups), sha256, write_groups(output, groups)), contaminated


def _finish(
    settings: PrepareSettings,
    out: Path,
    request: dict[str, Any],
    encoder: Encoder,
    records: list[dict[str, Any]],
    heldout: list[Path],
    workers: int,
) -> CorpusManifest:
    """Write the held-out split, without the paragraphs that are in training, and the manifest."""
    train = [TokenFile(**record["file"]) for record in records if record["file"]["tokens"]]
    if records and not train:
        raise UserError("no training documents are left; lower --heldout-fraction or give more text")
    contaminated = {digest for record in records for digest in record["contaminated"]}
    removed: dict[str, int] = {}
    path, documents = out / "heldout-00000.npy", decontaminated(_read_back(heldout), contaminated, removed)
    file, _ = _write_tokens(path, encoder, documents)
    if not file.tokens:
        remedy = "hold out others (--heldout-files, --seed) or keep them (--no-decontaminate)"
        raise UserError(f"every held-out paragraph also stands in the training text; {remedy}")
    found: dict[str, Any] = {}
    if file.groups_sha256 is not None:
        held = set(read_groups(path, file)) - {None}
        shared = (held.intersection(read_groups(out / each.name, each)) for each in train)
        found["groups"] = {"heldout": len(held), "in_both": len(set().union(*shared))}
    if train and settings.near_copy_tokens:
        paths, ids = [out / each.name for each in train], (encoder.dtype, encoder.eos_token_id)
        near_copies = find_near_copies(path, paths, *ids, settings.near_copy_tokens, workers)
        file = replace(file, near_copies_sha256=write_near_copies(path, near_copies))
        covered = int(np.diff(near_copies).sum())
        found["near_copies"] = {"stretches": len(near_copies), "tokens": covered}
    found["decontamination"] = removed
    found["versions"] = {"python": platform.python_version(), "tokenizers": version("tokenizers")}
    manifest = CorpusManifest(
        corpus=settings.source,
        tokenizer_sha256=encoder.sha256,
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        dtype=encoder.dtype,
        splits=({"train": train} if train else {}) | {"heldout": [file]},
        settings=request | found,
    )
    manifest.save(out)
    return manifest
