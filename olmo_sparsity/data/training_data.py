"""What the loop trains on, prepared or streamed, and the check of prepared files before it starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from olmo_sparsity.batch import Batch
from olmo_sparsity.config import Config
from olmo_sparsity.data.task_data import TaskData
from olmo_sparsity.data.tokens import CorpusManifest, check_checksum
from olmo_sparsity.data.windows import TrainingData
from olmo_sparsity.data.workers import available_cores
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import write_json
from olmo_sparsity.progress import progress

VERIFIED_NAME = "verified.json"
"""In the run folder: files whose checksums were right, with size and time of change then."""
CHUNK_MB = 4
MAX_THREADS = 8
QUIET_MB = 2000
"""Less is read in seconds: no progress is shown."""


class TrainingBatches(Protocol):
    """This process's share of every global batch; what a step reads depends on the step alone."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        ...

    @property
    def identity(self) -> str | None:
        """Changes with the text and the order of its windows' sources, not with its path; None for a task."""
        ...

    @property
    def steps_per_epoch(self) -> int | None:
        """Whole global batches of one pass over the text; None where that is not known."""
        ...

    def batches(self, first_step: int) -> Iterator[Batch]:
        """This process's part of the global batches from step ``first_step`` (0 is the run's first) on, for ever."""
        ...


def open_training_data(config: Config, *, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    """A task, token files (`corpus.path`, `data.paths`) or a stream (`corpus.stream`), as ``config`` says.

    Raises `UserError` for text or token files that are missing, unreadable or of another tokenizer.
    """
    if config.task.name is not None:
        return TaskData(config, rank=rank, world_size=world_size)
    if config.corpus.stream is not None:
        from olmo_sparsity.data.stream import StreamedData

        return StreamedData(config, rank=rank, world_size=world_size)
    return TrainingData(config, rank=rank, world_size=world_size)


def verify_checksums(config: Config) -> None:
    """Compare the prepared corpus that is trained on with its manifest; for one process of a run, before it starts.

    Files that had the right checksum, and have the same size and time of change as then, are not read again. Does
    nothing for `corpus.verify_checksums: false` and for token files without a manifest. Raises `UserError` for the
    first file that differs.
    """
    if config.corpus.path is None or not config.corpus.verify_checksums:
        return
    folder, cache = Path(config.corpus.path), Path(config.save_folder) / VERIFIED_NAME
    splits = CorpusManifest.load(folder).splits
    files = [file for name in _splits_read(config) for file in splits.get(name, [])]
    known = _read_cache(cache)
    expected = {folder / file.name: file.sha256 for file in files if (folder / file.name).is_file()}
    states = {path: _state(path, sha256) for path, sha256 in expected.items()}
    todo = [path for path, state in states.items() if known.get(str(path.resolve())) != state]
    if not todo:
        return
    for path, found in zip(todo, _checksums(todo), strict=True):
        check_checksum(path, expected[path], found)
    write_json(cache, known | {str(path.resolve()): states[path] for path in todo})


def _splits_read(config: Config) -> list[str]:
    evaluates = config.evaluation.interval is not None and not config.evaluation.paths
    return [config.corpus.train_split, *[config.corpus.heldout_split] * evaluates]


def _state(path: Path, sha256: str) -> list[int | str]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, sha256]


def _read_cache(path: Path) -> dict[str, list[int | str]]:
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}


def _checksums(paths: list[Path]) -> list[str]:
    """SHA-256 of the files, several at a time."""
    total = sum(-(-path.stat().st_size // (CHUNK_MB << 20)) * CHUNK_MB for path in paths)
    with (
        progress("verifying token files", total, "MB", enabled=total > QUIET_MB) as advance,
        ThreadPoolExecutor(min(MAX_THREADS, available_cores())) as pool,
    ):
        return list(pool.map(lambda path: _sha256(path, lambda: advance(CHUNK_MB)), paths))


def _sha256(path: Path, advance: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_MB << 20):
                digest.update(chunk)
                advance()
    except OSError as error:
        raise UserError(f"token file {path} cannot be read ({error.strerror}); copy it again") from error
    return digest.hexdigest()
