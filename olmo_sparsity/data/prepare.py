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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.groups import GROUPS_SUFFIX, SplitRule, choose_buckets, read_groups, write_groups
from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.near_copies import NEAR_COPIES_SUFFIX, find_near_copies, write_near_copies
from olmo_sparsity.data.sources import (
    GROUP_FIELD,
    LEFT_OUT_WHERE_OFF,
    SOURCES,
    GroupField,
    PrepareSettings,
    TextFiles,
    Unit,
)
from olmo_sparsity.data.text import (
    Decontamination,
    Document,
    Encoding,
    encode_documents,
    find_eos,
    paragraph_hashes,
    train_bpe,
)
from olmo_sparsity.data.tokens import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CorpusManifest,
    TokenFile,
    TokenFiles,
    check_sum,
    id_range,
    load_tokenizer,
    tokenizer_file,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, folder_lock, read_json, remove, sha256_file, write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores

PIPELINE_VERSION = 1
"""Raise it when the same settings make other token files: older unfinished work is then refused."""
WORK_NAME = ".partial"
REQUEST_NAME = "request.json"
OTHER_FOLDER = "choose another --out, or remove it"
OUTPUT_PATTERNS = (
    *(MANIFEST_NAME, TOKENIZER_NAME, WORK_NAME, f"heldout-*{NEAR_COPIES_SUFFIX}"),
    *(f"{split}-*{suffix}" for split in ("train", "heldout") for suffix in (".npy", GROUPS_SUFFIX)),
)


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made or found."""

    manifest: CorpusManifest | None
    """None where a shard was made, and the corpus is not finished."""
    train: list[TokenFile]
    """Training files, of the shard where one was asked for."""
    tokens_written: int
    """By this run; the rest was there already."""


def prepare(
    settings: PrepareSettings,
    out: str | Path,
    *,
    workers: int | None = None,
    shard: tuple[int, int] | None = None,
) -> Prepared:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. With ``shard``
    (i, n) only the i-th of n shares of the training files is made, at the same time as others if need be. Raises
    `UserError` for bad input, and for a folder that holds another corpus.
    """
    settings.check()
    if shard is not None:
        check_shardable(settings)
    # as a manifest gives it back
    request = json.loads(json.dumps({"pipeline": PIPELINE_VERSION, **settings.request()}))
    out = Path(out)
    if finished := _finished(out, request):
        return finished
    with folder_lock(out, part=None if shard is None else f"{shard[0]}-of-{shard[1]}"):
        if finished := _finished(out, request):
            return finished  # another process made it in the meantime
        _claim(out, request)
        try:
            prepared = _Work(settings, out, request, workers or available_cores()).run(shard)
        except BaseException:
            if shard is None and not any(out.glob("train-*.npy")):  # nothing that is worth keeping
                for path in _outputs(out):
                    remove(path)
            raise
        finally:
            if shard is None:  # else other shards may be at work
                for path in [*out.glob(".*.tmp-*"), *(out / WORK_NAME).glob(".*.tmp-*")]:
                    remove(path)  # of workers that were stopped in the middle
        if shard is None:
            remove(out / WORK_NAME)
    return prepared


def check_shardable(settings: PrepareSettings) -> None:
    """Refuse settings that need the whole text before the first token can be written."""
    chooses = SOURCES[settings.source].identify(settings).get("heldout_fraction") is not None
    if settings.tokenizer_name == "bpe" or chooses:
        raise UserError(
            "--shard needs a tokenizer and held-out text that are there already; pass --tokenizer olmo, or a "
            "tokenizer.json made by an earlier run without --shard, and name --heldout-files, or run without --shard"
        )


# --- the folder ---


def _finished(out: Path, request: dict[str, Any]) -> Prepared | None:
    """The corpus that ``out`` holds. Raises `UserError` where it is another one, or damaged."""
    if not (out / MANIFEST_NAME).is_file():
        return None
    manifest = CorpusManifest.load(out)
    _refuse_other(out, manifest.settings, request)
    for split in manifest.splits:
        TokenFiles.of_split(out, split)
    check_sum(out / TOKENIZER_NAME, manifest.tokenizer_sha256)
    return Prepared(manifest, manifest.splits.get("train", []), 0)


def _claim(out: Path, request: dict[str, Any]) -> None:
    """Make ``out`` ready for work: new, or to be gone on with. Raises `UserError` for another's."""
    path = out / WORK_NAME / REQUEST_NAME
    if path.is_file():
        _refuse_other(out, read_json(path, OTHER_FOLDER), request)
        return
    if foreign := [file.name for file in _outputs(out) if file.is_file()]:
        raise UserError(f"{out} has {foreign[0]} but no record of how it was made; {OTHER_FOLDER}")
    write_json(path, request)


def _refuse_other(out: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    names = dict.fromkeys([*request, *LEFT_OUT_WHERE_OFF])
    differing = [name for name in names if earlier.get(name) != request.get(name)]
    if differing:
        raise UserError(
            f"{out} holds a corpus, or the beginning of one, made with other settings ({', '.join(differing)}); "
            + OTHER_FOLDER
        )


def _outputs(out: Path) -> list[Path]:
    return [path for pattern in OUTPUT_PATTERNS for path in out.glob(pattern)]


# --- the stages ---


class _Work:
    """The stages of making a corpus; what an earlier run finished is not made again."""

    def __init__(self, settings: PrepareSettings, out: Path, request: dict[str, Any], workers: int):
        self.settings, self.out, self.work = settings, out, out / WORK_NAME
        self.request, self.workers = request, workers
        self.corpus = SOURCES[settings.source].corpus(settings, self.work, workers)
        self.rule = SplitRule(settings.seed, 0.0 if self.corpus.heldout else settings.heldout_fraction)
        if request.get("group_field") and not self.corpus.heldout:
            self.rule = replace(self.rule, heldout_buckets=self._choose_groups())

    def run(self, shard: tuple[int, int] | None) -> Prepared:
        """Run all stages and save the manifest; of a shard, those up to its training files."""
        heldout, encoding = self.hold_out(), self.encoding()
        train, written = self.encode_training(heldout, encoding, shard)
        if shard is not None:
            return Prepared(None, train, written)
        train = [file for file in train if file.tokens]
        if self.corpus.train and not train:
            raise UserError("no training documents are left; lower --heldout-fraction or give more text")
        heldout_file, removed = self._encode_heldout(heldout, encoding)
        heldout_file, near_copies = self._mark_near_copies(train, heldout_file, encoding)
        manifest = CorpusManifest(
            corpus=self.settings.source,
            tokenizer_sha256=encoding.tokenizer_sha256,
            vocab_size=id_range(load_tokenizer(encoding.tokenizer)),
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
        return Prepared(manifest, train, written + heldout_file.tokens)

    def hold_out(self) -> list[TextFiles]:
        """The held-out documents, a file of JSON lines for each unit that has some."""
        rule = None if self.corpus.heldout else self.rule
        units = self.corpus.heldout or self.corpus.train
        paths = [self.work / f"heldout-{index:05d}.jsonl" for index in range(len(units))]
        jobs = [(unit, path) for unit, path in zip(units, paths, strict=True) if not path.is_file()]
        self._run("choosing held-out documents", partial(_hold_out, rule), jobs)
        if not any(path.stat().st_size for path in paths):
            raise UserError(
                f"no document is held out; give more text, raise --heldout-fraction (now "
                f"{self.settings.heldout_fraction:g}), or name --heldout-files with text"
            )
        return [TextFiles((str(path),), GroupField(GROUP_FIELD)) for path in paths]

    def encoding(self) -> Encoding:
        """How to encode; writes tokenizer.json, unless an earlier run did."""
        path = self.out / TOKENIZER_NAME
        if not path.is_file():
            with atomic_path(path) as temporary:
                if self.settings.tokenizer_name == "bpe":
                    trained = train_bpe(self._sample(), self.settings.vocab_size)
                    temporary.write_text(trained.to_str(pretty=True), encoding="utf8")
                else:
                    temporary.write_bytes(tokenizer_file(self.settings.tokenizer_name).read_bytes())
        tokenizer = load_tokenizer(path)
        eos_token_id = find_eos(tokenizer, self.settings.eos_token)
        return Encoding(str(path), sha256_file(path), eos_token_id, dtype_name(id_range(tokenizer)))

    def encode_training(
        self, heldout: Sequence[TextFiles], encoding: Encoding, shard: tuple[int, int] | None
    ) -> tuple[list[TokenFile], int]:
        """Token files of training, or of ``shard``, in the order of the units, and how many tokens are new."""
        number, count = shard or (1, 1)
        indices = range(number - 1, len(self.corpus.train), count)  # dealt out as cards are
        records = {i: self.work / f"train-{i:05d}.json" for i in indices}
        missing = [i for i, record in records.items() if not self._is_encoded(record, encoding)]
        documents = _all(heldout) if self.settings.decontaminate and missing else ()
        hashes = {digest for document in documents for digest in paragraph_hashes(document.text)}
        of_heldout = np.array(list(hashes), dtype=np.uint64)  # which goes to other processes quickly
        encode = partial(_encode_unit, self.rule, encoding, of_heldout, self.corpus.limit_tokens)
        self._run("tokenizing", encode, [(self.corpus.train[i], records[i]) for i in missing])
        files = {i: TokenFile(**read_json(record, "remove it")["file"]) for i, record in records.items()}
        return list(files.values()), sum(files[i].tokens for i in missing)

    def _is_encoded(self, record: Path, encoding: Encoding) -> bool:
        """Whether a unit has its record, and its token file the size that this says."""
        if not record.is_file():
            return False
        file = TokenFile(**read_json(record, "remove it")["file"])
        path, size = self.out / file.name, file.tokens * np.dtype(encoding.dtype).itemsize
        return not size or (path.is_file() and path.stat().st_size == size)

    def _encode_heldout(
        self, heldout: Sequence[TextFiles], encoding: Encoding
    ) -> tuple[TokenFile, dict[str, int]]:
        """The held-out token file, without paragraphs that are in training, and how much was removed."""
        records = [read_json(path, "remove it") for path in sorted(self.work.glob("train-*.json"))]
        removal = Decontamination(
            frozenset(digest for record in records for digest in record["contaminated"])
        )
        cleaned = (document._replace(text=removal.clean(document.text)) for document in _all(heldout))
        left = (document for document in cleaned if document.text)
        file = _write_token_file(self.out / "heldout-00000.npy", encode_documents(left, encoding))
        if not file.tokens:
            raise UserError(
                "every held-out paragraph also stands in the training text; hold out other documents "
                "(--heldout-files, --seed) or keep them as they are (--no-decontaminate)"
            )
        return file, removal.counts

    def _choose_groups(self) -> frozenset[int]:
        """The buckets of the groups to hold out, kept in a file for the next start."""
        path = self.work / "groups.json"
        if not path.is_file():
            counts = self._run("counting groups", partial(_count_groups, self.rule), self.corpus.train)
            buckets = choose_buckets(np.sum(counts, axis=0), self.settings.heldout_fraction)
            write_json(path, sorted(buckets))
        return frozenset(read_json(path, "remove it", expect=list))

    def _count_groups(self, train: Sequence[TokenFile], heldout: TokenFile) -> dict[str, Any]:
        """How many groups are held out, and how many of these are also in training; empty without groups."""
        if heldout.groups_sha256 is None:
            return {}
        held = set(read_groups(self.out / heldout.name, heldout)) - {None}
        shared = [held.intersection(read_groups(self.out / file.name, file)) for file in train]
        return {"groups": {"heldout": len(held), "in_both": len(set().union(*shared))}}

    def _mark_near_copies(
        self, train: Sequence[TokenFile], heldout: TokenFile, encoding: Encoding
    ) -> tuple[TokenFile, dict[str, Any]]:
        """Write the near copies of the held-out file; returns its entry with their checksum, and how many there are."""
        length = self.settings.near_copy_tokens
        if not train or not length:
            return heldout, {}
        near_copies = find_near_copies(
            self.out / heldout.name,
            [self.out / file.name for file in train],
            dtype=np.dtype(encoding.dtype),
            eos_token_id=encoding.eos_token_id,
            length=length,
            workers=self.workers,
        )
        sha256 = write_near_copies(self.out / heldout.name, near_copies)
        counts = {"stretches": len(near_copies), "tokens": int(np.diff(near_copies).sum())}
        return replace(heldout, near_copies_sha256=sha256), {"near_copies": counts}

    def _sample(self) -> Iterator[str]:
        """Training documents from the start of every unit, `tokenizer_sample_mb` in all."""
        units = self.corpus.train
        with progress("training the tokenizer", len(units), "units") as advance:
            for unit in units:
                left = self.settings.tokenizer_sample_mb * 1e6 / len(units)
                for document in unit.documents():
                    if not self.rule.is_heldout(document):
                        yield document.text[: int(left) + 1]
                        left -= len(document.text)
                    if left <= 0:
                        break
                advance()

    def _run(self, description: str, function: Any, jobs: Sequence[Any]) -> list[Any]:
        return run_jobs(function, jobs, workers=self.workers, description=description, unit="units")


def dtype_name(vocab_size: int) -> str:
    """The smaller type of token files that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def _all(units: Sequence[Unit]) -> Iterator[Document]:
    return (document for unit in units for document in unit.documents())


# --- jobs, which run in worker processes and leave whole files or none ---


def _count_groups(rule: SplitRule, unit: Unit) -> np.ndarray:
    return rule.count_groups(unit.documents())


def _hold_out(rule: SplitRule | None, job: tuple[Unit, Path]) -> None:
    """Copy the held-out documents of a unit to a file of JSON lines; without a rule all of them are."""
    unit, path = job
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf8") as file:
        for document in unit.documents():
            if rule is None or rule.is_heldout(document):
                file.write(json.dumps({GROUP_FIELD: document.group, "text": document.text}) + "\n")


def _encode_unit(
    rule: SplitRule,
    encoding: Encoding,
    of_heldout: np.ndarray,
    limit_tokens: int | None,
    job: tuple[Unit, Path],
) -> None:
    """Write the training documents of a unit as a token file and, last, a record of it.

    The record has the hashes of the held-out paragraphs, ``of_heldout``, that stand in it, too. ``limit_tokens``: stop
    after the document that reaches so many.
    """
    unit, record = job
    heldout = frozenset(of_heldout.tolist())
    contaminated: set[int] = set()

    def encoded() -> Iterator[tuple[Document, np.ndarray]]:
        training = (document for document in unit.documents() if not rule.is_heldout(document))
        tokens = 0
        for document, ids in encode_documents(training, encoding):
            if heldout:
                contaminated.update(heldout.intersection(paragraph_hashes(document.text)))
            yield document, ids
            tokens += len(ids)
            if limit_tokens is not None and tokens >= limit_tokens:
                return

    file = _write_token_file(record.parent.parent / f"{record.stem}.npy", encoded())
    write_json(record, {"file": asdict(file), "contaminated": sorted(contaminated)})


def _write_token_file(output: Path, documents: Iterable[tuple[Document, np.ndarray]]) -> TokenFile:
    """Write the ids of documents one after the other, and their groups into a file beside it, if any has one.

    Without documents there is no file: a token file must not be empty.
    """
    groups: list[str | None] = []
    tokens = 0
    with atomic_path(output) as temporary:
        with open(temporary, "wb") as file:
            for document, ids in documents:
                file.write(ids.data)
                groups.append(document.group)
                tokens += len(ids)
        if not tokens:
            temporary.unlink()
    sha256 = sha256_file(output) if tokens else ""
    return TokenFile(output.name, tokens, len(groups), sha256, write_groups(output, groups))
