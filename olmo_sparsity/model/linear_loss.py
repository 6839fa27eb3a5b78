"""Cross-entropy of a linear head, a few rows at a time: the logits of all rows never exist together.

Logits and their gradient are the largest tensors of training by far, and are read and written several times. Here each
chunk's logits give its loss and its gradients at once, and are forgotten: memory does not grow with the number of rows,
and a chunk stays in the cache. Shapes: n rows, D width, V vocabulary (logits).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""Label of a row that does not count, as in `torch.nn.functional.cross_entropy`."""
_LOGITS_PER_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}
_FEWEST_ROWS = 128


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """Σ -log softmax(scale · hidden @ weightᵀ)[label] over the rows that count, in nats: a float32 scalar.

    Equal to the sum of `torch.nn.functional.cross_entropy` up to rounding; under autocast the products are in its type
    and the rest in float32. ``hidden``: (n, D). ``weight``: (V, D). ``labels``: (n,) integers; `IGNORED` ones do not
    count.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss, for an upstream gradient of 1, which `backward` multiplies."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        wanted = ctx.needs_input_grad[:2]
        with torch.autocast(kind, enabled=False):
            loss, *gradients = _loss_and_gradients(hidden, weight, labels, scale, dtype, any(wanted))
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * upstream.to(of_hidden.dtype), of_weight * upstream.to(of_weight.dtype), None, None


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, dtype: torch.dtype, differentiate: bool
) -> list[Tensor]:
    head = weight.to(dtype)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    size = max(_FEWEST_ROWS, _LOGITS_PER_CHUNK.get(hidden.device.type, 1 << 22) // len(weight))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        some, label = hidden[rows].to(dtype), labels[rows, None]
        logits = (some @ head.T).float() * scale
        counts = label != IGNORED
        at = label.clamp(min=0)
        log_sum = logits.logsumexp(dim=1, keepdim=True)
        loss += ((log_sum - logits.gather(1, at)) * counts).sum()
        if not differentiate:
            continue
        slope = logits.sub_(log_sum).exp_()  # the softmax
        slope.scatter_add_(1, at, slope.new_full(at.shape, -1.0))
        slope = slope.mul_(counts * scale).to(dtype)
        of_hidden[rows] = slope @ head
        of_weight += slope.T @ some
    if not differentiate:
        return [loss]
    return [loss, of_hidden, of_weight.to(weight.dtype)]
