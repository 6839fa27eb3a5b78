"""Progress of long work: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 15.0

Advance = Callable[..., None]


class _RateColumn(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.1f} {task.fields['unit']}/s" if speed else "", style="progress.data.speed")


@contextmanager
def progress(
    description: str, total: int, unit: str, *, done: int = 0, enabled: bool = True
) -> Iterator[Advance]:
    """Show progress on standard error while the block runs; yields ``advance(n=1, note="")``.

    ``total`` and ``done`` count ``unit``s (plural, "targets"); ``done`` is what an earlier run finished.
    In a terminal this is a bar with rate and time left; elsewhere a line every 15 seconds, so that a SLURM
    log stays readable. ``enabled=False`` shows nothing.
    """
    if not enabled:
        yield lambda n=1, note="": None
    elif sys.stderr.isatty():
        with _bar(description, total, unit, done) as advance:
            yield advance
    else:
        yield _line_writer(description, total, unit, done)


@contextmanager
def _bar(description: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} {task.fields[unit]}"),
        _RateColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as bar:
        task = bar.add_task(description, total=total, completed=done, unit=unit, note="")

        def advance(n: int = 1, note: str = "") -> None:
            bar.update(task, advance=n, note=note)

        yield advance


def _line_writer(description: str, total: int, unit: str, done: int) -> Advance:
    start = last = time.monotonic()
    completed = done

    def advance(n: int = 1, note: str = "") -> None:
        nonlocal last, completed
        completed += n
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES and completed < total:
            return
        last = now
        rate = (completed - done) / max(now - start, 1e-9)
        left = (total - completed) / rate if rate else float("inf")
        line = f"{description}: {completed:,}/{total:,} {unit}, {rate:,.1f} {unit}/s, {left:,.0f} s left"
        print(f"{line}  {note}".rstrip(), file=sys.stderr, flush=True)

    return advance
