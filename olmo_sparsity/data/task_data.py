"""Batches of a synthetic task for the training loop, generated on the fly.

What a step trains on is a function of (seed, step) alone, whatever the number of processes, workers or restarts.
Shapes: B samples, T tokens of a training window (shorter samples are padded behind their end).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from olmo_sparsity import positions
from olmo_sparsity.batch import Batch
from olmo_sparsity.config import Config
from olmo_sparsity.data.windows import check_batch_is_shared
from olmo_sparsity.tasks import Task, TaskBatch, make_task

_TEST_EPOCH = 1  # keeps the random starts of test samples apart from those of training, which is epoch 0


def task_of(config: Config) -> Task:
    """The task that ``config`` names, with its parameters."""
    assert config.task.name is not None, "a config without a task trains on text"
    return make_task(config.task.name, config.task.parameters)


class TaskPositions:
    """The position ids of a task's samples, as the config's scheme has them."""

    def __init__(self, config: Config):
        options = config.positions
        self.scheme, self.skip_probability = options.scheme, options.skip_probability
        self.couples = options.scheme in positions.COUPLED_SCHEMES
        self.table_size = options.table_size or 0
        self.options = positions.SchemeOptions(
            options.target_length or config.model.max_sequence_length, options.chunks
        )

    def ids(self, batch: TaskBatch, *, split: str, seed: int, indices: np.ndarray) -> np.ndarray:
        """Position ids of the samples ``indices`` (B,), (B, T) int64; 0 at padding.

        Training: those of the scheme. Test: coupled ids after a random start, or 0, 1, … for every other scheme, which
        are meant to be read without skips.
        """
        if self.couples:
            return self._coupled(batch, split, seed, indices)
        ids = np.zeros_like(batch.tokens)
        for row, (index, length) in enumerate(zip(indices.tolist(), batch.lengths.tolist(), strict=True)):
            scheme = self.scheme if split == "train" else "contiguous"
            options = self.options if split == "train" else positions.SchemeOptions(length)
            ids[row, :length] = positions.position_ids(
                scheme, length, options, seed=seed, epoch=0, index=index
            )
        return ids

    def _coupled(self, batch: TaskBatch, split: str, seed: int, indices: np.ndarray) -> np.ndarray:
        assert batch.coupled_ids is not None, "the config was checked: the task couples its tokens"
        trains = split == "train"
        rows = [
            positions.shifted(
                coupled,
                self.table_size,
                positions.draws(seed, 0 if trains else _TEST_EPOCH, index),
                skip_probability=self.skip_probability if trains else 0.0,
            )
            for coupled, index in zip(batch.coupled_ids, indices.tolist(), strict=True)
        ]
        return np.stack(rows)


def to_batch(samples: TaskBatch, ids: np.ndarray, length: int, *, predicts_ids: bool) -> Batch:
    """What the loop trains on: samples and their ids (B, ≤ T), padded to ``length`` T.

    Labels are the next tokens; the loss counts where the next token is one of the response.
    """

    def padded(values: np.ndarray) -> torch.Tensor:
        wide = np.zeros((len(values), length), dtype=values.dtype)
        wide[:, : values.shape[1]] = values
        return torch.from_numpy(wide)

    tokens, position_ids = padded(samples.tokens), padded(ids)
    loss_mask = padded(samples.loss_mask).roll(
        -1, dims=1
    )  # from the target's own column to the one before it
    return Batch(
        input_ids=tokens,
        position_ids=position_ids,
        labels=tokens.roll(-1, dims=1),
        loss_mask=loss_mask,
        id_labels=position_ids.roll(-1, dims=1) if predicts_ids else None,
    )


class _Steps(Dataset[Batch]):
    """One process's part of the global batch of every step, by the number of the step."""

    def __init__(self, config: Config, rank: int, world_size: int):
        self.task, self.positions = task_of(config), TaskPositions(config)
        self.seed, self.length = config.seed, config.model.max_sequence_length
        self.batch_size = config.global_train_batch_size
        self.rank, self.world_size = rank, world_size
        self.predicts_ids = config.positions.scheme == "predicted"

    def __getitem__(self, step: int) -> Batch:
        first = step * self.batch_size
        indices = np.arange(first + self.rank, first + self.batch_size, self.world_size)
        samples = self.task.sample("train", self.seed, indices)
        ids = self.positions.ids(samples, split="train", seed=self.seed, indices=indices)
        return to_batch(samples, ids, self.length, predicts_ids=self.predicts_ids)


class TaskData:
    """This process's share of every global batch of a task; see `TrainingBatches`."""

    steps_per_epoch = None

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1):
        check_batch_is_shared(config.global_train_batch_size, world_size)
        self.config = config
        self.steps = _Steps(config, rank, world_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch, padding included."""
        return self.steps.batch_size * self.steps.length

    def batches(self, first_step: int) -> Iterator[Batch]:
        """This process's part of the global batches from step ``first_step`` (0 is the run's first) on, for ever."""
        data, step = self.config.data, first_step
        if not data.num_workers:
            while True:
                yield self.steps[step]
                step += 1
        yield from DataLoader(
            self.steps,
            batch_size=None,
            sampler=range(first_step, 1 << 60),
            num_workers=data.num_workers,
            pin_memory=data.pin_memory and torch.cuda.is_available(),
            prefetch_factor=data.prefetch_factor,
        )
