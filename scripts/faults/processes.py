"""Commands as processes forked from this one, which has imported everything: each starts in a moment, not in seconds.

A process can be paused at a chosen moment, so that a fault happens exactly there.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import mmap
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# What the commands import, early or late; no operation of PyTorch runs here, so that threads start in the forks only.
IMPORTS = (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "matplotlib.pyplot",
    "scipy.stats",
    "olmo_sparsity.data.prepare",
    "olmo_sparsity.export",
    "olmo_sparsity.training.loop",
    "olmo_sparsity.training.zero",
    "analysis.engine",
    "analysis.figures.dependencies",
    "analysis.stats.summary",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "MPLBACKEND": "agg",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as commands set it, but read where PyTorch is imported
}
SECONDS_BETWEEN_LOOKS = 0.002
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION_3 = 0x20080522


def import_everything() -> None:
    """Import what the commands need. Call it before the first fork."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    for name in IMPORTS:
        importlib.import_module(name)
    # An interval that is written at once: a command of a second then leaves several parts behind.
    sys.modules["analysis.engine"].SECONDS_WORTH_KEEPING = 0.0  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Moment:
    """A point in the life of a process: before its n-th change of a file, or some seconds after its start."""

    change: int | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s" if self.change is None else f"before change {self.change} of a file"


class Process:
    """One forked process of a command, in a session of its own."""

    def __init__(
        self,
        script: Path,
        arguments: list[str],
        folder: Path,
        environment: dict[str, str],
        moment: Moment | None,
    ):
        self.moment = moment
        self.paused = False
        self.code: int | None = None
        self.lasted = 0.0
        """Seconds from its start to its end."""
        self.errors = b""
        self.changes_made = mmap.mmap(-1, 8)  # shared with the fork
        self.started = time.monotonic()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            pause_before = moment.change if moment else None
            _become(script, arguments, folder, environment, writer, self.changes_made, pause_before)
        os.close(writer)
        os.set_blocking(self.reader, False)

    @property
    def changes(self) -> int:
        """How many changes of files it has begun."""
        return int.from_bytes(self.changes_made[:8], "little")

    def look(self) -> bool:
        """Read its standard error and see whether it was paused; True once it has ended."""
        while text := _read(self.reader):
            self.errors += text
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self.paused = True
            elif pid:
                self.code, self.lasted = os.waitstatus_to_exitcode(status), time.monotonic() - self.started
                self.look()  # what it printed last
        return self.code is not None

    def pause_at_moment(self, seconds: float) -> bool:
        """Wait for its moment, where it is paused; False where it ends before."""
        moment = self.moment
        assert moment is not None
        if moment.change is None:
            wait_until(lambda: self.look() or time.monotonic() - self.started >= moment.seconds, seconds)
            self.signal(signal.SIGSTOP)
        wait_until(lambda: self.look() or self.paused, seconds)
        return self.paused and self.code is None

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False if that takes longer than ``seconds``."""
        return wait_until(self.look, seconds)

    def go_on(self) -> None:
        """End its pause."""
        self.paused = False
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        self.signal(signal.SIGKILL)
        wait_until(self.look, 10.0)

    def signal(self, number: int) -> None:
        """Send a signal to it and to whatever it started."""
        if self.code is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it has not made its session yet

    def close(self) -> None:
        """Leave nothing running and nothing open."""
        if not self.changes_made.closed:
            self.kill()
            os.close(self.reader)
            self.changes_made.close()


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``reached()``; False if that takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return True


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """The JSON value of a function that is run in a fork: threads it starts would make later forks of this one hang."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            answer = {"value": function(*arguments)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.load(file)
    os.waitpid(pid, 0)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(count: int) -> list[dict[str, str]]:
    """What a launcher would put into the environment of each of ``count`` processes."""
    if count == 1:
        return [{}]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
    }
    every = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in each.items()} for each in every]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def _become(
    script: Path,
    arguments: list[str],
    folder: Path,
    environment: dict[str, str],
    errors: int,
    changes_made: mmap.mmap,
    pause_before: int | None,
) -> NoReturn:
    """Run the script to its end, as a Python started for it would."""
    os.setsid()
    atexit._clear()  # what this process is to do at its own end is not for the script
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _obey_file_modes()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor, source in enumerate([null, null, errors]):
        os.dup2(source, descriptor)
    os.chdir(folder)
    os.environ.update(environment)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    sys.argv = [str(script), *arguments]
    _count_changes(folder, changes_made, pause_before)
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _count_changes(folder: Path, changes_made: mmap.mmap, pause_before: int | None) -> None:
    """Count the changes of files beneath ``folder``, and pause this process before one of them."""
    beneath = str(folder.resolve()) + os.sep

    def note(event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = values
            if not isinstance(flags, int) or not flags & _WRITES:
                return
        elif event in _CHANGES:
            path = values[0]
        else:
            return
        if isinstance(path, int) or not os.path.abspath(os.fsdecode(path)).startswith(beneath):
            return
        count = int.from_bytes(changes_made[:8], "little") + 1
        changes_made[:8] = count.to_bytes(8, "little")
        if count == pause_before:
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.addaudithook(note)


def _obey_file_modes() -> None:
    """Give up root's right to write where the modes of files and folders forbid it."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    overriding = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    for number in (0, 1, 2):  # effective, permitted, inheritable
        sets[number] &= ~overriding & 0xFFFFFFFF
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")
