"""What made a file: commit, library versions, command and machine, written with every result; what a machine has, and
its settings."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError

FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Of a processor: PyTorch chooses its kernels by them, so that equal commands give different last bits."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of glibc's malloc.h
LIBRARIES = ("torch", "ai2-olmo", "transformers", "accelerate", "deepspeed", "numpy", "olmo-sparsity")


def command_line() -> str:
    """How this process was started."""
    program, *arguments = sys.argv
    if not program.startswith("olmo-sparsity "):  # which is typed as it stands, python scripts/NAME.py is not
        program = shlex.join([Path(sys.executable).name, program])
    return f"{program} {shlex.join(arguments)}".rstrip()


def provenance() -> dict[str, Any]:
    """Commit, versions, command line, machine and time (UTC) of this process."""
    return {
        "commit": current_commit(),
        "versions": library_versions(),
        "command": command_line(),
        "machine": machine(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the numbers depend on; imports none of them."""
    versions = {"python": platform.python_version(), **dict.fromkeys(LIBRARIES, "not installed")}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def current_commit() -> str:
    """Commit of this code, followed by a + where files were changed since; empty outside a git checkout."""
    # Without optional locks: a run that is killed here must not leave the user's checkout locked.
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    try:
        # Fails for a copy that is installed inside another checkout, as in its .venv: that commit is not of this code.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        commit = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
        is_changed = bool(subprocess.check_output([*git, "status", "--porcelain", "-uno"]))
        return f"{commit}+" if is_changed else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def available_cpus() -> set[int]:
    """The numbers of the CPUs this process may use; inside a SLURM job these are the job's, not the machine's."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many CPU cores this process may use."""
    return len(available_cpus())


def processor_features() -> list[str]:
    """Those of `FEATURES` that this processor has; none where the system does not say."""
    about = _first_values("/proc/cpuinfo")
    flags = about.get("flags", about.get("Features", "")).split()
    return [name for name in FEATURES if name in flags]


def pick_device(name: str | None) -> Any:
    """The `torch.device` of this name; None: a GPU where there is one. Raises `UserError` where it is not there."""
    import torch

    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise UserError(f"there is no device {name!r}; give cpu, cuda, or cuda:1 and so on") from error
    if device.type != "cpu" and not (device.type == "cuda" and has_gpu):
        raise UserError(f"the device {name!r} cannot be used here; give another --device, such as cpu")
    return device


@cache
def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of at most 32 MB, its own limit; other C libraries are left as they are.

    By default it gives large blocks back at once, so that every pass of a model on a CPU faults its pages in again,
    which took a third of a measurement of a small model. Larger ones, if kept, are cut by smaller ones that stay: a
    measurement at N 4,096 then took 4 to 12 GB.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 25)
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_TOP_PAD, 1 << 26)


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
