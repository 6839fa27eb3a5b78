"""Token files compared with what is said of them: checksums, and that every id is in the vocabulary.

A file is read once for both. What was found is remembered, in a folder of the one who asks, for as long as the file's
size and times of change stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from olmo_sparsity.data.tokens import DTYPES, CorpusManifest, TokenFiles
from olmo_sparsity.data.workers import available_cores
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, write_json
from olmo_sparsity.util.progress import progress

VERIFIED_NAME = "verified.json"
CHUNK_MB = 4
MAX_THREADS = 8
QUIET_MB = 2000
"""Less is read in seconds: no progress is shown."""


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
    """None: unknown."""


def expected_files(corpus: str | Path, *splits: str) -> list[ExpectedFile]:
    """The files of some splits of a prepared corpus; a split that it does not have has none."""
    manifest = CorpusManifest.load(corpus)
    remedy = "its manifest was changed, or made for other files: prepare the corpus again"
    return [
        ExpectedFile(Path(corpus) / file.name, manifest.dtype, manifest.vocab_size, remedy, file.sha256)
        for split in splits
        for file in manifest.splits.get(split, [])
    ]


@dataclass(frozen=True)
class _Found:
    sha256: str | None
    """None: it was not asked for."""
    largest_id: int


class Verified:
    """Verifies token files; remembers in `verified.json` of a folder which were right.

    Args:
        folder: need not exist; nothing is written to it before `save`.
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
        todo = [file for file, known in zip(files, found, strict=True) if known is None]
        new = iter(_read_all(todo) if todo else ())
        for file, state, known in zip(files, states, found, strict=True):
            facts = known or next(new)
            _refuse(file, facts)
            if known is None:
                self._known[str(file.path.resolve())] = [*state, facts.sha256, facts.largest_id]
                self._changed = True

    def save(self) -> None:
        """Write down what was found since, for the next time."""
        if self._changed:
            write_json(self.path, self._known)
            self._changed = False

    def _recall(self, file: ExpectedFile, state: list[int | str]) -> _Found | None:
        match self._known.get(str(file.path.resolve())):
            case [*known, str() | None as sha256, int() as largest_id] if known == state:
                return None if file.sha256 and sha256 is None else _Found(sha256, largest_id)
        return None


def _state(file: ExpectedFile) -> list[int | str]:
    try:
        stat = file.path.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, file.dtype]


def _unreadable(file: ExpectedFile, error: OSError) -> UserError:
    return UserError(f"token file {file.path} cannot be read ({error.strerror}); copy it again")


def _read_all(files: Sequence[ExpectedFile]) -> list[_Found]:
    """What is in the files, several at a time."""
    total = sum(-(-file.path.stat().st_size // (CHUNK_MB << 20)) * CHUNK_MB for file in files)
    with (
        progress("verifying token files", total, "MB", enabled=total > QUIET_MB) as advance,
        ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool,
    ):
        return list(pool.map(lambda file: _read(file, lambda: advance(CHUNK_MB)), files))


def _read(file: ExpectedFile, advance: Callable[[], None]) -> _Found:
    digest, largest, dtype = hashlib.sha256(), 0, np.dtype(DTYPES[file.dtype])
    try:
        with open(file.path, "rb") as handle:
            while chunk := handle.read(CHUNK_MB << 20):
                if file.sha256:
                    digest.update(chunk)
                ids = np.frombuffer(chunk, dtype, count=len(chunk) // dtype.itemsize)
                largest = max(largest, int(ids.max(initial=0)))
                advance()
    except OSError as error:
        raise _unreadable(file, error) from error
    return _Found(digest.hexdigest() if file.sha256 else None, largest)


def _refuse(file: ExpectedFile, found: _Found) -> None:
    """Raise `UserError` where a file is not what it should be."""
    if file.sha256 and file.sha256 != found.sha256:
        raise UserError(
            f"checksum mismatch in {file.path}: its manifest says sha256 {file.sha256}, the file has {found.sha256}; "
            "copy it again from where it was prepared, or prepare the corpus again"
        )
    if found.largest_id >= file.vocab_size:
        raise UserError(
            f"{file.path} holds id {found.largest_id}, beyond the vocabulary of {file.vocab_size}; {file.remedy}"
        )
