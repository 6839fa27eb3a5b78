"""Cross-entropy of a linear head, a few rows at a time: the logits of all rows never exist together.

Logits and their gradient are the largest tensors of training by far, and are read and written several times. Here each
chunk's logits give its loss and its gradients at once, and are forgotten: memory does not grow with the number of rows,
and a chunk stays in the cache. Shapes: n rows, D width, V vocabulary (logits).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""A label that does not count, as in `torch.nn.functional.cross_entropy`."""
_LOGITS_PER_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}
_FEWEST_ROWS = 128


class Head(NamedTuple):
    """A linear head: logits = scale · (hidden @ weightᵀ + bias)."""

    weight: Tensor
    """(V, D)."""
    bias: Tensor | None = None
    """(V,)."""
    scale: float = 1.0


def losses(hidden: Tensor, head: Head, labels: Tensor, z_weight: float = 0.0) -> dict[str, Tensor]:
    """The losses of a model with one head, by name: scalars in nats, summed over the rows that count.

    Gradients flow through ``loss_nats``; with ``z_weight`` it is the sum of ``ce_loss_nats`` and ``z_loss_nats``, as
    `linear_cross_entropy` has them.
    """
    loss, z_loss = linear_cross_entropy(hidden, head, labels, z_weight)
    terms = {"ce_loss_nats": loss.detach() - z_loss, "z_loss_nats": z_loss} if z_weight else {}
    return {"loss_nats": loss, **terms}


def linear_cross_entropy(
    hidden: Tensor, head: Head, labels: Tensor, z_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sums over the rows that count, in nats, float32 scalars: -log softmax(logits)[label] + z-loss, and the z-loss.

    The z-loss is ``z_weight`` · (log Σ exp logits)² (PaLM, Chowdhery et al. 2022, section 5; as in OLMo); gradients
    flow through the first scalar alone. Equal to `torch.nn.functional.cross_entropy` up to rounding; under autocast the
    products are in its type and the rest in float32. ``hidden``: (…, D). ``labels``: (…) integers, of which
    `IGNORE_INDEX` does not count.
    """
    hidden, weight = hidden.flatten(0, -2), head.weight
    if head.bias is not None:
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1)
        weight = torch.cat([weight, head.bias[:, None]], dim=1)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()  # else their gradients were computed all the same
    return _LinearCrossEntropy.apply(hidden, weight, labels.flatten(), head.scale, z_weight)


def _rows_per_chunk(weight: Tensor) -> int:
    return max(_FEWEST_ROWS, _LOGITS_PER_CHUNK.get(weight.device.type, 1 << 22) // len(weight))


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss, for an upstream gradient of 1, which `backward` multiplies."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float, z_weight: float
    ) -> tuple[Tensor, Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        needs_gradients = any(ctx.needs_input_grad[:2])
        with torch.autocast(kind, enabled=False):
            loss, z_loss, *gradients = _loss_and_gradients(
                hidden, weight, labels, scale, z_weight, dtype, needs_gradients
            )
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_hidden, of_weight = (saved * upstream.to(saved.dtype) for saved in ctx.saved_tensors)
        return of_hidden, of_weight, None, None, None


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float,
    z_weight: float,
    dtype: torch.dtype,
    differentiate: bool,
) -> list[Tensor]:
    head = weight.to(dtype)
    loss, z_loss = torch.zeros(2, dtype=torch.float32, device=hidden.device)
    of_hidden = torch.empty_like(hidden)
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    size = _rows_per_chunk(weight)
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        chunk = hidden[rows].to(dtype)
        label = labels[rows, None]
        logits = (chunk @ head.T).float() * scale
        in_loss = label != IGNORE_INDEX
        column = label.clamp(min=0)
        log_sum = logits.logsumexp(dim=1, keepdim=True)
        loss += ((log_sum - logits.gather(1, column)) * in_loss).sum()
        z_loss += z_weight * (log_sum.square() * in_loss).sum()
        if not differentiate:
            continue
        slope = logits.sub_(log_sum).exp_()  # the softmax
        if z_weight:
            slope *= 1 + 2 * z_weight * log_sum
        slope = _less_one(slope, column).mul_(in_loss * scale).to(dtype)
        of_hidden[rows] = slope @ head
        if dtype == torch.float32:
            of_weight.addmm_(slope.T, chunk)  # in place: no second (V, D)
        else:
            of_weight += slope.T @ chunk
    if not differentiate:
        return [loss + z_loss, z_loss]
    return [loss + z_loss, z_loss, of_hidden, of_weight.to(weight.dtype)]


def _less_one(slope: Tensor, column: Tensor) -> Tensor:
    """``slope`` (rows, V), 1 less in the ``column`` (rows, 1) of each row."""
    if (
        torch.compiler.is_compiling()
    ):  # no pass over memory for it: comparing is fused into the one that follows
        return slope - (torch.arange(slope.shape[1], device=column.device) == column).to(slope.dtype)
    return slope.scatter_add_(1, column, slope.new_full(column.shape, -1.0))
