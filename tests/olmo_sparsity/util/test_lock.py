"""One process at a time on a folder: refused while the holder lives, free as soon as it is gone."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from olmo_sparsity.util import lock
from olmo_sparsity.util.lock import LOCK_NAME, folder_lock
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from olmo_sparsity.util.lock import folder_lock
with folder_lock(sys.argv[1], part=sys.argv[2] or None):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hold():
    """Start a process that holds a folder."""
    started = []

    def start(folder, part=""):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), part], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_second_comer_gets_one_line_and_a_kill_releases(tmp_path, hold):
    first = hold(tmp_path)
    with refused(f"in use by process {first.pid} on .*last seen"):  # noqa: SIM117
        with folder_lock(tmp_path):
            raise AssertionError("two processes hold one folder")
    first.send_signal(signal.SIGKILL)
    first.wait()
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK_NAME).is_file()
    assert not any(tmp_path.iterdir())


def test_it_is_released_by_another_thread_than_took_it(tmp_path):
    """As a run of several processes does."""
    with ExitStack() as held, ThreadPoolExecutor(1) as pool:
        pool.submit(held.enter_context, folder_lock(tmp_path)).result()
        assert (tmp_path / LOCK_NAME).is_file()
    assert not (tmp_path / LOCK_NAME).exists()


def test_parts_work_side_by_side_and_exclude_the_whole(tmp_path, hold):
    hold(tmp_path, "1-of-2")
    with folder_lock(tmp_path, part="2-of-2"):
        pass
    for part in (None, "1-of-2"):
        with refused("in use"), folder_lock(tmp_path, part=part):
            pass


def test_the_whole_excludes_parts(tmp_path, hold):
    hold(tmp_path)
    with refused("in use"), folder_lock(tmp_path, part="1-of-2"):
        pass


def foreign_lock(folder):
    """The lock of a process on another machine, as it would look here."""
    owner = lock.SoftFileLease(folder / LOCK_NAME, lease_duration=lock.LEASE_SECONDS)
    owner.acquire()
    text = (folder / LOCK_NAME).read_text()
    owner.release()
    (folder / LOCK_NAME).write_text(text.replace(f"host={os.uname().nodename}", "host=elsewhere"))
    assert "host=elsewhere" in (folder / LOCK_NAME).read_text()


def test_a_lock_of_another_machine_is_waited_for_until_its_lease_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 1.5)
    foreign_lock(tmp_path)
    start = time.monotonic()
    with folder_lock(tmp_path):
        assert time.monotonic() - start > 1


def test_a_lock_that_another_machine_renews_is_refused(tmp_path, monkeypatch):
    foreign_lock(tmp_path)
    monkeypatch.setattr(lock, "_SECONDS_BETWEEN_LOOKS", 0.05)
    seen = iter(range(100))
    monkeypatch.setattr(lock, "_renewed", lambda path: next(seen) // 4)
    with refused("on elsewhere"), folder_lock(tmp_path):
        pass


def test_a_holder_whose_lock_was_taken_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.3)
    with refused("taken over"), folder_lock(tmp_path):
        (tmp_path / LOCK_NAME).unlink()
        time.sleep(5)


def test_nothing_is_left_of_a_folder_that_was_made_for_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path / "new"):
        1 / 0  # noqa: B018
    assert not (tmp_path / "new").exists()
