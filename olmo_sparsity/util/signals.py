"""A job that gets a signal to stop saves first: SLURM sends SIGUSR1 before the time limit, SIGTERM to end it.

It sends them to every process of a step, as a terminal sends Ctrl-C to every process of a group.
"""

from __future__ import annotations

import atexit
import multiprocessing
import signal
import threading
from types import FrameType

REQUEUE_EXIT_CODE = 85
"""Exit code of `olmo-sparsity train` when it saved because of a signal: run the same command again to go on."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StoppedBySignal(Exception):
    """The run saved a checkpoint and stopped because of a signal."""


class StopRequest:
    """While the block runs, SIGUSR1, SIGTERM and Ctrl-C only set `received`; the loop acts on it after the step.

    A second Ctrl-C interrupts at once. Where Ctrl-C was ignored, as in a shell's background jobs, it stays so; and so
    does any of the signals ``more``, such as SIGHUP under nohup.
    """

    def __init__(self, *more: signal.Signals) -> None:
        self.signals = (*SIGNALS, *more)
        self.received: str | None = None

    def __enter__(self) -> StopRequest:
        self._previous_handlers = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for signal_number in self.signals:
                # SIGUSR1 is ignored by the job scripts until this listens to it
                is_wanted = signal_number in (signal.SIGUSR1, signal.SIGTERM)
                if is_wanted or signal.getsignal(signal_number) is not signal.SIG_IGN:
                    self._previous_handlers[signal_number] = signal.signal(signal_number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(signal_number).name
        if signal_number == signal.SIGINT:
            signal.signal(signal_number, signal.default_int_handler)


def leave_signals_to_main_process(worker: int = 0) -> None:
    """`worker_init_fn` of a data loader: its workers live on while the main process saves, which then ends them."""
    for signal_number in SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Python would send them SIGTERM, and wait for ever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler takes their end for an error
    for worker in workers:
        worker.kill()
