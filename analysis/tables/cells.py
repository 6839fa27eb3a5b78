"""What all tables share: cells with intervals, names of selectors, and printing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from olmo_sparsity.util.result_files import Json

_UNLIMITED = 10_000
_NAME_WIDTH = 16


def plain_table(first: str, *further: str) -> Table:
    """A table without lines: text in the first column, numbers at the right of the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(Text(first), no_wrap=True)
    for name in further:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def interval_cell(interval: dict[str, Any], *, scale: float = 1.0, digits: int = 2) -> str:
    """``value [low, high]`` of an `Interval.as_dict`, times ``scale``; a dash for what does not exist."""
    texts = [
        "–" if interval[name] is None else f"{interval[name] * scale:,.{digits}f}"
        for name in ("value", "low", "high")
    ]
    zero = f"{0:.{digits}f}"
    return "{} [{}, {}]".format(*(zero if text == f"-{zero}" else text for text in texts))


def percent_text(interval: Json, digits: int = 0) -> str:
    """``value [low, high]`` in per cent, without the sign."""
    return interval_cell(interval, scale=100.0, digits=digits)


def below(values: Iterable[float], *, scale: float = 1.0, digits: int = 2) -> str:
    """A line below a cell with the value of each training, ``(1.23, 1.31)``; nothing of one."""
    texts = [f"{value * scale:,.{digits}f}" for value in values]
    return f"\n({', '.join(texts)})" if len(texts) > 1 else ""


def name_lines(selector: str, rows: int) -> list[str]:
    """First cells of ``rows`` rows: a screened form's proposer, and the end of a long name, go below, to save width."""
    lines = [line for part in selector.replace("@", "\n@").split("\n") for line in wrap(part, _NAME_WIDTH)]
    lines[rows - 1 :] = ["\n".join(lines[rows - 1 :])]
    return lines + [""] * (rows - len(lines))


def print_whole(console: Console, part: RenderableType) -> None:
    """Print a table, or several; outside a terminal, as in a log, as wide as its cells, so that none is broken."""
    if console.is_terminal:
        console.print(part)
        return
    unlimited = Console(width=_UNLIMITED)
    width = Measurement.get(unlimited, unlimited.options, part).maximum
    Console(width=max(width, console.width), highlight=False).print(part)


def print_result(parts: Iterable[RenderableType], paths: Iterable[Path]) -> None:
    """Print what was found, and which files were written. Titles and captions of tables are whole lines."""
    console = Console(highlight=False, soft_wrap=True)
    for part in parts:
        if isinstance(part, Table):
            title, caption, part.title, part.caption = part.title, part.caption, None, None
            if title is not None:
                console.print(title, style="italic")
            print_whole(console, part)
            if caption is not None:
                console.print(caption, style="dim")
        else:
            print_whole(console, part)
        console.print()
    if written := ", ".join(map(str, paths)):
        console.print(f"wrote {written}", markup=False)
