"""A real SLURM on this machine for the tests that need one, started where that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import SECONDS

START = Path(__file__).parents[3] / "shared" / "slurm" / "start.sh"


def start() -> None:
    """Make sure that sbatch works here; skip the test where it cannot."""
    if shutil.which("sbatch") and _answers():
        return
    if not START.is_file() or os.geteuid() != 0:
        pytest.skip(f"no SLURM answers here, and it takes root and {START} to start one")
    # `nproc` in it believes OMP_NUM_THREADS, and SLURM would get so few cores
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if subprocess.run(["bash", str(START)], timeout=300, env=environment).returncode or not _answers():
        pytest.skip(f"{START} could not start SLURM")


def _answers() -> bool:
    command = ["sinfo", "--noheader", "--format=%T"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    return result.returncode == 0 and any(state in result.stdout for state in ("idle", "mixed", "allocated"))


def cores() -> int:
    """Cores of the node."""
    command = ["sinfo", "--noheader", "--format=%c"]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout.split()[0]
    )


def job(number: str) -> dict[str, str]:
    """What SLURM says about a job, by its own names: JobState, Restarts, ExitCode, …"""
    text = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", number],
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
    ).stdout
    return dict(item.partition("=")[::2] for item in text.split() if "=" in item)


def wait_for(what, condition, seconds: float = 120.0) -> None:
    """Wait until ``condition()``; fails with ``what`` after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


def wait_for_end(number: str, seconds: float = 120.0) -> dict[str, str]:
    """Wait until a job is over; returns what SLURM says about it."""
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    wait_for(f"end of job {number}", lambda: job(number)["JobState"] in ended, seconds)
    return job(number)


def process_of(number: str, rank: int) -> int:
    """The id of the process of a job's training that has this rank."""
    variables = {f"SLURM_JOB_ID={number}", f"RANK={rank}"}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            is_python = "python" in (folder / "comm").read_text()
        except OSError:  # it has ended, or is another user's
            continue
        if is_python and variables <= set(environment):
            return int(folder.name)
    raise AssertionError(f"job {number} has no process of rank {rank}")


def start_now(number: str) -> None:
    """Let a requeued job start soon; SLURM would wait two minutes.

    That wait is for what is left of the first start: one that begins in the same second gets its exit code.
    """
    wait_for("requeue", lambda: job(number)["JobState"] == "PENDING")
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True, timeout=SECONDS)
