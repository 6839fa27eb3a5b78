"""Scaled dot-product attention in the precision in which it trains fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LONGEST_IN_FLOAT32 = 128
"""Keys; above, bf16 is as fast (results/benchmarks)."""


def attend(
    attention: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """``attention(q, k, v, mask, **options)``; of few keys in float32 where a CPU trains in bf16.

    PyTorch's CPU kernel takes several times as long for the backward pass of short sequences in bf16 as in float32.
    Shapes are those of `torch.nn.functional.scaled_dot_product_attention`.
    """
    trains_in_bf16 = q.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    if not trains_in_bf16 or k.shape[-2] > LONGEST_IN_FLOAT32:
        return attention(q, k, v, mask, **options)
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    with torch.autocast("cpu", enabled=False):
        return attention(q.float(), k.float(), v.float(), mask, **options)
