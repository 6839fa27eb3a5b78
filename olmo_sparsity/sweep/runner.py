"""The processes of a grid of runs: some cells at a time, stopped and failed ones told apart."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from olmo_sparsity.sweep.grid import LOG_NAME, Cell
from olmo_sparsity.sweep.slurm import words
from olmo_sparsity.util.files import last_line
from olmo_sparsity.util.signals import REQUEUE_EXIT_CODE, StopRequest

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.2
_NOTHING_LOST = (REQUEUE_EXIT_CODE, -signal.SIGTERM, -signal.SIGUSR1)
"""Exit codes of a run that has saved, or was told to stop before it listened or after it had saved; and of
exact_match, which keeps what it has measured."""


@dataclass(frozen=True)
class Outcome:
    """How a cell stands: "running", "finished", "failed", or "stopped" (it goes on with the same command)."""

    cell: Cell
    state: str
    reason: str = ""
    """Of a failure, in one line."""


def run_cells(
    cells: list[Cell],
    *,
    jobs: int,
    environment: Mapping[str, str],
    commit: str,
    report: Callable[[Outcome], None],
) -> None:
    """Run ``jobs`` cells at a time, and ``report`` each that starts or ends; those that never started are not reported.

    On Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP no other cell starts, the running ones get SIGTERM, and this returns when they
    have saved. A cell that fails leaves the others alone. Two sweeps cannot train in one folder: the run locks it.
    """
    waiting = list(cells)
    running: list[_Running] = []
    with _Stop() as stop:
        try:
            while running or (waiting and not stop.received):
                while waiting and len(running) < jobs and not stop.received:
                    cell = waiting.pop(0)
                    report(Outcome(cell, "running"))
                    try:
                        running.append(_Running(cell, environment))
                    except OSError as error:  # its folder cannot be written to
                        report(Outcome(cell, "failed", f"{error.filename}: {error.strerror}"))
                time.sleep(SECONDS_BETWEEN_LOOKS)
                if stop.received:
                    _stop_all(running, stop.received)
                for each in list(running):
                    outcome = each.look(start_more=not stop.received)
                    if outcome is not None:
                        running.remove(each)
                        if outcome.state == "finished":
                            outcome.cell.mark(commit)
                        report(outcome)
        finally:  # none is left without whom to report to, whatever happened here
            _stop_all(running, "an error")
            for each in running:
                each.process.wait()


def _stop_all(running: list[_Running], why: str) -> None:
    told = [each for each in running if each.stop()]
    if told:
        log.info("%s: waiting until %d cells have saved", why, len(told))


class _Stop(StopRequest):
    """A closed terminal too, unless that is ignored, as `nohup` has it."""

    def __init__(self) -> None:
        super().__init__()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self.SIGNALS = (*StopRequest.SIGNALS, signal.SIGHUP)  # type: ignore[assignment]


class _Running:
    """A cell at work: its commands one after the other, which print into its log."""

    def __init__(self, cell: Cell, environment: Mapping[str, str]) -> None:
        cell.folder.mkdir(parents=True, exist_ok=True)
        self.cell, self.environment = cell, environment
        self.left = list(cell.commands)
        self.told_to_stop = False
        self.process = self._start_next()

    def _start_next(self) -> subprocess.Popen[bytes]:
        command = self.left.pop(0)
        with open(self.cell.folder / LOG_NAME, "ab") as log_file:
            log_file.write(f"$ {words(command)}\n".encode())
            log_file.flush()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=self.environment,
                process_group=0,  # Ctrl-C in a terminal is for the sweep alone, which passes it on
            )

    def stop(self) -> bool:
        """Send SIGTERM, once; returns whether it was sent now."""
        if self.told_to_stop:
            return False
        self.process.terminate()
        self.told_to_stop = True
        return True

    def look(self, *, start_more: bool) -> Outcome | None:
        """Its outcome; None while it runs. After a command that succeeded the next one starts if ``start_more``."""
        code = self.process.poll()
        if code is None:
            return None
        if code == 0 and self.left and start_more:
            self.process = self._start_next()
            return None
        if code in _NOTHING_LOST or (code == 0 and self.left):
            return Outcome(self.cell, "stopped")
        if code == 0:
            return Outcome(self.cell, "finished")
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        return Outcome(self.cell, "failed", f"{how}: {last_line(self.cell.folder / LOG_NAME)}")
