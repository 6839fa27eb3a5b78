"""Training batches of a synthetic task, generated on the fly; those of text are made in `windows.py`.

What a step trains on is a function of (seed, step) alone, whatever the number of processes, workers or restarts.
Shapes: B samples, T tokens of a training window, `window_length` (shorter samples are padded at their end).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch.utils.data import Dataset

from olmo_sparsity import positions
from olmo_sparsity.config.schema import DataConfig, PositionsConfig
from olmo_sparsity.data.training_batches import Batch, Shard, TrainingBatches
from olmo_sparsity.model.linear_loss import IGNORE_INDEX
from olmo_sparsity.tasks import Task, TaskBatch
from olmo_sparsity.tasks.batch import between
from olmo_sparsity.util.rng import Stream, generators

_SAMPLES_AT_ONCE = 512
_TEST_EPOCH = 1  # keeps the random starts of test samples apart from those of training, which is epoch 0


class TaskPositions:
    """The position ids of a task's samples, as the scheme of the section `positions` has them."""

    def __init__(self, settings: PositionsConfig, target_length: int):
        """``target_length``: T', below which the ids stay that are not coupled."""
        self.settings = settings
        self.table_size = settings.table_size or 0
        self.options = positions.SchemeOptions(target_length, settings.chunks)

    def ids(self, batch: TaskBatch, *, split: str, seed: int, indices: np.ndarray) -> np.ndarray:
        """Position ids of the samples ``indices`` (B,), (B, T) of the scheme's type; 0 at padding.

        Training: those of the scheme. Test: coupled ids after a random start, or 0, 1, … for every other scheme, which
        are meant to be read without skips.
        """
        if self.settings.is_coupled:
            ids = self._coupled(batch, split, seed, indices)
            return ids if split == "test" else self._corrupt_ids(ids, batch, seed, indices)
        scheme = self.settings.scheme if split == "train" else "contiguous"
        if scheme == "contiguous":  # nothing to draw
            width = batch.tokens.shape[1]
            return np.where(between(0, batch.lengths, width), np.arange(width), 0)
        assert self.options.target_length >= batch.lengths.max(initial=0), "the config was checked"
        of_samples = generators([Stream.POSITIONS, seed, 0], indices)
        drawn = [
            positions.SCHEMES[scheme](length, self.options, generator)
            for length, generator in zip(batch.lengths.tolist(), of_samples, strict=True)
        ]
        ids = np.zeros(batch.tokens.shape, dtype=np.result_type(np.int8, *drawn))
        for row, of_row in zip(ids, drawn, strict=True):
            row[: len(of_row)] = of_row
        return ids

    def has_coupled_ids(self, *, seed: int, indices: np.ndarray) -> np.ndarray:
        """Whether the training samples ``indices`` (B,) have their coupled ids, (B,) bool."""
        of_samples = generators([Stream.GIVEN_IDS, seed, 0], indices)
        share = self.settings.coupled_share
        return np.array([generator.random() < share for generator in of_samples], dtype=bool)

    def _corrupt_ids(self, ids: np.ndarray, batch: TaskBatch, seed: int, indices: np.ndarray) -> np.ndarray:
        """Ids (B, T) of training samples, with `id_noise` some wrong ones, with `coupled_share` contiguous samples."""
        if self.settings.id_noise:
            for row, generator in zip(ids, generators([Stream.GIVEN_IDS, seed, 1], indices), strict=True):
                coupled = np.flatnonzero(row)  # padding, which depends on the batch, draws nothing
                wrong = coupled[generator.random(len(coupled)) < self.settings.id_noise]
                lowest = row[coupled].min()
                highest = row[coupled].max()
                row[wrong] = generator.integers(lowest, highest, len(wrong), endpoint=True)
        if self.settings.coupled_share < 1:
            contiguous = ~self.has_coupled_ids(seed=seed, indices=indices)
            starts = [
                generator.integers(0, self.table_size - length, endpoint=True)
                for length, generator in zip(
                    batch.lengths.tolist(), generators([Stream.GIVEN_IDS, seed, 2], indices), strict=True
                )
            ]
            contiguous_ids = np.arange(ids.shape[1]) + np.array(starts, dtype=np.int64)[:, None]
            inside = between(0, batch.lengths, ids.shape[1])
            ids = np.where(contiguous[:, None], np.where(inside, contiguous_ids, 0), ids)
        return ids

    def _coupled(self, batch: TaskBatch, split: str, seed: int, indices: np.ndarray) -> np.ndarray:
        epoch, skips = (0, self.settings.skip_probability) if split == "train" else (_TEST_EPOCH, 0.0)
        coupled = batch.coupled_ids
        assert coupled is not None, "the config was checked: the task couples its tokens"
        largest = coupled.max(axis=1, initial=0)
        of_prompt = np.where(batch.loss_mask, 0, coupled).max(axis=1, initial=0)
        shifts = [
            positions.draw_shift(last, last_of_prompt, self.table_size, generator, skip_probability=skips)
            for last, last_of_prompt, generator in zip(
                largest.tolist(),
                of_prompt.tolist(),
                generators([Stream.POSITIONS, seed, epoch], indices),
                strict=True,
            )
        ]
        columns = np.array(shifts, dtype=np.int64).reshape(len(shifts), 3, 1)
        ids = positions.apply_shift(coupled, columns[:, 0], columns[:, 1], columns[:, 2])
        if batch.second_ids is None:
            return ids
        room = (self.settings.second_table_size or 0) - 1 - batch.second_ids.max(axis=1, initial=0)
        starts = [
            int(generator.integers(0, largest_start, endpoint=True))
            for generator, largest_start in zip(
                generators([Stream.SECOND_IDS, seed, epoch], indices), room, strict=True
            )
        ]
        second = positions.apply_shift(batch.second_ids, np.array(starts, dtype=np.int64)[:, None], 0, 0)
        return ids + self.table_size * second


def to_batch(
    samples: TaskBatch,
    ids: np.ndarray,
    window_length: int,
    *,
    predicts_ids: bool,
    coupled: np.ndarray | None = None,
) -> Batch:
    """The batch that the loop trains on: samples and their ids (B, ≤ T), padded to T, ``window_length``.

    Labels are the next tokens; in the loss are positions whose next token is one of the response. The loss of its id is
    that of the samples which are ``coupled`` (B,); None: of all.
    """

    def padded(values: np.ndarray) -> torch.Tensor:
        wide = np.zeros((len(values), window_length), dtype=values.dtype)
        wide[:, : values.shape[1]] = values
        return torch.from_numpy(wide)

    tokens = padded(samples.tokens)
    position_ids = padded(ids)
    id_labels = position_ids.roll(-1, dims=1)
    if coupled is not None:
        id_labels[~torch.from_numpy(coupled)] = IGNORE_INDEX
    return Batch(
        input_ids=tokens,
        position_ids=position_ids,
        labels=tokens.roll(-1, dims=1),
        loss_mask=padded(samples.loss_mask).roll(-1, dims=1),  # from the target's column to the one before it
        id_labels=id_labels if predicts_ids else None,
    )


class TaskData(TrainingBatches, Dataset[Batch]):
    """Batches of a task; item n is this process's part of the global batch of step n."""

    def __init__(
        self,
        task: Task,
        positions: TaskPositions,
        shard: Shard,
        loading: DataConfig,
        *,
        window_length: int,
        seed: int,
        identity: str | None = None,
    ):
        """``seed``: of samples and ids. ``identity``: of the text that the task takes its background from."""
        super().__init__(shard, loading)
        self.task = task
        self.positions = positions
        self.window_length = window_length
        self.seed = seed
        self.identity = identity

    def __getitem__(self, step: int) -> Batch:
        return self.of_steps(step, 1)[0]

    def of_steps(self, first_step: int, num_steps: int) -> list[Batch]:
        """The batches of consecutive steps, made at once: numpy's calls cost hardly more for more rows."""
        batch_size = self.shard.batch_size
        index_in_batch = np.arange(self.shard.rank, batch_size, self.shard.world_size)
        steps = np.arange(first_step, first_step + num_steps)
        indices = (batch_size * steps[:, None] + index_in_batch).reshape(-1)
        samples = self.task.sample("train", self.seed, indices)
        ids = self.positions.ids(samples, split="train", seed=self.seed, indices=indices)
        settings = self.positions.settings
        coupled = None
        if settings.coupled_share < 1:
            coupled = self.positions.has_coupled_ids(seed=self.seed, indices=indices)
        batch = to_batch(
            samples, ids, self.window_length, predicts_ids=settings.predicts_ids, coupled=coupled
        )
        return batch.split(self.shard.size)

    def batches(self, first_step: int) -> Iterator[Batch]:
        if self.loading.num_workers:
            steps = range(first_step, 1 << 60)
            yield from self._loader(self, batch_size=None, sampler=steps)
        num_steps = max(1, _SAMPLES_AT_ONCE // self.shard.size)
        for step in count(first_step, num_steps):
            yield from self.of_steps(step, num_steps)
