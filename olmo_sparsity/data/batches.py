"""What the loop trains on, and the check of prepared files before it starts."""

from __future__ import annotations

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.task_batches import TaskData, task_text
from olmo_sparsity.data.tokens import check_ids, open_verified
from olmo_sparsity.data.windows import Batch, TrainingBatches, TrainingData, bare_training_paths

__all__ = ["Batch", "TrainingBatches", "open_training_data", "verify_checksums"]


def open_training_data(config: Config, *, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    """A task, or token files (`corpus.path`, `data.paths`), as ``config`` says.

    Raises `UserError` for text or token files that are missing, unreadable or of another tokenizer.
    """
    if config.task.name is not None:
        return TaskData(config, rank=rank, world_size=world_size)
    return TrainingData(config, rank=rank, world_size=world_size)


def verify_checksums(config: Config) -> None:
    """Verify all token files that a run reads; for one process of a run, before its first step.

    Those of a corpus must be the ones of its manifest; `corpus.verify_checksums: false` leaves them out. Of others the
    ids must be of the type that they are read as, and in the vocabulary. Raises `UserError` for the first one that is
    not right.
    """
    corpus, evaluates = config.corpus, config.evaluation.interval is not None
    evaluation_paths = (config.evaluation.paths or []) if evaluates else []
    splits = [(text, split) for text in [task_text(config)] if text for split in ("train", "heldout")]
    if corpus.path is not None:
        splits.append((corpus.path, corpus.train_split))
        if evaluates and not evaluation_paths:
            splits.append((corpus.path, corpus.heldout_split))
    for folder, split in splits if corpus.verify_checksums else []:
        open_verified(folder, split)
    for path in [*bare_training_paths(config), *evaluation_paths]:  # token files without a manifest
        check_ids(path, config.data.memmap_dtype, config.model.vocab_size)
