"""Freed memory is used again without a page fault."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from olmo_sparsity.util.memory import keep_freed_memory
if {kept}: keep_freed_memory()
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_block_that_was_freed_is_not_faulted_in_again():
    def faults(kept):
        return int(subprocess.check_output([sys.executable, "-c", FAULTS.format(kept=kept)], text=True))

    assert faults(kept=True) < 100 < faults(kept=False)
