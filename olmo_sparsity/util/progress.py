"""Progress of long work: a bar in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

SECONDS_BETWEEN_LINES = 15.0
SCALED_FROM = 100_000
"""From this many units on, they are shown in thousands, millions and so on."""

Advance = Callable[..., None]


class _Lines:
    """Standard error as a log file: every refresh of a bar becomes a line."""

    def write(self, text: str) -> None:
        if line := " ".join(text.split()):
            print(line, file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def progress(
    description: str, total: int, unit: str, *, done: int = 0, enabled: bool = True, estimates: bool = True
) -> Iterator[Advance]:
    """Show progress on standard error while the block runs; yields ``advance(n=1, note="")``.

    ``total`` and ``done`` count ``unit``s (plural, "targets"); ``done`` is what an earlier run finished.
    In a terminal this is a bar with rate and time left; elsewhere a line every 15 seconds, so that a SLURM
    log stays readable. ``enabled=False`` shows nothing. ``n`` may be a part of a unit.
    ``estimates``: show rate and time left, for work whose steps are alike; else the note has what is known of them.
    """
    is_scaled = total >= SCALED_FROM
    done_of_total = "{n_fmt}/{total_fmt}{unit}" if is_scaled else "{n:.0f}/{total:.0f}{unit}"
    times = "{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}" if estimates else "{elapsed}{postfix}"
    layout: dict[str, Any] = {
        "dynamic_ncols": True,
        "bar_format": "{l_bar}{bar}| " + done_of_total + " [" + times + "]",
    }
    log_beside_bar: AbstractContextManager[None] = logging_redirect_tqdm()
    if not sys.stderr.isatty():
        log_beside_bar = nullcontext()
        times = ", {rate_noinv_fmt}, {remaining} left{postfix}" if estimates else ", {elapsed}{postfix}"
        line = "{desc}: " + done_of_total + times
        layout = {"file": _Lines(), "bar_format": line, "delay": SECONDS_BETWEEN_LINES}
        layout |= {"mininterval": SECONDS_BETWEEN_LINES, "maxinterval": SECONDS_BETWEEN_LINES}
    bar_of_work = tqdm(
        desc=description,
        total=total,
        initial=done,
        unit=f" {unit}",
        unit_scale=is_scaled,
        miniters=0,
        disable=not enabled,
        **layout,
    )
    with log_beside_bar, bar_of_work as bar:

        def advance(n: float = 1, note: str = "") -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(n)

        yield advance


def duration(seconds: float) -> str:
    """A time in words, to two digits at most: "8 s", "9 min", "2.5 h"."""
    if seconds < 99.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 99.5 * 60:
        return f"{round(seconds / 60)} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:,.0f} h"
