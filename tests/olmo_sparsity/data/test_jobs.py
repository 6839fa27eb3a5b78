"""Work that is spread over processes ends, whatever happens to one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.processes import SECONDS, started

ROOT = Path(__file__).parents[3]


def interrupt_and_die(parent: int, content: bytes) -> None:
    """Ctrl-C, which reaches a worker, too, that does not ignore it yet."""
    os.kill(parent, signal.SIGINT)
    os._exit(1)


def work(content: bytes) -> None:
    """For longer than anybody waits."""
    time.sleep(3600)


def test_ctrl_c_ends_it_though_a_worker_dies_of_it():
    """Jobs that hold more than a pipe are waiting then, as with the hashes of a large held-out split."""
    code = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from olmo_sparsity.data.jobs import run_jobs
from tests.olmo_sparsity.data.test_jobs import interrupt_and_die, work
shutdown = ProcessPoolExecutor.shutdown
def late(pool, **options):
    time.sleep(1)  # as on a busy machine
    shutdown(pool, **options)
ProcessPoolExecutor.shutdown = late
content = bytes(1 << 20)
run_jobs([partial(interrupt_and_die, os.getpid(), content), *[partial(work, content)] * 8], 2, "dying")
"""
    command = [sys.executable, "-c", code]
    with started(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT, errors
    assert "Exception in thread" not in errors
