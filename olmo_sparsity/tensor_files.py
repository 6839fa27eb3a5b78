"""Safetensors files: read by the library, written so that their SHA-256 is computed on the way to the disk.

The library's writer gives no checksum, and to read 84 GB of a 7B model again for it takes as long as writing them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from olmo_sparsity.util.errors import UserError

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""The format's names, in the order in which the library sorts them, wide ones first."""
_CHUNK_BYTES = 1 << 24


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file to disk, byte for byte as the library does; returns its SHA-256 in hexadecimal."""
    digest = sha256()
    # Both calls let go of Python's lock: hashing and writing take as long as the slower of them.
    with open(path, "wb") as file, ThreadPoolExecutor(1) as hashing:
        for chunk in _content(tensors):
            hashed = hashing.submit(digest.update, chunk)
            file.write(chunk)
            hashed.result()  # no chunk is held longer than it is written
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, of the one file that `write_tensors` would write."""
    digest = sha256()
    for chunk in _content(tensors):
        digest.update(chunk)
    return digest.hexdigest()


def _content(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of these tensors, in the library's order."""
    order = list(_DTYPES)
    names = sorted(tensors, key=lambda name: (-order.index(tensors[name].dtype), name))
    return chain([_header(tensors, names)], _chunks(tensors, names))


def _header(tensors: dict[str, Tensor], names: list[str]) -> bytes:
    """Names, types, shapes and places of the tensors as JSON, its length before it, filled up to 8 bytes."""
    about = {}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.numel() * tensor.element_size()
        about[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensors: dict[str, Tensor], names: list[str]) -> Iterator[bytes | memoryview]:
    """The bytes of the tensors, little-endian as the machine's; a tensor that is not contiguous is copied alone."""
    for name in names:
        content = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]


def load_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises `UserError`, which ends with ``remedy``, for a missing or damaged one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy}") from error
