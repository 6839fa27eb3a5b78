"""What a measurement prints when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from analysis.stats.tables import print_whole


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
            console.print(part)
        console.print()
    if written := ", ".join(map(str, paths)):
        console.print(f"wrote {written}", markup=False)
