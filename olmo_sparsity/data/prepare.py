"""Text to a prepared corpus: token files, tokenizer and manifest in one folder.

    text ──► held-out documents and their paragraphs ──► tokenizer ──► train-*.npy ──► heldout ──► manifest

Every file is written whole or not at all, the manifest last. State of unfinished work, with the request that it
answers, is in `.partial`; what is there is not made again: a run that was killed goes on where it stopped. Shards, on
any machines that share the folder, make a part of train-*.npy each, and what all need where it is not there yet.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.groups import SplitRule, choose_buckets, read_groups, write_groups
from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.near_copies import find_near_copies, write_near_copies
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.text import Document, Encoder, Unit, decontaminated, paragraphs, train_bpe, write_rows
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
from olmo_sparsity.util.files import (
    atomic_path,
    folder_lock,
    read_json,
    remove,
    sha256_file,
    user_path,
    write_json,
)
from olmo_sparsity.util.provenance import available_cores
from olmo_sparsity.util.text_rows import read_rows

PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""
WORK_NAME = ".partial"
OUTPUTS = TOKENIZER_NAME, "train-*.npy", "heldout-00000.*"
OFTEN_LEFT_OUT = "group_field", "near_copy_tokens", "text_field", "encoding"
"""Settings that a request has only where they are on, or not at their defaults."""
OTHER_FOLDER = "choose another --out, or remove it"
Shard = tuple[int, int]
Json = dict[str, Any]


def prepare(
    settings: PrepareSettings, out: str | Path, *, workers: int | None = None, shard: Shard | None = None
) -> CorpusManifest | None:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. With ``shard``
    (i, n) only the i-th of n shares of the training files is made, at the same time as others if need be; None is
    returned. Raises `UserError` for bad input, and for a folder that holds another corpus.
    """
    settings.check(in_shards=shard is not None)
    request, out = {"pipeline": PIPELINE_VERSION, **settings.request()}, user_path(out)
    finished = (out / MANIFEST_NAME).is_file()  # then it may be on a disk that cannot be written to
    with nullcontext() if finished else folder_lock(out, part=shard and f"{shard[0]}-of-{shard[1]}"):
        if manifest := _claim(out, request):
            return manifest
        try:
            return _make(settings, out, request, workers or available_cores(), shard)
        finally:
            if shard is None:  # else other shards may be at work
                _tidy(out)


def _claim(out: Path, request: Json) -> CorpusManifest | None:
    """The corpus that ``out`` holds, if it is finished; else ``out`` is to be worked in from now on. Raises `UserError`
    where ``out`` holds another corpus, finished or not, or a damaged one."""
    manifest = CorpusManifest.load(out) if (out / MANIFEST_NAME).is_file() else None
    record = out / WORK_NAME / "request.json"
    if not manifest and not record.is_file():
        for path in chain.from_iterable(map(out.glob, OUTPUTS)):
            raise UserError(f"{out} has {path.name} but no record of how it was made; {OTHER_FOLDER}")
        write_json(record, request)
    earlier = manifest.settings if manifest else read_json(record, OTHER_FOLDER)
    names = dict.fromkeys([*request, *OFTEN_LEFT_OUT])
    if differing := [name for name in names if earlier.get(name) != request.get(name)]:
        raise UserError(
            f"{out} holds a corpus, or the beginning of one, made with other settings ({', '.join(differing)}); "
            f"{OTHER_FOLDER}"
        )
    if manifest:
        for split in manifest.splits:
            TokenFiles.of_split(out, split)
        check_sum(out / TOKENIZER_NAME, manifest.tokenizer_sha256)
    return manifest


def _tidy(out: Path) -> None:
    """Remove what no later run needs: of a finished corpus its state, of one without training files all of it."""
    work = out / WORK_NAME
    finished = (out / MANIFEST_NAME).is_file()
    begun = any(out.glob("train-*.npy"))
    left = [work] if finished else [] if begun else [*chain.from_iterable(map(out.glob, OUTPUTS)), work]
    for path in [*out.glob(".*.tmp-*"), *work.glob(".*.tmp-*"), *left]:
        remove(path)  # temporaries are of workers that were stopped in the middle


def _make(
    settings: PrepareSettings, out: Path, request: Json, workers: int, shard: Shard | None
) -> CorpusManifest | None:
    """Hold documents out, make the tokenizer and the training files that are not there; without ``shard`` finish."""
    work = out / WORK_NAME
    units, heldout_units = settings.units(work, workers)
    rule = SplitRule(settings.seed, settings.heldout_fraction if settings.chooses_heldout else 0.0)
    if rule.heldout_fraction and request.get("group_field"):
        counts = run_jobs([partial(rule.count_groups, unit) for unit in units], workers, "counting groups")
        documents = sum(counts, Counter[int]())
        rule = replace(rule, heldout_buckets=choose_buckets(documents, rule.heldout_fraction))
    training = [partial(rule.split, unit, heldout=False) for unit in units]
    chosen = heldout_units or [partial(rule.split, unit, heldout=True) for unit in units]
    heldout = {work / f"heldout-{index:05d}.jsonl": unit for index, unit in enumerate(chosen)}
    copies = [partial(write_rows, unit, path) for path, unit in heldout.items() if not path.is_file()]
    run_jobs(copies, workers, "holding out")
    if not any(path.stat().st_size for path in heldout):
        raise UserError(
            f"no document is held out; give more text, raise --heldout-fraction (now {settings.heldout_fraction:g}), "
            "or name --heldout-files with text"
        )

    if not (out / TOKENIZER_NAME).is_file():
        with atomic_path(out / TOKENIZER_NAME) as temporary:
            if settings.tokenizer_name == "bpe":
                characters = settings.tokenizer_sample_mb * 1e6 / len(training)
                sample = chain.from_iterable(_start(unit, characters) for unit in training)
                train_bpe(sample, settings.vocab_size).save(str(temporary))
            else:
                temporary.write_bytes(tokenizer_file(settings.tokenizer_name).read_bytes())
    encoder = Encoder(out / TOKENIZER_NAME, settings.eos_token)

    first, count = shard or (1, 1)  # round-robin
    records = {work / f"train-{i:05d}.json": training[i] for i in range(first - 1, len(units), count)}
    for record in filter(Path.is_file, records):
        file = TokenFile(**read_json(record, "remove it")["file"])
        path = out / file.name
        size = file.tokens * np.dtype(encoder.dtype).itemsize
        if (path.stat().st_size if path.is_file() else 0) != size:
            record.unlink()  # its token file was damaged, and is made again
    searched = _read_back(work) if settings.decontaminate else []
    hashes = frozenset(digest for document in searched for _, digest in paragraphs(document.text))
    limit = settings.limit_tokens and -(-settings.limit_tokens // len(units))
    encode = partial(_encode, encoder, hashes, limit)
    jobs = [partial(encode, unit, path) for path, unit in records.items() if not path.is_file()]
    run_jobs(jobs, workers, "tokenizing")
    made = [read_json(path, "remove it") for path in records]
    return None if shard else _finish(settings, out, request, encoder, made, workers)


def _finish(
    settings: PrepareSettings, out: Path, request: Json, encoder: Encoder, made: list[Json], workers: int
) -> CorpusManifest:
    """Write the held-out split, without the paragraphs that training files ``made`` have, and the manifest."""
    train = [TokenFile(**record["file"]) for record in made if record["file"]["tokens"]]
    if made and not train:
        raise UserError("no training documents are left; lower --heldout-fraction or give more text")
    contaminated = {digest for record in made for digest in record["contaminated"]}
    removed: dict[str, int] = {}
    kept = decontaminated(_read_back(out / WORK_NAME), contaminated, removed)
    file = _encode(encoder, frozenset(), None, lambda: kept, out / WORK_NAME / "heldout-00000.json")
    if not file.tokens:
        raise UserError(
            "every held-out paragraph also stands in the training text; hold out others (--heldout-files, --seed) or "
            "keep them (--no-decontaminate)"
        )
    statistics: Json = {}
    path = out / file.name
    paths = [out / token_file.name for token_file in train]
    if file.groups_sha256 is not None:
        groups = set(read_groups(path, file)) - {None}
        shared = map(groups.intersection, map(read_groups, paths, train))
        statistics["groups"] = {"heldout": len(groups), "in_both": len(set().union(*shared))}
    if train and settings.near_copy_tokens:
        ids = encoder.dtype, encoder.eos_token_id
        near_copies = find_near_copies(path, paths, *ids, settings.near_copy_tokens, workers)
        file = replace(file, near_copies_sha256=write_near_copies(path, near_copies))
        statistics["near_copies"] = {"stretches": len(near_copies), "tokens": int(np.diff(near_copies).sum())}
    statistics["decontamination"] = removed
    statistics["versions"] = {"python": platform.python_version(), "tokenizers": version("tokenizers")}
    manifest = CorpusManifest(
        corpus=settings.source,
        tokenizer_sha256=encoder.sha256,
        vocab_size=encoder.vocab_size,
        eos_token_id=encoder.eos_token_id,
        dtype=encoder.dtype,
        splits=({"train": train} if train else {}) | {"heldout": [file]},
        settings=request | statistics,
    )
    manifest.save(out)
    return manifest


def _read_back(work: Path) -> Iterator[Document]:
    paths = sorted(work.glob("heldout-*.jsonl"), key=lambda path: (len(path.name), path))  # by number
    return (Document(**row) for path in paths for _, row in read_rows(path))


def _start(unit: Unit, characters: float) -> Iterator[str]:
    """Texts from the start of a unit, of ``characters`` characters in all."""
    for document in unit():
        yield document.text[: int(characters) + 1]
        characters -= len(document.text)
        if characters <= 0:
            return


def _encode(
    encoder: Encoder, searched: frozenset[int], limit: int | None, unit: Unit, record: Path
) -> TokenFile:
    """Write documents of a unit, until they have ``limit`` tokens, as a token file, or no file where there are none.
    Last comes a record of it, with those hashes of ``searched`` that their paragraphs have."""
    output = record.parents[1] / f"{record.stem}.npy"
    groups: list[str | None] = []
    tokens = 0
    contaminated = set[int]()
    with atomic_path(output) as temporary:
        with open(temporary, "wb") as file:
            for document, ids in encoder.encode(unit()):
                file.write(ids.data)
                groups.append(document.group)
                tokens += len(ids)
                if searched:
                    hashes = (digest for _, digest in paragraphs(document.text))
                    contaminated.update(searched.intersection(hashes))
                if limit is not None and tokens >= limit:
                    break
        if not tokens:
            temporary.unlink()
    sha256 = sha256_file(output) if tokens else ""
    made = TokenFile(output.name, tokens, len(groups), sha256, write_groups(output, groups))
    write_json(record, {"file": asdict(made), "contaminated": sorted(contaminated)})
    return made
