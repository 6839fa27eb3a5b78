"""Commands as processes forked from one that has imported everything: each starts in a moment instead of in seconds.

To a training they are processes of `torchrun` or `srun`, which say in the environment alone who is who. A fault can be
put into one of them, at a moment of its life.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.processes import SECONDS

ROOT = Path(__file__).parents[2]
# The second and third are what DeepSpeed and Accelerate import late.
IMPORTS = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers",
    "olmo_sparsity.data.prepare",
    "olmo_sparsity.training.loop",
    "olmo_sparsity.training.zero",
    "analysis.measuring",
]
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
"""Audit events of a change of a file, beside opening one to write."""


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ranks(count: int) -> list[dict[str, str]]:
    """What a launcher would put into the environment of each of ``count`` processes."""
    if count == 1:
        return [{}]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    every = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in environment.items()} for environment in every]


class Forked:
    """Processes of a command that work together, with the methods that `subprocess.Popen` has for one.

    Used as a context manager it ends those that are left.
    """

    def __init__(
        self,
        count: int,
        arguments: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        of_rank_1: tuple[str, ...] = (),
        *,
        command: str = "train",
        faults: dict[int, dict[str, Any]] | None = None,
    ):
        """Start ``count`` processes; what they print goes through files in ``folder``.

        Each leads a process group, so that a signal reaches its children too. ``of_rank_1``: more arguments;
        ``faults``: by rank, arguments of `_arm`.
        """
        self.printed = [tempfile.mkstemp(dir=folder, suffix=".txt")[1] for _ in ("output", "errors")]
        self.exit_codes: dict[int, int | None] = {}
        for number, rank in enumerate(ranks(count)):
            words = [*arguments, *(of_rank_1 if number == 1 else ())]
            order = {"command": command, "arguments": words, "printed": self.printed}
            order["fault"] = (faults or {}).get(number)
            self.exit_codes[_server().ask(environment={**rank, **(environment or {})}, **order)] = None

    @property
    def running(self) -> list[int]:
        """Ids of the processes that have not ended."""
        for process, code in self.exit_codes.items():
            if code is None:
                self.exit_codes[process] = _server().ask(exit_code_of=process)
        return [process for process, code in self.exit_codes.items() if code is None]

    @property
    def returncode(self) -> int | None:
        """An exit code that is not 0, where there is one; None until all have ended."""
        return None if self.running else next(filter(None, self.exit_codes.values()), 0)

    def terminate(self) -> None:
        """End every process with its children, also one that saves on SIGTERM or waits for another."""
        for process in self.running:
            os.killpg(process, signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end of all; what they printed. Raises `subprocess.TimeoutExpired` after so many seconds."""
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            time.sleep(0.02)
        output, errors = (Path(path).read_text() for path in self.printed)
        if self.running:
            raise subprocess.TimeoutExpired("training", timeout, output, errors)
        return output, errors


class _Server:
    """The process that they are forked from, seen from here; it ends when this one does."""

    def __init__(self) -> None:
        answers, write_end = os.pipe()  # standard output belongs to what is imported
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked", str(write_end)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            pass_fds=[write_end],
        )
        os.close(write_end)
        self.answers = os.fdopen(answers)

    def ask(self, **order: Any) -> Any:
        """Have an order of `_serve` done; the answer."""
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        is_answered, _, _ = select.select([self.answers], [], [], SECONDS)
        assert is_answered, f"the process that commands are forked from says nothing for {SECONDS:.0f} s"
        answer = self.answers.readline()
        assert answer, "the process that commands are forked from has ended; it says above why"
        return json.loads(answer)


_server = cache(_Server)


def _serve(answers: int) -> None:
    """Answer orders: the id of a new process, or the exit code of one, None while it runs."""
    for name in IMPORTS:
        importlib.import_module(name)
    running = set()
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if "exit_code_of" in order:
                ended, status = os.waitpid(order["exit_code_of"], os.WNOHANG)
                running.discard(ended)
                answer = os.waitstatus_to_exitcode(status) if ended else None
            elif (answer := os.fork()) == 0:
                running.clear()
                os.close(answers)
                _become(**order)
            else:
                with suppress(OSError):  # it does so itself; here before anybody signals to its group
                    os.setpgid(answer, answer)
                running.add(answer)
            os.write(answers, f"{json.dumps(answer)}\n".encode())
    finally:  # the tests have ended, or were interrupted
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def _become(
    command: str,
    arguments: list[str],
    environment: dict[str, str],
    printed: list[str],
    fault: dict[str, Any] | None,
) -> None:
    """Become a script of this project, which leaves by SystemExit."""
    os.setpgid(0, 0)
    for descriptor, path in enumerate(["/dev/null", *printed]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    os.environ.update(environment)
    sys.argv = [f"scripts/{command}.py", *arguments]
    if fault is not None:
        _arm(**fault)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _arm(
    log: str, beneath: str, kind: str, room: int = 0, change: int | None = None, seconds: float | None = None
) -> None:
    """Let a fault happen before the n-th ``change`` of a file ``beneath`` a folder, or some ``seconds`` from now.

    ``kind``: kill (this process and its children), full-disk (from then on no file can grow beyond ``room`` bytes),
    stale (this process stands still), or none. Every change leaves a byte in the file ``log``.
    """
    noted = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    count = 0

    def strike() -> None:
        if kind == "kill":
            os.killpg(0, signal.SIGKILL)
        elif kind == "full-disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        elif kind == "stale":
            os.kill(os.getpid(), signal.SIGSTOP)

    def note(event: str, values: tuple[Any, ...]) -> None:
        nonlocal count
        opens = event == "open" and isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
        if not (opens or event in CHANGES) or isinstance(values[0], int):
            return
        if os.path.abspath(os.fsdecode(values[0])).startswith(beneath):
            count += 1
            os.write(noted, b".")
            if count == change:
                strike()

    if seconds is not None:
        timer = threading.Timer(seconds, strike)
        timer.daemon = True
        timer.start()
    sys.addaudithook(note)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
