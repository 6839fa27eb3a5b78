"""Text to a prepared corpus: token files, tokenizer and manifest in one folder.

    text ──► held-out documents and their paragraphs ──► tokenizer ──► train-*.npy ──► heldout ──► manifest

What is finished is kept in the folder, with the state of unfinished work in `.partial`, so that a run that
was killed goes on where it stopped. Shards, on any machines that share the folder, make a part of train-*.npy each.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.encode import (
    EncodedUnit,
    EncodeJob,
    Encoding,
    HoldOutJob,
    count_groups,
    encode_heldout,
    encode_unit,
    hold_out,
)
from olmo_sparsity.data.groups import choose_buckets, groups_name, read_groups, shared_groups
from olmo_sparsity.data.near_copies import find_near_copies, near_copies_name, write_near_copies
from olmo_sparsity.data.sources import GroupField, PrepareSettings, TextFiles, find_source
from olmo_sparsity.data.text import GROUP_FIELD, SplitRule, Unit
from olmo_sparsity.data.tokenizers import find_eos, id_range, load_tokenizer, tokenizer_file, train_bpe
from olmo_sparsity.data.tokens import MANIFEST_NAME, TOKENIZER_NAME, CorpusManifest, TokenFile, dtype_name
from olmo_sparsity.data.workspace import (
    REQUEST_NAME,
    SHARDS_NAME,
    WORK_NAME,
    claim,
    finished_corpus,
    has_nothing_finished,
    is_whole,
    locked,
    refuse_missing,
    remove_outputs,
    remove_temporaries,
    remove_work,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, read_json, remove, sha256_file, write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores
from olmo_sparsity.util.shard import Shard
from olmo_sparsity.util.workers import StoppedEarly, run_jobs

PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""


@dataclass(frozen=True)
class Prepared:
    """A finished corpus and what this run did for it."""

    manifest: CorpusManifest
    tokens_written: int
    """By this run; 0 where the corpus was there already."""


@dataclass(frozen=True)
class PreparedShard:
    """What a finished share of a corpus holds, and what this run did for it."""

    files: list[TokenFile]
    """Of each unit of the share; without tokens where it has no training document."""
    tokens_written: int
    """By this run; the rest was there already."""
    corpus_is_ready: bool = False
    """All shares were merged already; nothing was left to do."""


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
    stages = _Stages(settings, out, workers)
    out, request = stages.out, stages.request
    if not overwrite and (finished := finished_corpus(out, request)) is not None:
        remove_work(out)
        return Prepared(finished, 0)
    if merge and not (out / WORK_NAME / REQUEST_NAME).is_file():
        raise UserError(f"{out} has nothing to merge; make its parts with --shard 1/n … n/n first")
    with locked(out):
        if not overwrite and (finished := finished_corpus(out, request)) is not None:
            return Prepared(finished, 0)  # another process made it in the meantime
        claim(out, request, settings, overwrite=overwrite)
        try:
            manifest, written = stages.run(merge)
        except BaseException as error:
            remove_temporaries(out)  # of workers that were stopped in the middle
            of_shards = merge or (out / WORK_NAME / SHARDS_NAME).is_file()  # the work of many tasks is kept
            bad_input = isinstance(error, UserError) and not isinstance(error, StoppedEarly) and not of_shards
            if bad_input or has_nothing_finished(out):
                remove_outputs(out)
            raise
        remove(out / WORK_NAME)
    return Prepared(manifest, written)


def prepare_shard(
    settings: PrepareSettings, out: str | Path, shard: Shard, *, workers: int | None = None
) -> PreparedShard:
    """Make one share of the training units; other shares may be made in the same folder at the same time.

    `prepare` with ``merge`` then makes the corpus whole, with the bytes that it would have had in one go. Raises
    `UserError` for bad input, and for settings that need a look at all the text; finished units are kept.
    """
    stages = _Stages(settings, out, workers)
    check_shardable(settings)
    out = stages.out
    if (out / MANIFEST_NAME).is_file():
        if finished_corpus(out, stages.request) is None:
            raise UserError(f"{out} is finished but damaged; run the command without --shard to mend it")
        return PreparedShard([], 0, corpus_is_ready=True)
    with locked(out, part=f"{shard.number}-of-{shard.count}"):
        claim(out, stages.request, settings, shard=shard)
        try:
            units, written = stages.run_shard(shard)
        except BaseException:
            remove_temporaries(out, shard)
            raise
    return PreparedShard([unit.file for unit in units], written)


def check_shardable(settings: PrepareSettings) -> None:
    """Refuse settings that need the whole text before the first token can be written."""
    problems = []
    if settings.tokenizer_name == "bpe":
        problems.append(
            "--shard needs a tokenizer that is there already, and bpe is trained on all the text; pass "
            "--tokenizer olmo, or a tokenizer.json made by an earlier run without --shard"
        )
    if find_source(settings.source).identify(settings).get("heldout_fraction") is not None:
        problems.append(
            f"--shard needs held-out text of its own, and {settings.source} would be searched as a whole for "
            "documents to hold out; name --heldout-files, or run without --shard"
        )
    if settings.heldout_files and not settings.files:
        problems.append("--shard divides training files, and there are none; run without --shard")
    if problems:
        raise UserError("; ".join(problems))


class _Stages:
    """The stages of making a corpus; what an earlier run finished is not made again."""

    def __init__(self, settings: PrepareSettings, out: str | Path, workers: int | None):
        settings.check()
        self.settings, self.out, self.work = settings, Path(out), Path(out) / WORK_NAME
        self.workers = workers or available_cores()
        request = {"pipeline": PIPELINE_VERSION, **settings.request()}
        self.request = json.loads(json.dumps(request))  # as a manifest gives it back

    def run(self, merge: bool) -> tuple[CorpusManifest, int]:
        """Run all stages; returns the saved manifest and the number of tokens written by this run."""
        self._open()
        heldout, paragraphs = self._hold_out()
        encoding, vocab_size = self._make_tokenizer()
        units, written = self._encode_training(encoding, paragraphs, merge=merge)
        train = [unit.file for unit in units if unit.file.tokens]
        if self.corpus.train and not train:
            raise UserError("no training documents are left; lower --heldout-fraction or give more text")
        [(heldout_file, removed)] = run_jobs(
            partial(encode_heldout, heldout, encoding, self.out / "heldout-00000.npy"),
            [frozenset(digest for unit in units for digest in unit.contaminated)],
            workers=1,
            description="held-out split",
            unit="files",
        )
        if not heldout_file.tokens:
            raise UserError(
                "every held-out paragraph also stands in the training text; hold out other documents "
                "(--heldout-files, --seed) or keep them as they are (--no-decontaminate)"
            )
        heldout_file, near_copies = self._mark_near_copies(train, heldout_file, encoding)
        manifest = CorpusManifest(
            corpus=self.settings.source,
            tokenizer_sha256=sha256_file(self.out / TOKENIZER_NAME),
            vocab_size=vocab_size,
            eos_token_id=encoding.eos_token_id,
            dtype=encoding.dtype,
            splits={**({"train": train} if train else {}), "heldout": [heldout_file]},
            settings={
                **self.request,
                **self._count_groups(train, heldout_file),
                **near_copies,
                "decontamination": removed,
                "versions": {"python": platform.python_version(), "tokenizers": version("tokenizers")},
            },
        )
        manifest.save(self.out)
        return manifest, written + heldout_file.tokens

    def _count_groups(self, train: Sequence[TokenFile], heldout: TokenFile) -> dict[str, Any]:
        """How many groups are held out, and how many of these are also in training; empty without groups."""
        if heldout.groups_sha256 is None:
            return {}
        path = self.out / groups_name(heldout.name)
        held = frozenset(read_groups(path, heldout.groups_sha256, heldout.documents)) - {None}
        shared = run_jobs(
            partial(shared_groups, held),
            [self.out / groups_name(file.name) for file in train if file.groups_sha256],
            workers=self.workers,
            description="comparing groups",
            unit="files",
        )
        return {"groups": {"heldout": len(held), "in_both": len(set().union(*shared))}}

    def _mark_near_copies(
        self, train: Sequence[TokenFile], heldout: TokenFile, encoding: Encoding
    ) -> tuple[TokenFile, dict[str, Any]]:
        """Write the near copies of the held-out file; returns its entry with their checksum, and how many there are."""
        length = self.settings.near_copy_tokens
        if not train or not length:
            return heldout, {}
        found = find_near_copies(
            self.out / heldout.name,
            [self.out / file.name for file in train],
            dtype=np.dtype(encoding.dtype),
            eos_token_id=encoding.eos_token_id,
            length=length,
            workers=self.workers,
        )
        sha256 = write_near_copies(self.out / near_copies_name(heldout.name), found)
        tokens = int((found[:, 1] - found[:, 0]).sum())
        return replace(heldout, near_copies_sha256=sha256), {
            "near_copies": {"stretches": len(found), "tokens": tokens}
        }

    def run_shard(self, shard: Shard) -> tuple[list[EncodedUnit], int]:
        """Make the training units of one share; returns them and the number of tokens written by this run."""
        self._open()
        _, paragraphs = self._hold_out()
        encoding, _ = self._make_tokenizer()
        return self._encode_training(encoding, paragraphs, shard=shard)

    def _open(self) -> None:
        """Find the text."""
        source = find_source(self.settings.source)
        self.corpus = source.corpus(self.settings, self.work, self.workers)
        self.rule = SplitRule(
            self.settings.seed, 0.0 if self.corpus.heldout else self.settings.heldout_fraction
        )
        if self.request.get("group_field") and not self.corpus.heldout:
            self.rule = replace(self.rule, heldout_buckets=self._choose_groups())

    def _choose_groups(self) -> frozenset[int]:
        """The buckets of the groups to hold out, kept in a file for the next start."""
        path = self.work / "groups.json"
        with suppress(UserError):
            return frozenset(read_json(path, "", expect=list))
        counts = run_jobs(
            partial(count_groups, self.rule),
            self.corpus.train,
            workers=self.workers,
            description="counting groups",
            unit=self.corpus.unit_name,
        )
        remedy = (
            "ask for another --heldout-fraction or --seed, or split by document with --group-field none"
            + ", or name --heldout-files" * (self.settings.source == "text")
        )
        buckets = choose_buckets(np.sum(counts, axis=0), self.settings.heldout_fraction, remedy)
        write_json(path, sorted(buckets))
        return buckets

    def _hold_out(self) -> tuple[list[Unit], Path]:
        """Held-out documents as units, and the file of the hashes of all their paragraphs, (P,) uint64."""
        rule, least = None if self.corpus.heldout else self.rule, self.settings.decontaminate_min_characters
        jobs = []
        for index, unit in enumerate(self.corpus.heldout or self.corpus.train):
            stem = self.work / f"heldout-{index:05d}"
            documents, paragraphs, record = map(stem.with_suffix, (".jsonl", ".npy", ".json"))
            jobs.append(HoldOutJob(unit, rule, documents, paragraphs, record, least))
        todo = [job for job in jobs if not job.is_done]
        counts = run_jobs(
            hold_out,
            todo,
            workers=self.workers,
            description="choosing held-out documents",
            unit=self.corpus.unit_name,
            done=len(jobs) - len(todo),
        )
        if not any(job.documents.stat().st_size for job in jobs):
            if not sum(counts):
                raise UserError("the input has no documents, or only empty ones; give files with text")
            raise UserError(
                f"none of {sum(counts):,} documents is held out; raise --heldout-fraction (now "
                f"{self.settings.heldout_fraction:g}), give more text, or name held-out files with --heldout-files"
            )
        path, file = self.work / "paragraphs.npy", BytesIO()
        np.save(file, np.unique(np.concatenate([np.load(job.paragraphs) for job in jobs])))
        # Where it is whole, another shard may be reading it.
        if not path.is_file() or path.read_bytes() != file.getbuffer():
            with atomic_path(path) as temporary:
                temporary.write_bytes(file.getbuffer())
        field = GroupField(GROUP_FIELD)
        return [TextFiles((str(job.documents),), field) for job in jobs], path

    def _make_tokenizer(self) -> tuple[Encoding, int]:
        """Write tokenizer.json, unless an earlier run did; returns how to encode, and the vocabulary size."""
        path = self.out / TOKENIZER_NAME
        if not self._has_tokenizer(path):
            with atomic_path(path) as temporary:
                if self.settings.tokenizer_name == "bpe":
                    trained = train_bpe(self._sample(), self.settings.vocab_size)
                    temporary.write_text(trained.to_str(pretty=True), encoding="utf8")
                else:
                    temporary.write_bytes(tokenizer_file(self.settings.tokenizer_name).read_bytes())
            write_json(self.work / TOKENIZER_NAME, {"sha256": sha256_file(path)})
        tokenizer = load_tokenizer(path)
        vocab_size = id_range(tokenizer)
        eos_token_id = find_eos(tokenizer, self.settings.eos_token)
        return Encoding(str(path), eos_token_id, dtype_name(vocab_size)), vocab_size

    def _has_tokenizer(self, path: Path) -> bool:
        """Whether an earlier run, or another shard, wrote it, and its checksum is right."""
        try:
            return read_json(self.work / TOKENIZER_NAME, "").get("sha256") == sha256_file(path)
        except (UserError, OSError):
            return False

    def _sample(self) -> Iterator[str]:
        """Training documents from the start of every unit, `tokenizer_sample_mb` in all."""
        units = self.corpus.train
        with progress("training the tokenizer", len(units), self.corpus.unit_name) as advance:
            for unit in units:
                left = self.settings.tokenizer_sample_mb * 1e6 / len(units)
                for document in unit.documents():
                    if not self.rule.is_heldout(document):
                        yield document.text[: int(left) + 1]
                        left -= len(document.text)
                    if left <= 0:
                        break
                advance()

    def _encode_training(
        self, encoding: Encoding, paragraphs: Path, *, shard: Shard | None = None, merge: bool = False
    ) -> tuple[list[EncodedUnit], int]:
        """Token files of the training split in the order of the units, and how many tokens this run wrote.

        Only those of ``shard`` where one is given; with ``merge`` all of them must be there.
        """
        jobs = [
            EncodeJob(
                unit,
                self.rule,
                encoding,
                self.out / f"train-{index:05d}.npy",
                self.work / f"train-{index:05d}.json",
                paragraphs if self.settings.decontaminate else None,
                self.corpus.limit_tokens,
            )
            for index, unit in enumerate(self.corpus.train)
            if shard is None or shard.has(index)
        ]
        found = [EncodedUnit.load(job.record) for job in jobs]
        done = [unit if unit and is_whole(self.out, unit.file) else None for unit in found]
        missing = [index for index, unit in enumerate(done) if unit is None]
        if merge:
            refuse_missing(self.work, missing, len(jobs))
        new = run_jobs(
            encode_unit,
            [jobs[index] for index in missing],
            workers=self.workers,
            description="tokenizing",
            unit=self.corpus.unit_name,
            done=len(jobs) - len(missing),
        )
        made = dict(zip(missing, new, strict=True))
        return [unit or made[index] for index, unit in enumerate(done)], sum(unit.file.tokens for unit in new)
