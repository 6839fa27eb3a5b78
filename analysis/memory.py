"""How many tokens one forward pass may have within a memory limit, found by trying.

Shapes: R rows, N tokens of long context.
"""

from __future__ import annotations

import os
import resource
import sys

import torch

from analysis.adapters import TokenModel
from analysis.scorer import TOKENS_PER_BATCH
from olmo_sparsity.errors import UserError

GB = 1e9
_SHARE_OF_HOST, _SHARE_OF_DEVICE = 0.5, 0.8


def default_limit_bytes(device: torch.device) -> float:
    """Half the host's memory, or four fifths of what is free on the GPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _SHARE_OF_DEVICE * free
    return _SHARE_OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def tokens_that_fit(
    model: TokenModel, device: torch.device, n_long: int, limit_bytes: float, *, most: int | None = None
) -> int:
    """The most tokens of one forward pass, at least N and at most ``most``, whose memory stays within the limit.

    Batches of contexts are tried, each twice as large as the one before, while the next is expected to fit
    (memory grows no faster than the batch). Depends on memory alone, never on speed, so that a machine gives the same
    batches every time. ``most``: by default `TOKENS_PER_BATCH`, beyond which a batch gets no faster. Raises `UserError`
    where not even one context fits.
    """
    most = most or TOKENS_PER_BATCH[device.type]
    rows = 1
    while rows == 1 or rows * n_long <= most:
        used = _peak_bytes(model, device, rows, n_long)
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
def _peak_bytes(model: TokenModel, device: torch.device, rows: int, n_long: int) -> float:
    """Memory that a forward pass over (R, N) tokens takes beyond what was in use; 0 where it reuses freed memory."""
    tokens = torch.ones(rows, n_long, dtype=torch.long, device=device)
    ids = torch.arange(n_long, device=device).expand(rows, -1)
    if device.type != "cuda":
        before = _most_resident_bytes()
        model(tokens, position_ids=ids, last_logits_only=True)
        return _most_resident_bytes() - before
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        model(tokens, position_ids=ids, last_logits_only=True)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return float("inf")
    return torch.cuda.max_memory_allocated(device) - before


def _most_resident_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes but for macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
