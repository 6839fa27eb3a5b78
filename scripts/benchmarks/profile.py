"""Where the time of a training step goes: its longest operations on a CPU, its longest kernels on a GPU."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.settings import ProfileSettings
from benchmarks.timing import Json, about_this_run, chosen_device, synchroniser, time_in_turn
from benchmarks.train import use_cpu_without_gpu, with_random_tokens
from benchmarks.trainer import train_steps
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.batches import open_training_data
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.engine import Engine

WARM_UP_STEPS = 4
"""Compiling, autotuning and the allocator are done after these."""
_LONGEST_NAME = 90


def run(settings: ProfileSettings) -> Json:
    """Seconds of steps that are not profiled, and milliseconds a step of the operations of those that are."""
    use_cpu_without_gpu()
    made = about_this_run(chosen_device())
    # Else the compiler's kernels have no names on a CPU.
    names_kernels = torch._inductor.config.patch({"cpp.enable_kernel_profile": True})
    with names_kernels, tempfile.TemporaryDirectory() as folder:
        config = load_config(settings.config, settings.overrides)
        if config.task.name is None:
            config = with_random_tokens(config, Path(folder))
        if config.compile is not None:
            config = replace(config, compile=replace(config.compile, from_steps=0))
        engine = Engine(config, build_model(config))
        batches = open_training_data(config).batches(0)
        step = partial(train_steps, engine, config, batches, 1)
        seconds = time_in_turn({"step": step}, settings.steps, engine.device.type, warm_up=WARM_UP_STEPS)[
            "step"
        ]
        with torch.profiler.profile(activities=_activities(engine.device)) as profiler:
            train_steps(engine, config, batches, settings.steps)
            synchroniser(engine.device.type)()
    operations = _operations(profiler, engine.device, settings.steps)
    return {
        "benchmark": "profile",
        "config": settings.config,
        "precision": engine.accelerator.mixed_precision,
        "compiled": engine.is_compiled,
        "profiled_steps": settings.steps,
        "step_ms": 1e3 * statistics.median(seconds),
        "step_ms_low": 1e3 * min(seconds),
        "step_ms_high": 1e3 * max(seconds),
        "operations_ms": sum(each["ms"] for each in operations.values()),
        **made,
        "operations": {name[:_LONGEST_NAME]: operations[name] for name in [*operations][: settings.longest]},
    }


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What is recorded: on a GPU its kernels alone, since recording operators too would slow the CPU that asks."""
    return [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]


def _operations(profiler: torch.profiler.profile, device: torch.device, steps: int) -> dict[str, Json]:
    """Calls and milliseconds a step of each operation, by name, the longest first; without those it calls."""
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    found = {}
    for each in profiler.key_averages():
        if each.device_type == kind:
            own_us = each.self_device_time_total if kind == DeviceType.CUDA else each.self_cpu_time_total
            found[each.key] = {"calls": each.count / steps, "ms": own_us / 1e3 / steps}
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))
