"""Model FLOPs of training; their quotient with what a device can do is the model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re

import torch
from torch import nn

from olmo_sparsity.config.schema import Config
from olmo_sparsity.model.build import empty_model, token_embedding

_PEAK_TERAFLOPS = {
    # name as torch.cuda.get_device_name gives it, dense bf16 TFLOP/s of NVIDIA's data sheets;
    # the first that fits counts, so variants stand before the plain name
    # NVIDIA HGX B200 and B300: 36 PFLOP/s of 8 GPUs with sparsity, half of it dense
    r"\bB[23]00\b": 2250.0,
    r"\bH(100|200) NVL\b": 835.5,
    r"\bH100 PCIe\b": 756.0,
    r"\b(G?H200|H100|H800)\b": 989.4,
    r"\bA(100|800)\b": 312.0,
    r"\bA40\b": 149.7,
    r"\bA30\b": 165.0,
    r"\bL40S\b": 362.0,
    r"\bL40\b": 181.0,
    r"\bL4\b": 121.0,
}


def flops_per_token(config: Config) -> float:
    """Model FLOPs of training on one token, forward and backward: 6 N + 12 L d T (PaLM, Chowdhery et al. 2022, app. B).

    N: elements of all matrices that every token is multiplied with: the output projection is one of them, tied or not;
    the look-up tables of tokens and positions are not. L layers, d = `d_model`, T = `max_sequence_length`: attention
    counts as the full T x T matrix, also where a causal kernel skips half of it, as in MFU figures of others. Not
    counted: recomputation under activation checkpointing, norms, activations, softmax, the loss, the optimizer, and
    that DAPE v2 convolves T x T scores.
    """
    model = empty_model(config, device="meta")
    sizes = config.model
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.ndim == 2 and id(parameter) not in tables
    )
    if sizes.weight_tying and sizes.family == "olmo":  # the head of GPT-NeoX is a matrix of its own
        matrices += token_embedding(model).weight.numel()
    return 6.0 * matrices + 12.0 * sizes.n_layers * sizes.d_model * sizes.max_sequence_length


def peak_flops(config: Config, device: torch.device) -> float | None:
    """FLOP/s that one device does at most in dense bf16, whatever the run's precision; None where it is not known.

    `speed_monitor.gpu_flops_available` overrides the table. A processor, or part of a GPU (MIG), is not guessed.
    """
    if config.model.family == "tuples":
        return None  # it looks up instead of multiplying matrices
    if config.speed_monitor.gpu_flops_available is not None:
        return float(config.speed_monitor.gpu_flops_available)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    fitting = (peak * 1e12 for pattern, peak in _PEAK_TERAFLOPS.items() if re.search(pattern, name))
    return None if "MIG" in name else next(fitting, None)
