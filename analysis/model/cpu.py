"""Multiplication on a CPU by oneDNN, where MKL is slow."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from olmo_sparsity.util.provenance import machine


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies fp32 on a CPU by oneDNN where no gradient is wanted."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, in) -> (…, out)."""
        wants_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if wants_gradient or not input.is_cpu or input.dtype != torch.float32:
            return super().forward(input)
        return _by_onednn(input, self.weight, self.bias)


def multiply_by_onednn(model: nn.Module) -> None:
    """Make its linear layers `OneDNNLinear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """(n, in), (out, in) -> (n, out), as a linear layer multiplies, by whom it is fast; no gradient flows back."""
    if (
        inputs.is_cpu
        and inputs.dtype == torch.float32
        and inputs.numel()
        and weight.numel()
        and mkl_is_slow()
    ):
        return _by_onednn(inputs, weight, None)
    return nn.functional.linear(inputs, weight)


def _by_onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # rows that do not follow one another, as keys of one head have, would take hundreds of times as long
    return torch.ops.mkldnn._linear_pointwise(inputs.contiguous(), weight.contiguous(), bias, "none", [], "")


@cache
def mkl_is_slow() -> bool:
    """Whether MKL, which multiplies fp32 for PyTorch, is slower than oneDNN, as on AMD's processors.

    It leaves their AVX-512 unused (half the rate of oneDNN), and with AVX2 has 0.5 to 0.8 of it where an output is as
    wide as a vocabulary.
    """
    return torch.backends.mkldnn.is_available() and "AMD" in machine()["processor"]
