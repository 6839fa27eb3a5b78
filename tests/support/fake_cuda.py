"""CUDA tensors on a machine without CUDA: every operation's shape, type and device are computed, none of its numbers.

Two devices or types that do not go together raise, and so does whatever waits for a number: `.item()`, `.tolist()`, a
branch on a tensor, a shape that depends on values. Backward passes are left out: autograd asks for a driver.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.cuda.amp.common
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.processes import SECONDS

DEVICE = torch.device("cuda", 0)
"""With its number: without one PyTorch would ask the driver for it."""


# A build of PyTorch for processors has nothing that could select a CUDA device, and many operations ask for it.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
"""


@cache
def _register_guard() -> None:
    """Let a CUDA device be selected, which does nothing; needs a C++ compiler, and some seconds."""
    if torch.version.cuda is not None:
        return
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("no C++ compiler, such as Debian's g++")
    headers, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{headers}", str(source)]
        subprocess.run([*command, f"-L{libraries}", "-lc10", "-o", str(library)], check=True, timeout=SECONDS)
        ctypes.CDLL(str(library))


@contextmanager
def fake_cuda() -> Iterator[None]:
    """While it runs, new tensors are fake, and PyTorch believes in CUDA far enough for autocast."""
    _register_guard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        patch.setattr(Tensor, "numpy", _numpy)
        patch.setattr(torch, "tensor", _tensor)
        with FakeTensorMode():
            yield


def _numpy(tensor: Tensor) -> np.ndarray:
    """Zeros of the tensor's shape; as in PyTorch, only for one on the CPU."""
    if tensor.device.type != "cpu":
        raise TypeError(f"can't convert {tensor.device} device type tensor to numpy")
    return np.zeros(tensor.shape, dtype=str(tensor.dtype).removeprefix("torch."))


def _tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.tensor`, which makes no fake one in inference mode."""
    kinds = {"b": torch.bool, "i": torch.int64, "f": torch.get_default_dtype()}
    return torch.empty(np.shape(data), dtype=dtype or kinds[np.asarray(data).dtype.kind], device=device)


def on_fake_cuda(model: nn.Module) -> nn.Module:
    """The model with fake CUDA parameters and buffers, shared ones shared; plain attributes stay, so that they show."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made.setdefault(id(tensor), nn.Parameter(empty) if is_parameter else empty)
                    tensors[name] = made[id(tensor)]  # type: ignore[assignment]
    return model


class HostReads(TorchDispatchMode):
    """Notes every operation that makes the processor wait for the device: a number that is read, or a copy to it."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        copies = name == "_to_copy" and args[0].device.type != "cpu" and output.device.type == "cpu"
        if name in self.WAITING or copies:
            self.seen.append(name)
        return output
