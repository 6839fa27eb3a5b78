"""Where a model is run: the device, and how many tokens fit one forward pass.

Shapes: R rows, N tokens of long context.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from analysis.model.adapter import Adapter
from olmo_sparsity.util.errors import UserError

TOKENS_PER_BATCH = {"cpu": 1024, "cuda": 65_536}
"""Tokens of one forward pass: enough to keep the cores busy, few enough to stay in cache."""
LOGITS_PER_SLICE = 1 << 24
"""Logits that are read at once: log-softmax needs copies in fp32, and all of them would not fit."""
GB = 1e9
_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.5, 0.8


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


def default_limit_bytes(device: torch.device) -> float:
    """Half the host's memory, or four fifths of what is free on the GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _SHARE_OF_DEVICE * free
    return _SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tokens_that_fit(
    model: Adapter, device: torch.device, n_long: int, limit_bytes: float, *, n_targets: int = 1
) -> int:
    """The most tokens of one forward pass whose memory stays within the limit: N, or up to `TOKENS_PER_BATCH`.

    ``n_targets``: the last positions of a context whose losses are computed.

    Batches of contexts are tried, each twice as large as the one before, while the next is expected to fit
    (memory grows no faster than the batch). Depends on memory alone, never on speed, so that a machine gives the same
    batches every time. Raises `UserError` where not even one context fits.
    """
    rows, maximum = 1, TOKENS_PER_BATCH[device.type]
    used = _peak_bytes(model, device, rows, n_long, n_targets)
    if used > limit_bytes:
        raise UserError(
            f"one context of N = {n_long:,} tokens takes {used / GB:.2g} GB, more than the limit of "
            f"{limit_bytes / GB:.2g} GB; raise the memory limit or lower n_long"
        )
    while 2 * used <= limit_bytes:
        if 2 * rows * n_long > maximum:
            return max(n_long, maximum)  # less than twice the last trial
        used = _peak_bytes(model, device, 2 * rows, n_long, n_targets)
        if used > limit_bytes:
            break
        rows *= 2
    return rows * n_long


@torch.inference_mode()
def _peak_bytes(model: Adapter, device: torch.device, rows: int, n_long: int, n_targets: int) -> float:
    """Memory that losses of the last positions of (R, N) tokens take beyond what was in use.

    On a GPU by torch's own count. On the host what the process takes beyond its earlier peak: a pass that stays below
    what the process had before is known to fit.
    """
    on_gpu = device.type == "cuda"
    tokens = torch.ones(rows, n_long, dtype=torch.long, device=device)
    ids = torch.arange(n_long, device=device).expand(rows, -1)
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else _host_peak_bytes()
    try:
        logits = model(tokens, position_ids=ids, logits_to_keep=n_targets).logits
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, -n_targets:].flatten(), reduction="none")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        return float("inf")
    return (torch.cuda.max_memory_allocated(device) if on_gpu else _host_peak_bytes()) - before


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host, where torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _host_peak_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
