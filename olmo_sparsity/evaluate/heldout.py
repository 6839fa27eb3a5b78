"""Held-out loss while training, in windows of the training length; `analysis.probes.length` measures it by position.

Every evaluation of every run reads the same windows, whatever the number of processes. No random state is touched.
Shapes: B windows, T tokens of a training window (`window_length`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.data.training_batches import Batch
from olmo_sparsity.data.windows import collate
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

ReduceSum = Callable[[Tensor], Tensor]
"""The sum over all processes of a tensor that each of them has; the identity for one process."""


class HeldoutEvaluation:
    """The held-out loss of a run in windows of the training length T, packed as training packs them, but with
    contiguous position ids from 0; the same windows every time."""

    def __init__(
        self,
        tokens: TokenFiles,
        *,
        window_length: int,
        windows: int,
        seed: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        """Chooses at most ``windows`` windows of held-out text by seed and text; ``batch_size`` are read at once.

        Raises `UserError` where there is too little text for one window.
        """
        self.tokens = tokens
        self.window_length = window_length
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        all_windows = [
            (file, start)
            for file, length in enumerate(tokens.lengths)
            for start in range(0, length - window_length + 1, window_length)
        ]
        if not all_windows:
            raise UserError(
                f"the held-out text has {sum(tokens.lengths):,} tokens, fewer than one window of {window_length}; "
                "hold more text out, or set evaluation.interval: null"
            )
        generator = np.random.default_rng([Stream.HELDOUT_WINDOWS, seed, 0])
        chosen = generator.permutation(len(all_windows))[:windows]
        self.windows = np.array(all_windows, dtype=np.int64)[np.sort(chosen)]
        """(n, 2): file and first token."""

    @torch.no_grad()
    def run(
        self, model: nn.Module, reduce_sum: ReduceSum, device: torch.device | str = "cpu"
    ) -> dict[str, Any]:
        """Measure; every process calls this at the same step, and gets the same result.

        ``model`` is called equally often in every process, as ZeRO 3 needs it. Returns a row of `metrics.jsonl`:
        `heldout_loss_nats` (mean per token), `heldout_tokens` (how many) and `heldout_window_tokens` (T).
        """
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss and tokens
        for batch in self._batches():
            sums[1] += batch.num_loss_tokens
            batch = batch.to(torch.device(device))
            sums[0] += model(**batch.model_inputs, **batch.targets)["loss_nats"]
        loss, tokens = reduce_sum(sums).tolist()
        return {
            "heldout_loss_nats": loss / tokens,
            "heldout_tokens": int(tokens),
            "heldout_window_tokens": self.window_length,
        }

    def _batches(self) -> Iterator[Batch]:
        """This process's share; a process with fewer windows repeats one outside of the loss, to keep step."""
        share = -(-len(self.windows) // self.world_size)
        for first in range(0, share, self.batch_size):
            steps = range(first, min(first + self.batch_size, share))
            yield collate([self._item(step * self.world_size + self.rank) for step in steps])

    def _item(self, index: int) -> dict[str, Any]:
        file, start = self.windows[index % len(self.windows)]
        window = self.tokens.read(file, start, start + self.window_length).astype(np.int64)
        ids = np.arange(self.window_length, dtype=np.int64)
        return {"input_ids": window, "position_ids": ids, "in_loss": index < len(self.windows)}
