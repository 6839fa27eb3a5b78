"""What a run trains on: prepared text (`windows.py`), or batches of a synthetic task, generated on the fly.

What a step trains on is a function of (seed, step) alone, whatever the number of processes, workers or restarts.
Shapes: B samples, T tokens of a training window (shorter samples are padded behind their end).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch.utils.data import Dataset

from olmo_sparsity import positions
from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles, check_ids, open_verified
from olmo_sparsity.data.windows import (
    Batch,
    TrainingBatches,
    TrainingData,
    identity_of,
)
from olmo_sparsity.model.linear_loss import IGNORE_INDEX
from olmo_sparsity.tasks import Task, TaskBatch, make_task
from olmo_sparsity.tasks.samples import between
from olmo_sparsity.util.rng import Stream, generators

_SAMPLES_AT_ONCE = 512
_TEST_EPOCH = 1  # keeps the random starts of test samples apart from those of training, which is epoch 0


def task_of(config: Config) -> Task:
    """The task that ``config`` names, with its parameters."""
    assert config.task.name is not None, "a config without a task trains on text"
    return make_task(config.task.name, config.task.parameters)


def task_text(config: Config) -> str | None:
    """The prepared corpus that a task takes its background from; None: it has none, or there is no task."""
    return None if config.task.name is None else config.task.parameters.get("text")


class TaskPositions:
    """The position ids of a task's samples, as the config's scheme has them."""

    def __init__(self, config: Config):
        self.settings = config.positions
        self.table_size = config.positions.table_size or 0
        self.options = positions.SchemeOptions(config.target_length, config.positions.chunks)

    def ids(self, batch: TaskBatch, *, split: str, seed: int, indices: np.ndarray) -> np.ndarray:
        """Position ids of the samples ``indices`` (B,), (B, T) of the scheme's type; 0 at padding.

        Training: those of the scheme. Test: coupled ids after a random start, or 0, 1, … for every other scheme, which
        are meant to be read without skips.
        """
        if self.settings.is_coupled:
            ids = self._coupled(batch, split, seed, indices)
            return ids if split == "test" else self._without_some(ids, batch, seed, indices)
        scheme = self.settings.scheme if split == "train" else "contiguous"
        if scheme == "contiguous":  # nothing to draw
            width = batch.tokens.shape[1]
            return np.where(between(0, batch.lengths, width), np.arange(width), 0)
        assert self.options.target_length >= batch.lengths.max(initial=0), "the config was checked"
        each = zip(batch.lengths.tolist(), generators([Stream.POSITIONS, seed, 0], indices), strict=True)
        drawn = [positions.SCHEMES[scheme](length, self.options, generator) for length, generator in each]
        ids = np.zeros(batch.tokens.shape, dtype=np.result_type(np.int8, *drawn))
        for row, of_row in zip(ids, drawn, strict=True):
            row[: len(of_row)] = of_row
        return ids

    def has_coupled_ids(self, *, seed: int, indices: np.ndarray) -> np.ndarray:
        """Whether the training samples ``indices`` (B,) are given their coupled ids, (B,) bool."""
        drawn = generators([Stream.GIVEN_IDS, seed, 0], indices)
        return np.array([each.random() < self.settings.coupled_share for each in drawn], dtype=bool)

    def _without_some(self, ids: np.ndarray, batch: TaskBatch, seed: int, indices: np.ndarray) -> np.ndarray:
        """The ids (B, T) of training samples: some wrong (`id_noise`), some samples' contiguous (`coupled_share`)."""
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
            places = np.arange(ids.shape[1]) + np.array(starts, dtype=np.int64)[:, None]
            inside = between(0, batch.lengths, ids.shape[1])
            ids = np.where(contiguous[:, None], np.where(inside, places, 0), ids)
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
        drawn = generators([Stream.SECOND_IDS, seed, epoch], indices)
        starts = [int(each.integers(0, most, endpoint=True)) for each, most in zip(drawn, room, strict=True)]
        second = positions.apply_shift(batch.second_ids, np.array(starts, dtype=np.int64)[:, None], 0, 0)
        return ids + self.table_size * second


def to_batch(
    samples: TaskBatch,
    ids: np.ndarray,
    length: int,
    *,
    predicts_ids: bool,
    coupled: np.ndarray | None = None,
) -> Batch:
    """What the loop trains on: samples and their ids (B, ≤ T), padded to ``length`` T.

    Labels are the next tokens; the loss counts where the next token is one of the response. That of its id counts in
    the samples that are ``coupled`` (B,); None: in all.
    """

    def padded(values: np.ndarray) -> torch.Tensor:
        wide = np.zeros((len(values), length), dtype=values.dtype)
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

    def __init__(self, config: Config, *, rank: int = 0, world_size: int = 1):
        super().__init__(config, rank=rank, world_size=world_size)
        self.task, self.positions = task_of(config), TaskPositions(config)
        if text := task_text(config):
            self.identity = identity_of(CorpusManifest.load(text).splits["train"])

    def __getitem__(self, step: int) -> Batch:
        return self.of_steps(step, 1)[0]

    def of_steps(self, first_step: int, number: int) -> list[Batch]:
        """The batches of consecutive steps made at once: numpy's calls cost hardly more for more rows."""
        config = self.config
        places = np.arange(self.rank, self.batch_size, self.world_size)
        steps = np.arange(first_step, first_step + number)
        indices = (self.batch_size * steps[:, None] + places).reshape(-1)
        samples = self.task.sample("train", config.seed, indices)
        ids = self.positions.ids(samples, split="train", seed=config.seed, indices=indices)
        coupled = None
        if config.positions.coupled_share < 1:
            coupled = self.positions.has_coupled_ids(seed=config.seed, indices=indices)
        predicts_ids = config.positions.predicts_ids
        length = config.model.max_sequence_length
        return to_batch(samples, ids, length, predicts_ids=predicts_ids, coupled=coupled).split(self.share)

    def batches(self, first_step: int) -> Iterator[Batch]:
        if self.config.data.num_workers:
            steps = range(first_step, 1 << 60)
            yield from self._loader(self, batch_size=None, sampler=steps, pin_memory=self.pin_memory)
        number = max(1, _SAMPLES_AT_ONCE // self.share)
        for step in count(first_step, number):
            yield from self.of_steps(step, number)


# --- what the loop trains on, and the check of prepared files before it starts ---


def open_training_data(config: Config, *, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    """A task, or token files (`corpus.path`, `data.paths`), as ``config`` says.

    Raises `UserError` for text or token files that are missing, unreadable or of another tokenizer.
    """
    data = TrainingData if config.task.name is None else TaskData
    return data(config, rank=rank, world_size=world_size)


def verify_checksums(config: Config) -> None:
    """Verify all token files that a run reads; for one process of a run, before its first step.

    Those of a corpus must be the ones of its manifest. Of others the ids must be of the type that they are read as, and
    in the vocabulary. Raises `UserError` for the first one that is not right.
    """
    splits = [(text, split) for text in [task_text(config)] if text for split in ("train", "heldout")]
    evaluates = config.evaluation.interval is not None
    evaluation_paths = (config.evaluation.paths or []) if evaluates else []
    if config.corpus.path is not None:
        splits.append((config.corpus.path, "train"))
        if evaluates and not evaluation_paths:
            splits.append((config.corpus.path, "heldout"))
    for folder, split in splits:
        open_verified(folder, split)
    without_manifest = [*(config.data.paths or ()), *evaluation_paths]
    if without_manifest:
        TokenFiles(
            without_manifest, config.data.memmap_dtype, config.model.eos_token_id
        )  # each can be opened
    for path in without_manifest:
        check_ids(path, config.data.memmap_dtype, config.model.vocab_size)
