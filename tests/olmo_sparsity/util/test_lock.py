"""One process at a time on a folder: refused while the holder lives, free as soon as it is gone."""

import errno
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from olmo_sparsity.util.files import LOCK_NAME, folder_lock
from tests.support.processes import SECONDS, started
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]
HOLD = """
import os, sys, time
from olmo_sparsity.util.files import folder_lock
with folder_lock(sys.argv[1], part=sys.argv[2] or None):
    if not sys.argv[3] or os.fork():  # as for a worker of a data loader
        print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hold():
    """Start a process that holds a folder, and has a forked ``child``, where asked for."""
    with ExitStack() as running:

        def start(folder, part="", child=""):
            command = [sys.executable, "-c", HOLD, folder, part, child]
            process = running.enter_context(started(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            is_held, _, _ = select.select([process.stdout], [], [], SECONDS)
            assert is_held and process.stdout.readline() == "held\n"
            return process

        yield start


def assert_held(folder, part=None):
    with refused(f"{folder} is in use by another process; wait for it"), folder_lock(folder, part=part):
        pass


@pytest.mark.parametrize("child", ["", "with a child"])
def test_the_second_comer_gets_one_line_and_a_kill_releases(tmp_path, hold, child, monkeypatch):
    monkeypatch.setattr("olmo_sparsity.util.files.SECONDS_FOR_PARTS", 0.3)
    first = hold(tmp_path, child=child)
    for part in (None, "1-of-2"):
        assert_held(tmp_path, part)
    first.kill()
    first.wait(SECONDS)
    if child:
        os.killpg(first.pid, 0)  # it lives on
    with folder_lock(tmp_path):
        assert (tmp_path / LOCK_NAME).is_file()
    assert not any(tmp_path.iterdir())


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with folder_lock(tmp_path):
        assert "cannot be locked (Function not implemented)" in caplog.text


def test_it_is_released_by_another_thread_than_took_it(tmp_path):
    """As a run of several processes does."""
    with ExitStack() as held, ThreadPoolExecutor(1) as pool:
        pool.submit(held.enter_context, folder_lock(tmp_path)).result()
        assert_held(tmp_path)
    assert not any(tmp_path.iterdir())


def test_parts_work_side_by_side_and_exclude_the_whole(tmp_path, hold):
    hold(tmp_path, "1-of-2")
    with folder_lock(tmp_path, part="2-of-2"):
        assert_held(tmp_path, "1-of-2")
    assert_held(tmp_path)


@pytest.mark.parametrize("part", [None, "1-of-2"])
def test_nothing_is_left_of_a_folder_that_was_made_for_nothing(tmp_path, part):
    with pytest.raises(ZeroDivisionError), folder_lock(tmp_path / "new", part=part):
        1 / 0  # noqa: B018
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("parts", [[""] * 3, ["1-of-3", "2-of-3", "3-of-3"]])
def test_many_that_come_and_go_are_never_inside_at_once_nor_parts_refused(tmp_path, parts):
    code = """
import os, sys
from contextlib import suppress
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import folder_lock
folder, part = sys.argv[1:]
for _ in range(300):
    with suppress(() if part else UserError), folder_lock(folder, part=part or None):
        os.close(os.open(f"{folder}/inside{part}", os.O_CREAT | os.O_EXCL))
        os.unlink(f"{folder}/inside{part}")
"""
    commands = [[sys.executable, "-c", code, tmp_path, part] for part in parts]
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with ExitStack() as stack:
        processes = [stack.enter_context(started(command, **options)) for command in commands]
        assert [process.communicate(timeout=SECONDS)[1] for process in processes] == [""] * 3
    assert not any(tmp_path.iterdir())
