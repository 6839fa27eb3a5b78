"""The machine that a process runs on: how much there is of it, and what of it decides the last bits of numbers."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Of a processor: PyTorch chooses its kernels by them, so that equal commands give different last bits."""


def available_cores() -> int:
    """CPU cores this process may use; inside a SLURM job these are the job's, not the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_features() -> list[str]:
    """Those of `FEATURES` that this processor has; none where the system does not say."""
    about = _first_values("/proc/cpuinfo")
    flags = about.get("flags", about.get("Features", "")).split()
    return [name for name in FEATURES if name in flags]


def pick_device(name: str | None) -> Any:
    """The `torch.device` of this name; None: a GPU where there is one. Raises `UserError` where it is not there."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"there is no device {name!r}; give cpu, cuda, or cuda:1 and so on") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"the device {name!r} cannot be used here; give another --device, such as cpu")
    return device


def machine() -> dict[str, Any]:
    """Processor, its features, cores, threads, GPU and its driver: with a seed they decide what a training becomes.

    Cores, threads and GPU are those that this process may use; the last two are None where it has not imported torch.
    """
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "processor": _first_values("/proc/cpuinfo").get("model name", platform.machine()),
        "features": processor_features(),
        "cores": available_cores(),
        "threads": None if torch is None else torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch is not None and on_gpu else None,
        "driver": _first_values("/proc/driver/nvidia/version").get("NVRM version") if on_gpu else None,
    }


def _first_values(path: str) -> dict[str, str]:
    """The first value of each name in a file of lines ``name : value``; empty where there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf8").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in reversed(lines)]
    return {name.strip(): value.strip() for name, _, value in pairs}
