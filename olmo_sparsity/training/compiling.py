"""Whether a run is compiled by `torch.compile`, and how."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from olmo.config import ActivationCheckpointingStrategy

from olmo_sparsity.config.schema import Config, parse_duration
from olmo_sparsity.model.build import Model, decoder_of
from olmo_sparsity.model.tuples import TupleAttention
from olmo_sparsity.util.errors import UserError, first_line

log = logging.getLogger(__name__)


def compiled(config: Config, model: Model, device: torch.device, *, by_layer: bool = False) -> Any:
    """What to train with: the compiled model, which shares all tensors with ``model``; None where nothing is compiled.

    The log then says why; short runs are not compiled, and need no reason. ``by_layer``: each layer is compiled by
    itself, and ``model`` is returned, for layers that are computed again in the backward pass (compiled inside of
    that), or gathered from other processes one by one. The config and the machine alone decide, so a resumed run
    computes as it did before. Raises `UserError` for a mode or a backend that PyTorch does not have.
    """
    if config.compile is None or not _is_long_enough(config):
        return None
    options = asdict(config.compile)
    if options.pop("from_steps"):
        reason = _why_not(config, device)
        if reason is not None:
            log.info("not compiled: %s", reason)
            return None
    try:
        if not by_layer:
            return torch.compile(model, **options)
        decoder: Any = decoder_of(model)
        if isinstance(decoder, TupleAttention):
            log.info("not compiled: tuples have no layers that could be compiled one by one")
            return None
        for block in decoder.blocks():
            block.forward = torch.compile(block.forward, **options)
        return model
    except RuntimeError as error:
        reason = first_line(error).rstrip(".")
        raise UserError(f"compile: {reason}; change it, or set compile: null") from error


def uncompiled() -> Any:
    """A context in which what was compiled is computed as it was written."""
    return torch.compiler.set_stance("force_eager")


def is_of_compiler(error: Exception) -> bool:
    """Whether compiling failed, and not what was compiled."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _is_long_enough(config: Config) -> bool:
    """Whether the run has `compile.from_steps` steps; one that is counted in epochs, of unknown length, is taken to."""
    assert config.compile is not None
    amount, unit = parse_duration(config.max_duration)
    steps = {"steps": amount, "tokens": amount / config.tokens_per_step}.get(unit, float("inf"))
    return steps >= config.compile.from_steps


def _why_not(config: Config, device: torch.device) -> str | None:
    if config.activation_checkpointing == ActivationCheckpointingStrategy.fine_grained:
        return "activation_checkpointing: fine_grained breaks the graph inside of every layer"
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
