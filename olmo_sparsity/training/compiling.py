"""Whether a run is compiled by `torch.compile`, and how."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from olmo_sparsity.config.checks import parse_duration
from olmo_sparsity.config.schema import Config
from olmo_sparsity.util.errors import UserError, first_line

log = logging.getLogger(__name__)


def compiled(config: Config, model: nn.Module, device: torch.device, processes: int) -> Any:
    """The compiled model, which shares all tensors with ``model``, or ``model`` itself; the log then says why.

    Short runs are not compiled, and need no reason. The config and the machine alone decide, so a resumed run computes
    as it did before. Raises `UserError` for a mode or a backend that PyTorch does not have.
    """
    if config.compile is None or not _is_long_enough(config):
        return model
    options = asdict(config.compile)
    if options.pop("from_steps"):
        reason = _why_not(config, device, processes)
        if reason is not None:
            log.info("not compiled: %s", reason)
            return model
    try:
        return torch.compile(model, **options)
    except RuntimeError as error:
        reason = first_line(error).rstrip(".")
        raise UserError(f"compile: {reason}; change it, or set compile: null") from error


def is_of_compiler(error: Exception) -> bool:
    """Whether compiling failed, and not what was compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _is_long_enough(config: Config) -> bool:
    """Whether the run has `compile.from_steps` steps; one that is counted in epochs, of unknown length, is taken to."""
    assert config.compile is not None
    amount, unit = parse_duration(config.max_duration)
    steps = {"steps": amount, "tokens": amount / config.tokens_per_step}.get(unit, float("inf"))
    return steps >= config.compile.from_steps


def _why_not(config: Config, device: torch.device, processes: int) -> str | None:
    if processes > 1 or config.deepspeed.config is not None:
        return (
            "compiled training of several processes is not tried enough; --compile.from_steps=0 asks for it"
        )
    if config.activation_checkpointing is not None:
        return "with activation_checkpointing a graph breaks at every layer"
    if config.compile is not None and config.compile.backend == "inductor":
        return _missing_compiler(device)
    return None


def _missing_compiler(device: torch.device) -> str | None:
    """Which compiler is missing on this device, looked for as PyTorch does; None where there is one."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed, or does not know this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError:
        return "there is no C++ compiler; with g++ installed training is faster"
    return None
