"""Text to token ids, and the jobs of preparing a corpus that run in worker processes.

Each job leaves whole files or none. Shapes: n tokens of one document.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.data.groups import groups_name, write_groups
from olmo_sparsity.data.text import (
    BUCKETS,
    SPACE,
    Decontamination,
    Document,
    SplitRule,
    Unit,
    paragraph_hashes,
    split_pieces,
    write_document,
)
from olmo_sparsity.data.tokenizers import load_tokenizer
from olmo_sparsity.data.tokens import TokenFile
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, read_json, sha256_file, write_json
from olmo_sparsity.util.result_files import CHECKSUM, json_checksum
from olmo_sparsity.util.workers import report

BATCH_CHARACTERS = 1 << 20
"""Text tokenized at once: enough to keep the tokenizer's threads busy, little enough to bound memory."""
REPORT_DOCUMENTS = 1000


@dataclass(frozen=True)
class Encoding:
    """How text becomes token ids."""

    tokenizer: str
    """Path of the tokenizer.json."""
    eos_token_id: int
    dtype: str
    """uint16 or uint32."""


@dataclass(frozen=True)
class HoldOutJob:
    """Copy the held-out documents of a unit to a file of JSON lines, and hash their paragraphs."""

    unit: Unit
    rule: SplitRule | None
    """None: every document is held out."""
    documents: Path
    paragraphs: Path
    """Hashes of the paragraphs, (P,) uint64."""
    record: Path
    """Checksums of both, written last."""
    min_paragraph_characters: int
    """Shorter paragraphs are not hashed."""

    @property
    def is_done(self) -> bool:
        """Whether an earlier run did this job, and its files are whole."""
        try:
            return read_json(self.record, "") == self.checksums()
        except (UserError, OSError):
            return False

    def checksums(self) -> dict[str, str]:
        """SHA-256 of both files by their names."""
        return {path.name: sha256_file(path) for path in (self.documents, self.paragraphs)}


@dataclass(frozen=True)
class EncodeJob:
    """Write the training documents of a unit as a token file, and a record that it is done."""

    unit: Unit
    rule: SplitRule
    encoding: Encoding
    output: Path
    record: Path
    heldout_paragraphs: Path | None
    """File of the hashes of all held-out paragraphs (uint64); None: do not look for them."""
    limit_tokens: int | None = None
    """Stop after the document that reaches this many tokens."""


@dataclass(frozen=True)
class EncodedUnit:
    """What a finished unit holds; where it had no training document, `file` is not there."""

    file: TokenFile
    contaminated: list[int]
    """Hashes of the held-out paragraphs that were seen in it."""

    @classmethod
    def load(cls, record: Path) -> EncodedUnit | None:
        """Read the record of a finished unit; None where it is not finished, or the record is damaged."""
        try:
            raw = read_json(record, "")
        except UserError:
            return None
        if raw.get(CHECKSUM) != json_checksum(raw):
            return None
        return cls(TokenFile(**raw["file"]), raw["contaminated"])

    def save(self, record: Path) -> None:
        """Write the record, atomically, with a checksum of itself."""
        value = asdict(self)
        write_json(record, {CHECKSUM: json_checksum(value), **value})


def count_groups(rule: SplitRule, unit: Unit) -> np.ndarray:
    """How many documents of a unit have a group, by the bucket of their group, (BUCKETS,) int64."""
    counts = np.zeros(BUCKETS, dtype=np.int64)
    for number, document in enumerate(unit.documents(), start=1):
        if document.group is not None:
            counts[rule.bucket(document.group)] += 1
        if number % REPORT_DOCUMENTS == 0:
            report(REPORT_DOCUMENTS)
    return counts


def hold_out(job: HoldOutJob) -> int:
    """Run a `HoldOutJob`; returns how many documents the unit has, held out or not."""
    hashes: set[int] = set()
    number = 0
    with atomic_path(job.documents) as temporary, open(temporary, "w", encoding="utf8") as file:
        for number, document in enumerate(job.unit.documents(), start=1):
            if job.rule is None or job.rule.is_heldout(document):
                write_document(file, document)
                hashes.update(paragraph_hashes(document.text, job.min_paragraph_characters))
            if number % REPORT_DOCUMENTS == 0:
                report(REPORT_DOCUMENTS)
        with atomic_path(job.paragraphs) as array_file, open(array_file, "wb") as handle:
            np.save(handle, np.array(sorted(hashes), dtype=np.uint64))
    report(number % REPORT_DOCUMENTS)
    write_json(job.record, job.checksums())
    return number


def encode_unit(job: EncodeJob) -> EncodedUnit:
    """Run an `EncodeJob`."""
    documents = (each for each in job.unit.documents() if not job.rule.is_heldout(each))
    heldout = frozenset(np.load(job.heldout_paragraphs).tolist()) if job.heldout_paragraphs else frozenset()
    contaminated: set[int] = set()

    def written() -> Iterator[tuple[Document, np.ndarray]]:
        tokens = 0
        for document, ids in encode_documents(documents, job.encoding):
            if heldout:
                contaminated.update(heldout.intersection(paragraph_hashes(document.text)))
            yield document, ids
            tokens += len(ids)
            if job.limit_tokens is not None and tokens >= job.limit_tokens:
                return

    result = EncodedUnit(write_token_file(job.output, written()), sorted(contaminated))
    result.save(job.record)
    return result


def encode_heldout(
    units: Sequence[Unit], encoding: Encoding, output: Path, contaminated: frozenset[int]
) -> tuple[TokenFile, dict[str, int]]:
    """Write the held-out documents as one token file, without the paragraphs of these hashes.

    Returns also how much was removed.
    """
    decontamination = Decontamination(contaminated)
    documents = (document for unit in units for document in unit.documents())
    cleaned = (each._replace(text=decontamination.clean(each.text)) for each in documents)
    left = (each for each in cleaned if each.text)
    return write_token_file(output, encode_documents(left, encoding)), decontamination.counts


def write_token_file(output: Path, documents: Iterable[tuple[Document, np.ndarray]]) -> TokenFile:
    """Write the ids of documents one after the other, and their groups into a file beside it, if any has one.

    Without documents there is no file: a token file must not be empty.
    """
    digest = hashlib.sha256()
    tokens = count = 0
    with (
        atomic_path(output) as temporary,
        open(temporary, "wb") as file,
        write_groups(output.with_name(groups_name(output.name))) as groups,
    ):
        for document, ids in documents:
            file.write(ids.data)
            digest.update(ids.data)
            groups.write(document.group)
            tokens += len(ids)
            count += 1
        if not tokens:
            temporary.unlink()
            output.unlink(missing_ok=True)
    return TokenFile(output.name, tokens, count, digest.hexdigest(), groups.sha256)


# --- text to ids ---


def encode_documents(
    documents: Iterable[Document], encoding: Encoding
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids and the EOS id, (n+1,).

    Where a text spells out the EOS token, that is left out: EOS ends a document and stands nowhere else.
    """
    stat = Path(encoding.tokenizer).stat()
    encode = _encoder(encoding.tokenizer, encoding.dtype, stat.st_size, stat.st_mtime_ns)
    begun: list[np.ndarray] = []
    end = np.array([encoding.eos_token_id], dtype=encoding.dtype)
    for batch in _batches(_pieces(documents)):
        ended = tokens = 0
        for (_, document), piece_ids in zip(batch, encode([piece for piece, _ in batch]), strict=True):
            begun.append(piece_ids[piece_ids != encoding.eos_token_id])
            if document is not None:
                ids = np.concatenate([*begun, end])
                begun = []
                ended, tokens = ended + 1, tokens + len(ids)
                yield document, ids
        report(ended, tokens)


@lru_cache(maxsize=2)
def _encoder(path: str, dtype: str, size: int, modified_ns: int) -> Callable[[list[str]], list[np.ndarray]]:
    """A function from texts to ids. Cached, because it remembers words, until the file at ``path`` changes."""
    tokenizer, kind = load_tokenizer(path), np.dtype(dtype)
    if cuts_at_words(tokenizer):
        return WordEncoder(tokenizer, kind).encode

    def encode(texts: list[str]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=kind) for one in encoded]

    return encode


def _pieces(documents: Iterable[Document]) -> Iterator[tuple[str, Document | None]]:
    """Pieces of each text in order; the last one comes with the whole document."""
    for document in documents:
        pieces = split_pieces(document.text)
        piece = next(pieces)
        for following in pieces:
            yield piece, None
            piece = following
        yield piece, document


def _batches(pieces: Iterable[tuple[str, Document | None]]) -> Iterator[list[tuple[str, Document | None]]]:
    batch: list[tuple[str, Document | None]] = []
    characters = 0
    for piece, document in pieces:
        batch.append((piece, document))
        characters += len(piece)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- words that were met before ---

_WORD = re.compile(rf"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
_SPACE_INSIDE = re.compile(rf"[^{SPACE}][{SPACE}]")
MAX_KNOWN = 500_000
MAX_KNOWN_CHARACTERS = 20_000_000
"""Words that are remembered: some 100 MB. A run of characters without white space is a word too, however long."""


class WordEncoder:
    """The ids of `Tokenizer.encode`, several times as fast, for a tokenizer that `cuts_at_words`; keep it.

    A byte-level BPE cuts text with GPT-2's expression before it merges anything, and where white space follows
    something else it always cuts, whatever stands around it. So the ids of a text are those of its words one after
    the other, a word being white space and what follows it, and most words were met before.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype):
        self.tokenizer, self.dtype = tokenizer, dtype
        self.known: dict[str, bytes] = {}
        self.known_characters = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, (n,)."""
        words = [_WORD.findall(text) for text in texts]
        new = list(set(chain.from_iterable(words)) - self.known.keys())
        encoded = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
        for word, one in zip(new, encoded, strict=True):
            self.known[word] = np.array(one.ids, self.dtype).tobytes()
            self.known_characters += len(word)
        ids = [np.frombuffer(b"".join(map(self.known.__getitem__, each)), self.dtype) for each in words]
        if len(self.known) > MAX_KNOWN or self.known_characters > MAX_KNOWN_CHARACTERS:
            self.known.clear()  # the frequent ones are back after one batch
            self.known_characters = 0
        return ids


def cuts_at_words(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its words: a byte-level BPE with nothing added that changes this."""
    parts = json.loads(tokenizer.to_str())
    cutter, normalizer = parts["pre_tokenizer"] or {}, parts["normalizer"]
    return (
        parts["model"]["type"] == "BPE"
        and not parts["model"]["dropout"]
        and (normalizer is None or normalizer["type"] == "NFC")
        and cutter.get("type") == "ByteLevel"
        and cutter["use_regex"]
        and not cutter["add_prefix_space"]
        and not any(
            token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or _SPACE_INSIDE.search(token["content"])
            for token in parts["added_tokens"]
        )
    )
