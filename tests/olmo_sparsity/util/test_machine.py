from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from olmo_sparsity.util import provenance as module
from olmo_sparsity.util.provenance import FEATURES, machine


def test_the_machine_is_what_the_system_says() -> None:
    found = machine()
    told = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    assert found["processor"] in told
    flags = next(line for line in told.splitlines() if line.startswith("Flags:")).split()[1:]
    assert set(found["features"]) == set(FEATURES) & set(flags)
    assert found["cores"] == len(os.sched_getaffinity(0)) and found["threads"] == torch.get_num_threads()
    assert torch.cuda.is_available() or (found["gpu"], found["driver"]) == (None, None)


def test_it_imports_no_torch_and_needs_no_files_of_the_kernel(tmp_path: Path) -> None:
    code = (
        "import sys; from olmo_sparsity.util.provenance import machine; assert machine()['threads'] is None; "
    )
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)
    assert module._first_values(str(tmp_path / "none")) == {}
    (tmp_path / "cpuinfo").write_text("model name\t: a\nflags : x y\n\nmodel name\t: b: c\n")
    assert module._first_values(str(tmp_path / "cpuinfo")) == {"model name": "a", "flags": "x y", "": ""}
