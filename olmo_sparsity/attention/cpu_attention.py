"""The softmax itself by matrix products, which train faster on a CPU than PyTorch's kernel."""

import torch
from torch import Tensor, nn

LONGEST_BY_PRODUCTS, QUERIES_OF_A_PRODUCT = 1024, 128  # tokens (results/benchmarks)


def by_products(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether causal softmax of queries (B, H, T, D) is trained by products.

    They are faster where it is compiled or in bf16, above all in the backward pass.
    """
    is_short = mask is None and q.shape[-2] == k.shape[-2] <= LONGEST_BY_PRODUCTS
    is_faster = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return is_short and is_faster and q.device.type == "cpu" and torch.is_grad_enabled()


def causal_products(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal softmax attention, (B, H, T, D); keys and values may have fewer heads. The weights are float32.

    One block of queries after the other, so that no scores of later keys are formed but those of the block.
    """
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], dim=1) for tensor in (k, v))
    outputs: list[Tensor] = []
    for queries in (q * q.shape[-1] ** -0.5).split(QUERIES_OF_A_PRODUCT, dim=-2):
        first = sum(output.shape[-2] for output in outputs)
        end = first + queries.shape[-2]
        later = torch.ones(end - first, end, dtype=torch.bool, device=q.device).triu(first + 1)
        scores = (queries @ k[:, :, :end].transpose(-1, -2)).float().masked_fill(later, float("-inf"))
        outputs.append(nn.functional.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v[:, :, :end])
    return torch.cat(outputs, dim=-2)
