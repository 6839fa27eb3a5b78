"""A job that is told to stop saves first: SLURM sends SIGUSR1 before the time limit, SIGTERM when it preempts."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

REQUEUE_EXIT_CODE = 85
"""Exit code of `scripts/train.py` when it saved because of a signal: run the same command again to go on."""


class StoppedBySignal(Exception):
    """The run saved a checkpoint and stopped because a signal asked for it."""


class StopRequest:
    """While the block runs, SIGUSR1 and SIGTERM only set `received`; the loop acts on it at the next step's end."""

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> StopRequest:
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
