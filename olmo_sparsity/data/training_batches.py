"""What the training loop sees, whatever it trains on: batches, and each process's share of them.

Shapes: B examples, T tokens of a training window (`window_length`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from olmo_sparsity.config.schema import DataConfig
from olmo_sparsity.model.linear_loss import IGNORE_INDEX
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.signals import leave_signals_to_main_process

_WIDTHS = 4
"""How many widths a batch may be cut to: the compiler compiles for each of them, and gives up after eight."""


@dataclass(frozen=True)
class Batch:
    """Tokens with their position ids, and what is to be predicted at each of them."""

    input_ids: Tensor
    """(B, T) int64."""
    position_ids: Tensor
    """(B, T) int64, or float32 of ids that are real numbers: the id that each token is rotated by."""
    labels: Tensor
    """(B, T) int64, the token to be predicted at each position; read only where the loss mask is set."""
    loss_mask: Tensor
    """(B, T) bool, the positions that are in the loss."""
    id_labels: Tensor | None = None
    """(B, T) int64, the position id of the token to be predicted, likewise; None: ids are not predicted."""

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """The arguments of the model's forward pass, by name."""
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    @property
    def targets(self) -> dict[str, Tensor]:
        """The labels of its loss, by name; `IGNORE_INDEX` where a position is not in the loss."""
        targets = {"labels": self.labels, "id_labels": self.id_labels}
        return {
            name: values.masked_fill(~self.loss_mask, IGNORE_INDEX)
            for name, values in targets.items()
            if values is not None
        }

    def _tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(**{name: change(tensor) for name, tensor in self._tensors().items()})

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; the copy overlaps computation where the tensors are pinned."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int) -> list[Batch]:
        """Batches of at most ``size`` examples, in order."""
        pieces = {name: tensor.split(size) for name, tensor in self._tensors().items()}
        return [
            Batch(**dict(zip(pieces, tensors, strict=True))) for tensors in zip(*pieces.values(), strict=True)
        ]

    def micro_batches(self, size: int) -> list[Batch]:
        """Batches of at most ``size`` examples; where these end at different positions, the shortest first.

        A micro-batch is as wide as its longest example: no model reads what follows a token.
        """
        ends = self._ends()
        if (ends == ends[0]).all():
            return self.split(size)
        by_length = self._rows(torch.from_numpy(ends.argsort(kind="stable")))
        return [micro_batch._narrowed() for micro_batch in by_length.split(size)]

    def by_length(self, count: int) -> list[Batch]:
        """``count`` batches (fewer of fewer examples) of as many examples each, or one more, the shortest first."""
        order = torch.from_numpy(self._ends().argsort(kind="stable"))
        return [self._rows(rows) for rows in order.tensor_split(min(count, len(order)))]

    def _ends(self) -> np.ndarray:
        """Number of positions up to the last one that is in the loss, (B,).

        With NumPy, on one core: PyTorch would use all of them for this little, while a GPU is idle.
        """
        in_loss = self.loss_mask.numpy()
        return np.where(in_loss.any(axis=1), in_loss.shape[1] - in_loss[:, ::-1].argmax(axis=1), 0)

    def _rows(self, rows: Tensor) -> Batch:
        return self._changed(lambda tensor: tensor[rows])

    def _narrowed(self) -> Batch:
        """Without the positions after the last one that is in the loss, except up to a quarter of all."""
        step = math.ceil(self.loss_mask.shape[1] / _WIDTHS)
        width = step * max(1, math.ceil(int(self._ends().max()) / step))
        return self._changed(lambda tensor: tensor[:, :width])

    def pin_memory(self) -> Batch:
        """Called by PyTorch's data loader when ``data.pin_memory`` is set."""
        return self._changed(Tensor.pin_memory)

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens are in the loss."""
        return int(np.count_nonzero(self.loss_mask.numpy()))


def local_batch_size(global_batch_size: int, world_size: int) -> int:
    """Windows of a global batch that each process reads. Raises `UserError` where they are not equally many."""
    local, remainder = divmod(global_batch_size, world_size)
    if remainder:
        raise UserError(
            f"global_train_batch_size {global_batch_size} cannot be shared by {world_size} processes; "
            f"make it a multiple of {world_size}"
        )
    return local


@dataclass(frozen=True)
class Shard:
    """A process's part of every global batch: its examples rank, rank + world_size, …

    Raises `UserError` where not all processes have equally many.
    """

    batch_size: int
    """Of the global batch."""
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        local_batch_size(self.batch_size, self.world_size)

    @property
    def size(self) -> int:
        """How many examples that are."""
        return self.batch_size // self.world_size


class Loader(DataLoader[Any]):
    """PyTorch's loader, which leaves counting its workers to the training, where those of all ranks are known."""

    def check_worker_number_rationality(self) -> None:
        pass


class TrainingBatches(ABC):
    """This process's share of every global batch; what a step reads depends on the step alone."""

    identity: str | None = None
    """Changes with the text and the order of its windows' sources, not with its path; None for a task."""
    steps_per_epoch: int | None = None
    """Whole global batches of one pass over the text; None where that is not known."""

    def __init__(self, shard: Shard, loading: DataConfig):
        """``loading``: the section `data`, of which PyTorch's loader reads its options."""
        self.shard = shard
        self.loading = loading

    @abstractmethod
    def batches(self, first_step: int) -> Iterator[Batch]:
        """This process's part of the global batches from step ``first_step`` (0 is the run's first) on, without end."""

    def _loader(self, dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
        """PyTorch's loader with the config's number of workers."""
        loading = self.loading
        if loading.num_workers:
            options = {"prefetch_factor": loading.prefetch_factor, "timeout": loading.timeout, **options}
        return Loader(
            dataset,
            num_workers=loading.num_workers,
            pin_memory=loading.pin_memory and torch.cuda.is_available(),
            worker_init_fn=leave_signals_to_main_process,
            **options,
        )
