"""Training processes forked from one that has imported everything: each starts in a moment instead of in seconds.

To the training they are processes of `torchrun` or `srun`, which say in the environment alone who is who.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from scripts.faults.processes import ranks

ROOT = Path(__file__).parents[2]
# The second and third are what DeepSpeed and Accelerate import late.
IMPORTS = [
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers",
    "olmo_sparsity.training.loop",
    "olmo_sparsity.training.zero",
]


class Forked:
    """Processes of ``scripts/train.py`` that train together, with the methods that `subprocess.Popen` has for one."""

    def __init__(
        self,
        count: int,
        arguments: list[str],
        folder: Path,
        environment: dict[str, str] | None = None,
        of_rank_1: tuple[str, ...] = (),
    ):
        """Start ``count`` processes; what they print goes through files in ``folder``.

        Each leads a process group, so that a signal reaches its children too. ``of_rank_1``: more arguments.
        """
        self.printed = [tempfile.mkstemp(dir=folder, suffix=".txt")[1] for _ in ("output", "errors")]
        self.exit_codes: dict[int, int | None] = {}
        for number, rank in enumerate(ranks(count)):
            order = {"arguments": [*arguments, *(of_rank_1 if number == 1 else ())], "printed": self.printed}
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

    def send_signal(self, number: int) -> None:
        """Send a signal to every process."""
        for process in self.running:
            os.kill(process, number)

    def terminate(self) -> None:
        """End every process, also one that saves on SIGTERM or waits for another."""
        self.send_signal(signal.SIGKILL)

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
        return json.loads(self.answers.readline())


_server = cache(_Server)


def _serve(answers: int) -> None:
    """Answer orders: the id of a new process, or the exit code of one, None while it runs."""
    for name in IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        if "exit_code_of" in order:
            ended, status = os.waitpid(order["exit_code_of"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            os.close(answers)
            _train(**order)
        os.write(answers, f"{json.dumps(answer)}\n".encode())


def _train(arguments: list[str], environment: dict[str, str], printed: list[str]) -> None:
    """Become ``scripts/train.py``, which leaves by SystemExit."""
    os.setpgid(0, 0)
    for descriptor, path in enumerate(["/dev/null", *printed]):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), descriptor)
    os.environ.update(environment)
    sys.argv = ["scripts/train.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
