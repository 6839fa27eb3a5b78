"""Where a model is run: the device, and how many tokens it reads in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from analysis.model.adapter import Adapter

TOKENS_PER_BATCH = {"cpu": 1024, "cuda": 65_536}
"""Tokens of one forward pass: enough to keep the cores busy, few enough to stay in cache. Halved where memory runs
out."""
LOGITS_PER_SLICE = 1 << 24
"""Logits that are read at once: log-softmax needs copies in fp32, and all of them would not fit."""


class OnDevice:
    """What every forward pass needs: the model, the device where it is, and the size of a batch."""

    def __init__(self, model: Adapter, device: torch.device, tokens_per_batch: int | None):
        self.model = model
        self.device = device
        self.tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH[device.type]

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array of whole numbers as a tensor on the device, int64."""
        copied = np.array(array, dtype=np.int64)  # token files are read-only, of which torch warns
        return torch.from_numpy(copied).to(self.device)


def chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Rows in parts of ``size``, at least 1; the last may be smaller."""
    size = max(1, size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host, where torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
