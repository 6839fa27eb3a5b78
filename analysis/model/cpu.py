"""Multiplication on a CPU by oneDNN, where MKL is slow."""

from __future__ import annotations

import torch
from torch import nn

from olmo_sparsity.util.provenance import machine


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies fp32 on a CPU by oneDNN where no gradient is wanted."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in) -> (…, out)."""
        wants_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if wants_gradient or not input.is_cpu or input.dtype != torch.float32:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")


def multiply_by_onednn(model: nn.Module) -> None:
    """Make its linear layers `OneDNNLinear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


def mkl_is_slow() -> bool:
    """Whether MKL, which multiplies fp32 for PyTorch, leaves the AVX-512 of this processor unused, as on AMD's."""
    uses_avx512 = torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability()
    return uses_avx512 and "AMD" in machine()["processor"]
