"""Safetensors files that are hashed while they are written, against the library's writer."""

from hashlib import sha256

import pytest
import torch
from safetensors.torch import save_file

from olmo_sparsity import tensor_files
from olmo_sparsity.tensor_files import load_tensors, write_tensors
from tests.support.refusals import refused


def tensors():
    generator = torch.Generator().manual_seed(0)
    kinds = [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.bool,
        torch.uint8,
        torch.float16,
    ]
    of_kinds = {f"b.{kind}|é": (torch.randn(3, 5, generator=generator) * 9).to(kind) for kind in kinds}
    return {
        **of_kinds,
        "a number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(7, 5, generator=generator).T,
        "part": torch.randn(20, generator=generator)[3:11:2],
    }


@pytest.mark.parametrize("chunk_bytes", [1 << 24, 7])
def test_bytes_are_the_librarys_and_the_checksum_is_of_them(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", chunk_bytes)
    written = write_tensors(tmp_path / "ours", tensors())
    save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert written == sha256((tmp_path / "ours").read_bytes()).hexdigest()


def test_no_tensors(tmp_path):
    write_tensors(tmp_path / "none", {})
    assert load_tensors(tmp_path / "none", "") == {}


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    write_tensors(tmp_path / "cut", tensors())
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    for name in ("cut", "missing"):
        with refused(f"{name} cannot be read .*; copy it again"):
            load_tensors(tmp_path / name, "copy it again")
