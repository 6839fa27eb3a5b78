"""What the loop trains on, prepared or streamed, and the check of prepared files before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from olmo_sparsity.config.load import Config
from olmo_sparsity.data.task_batches import TaskData
from olmo_sparsity.data.tokens import ExpectedFile, Verified, expected_files
from olmo_sparsity.data.windows import Batch, TrainingData, bare_training_paths


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
    """Verify all token files that the run reads; for one process of a run, before it starts.

    Those of a corpus must be the ones of its manifest; `corpus.verify_checksums: false` leaves them out. All ids must
    be in the vocabulary. Files that were right, and have not changed since, are not read again. Raises `UserError` for
    the first one that is not right.
    """
    verified = Verified(config.save_folder)
    verified.check([*_corpus_files(config), *_bare_files(config)])
    verified.save()


def _corpus_files(config: Config) -> list[ExpectedFile]:
    if config.corpus.path is None or not config.corpus.verify_checksums:
        return []
    evaluates = config.evaluation.interval is not None and not config.evaluation.paths
    splits = [config.corpus.train_split, *[config.corpus.heldout_split] * evaluates]
    return expected_files(config.corpus.path, *splits)


def _bare_files(config: Config) -> list[ExpectedFile]:
    """Token files without a manifest."""
    paths = bare_training_paths(config)
    if config.evaluation.interval is not None:
        paths = [*paths, *(config.evaluation.paths or [])]
    remedy = (
        f"model.vocab_size is {config.model.vocab_size}: the file was made with another tokenizer or another "
        "data.memmap_dtype"
    )
    dtype, vocab_size = config.data.memmap_dtype, config.model.vocab_size
    return [ExpectedFile(Path(path), dtype, vocab_size, remedy) for path in paths]
