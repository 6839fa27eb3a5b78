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
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import chain, filterfalse
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.groups import SplitRule, choose_buckets, read_groups, write_groups
from olmo_sparsity.data.jobs import run_jobs
from olmo_sparsity.data.near_copies import find_near_copies, write_near_copies
from olmo_sparsity.data.sources import PrepareSettings, Unit, read_rows
from olmo_sparsity.data.text import (
    Document,
    Encoder,
    decontaminated,
    paragraph_hashes,
    train_bpe,
    write_rows,
)
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
OUTPUT_NAME = re.compile(
    r"manifest\.json|tokenizer\.json|\.partial|(train|heldout)-\d{5,}\.(npy|groups\.jsonl\.gz|near-copies)"
)
Shard = tuple[int, int]
OTHER_FOLDER = "choose another --out, or remove it"


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
    settings: PrepareSettings, out: str | Path, *, workers: int | None = None, shard: Shard | None = None
) -> Prepared:
    """Make the corpus that ``settings`` describe in folder ``out``, or finish it, or find it finished.

    ``workers`` is the number of processes (default: the cores there are); results do not depend on it. With ``shard``
    (i, n) only the i-th of n shares of the training files is made, at the same time as others if need be. Raises
    `UserError` for bad input, and for a folder that holds another corpus.
    """
    settings.check(in_shards=shard is not None)
    # as a manifest gives it back
    request = json.loads(json.dumps({"pipeline": PIPELINE_VERSION, **settings.request()}))
    out = Path(out)
    if finished := _finished(out, request):
        return finished
    with folder_lock(out, part=shard and f"{shard[0]}-of-{shard[1]}"):
        if finished := _finished(out, request):
            return finished  # another process made it in the meantime
        _claim(out, request)
        try:
            return _Work(settings, out, request, workers or available_cores()).make(shard)
        finally:
            if shard is None:  # else other shards may be at work
                _tidy(out)


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
    path = out / WORK_NAME / "request.json"
    if path.is_file():
        _refuse_other(out, read_json(path, OTHER_FOLDER), request)
    elif foreign := [file.name for file in _outputs(out) if file.is_file()]:
        raise UserError(f"{out} has {foreign[0]} but no record of how it was made; {OTHER_FOLDER}")
    else:
        write_json(path, request)


def _refuse_other(out: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    names = dict.fromkeys([*request, "group_field", "near_copy_tokens"])  # left out where they are off
    if differing := [name for name in names if earlier.get(name) != request.get(name)]:
        what = f"a corpus, or the beginning of one, made with other settings ({', '.join(differing)})"
        raise UserError(f"{out} holds {what}; {OTHER_FOLDER}")


def _tidy(out: Path) -> None:
    """Remove what no later run needs: of a finished corpus its state, of one without training files all of it."""
    finished, begun = (out / MANIFEST_NAME).is_file(), any(out.glob("train-*.npy"))
    left = [out / WORK_NAME] if finished else [] if begun else _outputs(out)
    for path in [*out.glob(".*.tmp-*"), *(out / WORK_NAME).glob(".*.tmp-*"), *left]:
        remove(path)  # temporaries are of workers that were stopped in the middle


def _outputs(out: Path) -> list[Path]:
    return [path for path in out.iterdir() if OUTPUT_NAME.fullmatch(path.name)]


# --- the stages ---


class _Work:
    """The stages of making a corpus; what an earlier run finished is not made again.

    The jobs of a stage run in worker processes, on a copy of this, and leave whole files or none.
    """

    def __init__(self, settings: PrepareSettings, out: Path, request: dict[str, Any], workers: int):
        self.settings, self.out, self.work = settings, out, out / WORK_NAME
        self.request, self.workers = request, workers
        self.chooses_heldout = settings.chooses_heldout
        self.rule = SplitRule(settings.seed, settings.heldout_fraction if self.chooses_heldout else 0.0)
        self.encoder: Encoder
        self.of_heldout: frozenset[int] = frozenset()
        self.limit_tokens = settings.limit_tokens

    def __getstate__(self) -> dict[str, Any]:
        """What jobs need, and not the settings: they may name thousands of files."""
        return {**vars(self), "settings": None, "request": None}

    def make(self, shard: Shard | None) -> Prepared:
        """Run all stages and save the manifest; of a shard, those up to its training files."""
        units, given = (dict(enumerate(each)) for each in self.settings.units(self.work, self.workers))
        if self.chooses_heldout and self.request.get("group_field"):
            self._choose_groups(units)
        heldout = self._of_each(given or units, "heldout-{:05d}.jsonl", "holding out", self._hold_out)
        if not any(path.stat().st_size for path in heldout):
            remedy = "give more text, raise --heldout-fraction"
            remedy += f" (now {self.settings.heldout_fraction:g}), or name --heldout-files with text"
            raise UserError(f"no document is held out; {remedy}")
        self._make_tokenizer(units)
        if self.settings.decontaminate:
            hashes = (paragraph_hashes(document.text) for document in _read_back(heldout))
            self.of_heldout = frozenset(chain.from_iterable(hashes))
        if self.settings.limit_tokens is not None:
            self.limit_tokens = -(-self.settings.limit_tokens // len(units))
        number, count = shard or (1, 1)
        share = {i: units[i] for i in range(number - 1, len(units), count)}  # dealt out as cards are
        before = {path for path in self.work.glob("train-*.json") if self._is_whole(path)}
        records = self._of_each(share, "train-{:05d}.json", "tokenizing", self._encode_unit)
        files = list(map(_recorded, records))
        written = sum(file.tokens for file, path in zip(files, records, strict=True) if path not in before)
        if shard is not None:
            return Prepared(None, files, written)
        train = [file for file in files if file.tokens]
        if units and not train:
            raise UserError("no training documents are left; lower --heldout-fraction or give more text")
        manifest = self._finish(train, heldout)
        return Prepared(manifest, train, written + manifest.splits["heldout"][0].tokens)

    def _of_each(
        self, units: dict[int, Unit], name: str, description: str, write: Callable[[tuple[Unit, Path]], None]
    ) -> list[Path]:
        """The files that ``write`` makes of units, named by their numbers; those that are there already stay."""
        paths = {i: self.work / name.format(i) for i in units}
        jobs = [(units[i], path) for i, path in paths.items() if not path.is_file()]
        run_jobs(write, jobs, self.workers, description)
        return list(paths.values())

    # --- before the training text is encoded ---

    def _choose_groups(self, units: dict[int, Unit]) -> None:
        paths = self._of_each(units, "groups-{:05d}.json", "counting groups", self._count_groups)
        documents: Counter[int] = Counter()
        for path in paths:
            documents.update({int(bucket): count for bucket, count in read_json(path, "remove it").items()})
        self.rule = replace(self.rule, heldout_buckets=choose_buckets(documents, self.rule.heldout_fraction))

    def _count_groups(self, job: tuple[Unit, Path]) -> None:
        unit, path = job
        write_json(path, Counter(self.rule.bucket(group) for _, group in unit() if group is not None))

    def _hold_out(self, job: tuple[Unit, Path]) -> None:
        """Copy the held-out documents of a unit to a file of JSON lines."""
        unit, path = job
        documents = filter(self.rule.is_heldout, unit()) if self.chooses_heldout else unit()
        with atomic_path(path) as temporary:
            write_rows(temporary, documents)

    def _make_tokenizer(self, units: dict[int, Unit]) -> None:
        path = self.out / TOKENIZER_NAME
        if not path.is_file():
            with atomic_path(path) as temporary:
                if self.settings.tokenizer_name == "bpe":
                    trained = train_bpe(self._sample(units), self.settings.vocab_size)
                    temporary.write_text(trained.to_str(pretty=True), encoding="utf8")
                else:
                    temporary.write_bytes(tokenizer_file(self.settings.tokenizer_name).read_bytes())
        self.encoder = Encoder(path, self.settings.eos_token)

    def _sample(self, units: dict[int, Unit]) -> Iterator[str]:
        """Training documents from the start of every unit, `tokenizer_sample_mb` in all."""
        for unit in units.values():
            left = self.settings.tokenizer_sample_mb * 1e6 / len(units)
            for document in filterfalse(self.rule.is_heldout, unit()):
                yield document.text[: int(left) + 1]
                left -= len(document.text)
                if left <= 0:
                    break

    # --- token files ---

    def _is_whole(self, record: Path) -> bool:
        """Whether the token file of a unit has the size that its record says; the record goes where it has not."""
        file = _recorded(record)
        path, size = self.out / file.name, file.tokens * np.dtype(self.encoder.dtype).itemsize
        is_whole = (path.stat().st_size if path.is_file() else 0) == size
        if not is_whole:
            record.unlink()
        return is_whole

    def _encode_unit(self, job: tuple[Unit, Path]) -> None:
        """Write the training documents of a unit as a token file and, last, a record of it.

        The record has the hashes of the held-out paragraphs that stand in it, too.
        """
        unit, record = job
        contaminated: set[int] = set()

        def encoded() -> Iterator[tuple[Document, np.ndarray]]:
            tokens = 0
            for document, ids in self.encoder.encode(filterfalse(self.rule.is_heldout, unit())):
                if self.of_heldout:
                    contaminated.update(self.of_heldout.intersection(paragraph_hashes(document.text)))
                yield document, ids
                tokens += len(ids)
                if self.limit_tokens is not None and tokens >= self.limit_tokens:
                    return

        file = _write_token_file(self.out / f"{record.stem}.npy", encoded())
        write_json(record, {"file": asdict(file), "contaminated": sorted(contaminated)})

    def _finish(self, train: list[TokenFile], heldout: list[Path]) -> CorpusManifest:
        """Write the held-out split, without the paragraphs that are in training, and the manifest."""
        records = [read_json(path, "remove it") for path in self.work.glob("train-*.json")]
        contaminated = {digest for record in records for digest in record["contaminated"]}
        removed: dict[str, int] = {}
        documents = decontaminated(_read_back(heldout), contaminated, removed)
        file = _write_token_file(self.out / "heldout-00000.npy", self.encoder.encode(documents))
        if not file.tokens:
            remedy = "hold out others (--heldout-files, --seed) or keep them (--no-decontaminate)"
            raise UserError(f"every held-out paragraph also stands in the training text; {remedy}")
        found: dict[str, Any] = {}
        if file.groups_sha256 is not None:
            held = set(read_groups(self.out / file.name, file)) - {None}
            shared = (held.intersection(read_groups(self.out / each.name, each)) for each in train)
            found["groups"] = {"heldout": len(held), "in_both": len(set().union(*shared))}
        if train and (length := self.settings.near_copy_tokens):
            path, *paths = (self.out / each.name for each in (file, *train))
            ids = self.encoder.dtype, self.encoder.eos_token_id
            near_copies = find_near_copies(path, paths, *ids, length, self.workers)
            file = replace(file, near_copies_sha256=write_near_copies(path, near_copies))
            covered = int(np.diff(near_copies).sum())
            found["near_copies"] = {"stretches": len(near_copies), "tokens": covered}
        found["decontamination"] = removed
        found["versions"] = {"python": platform.python_version(), "tokenizers": version("tokenizers")}
        manifest = CorpusManifest(
            corpus=self.settings.source,
            tokenizer_sha256=self.encoder.sha256,
            vocab_size=self.encoder.vocab_size,
            eos_token_id=self.encoder.eos_token_id,
            dtype=self.encoder.dtype,
            splits=({"train": train} if train else {}) | {"heldout": [file]},
            settings=self.request | found,
        )
        manifest.save(self.out)
        return manifest


def _read_back(paths: list[Path]) -> Iterator[Document]:
    return (Document(**row) for path in paths for _, row in read_rows(str(path)))


def _recorded(record: Path) -> TokenFile:
    return TokenFile(**read_json(record, "remove it")["file"])


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
