"""Where a model is run: the device, its precision, and how many tokens fit one forward pass.

Shapes: R rows, N tokens of long context.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.model.adapters import TokenModel
from olmo_sparsity.util.errors import UserError

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65_536}
"""Tokens of one forward pass: enough to keep the cores busy, few enough to stay in cache."""
LOGITS_PER_SLICE = 1 << 24
"""Logits that are read at once: log-softmax needs copies in fp32, and all of them would not fit."""
GB = 1e9
_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.5, 0.8
_STATUS, _CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def pick_device(asked: str | None) -> torch.device:
    """The device of that name; None means a GPU where there is one. Raises `UserError` where it cannot be used."""
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"there is no device {asked!r}; give cpu, cuda, or cuda:1 and so on") from error
    if device.type not in TOKENS_PER_BATCH or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"the device {asked!r} cannot be used here; give another --device, such as cpu")
    return device


class OnDevice:
    """What every forward pass needs: the device, the precision, and the size of a batch."""

    def __init__(self, device: torch.device, bf16: bool, tokens_per_batch: int | None):
        self.device = device
        self.bf16 = bf16
        self.tokens_per_batch = tokens_per_batch or TOKENS_PER_BATCH[device.type]

    def precision(self) -> AbstractContextManager:
        """bf16 autocast where it is asked for."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def tensor(self, array: np.ndarray) -> Tensor:
        """An array of whole numbers as a tensor on the device, int64."""
        own = np.array(array, dtype=np.int64)  # a copy: files are read-only
        return torch.from_numpy(own).to(self.device)


def chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Rows in parts of ``size``, at least 1; the last may be smaller."""
    size = max(1, size)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def default_limit_bytes(device: torch.device) -> float:
    """Half the host's memory, or four fifths of what is free on the GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _SHARE_OF_DEVICE * free
    return _SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tokens_that_fit(
    model: TokenModel,
    device: torch.device,
    n_long: int,
    limit_bytes: float,
    *,
    asked: int = 1,
) -> int:
    """The most tokens of one forward pass whose memory stays within the limit: N, or up to `TOKENS_PER_BATCH`.

    ``asked``: the last positions of a context whose losses are computed.

    Batches of contexts are tried, each twice as large as the one before, while the next is expected to fit
    (memory grows no faster than the batch). Depends on memory alone, never on speed, so that a machine gives the same
    batches every time. Raises `UserError` where not even one context fits.
    """
    most = TOKENS_PER_BATCH[device.type]
    rows = 1
    while rows == 1 or rows * n_long <= most:
        used = _peak_bytes(model, device, rows, n_long, asked)
        if used > limit_bytes:
            if rows > 1:
                return rows // 2 * n_long
            raise UserError(
                f"one context of N = {n_long:,} tokens takes {used / GB:.2g} GB, more than the limit of "
                f"{limit_bytes / GB:.2g} GB; raise --memory-limit or lower --n-long"
            )
        if 2 * used > limit_bytes:
            return rows * n_long
        rows *= 2
    return max(n_long, most)  # less than twice the last trial


@torch.inference_mode()
def _peak_bytes(model: TokenModel, device: torch.device, rows: int, n_long: int, asked: int) -> float:
    """Memory that losses of the last positions of (R, N) tokens take beyond what was in use; 0 where it is unknown."""
    tokens = torch.ones(rows, n_long, dtype=torch.long, device=device)
    ids = torch.arange(n_long, device=device).expand(rows, -1)
    memory = MemoryGrowth(device)
    try:
        logits = model(tokens, position_ids=ids, logits_to_keep=asked).logits
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, -asked:].flatten(), reduction="none")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return float("inf")
    return memory.growth_bytes() or 0.0


class MemoryGrowth:
    """Growth of the memory in use from here to its peak: torch's on a GPU, else the resident set (Linux only).

    Not getrusage: its peak is never reset, and a spawned process inherits that of its parent.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            _CLEAR_PEAK.write_text("5")
            self.before = _resident_bytes("VmRSS")
        except OSError:  # not Linux, or not allowed
            pass

    def growth_bytes(self) -> int | None:
        """Bytes; None where they cannot be measured."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return _resident_bytes("VmHWM") - self.before


def _resident_bytes(field: str) -> int:
    """VmRSS, the resident set, or VmHWM, its peak."""
    for line in _STATUS.read_text(encoding="utf8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # "123 kB"
    raise OSError(f"{_STATUS} has no {field}")
