"""Token files cut into windows, each with its position ids and needles, and training batches of them.

Example i of epoch e is the same, position ids included, whatever the number of processes, workers or restarts.
Shapes: B examples, T tokens of a training window (`window_length`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from olmo.data.util import find_periodic_sequences
from torch.utils.data import Dataset

from olmo_sparsity.config.schema import DataConfig, InstanceFilterConfig, NeedlesConfig, PositionsConfig
from olmo_sparsity.data.tokens import TokenFile, TokenFiles
from olmo_sparsity.data.training_batches import Batch, Shard, TrainingBatches
from olmo_sparsity.positions import SchemeOptions, position_ids
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream


def identity_of(files: Sequence[TokenFile]) -> str:
    """SHA-256 of what token files hold, by the checksums of their manifest."""
    return sha256(" ".join(file.sha256 for file in files).encode()).hexdigest()


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
        """The window's tokens (T,) with needles, which do not occur in it elsewhere; or the window unchanged.

        Raises `UserError` where the window has so much of the vocabulary that there are no such needles.
        """
        settings = self.settings
        if settings.share == 0:
            return window
        generator = np.random.default_rng([Stream.WOVEN_NEEDLES, self.seed, epoch, index])
        if generator.random() >= settings.share:
            return window
        lengths = settings.key_tokens + generator.choice(settings.value_tokens, settings.per_window)
        unused = np.setdiff1d(self.vocabulary, window)
        if len(unused) < (needed := int(lengths.sum())):
            raise UserError(
                f"a window leaves {len(unused)} tokens of the vocabulary for needles of {needed} others; lower "
                "needles.per_window, or take a larger vocabulary or a shorter window"
            )
        needles = self._draw(generator, unused, lengths)
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
