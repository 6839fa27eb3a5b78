"""Token files as OLMo has them: nothing but token ids, every document ended by the EOS id.

A prepared corpus is a folder with `manifest.json` (`CorpusManifest`), `tokenizer.json` and the token files of its
splits (`TokenFiles`), which are compared with what is said of them before they are used (`Verified`).

Shapes: n tokens of one document or file, T tokens of one training window.
"""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from io import FileIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from olmo_sparsity.data.groups import groups_name, read_groups
from olmo_sparsity.data.near_copies import near_copies_name, read_near_copies
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores
from olmo_sparsity.util.result_files import misfit

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
MANIFEST_VERSION = 1
VERIFIED_NAME = "verified.json"
DTYPES = ("uint16", "uint32")
CHUNK_MB = 4
MAX_THREADS = 8
_PIECE = 1 << 24
_FEW = 32
"""Of fewer ids that are not 0 nobody can tell how many bytes they have."""
QUIET_MB = 2000
"""Less is read in seconds: no progress is shown."""
_FILE_SHAPE = {"name": str, "tokens": int, "documents": int, "sha256": str}
_MANIFEST_SHAPE = {
    **dict.fromkeys(("corpus", "tokenizer_sha256", "dtype"), str),
    **dict.fromkeys(("vocab_size", "eos_token_id"), int),
    "splits": {...: [_FILE_SHAPE]},
    "settings": dict,
}


def dtype_name(vocab_size: int) -> str:
    """The smaller of `DTYPES` that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class TokenFile:
    """One token file of a corpus, as its manifest describes it."""

    name: str
    """File name inside the corpus folder."""
    tokens: int
    """Number of token ids, EOS included."""
    documents: int
    """Number of documents, each ended by one EOS id."""
    sha256: str
    """Checksum of the file's bytes."""
    groups_sha256: str | None = None
    """Checksum of the file of the groups of its documents, see `groups_name`; None where there is none."""
    near_copies_sha256: str | None = None
    """Checksum of the file of its near copies, see `near_copies_name`; None where they were not looked for."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for what cannot be one."""
        if not self.name.isprintable() or self.name in ("", ".", "..") or {"/", "\\"} & set(self.name):
            raise ValueError(f"{self.name!r} is no bare file name")
        if self.tokens < 0 or self.documents < 0:
            raise ValueError(f"{self.name} has a negative number of tokens or documents")
        checksums = (self.groups_sha256, self.near_copies_sha256)
        if not all(isinstance(each, str | None) for each in checksums):
            raise ValueError("a checksum is no text")

    def as_dict(self) -> dict[str, Any]:
        """As in the manifest: checksums that are None are left out, as before there were groups."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class CorpusManifest:
    """What a prepared corpus holds and how it was made: `manifest.json` beside the token files."""

    corpus: str
    """Kind of source: docs, text or c4."""
    tokenizer_sha256: str
    """Checksum of `tokenizer.json`; training and analysis refuse a corpus made with another tokenizer."""
    vocab_size: int
    eos_token_id: int
    dtype: str
    """uint16 or uint32."""
    splits: dict[str, list[TokenFile]]
    """Token files of each split; `prepare_data.py` makes `train` and `heldout`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """How it was made: source files, fractions, seed, library versions."""
    version: int = MANIFEST_VERSION

    def save(self, folder: str | Path) -> None:
        """Write `manifest.json`, atomically."""
        splits = {name: [file.as_dict() for file in files] for name, files in self.splits.items()}
        write_json(Path(folder) / MANIFEST_NAME, asdict(self) | {"splits": splits})

    @classmethod
    def load(cls, folder: str | Path) -> CorpusManifest:
        """Read `manifest.json`. Raises `UserError` where `folder` is no finished corpus."""
        path, remedy = Path(folder) / MANIFEST_NAME, "prepare the corpus again, with --overwrite"
        if not path.is_file():
            raise UserError(
                f"{folder} is no prepared corpus: {path} is missing; make it with scripts/prepare_data.py"
            )
        raw = read_json(path, remedy)
        if raw.get("version") != MANIFEST_VERSION:
            raise UserError(
                f"{path} has format version {raw.get('version')}, this code reads {MANIFEST_VERSION}; {remedy}"
            )
        try:
            return cls._parse(raw)
        except (TypeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({first_line(error)}); {remedy}") from error

    @classmethod
    def _parse(cls, raw: dict[str, Any]) -> CorpusManifest:
        manifest = cls(**raw)
        if odd := misfit(vars(manifest), _MANIFEST_SHAPE):
            raise ValueError(odd)
        if manifest.dtype not in DTYPES:
            raise ValueError(f"dtype {manifest.dtype!r} is none of {', '.join(DTYPES)}")
        if not 0 <= manifest.eos_token_id < manifest.vocab_size:
            raise ValueError(
                f"eos_token_id {manifest.eos_token_id} is not below vocab_size {manifest.vocab_size}"
            )
        splits = {name: [TokenFile(**file) for file in files] for name, files in raw["splits"].items()}
        return replace(manifest, splits=splits)


class TokenFiles:
    """Token ids of one split, whose files stay open: one that is removed can be read on.

    Windows and documents never cross a file. Raises `UserError` for a missing, truncated or empty file.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        dtype: str,
        eos_token_id: int,
        described: Sequence[TokenFile] = (),
    ):
        """``described``: each file as a manifest has it; none where there is no manifest."""
        if not paths:
            raise UserError("no token files are given; set corpus.path or data.paths")
        if dtype not in DTYPES:
            raise UserError(
                f"token files of type {dtype!r} are not supported; choose one of {', '.join(DTYPES)}"
            )
        self.dtype = np.dtype(dtype)
        self.eos_token_id = eos_token_id
        self.paths, self.described = [Path(path) for path in paths], described
        _allow_open_files(len(paths))
        self._files = [self._open(path, file) for path, file in zip_longest(self.paths, described)]
        self.lengths = [os.fstat(file.fileno()).st_size // self.dtype.itemsize for file in self._files]

    def __reduce__(self) -> tuple[Any, ...]:
        """For loader workers that are not forked: they open the files anew."""
        return TokenFiles, (self.paths, self.dtype.name, self.eos_token_id, self.described)

    @classmethod
    def of_split(cls, folder: str | Path, split: str) -> TokenFiles:
        """The token files of one split of a prepared corpus. Raises `UserError` for an unknown split."""
        manifest = CorpusManifest.load(folder)
        if split not in manifest.splits:
            to_evaluate = ", and was prepared to evaluate on only; prepare a corpus with training --files"
            raise UserError(
                f"{folder} has no split {split!r}; it has {', '.join(sorted(manifest.splits))}"
                + to_evaluate * (manifest.splits.keys() == {"heldout"})
            )
        files = manifest.splits[split]
        paths = [Path(folder) / file.name for file in files]
        return cls(paths, manifest.dtype, manifest.eos_token_id, files)

    def _open(self, path: Path, described: TokenFile | None) -> FileIO:
        if not path.is_file():
            raise UserError(
                f"token file {path} is missing; prepare the corpus again with scripts/prepare_data.py"
            )
        size = path.stat().st_size
        if size == 0:
            raise UserError(f"token file {path} is empty; prepare the corpus again")
        if size % self.dtype.itemsize:
            raise UserError(
                f"token file {path} is truncated or not of type {self.dtype.name}: {size} bytes is no multiple of "
                f"{self.dtype.itemsize}; prepare it again or set data.memmap_dtype"
            )
        tokens = size // self.dtype.itemsize
        if described is not None and tokens != described.tokens:
            raise UserError(
                f"token file {path} is truncated or was changed: it has {tokens:,} tokens, its manifest says "
                f"{described.tokens:,}; prepare the corpus again"
            )
        file = FileIO(path)
        if file.read(6) == b"\x93NUMPY":
            raise UserError(
                f"{path} was written by numpy.save; token files hold nothing but the ids: "
                "write them with numpy.load(old).tofile(new)"
            )
        return file

    @property
    def num_tokens(self) -> int:
        """Number of token ids in all files."""
        return sum(self.lengths)

    def read(self, file: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Token ids of file number ``file`` from ``start`` to before ``stop``, or to its end, (n,).

        Not through a memory map, which ends the process, or gives zeros, where a file was cut meanwhile: that raises
        `UserError`.
        """
        length, path = self.lengths[file], self.paths[file]
        ids = np.empty(len(range(length)[start:stop]), self.dtype)
        rest, offset = ids.data.cast("B"), start * self.dtype.itemsize
        while rest:
            with _readable(path):
                done = os.preadv(self._files[file].fileno(), [rest], offset)
            if not done:
                raise UserError(
                    f"token file {path} was cut while it was in use: it had {length:,} tokens; put it back whole and "
                    "run the same command again (training: with --resume)"
                )
            rest, offset = rest[done:], offset + done
        return ids

    @cached_property
    def document_bounds(self) -> np.ndarray:
        """Documents of all files, (D, 3): file, first token, one past the last (the EOS id is not part of it)."""
        rows = []
        for file, length in enumerate(self.lengths):
            ends = self._ends_in(file)
            if len(ends) == 0 or ends[-1] != length - 1:
                ends = np.append(ends, length)  # a last document that was cut off, as in OLMo's own files
            starts = np.append(0, ends[:-1] + 1)
            rows.append(np.stack([np.full_like(ends, file), starts, ends], axis=1))
        return np.concatenate(rows)

    @cached_property
    def groups(self) -> np.ndarray | None:
        """Name of the group of each document, (D,) strings; None where the corpus has no groups.

        A document that stands by itself is a group by itself. Raises `UserError` for a damaged file.
        """
        if not any(file.groups_sha256 for file in self.described):
            return None
        names: list[str | None] = []
        for path, file in zip(self.paths, self.described, strict=True):
            if file.groups_sha256:
                beside = path.with_name(groups_name(file.name))
                names += read_groups(beside, file.groups_sha256, file.documents)
            else:
                names += [None] * file.documents
        named = [name or f"document {number} by itself" for number, name in enumerate(names)]
        return np.array(named, dtype=object)

    @cached_property
    def near_copies(self) -> np.ndarray | None:
        """Stretches that also stand in the training text: file, first token, one past the last, (R, 3), ascending.

        None where they were not looked for. Raises `UserError` for a damaged file.
        """
        if not self.described or any(file.near_copies_sha256 is None for file in self.described):
            return None
        parts = []
        for number, (path, file) in enumerate(zip(self.paths, self.described, strict=True)):
            beside = path.with_name(near_copies_name(file.name))
            found = read_near_copies(beside, file.near_copies_sha256)
            parts.append(np.insert(found, 0, number, axis=1))
        return np.concatenate(parts)

    def in_near_copy(self, document: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy, (n,) bool; None where they were not looked for."""
        if self.near_copies is None:
            return None
        file, start = self.document_bounds[document, 0], self.document_bounds[document, 1]
        inside = np.zeros(len(document), dtype=bool)
        for number in np.unique(file):
            _, first, end = self.near_copies[self.near_copies[:, 0] == number].T
            rows = np.flatnonzero(file == number)
            token = start[rows] + position[rows]
            begun, ended = (np.searchsorted(bounds, token, side="right") for bounds in (first, end))
            inside[rows] = begun > ended
        return inside

    def document(self, number: int) -> np.ndarray:
        """Token ids of document ``number``, (n,), without its EOS."""
        file, start, end = self.document_bounds[number]
        return self.read(file, start, end)

    def _ends_in(self, file: int) -> np.ndarray:
        """Indices of the EOS ids of a file; reads it piece by piece, so memory stays constant."""
        pieces = range(0, self.lengths[file], _PIECE)
        found = [np.flatnonzero(self.read(file, i, i + _PIECE) == self.eos_token_id) + i for i in pieces]
        return np.concatenate(found).astype(np.int64)


def _allow_open_files(count: int) -> None:
    """C4 has 1,024 files, as many as a process may usually have open; it may raise that by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# --- verified token files ---


@dataclass(frozen=True)
class ExpectedFile:
    """A token file, and what must be true of it."""

    path: Path
    dtype: str
    vocab_size: int
    """All ids are below it."""
    remedy: str
    """For an id that is not."""
    sha256: str | None = None
    """None: unknown, and so is whether the ids are of this type."""


class Found(NamedTuple):
    """What a file holds."""

    sha256: str
    largest_id: int
    id_bytes: int
    """How many bytes an id has, as far as the ids tell."""


def expected_files(corpus: str | Path, *splits: str) -> list[ExpectedFile]:
    """The files of some splits of a prepared corpus; a split that it does not have has none."""
    manifest = CorpusManifest.load(corpus)
    remedy = "its manifest was changed, or made for other files: prepare the corpus again"
    return [
        ExpectedFile(Path(corpus) / file.name, manifest.dtype, manifest.vocab_size, remedy, file.sha256)
        for split in splits
        for file in manifest.splits.get(split, [])
    ]


class Verified:
    """Compares token files with what is said of them: checksums, type of the ids, and that all are in the vocabulary.

    A file is read once for all. What was found is remembered in `verified.json` of ``folder``, which need not exist
    before `save`, for as long as the file's size and times of change stay the same.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / VERIFIED_NAME
        self._known: dict[str, Any] = {}
        with suppress(UserError):  # without it, files are read again
            self._known = read_json(self.path, "")
        self._changed = False

    def open_split(self, corpus: str | Path, split: str) -> TokenFiles:
        """The verified token files of one split of a prepared corpus. Raises `UserError` as both parts do."""
        tokens = TokenFiles.of_split(corpus, split)
        self.check(expected_files(corpus, split))
        return tokens

    def check(self, files: Sequence[ExpectedFile]) -> None:
        """Read the files that are not known yet. Raises `UserError` for the first of ``files`` that is not right."""
        states = [_state(file) for file in files]
        found = [self._recall(file, state) for file, state in zip(files, states, strict=True)]
        new = iter(_read_all([file for file, known in zip(files, found, strict=True) if known is None]))
        for file, state, known in zip(files, states, found, strict=True):
            holds = known or next(new)
            _refuse(file, holds)
            if known is None:
                self._known[str(file.path.resolve())] = [*state, *holds]
                self._changed = True

    def save(self) -> None:
        """Write what was found to `verified.json`."""
        if self._changed:
            write_json(self.path, self._known)
            self._changed = False

    def _recall(self, file: ExpectedFile, state: list[int | str]) -> Found | None:
        match self._known.get(str(file.path.resolve())):
            case [*known, str() as sha256, int() as largest_id, int() as id_bytes] if known == state:
                return Found(sha256, largest_id, id_bytes)
        return None


def _state(file: ExpectedFile) -> list[int | str]:
    with _readable(file.path):
        stat = file.path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, file.dtype]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"token file {path} cannot be read ({error.strerror}); copy it again") from error


def _read_all(files: Sequence[ExpectedFile]) -> list[Found]:
    """What the files hold, several at a time."""
    total = sum(-(-file.path.stat().st_size // (CHUNK_MB << 20)) * CHUNK_MB for file in files)
    with (
        progress("verifying token files", total, "MB", enabled=total > QUIET_MB) as advance,
        ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool,
    ):
        return list(pool.map(lambda file: _read(file, lambda: advance(CHUNK_MB)), files))


def _read(file: ExpectedFile, advance: Callable[[], None]) -> Found:
    digest, dtype = hashlib.sha256(), np.dtype(file.dtype)
    largest = nonzero = bits = 0
    with _readable(file.path), open(file.path, "rb") as handle:
        while chunk := handle.read(CHUNK_MB << 20):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype, count=len(chunk) // dtype.itemsize)
            largest = max(largest, int(ids.max(initial=0)))
            nonzero += np.count_nonzero(ids)
            bits |= int(np.bitwise_or.reduce(np.frombuffer(chunk, np.uint64, count=len(chunk) // 8)))
            advance()
    id_bytes = _bytes_of_ids(dtype.itemsize, largest, nonzero, bits)
    return Found(digest.hexdigest(), largest, id_bytes)


def _bytes_of_ids(read: int, largest: int, nonzero: int, bits: int) -> int:
    """How many bytes an id has, given those that it was read as; ``bits`` has those set in any eight bytes of the file.

    What ids of more bytes have above is 0, or in large vocabularies a number below 16 (ids below 2**20) while all
    numbers occur below; among ids of fewer bytes there is always one to gainsay it, unless they are few.
    """
    if nonzero < _FEW:
        return read
    if bits < 1 << 32:
        return 8
    low, high = ((bits | bits >> 32) >> shift & 0xFFFF for shift in (0, 16))
    if read == 2 and (high == 0 or (high < 16 and low >= 1 << 15)):
        return 4
    if read == 4 and 1 << 24 <= largest < 0xFFFF << 16:  # above are negative numbers, such as -1 for no token
        return 2
    return read


def _refuse(file: ExpectedFile, found: Found) -> None:
    """Raise `UserError` where a file is not what it should be."""
    sha256, largest_id, id_bytes = found
    read_as = np.dtype(file.dtype).itemsize
    if file.sha256 is None and id_bytes != read_as:
        remedy = f"set data.memmap_dtype: uint{8 * id_bytes}"
        if id_bytes == 8:
            written = "numpy.fromfile(old, 'int64').astype('uint32').tofile(new)"
            remedy = f"set data.memmap_dtype: uint32 and write them anew with {written}"
        raise UserError(f"{file.path} holds ids of {id_bytes} bytes, read as {read_as}; {remedy}")
    if file.sha256 not in (None, sha256):
        raise UserError(
            f"checksum mismatch in {file.path}: its manifest says sha256 {file.sha256}, the file has {sha256}; "
            "copy it again from where it was prepared, or prepare the corpus again"
        )
    if largest_id >= file.vocab_size:
        raise UserError(
            f"{file.path} holds id {largest_id}, beyond the vocabulary of {file.vocab_size}; {file.remedy}"
        )
