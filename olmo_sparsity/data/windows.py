"""Training batches, and those of token files that are cut into windows, each with its position ids and needles.

Example i of epoch e is the same, position ids included, whatever the number of processes, workers or restarts.
Shapes: B examples, T tokens of a training window (`window_length`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from olmo.data.util import find_periodic_sequences
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from olmo_sparsity.config.schema import DataConfig, InstanceFilterConfig, NeedlesConfig, PositionsConfig
from olmo_sparsity.data.tokens import TokenFile, TokenFiles
from olmo_sparsity.model.linear_loss import IGNORE_INDEX
from olmo_sparsity.positions import SchemeOptions, position_ids
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream
from olmo_sparsity.util.signals import leave_signals_to_main_process

# --- what the training loop sees, whatever it trains on ---

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


def identity_of(files: Sequence[TokenFile]) -> str:
    """SHA-256 of what token files hold, by the checksums of their manifest."""
    return sha256(" ".join(file.sha256 for file in files).encode()).hexdigest()


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
        return DataLoader(
            dataset,
            num_workers=loading.num_workers,
            pin_memory=loading.pin_memory and torch.cuda.is_available(),
            worker_init_fn=leave_signals_to_main_process,
            **options,
        )


# --- windows of token files ---


class WindowDataset(Dataset[dict[str, Any]]):
    """Windows of token files; set ``epoch`` before reading, because ids are redrawn at every visit."""

    def __init__(
        self,
        tokens: TokenFiles,
        *,
        window_length: int,
        positions: PositionsConfig,
        target_length: int,
        seed: int,
        weaver: NeedleWeaver,
        instance_filter: InstanceFilterConfig | None = None,
    ):
        """``target_length``: T', below which the ids stay. ``seed``: of the ids."""
        self.tokens = tokens
        self.window_length = window_length
        self.positions = positions
        self.scheme_options = SchemeOptions(target_length, positions.chunks)
        self.seed = seed
        self.weaver = weaver
        self.instance_filter = instance_filter
        self.epoch = 0
        # Of each file the number of its first window; what is left at its end is not used (as in OLMo).
        self.first_windows = np.cumsum([0, *(length // window_length for length in tokens.lengths)])

    def __len__(self) -> int:
        return int(self.first_windows[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Window ``index`` of this epoch: ``input_ids`` (T,) int64, ``position_ids`` (T,) as `positions.position_ids`
        has them, and ``in_loss``, False where the instance filter drops it."""
        file = int(np.searchsorted(self.first_windows, index, side="right")) - 1
        start = (index - int(self.first_windows[file])) * self.window_length
        ids = position_ids(
            self.positions.scheme,
            self.window_length,
            self.scheme_options,
            seed=self.seed,
            epoch=self.epoch,
            index=index,
        )
        text = self._text(file, start, ids).astype(np.int64)
        window = self.weaver.weave(text, epoch=self.epoch, index=index)
        return {"input_ids": window, "position_ids": ids, "in_loss": self._passes_filter(window)}

    def _text(self, file: int, start: int, ids: np.ndarray) -> np.ndarray:
        """The tokens (T,) of a window that begins at ``start``.

        With `content: skip` the text skips as the ids do, where its document goes on for T' tokens.
        """
        if self.positions.content == "skip":
            target_length = self.scheme_options.target_length
            stretch = self.tokens.read(file, start, start + target_length)
            if len(stretch) == target_length and not (stretch == self.tokens.eos_token_id).any():
                return stretch[ids]
        return self.tokens.read(file, start, start + self.window_length)

    def _passes_filter(self, window: np.ndarray) -> bool:
        """OLMo's instance filter: no n-gram of few tokens is repeated too often."""
        limits = self.instance_filter
        if limits is None:
            return True
        repeated = find_periodic_sequences(
            window, max_period=limits.repetition_max_period, min_period=limits.repetition_min_period
        )
        return all(match.times < limits.repetition_max_count for match in repeated)


def collate(items: list[dict[str, Any]]) -> Batch:
    """Stack windows to a batch; labels are the next tokens, and a window's last predicts nothing (as in OLMo)."""
    input_ids = torch.from_numpy(np.stack([item["input_ids"] for item in items]))
    labels = input_ids.roll(-1, dims=1)
    in_loss = torch.tensor([item["in_loss"] for item in items])
    loss_mask = in_loss[:, None].expand(input_ids.shape).clone()
    loss_mask[:, -1] = False
    position_ids = torch.from_numpy(np.stack([item["position_ids"] for item in items]))
    return Batch(input_ids, position_ids, labels, loss_mask)


class TextData(TrainingBatches):
    """Batches of windows of text, from token files; `TaskData` has those of a synthetic task."""

    steps_per_epoch: int

    def __init__(
        self,
        dataset: WindowDataset,
        shard: Shard,
        loading: DataConfig,
        *,
        order_seed: int,
        first_epoch: int = 0,
    ):
        """``order_seed``: of the order of windows, which also depends on the epoch, counted from ``first_epoch``."""
        super().__init__(shard, loading)
        self.dataset = dataset
        self.order_seed = order_seed
        self.first_epoch = first_epoch
        self.identity = self._identity()
        self.steps_per_epoch = len(dataset) // shard.batch_size
        if self.steps_per_epoch == 0:
            raise UserError(
                f"the training tokens give {len(dataset):,} windows of {dataset.window_length} tokens, fewer than "
                f"global_train_batch_size {shard.batch_size}; add text or lower the batch size or the window"
            )

    def _identity(self) -> str:
        """SHA-256 of what the token files hold, as far as a manifest or their sizes and first tokens tell."""
        tokens = self.dataset.tokens
        if tokens.described:
            return identity_of(tokens.described)
        digests = [
            f"{length} {sha256(tokens.read(file, 0, 1 << 20).data).hexdigest()}"
            for file, length in enumerate(tokens.lengths)
        ]
        return sha256(" ".join(digests).encode()).hexdigest()

    def batches(self, first_step: int) -> Iterator[Batch]:
        epoch, step_in_epoch = divmod(first_step, self.steps_per_epoch)
        while True:
            yield from self._epoch(epoch, step_in_epoch)
            epoch, step_in_epoch = epoch + 1, 0

    def _epoch(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """The rest of an epoch, in the order that OLMo's `IterableDataset` has."""
        self.dataset.epoch = self.first_epoch + epoch
        order = np.arange(len(self.dataset), dtype=np.uint32)
        np.random.Generator(np.random.PCG64(self.order_seed + self.dataset.epoch)).shuffle(order)
        batch_size = self.shard.batch_size
        order = order[first_step * batch_size : self.steps_per_epoch * batch_size]
        yield from self._loader(
            self.dataset,
            batch_size=self.shard.size,
            sampler=map(
                int, order[self.shard.rank :: self.shard.world_size]
            ),  # a list of 5 million takes 180 MB
            collate_fn=collate,
            persistent_workers=self.loading.persistent_workers and self.loading.num_workers > 0,
        )


# --- needles woven into windows ---

_ONE_KEY_IN = 8


def is_held_out(key: np.ndarray) -> bool:
    """Whether a key, token ids (q,), is one of the eighth that training never sees: its ids sum to a multiple of 8."""
    return int(key.sum()) % _ONE_KEY_IN == 0


class NeedleWeaver:
    """Weaves the needles of the section `needles` into training windows, which are then

        text[:p]  key  value  text[p:p']  key  value  text[p':]        (T tokens; the end of the text is left out)

    The value after the second key can only be predicted from the first one, so that a model which trains on such
    windows has a reason to read far back [ours]. The gap p' - p is log-uniform over what the window holds: near ones
    teach a model to look a key up at all, far ones how far back to look. `analysis.probes.needle` tests it with keys
    that are never woven (`is_held_out`). What a window gets is a function of (seed, epoch, index).
    """

    def __init__(self, settings: NeedlesConfig, *, vocabulary: np.ndarray, seed: int):
        """``vocabulary``: the token ids (n,) that needles are made of."""
        self.settings = settings
        self.vocabulary = vocabulary
        self.seed = seed

    def weave(self, window: np.ndarray, *, epoch: int, index: int) -> np.ndarray:
        """The window's tokens (T,) with needles, which do not occur in it elsewhere; or the window unchanged."""
        settings = self.settings
        if settings.share == 0:
            return window
        generator = np.random.default_rng([Stream.WOVEN_NEEDLES, self.seed, epoch, index])
        if generator.random() >= settings.share:
            return window
        lengths = settings.key_tokens + generator.choice(settings.value_tokens, settings.per_window)
        needles = self._draw(generator, np.setdiff1d(self.vocabulary, window), lengths)
        text = window[: len(window) - 2 * int(lengths.sum())]
        gaps = ((len(text) + 2) ** generator.random(len(needles))).astype(int) - 1
        first = generator.integers(0, len(text) - gaps + 1)
        offsets = np.stack([first, first + gaps], axis=1)
        insert_at = [np.repeat(pair, len(needle)) for pair, needle in zip(offsets, needles, strict=True)]
        inserted = [np.tile(needle, 2) for needle in needles]
        return np.insert(text, np.concatenate(insert_at), np.concatenate(inserted))

    def _draw(
        self, generator: np.random.Generator, unused: np.ndarray, lengths: np.ndarray
    ) -> list[np.ndarray]:
        """Key and value of each needle, no token twice in the window."""
        while True:
            drawn = generator.choice(unused, int(lengths.sum()), replace=False)
            needles = np.split(drawn, np.cumsum(lengths)[:-1])
            if not any(is_held_out(needle[: self.settings.key_tokens]) for needle in needles):
                return needles
