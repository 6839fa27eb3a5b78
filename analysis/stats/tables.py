"""Numbers with intervals as the cells of a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNLIMITED = 10_000


def interval_cell(interval: dict[str, Any], *, scale: float = 1.0, digits: int = 2) -> str:
    """``value [low, high]`` of an `Interval.as_dict`, times ``scale``; a dash for what does not exist."""
    texts = [
        "–" if interval[name] is None else f"{interval[name] * scale:,.{digits}f}"
        for name in ("value", "low", "high")
    ]
    zero = f"{0:.{digits}f}"
    return "{} [{}, {}]".format(*(zero if text == f"-{zero}" else text for text in texts))


def print_whole(console: Console, table: Table) -> None:
    """Print a table; where nobody watches, as in a log, as wide as its cells are, so that none is cut or broken."""
    if console.is_terminal:
        console.print(table)
        return
    unlimited = Console(width=_UNLIMITED)
    width = Measurement.get(unlimited, unlimited.options, table).maximum
    Console(width=max(width, console.width), highlight=False).print(table)
