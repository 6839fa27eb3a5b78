"""What scripts of studies in `results/` share: their options, and the loop of those that have minutes of one GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

MARGIN = 1.3
"""The next batch may take so many times as long as the longest one so far."""


def study_parser(description: str | None, records: Path, *, figures: bool = False) -> argparse.ArgumentParser:
    """A parser with --records and --numbers, and --figures where the script draws some.

    ``description``: the script's docstring, printed as it is; ``records``: the folder that is read by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the records (default: that of this page)"
    parser.add_argument("--records", type=Path, default=records, metavar="DIR", help=folder)
    numbers = "file to write all numbers to (default: none is written)"
    parser.add_argument("--numbers", type=Path, metavar="CSV", help=numbers)
    if figures:
        drawn = "folder to draw the figures into (default: none are drawn)"
        parser.add_argument("--figures", type=Path, metavar="DIR", help=drawn)
    return parser


def in_turn_until(end: float, orders: Mapping[Path, Sequence[int]]) -> Iterator[tuple[Path, int]]:
    """Each text in turn with the number of its next batch, until one has none left or another batch may end too late.

    How long a batch takes is measured from one to the next.

    Args:
        end: in seconds, as `time.monotonic` counts.
        orders: numbers of the batches of each text.
    """
    longest = 0.0
    numbers = {text: iter(order) for text, order in orders.items()}
    for text in cycle(numbers):
        number = next(numbers[text], None)
        began = time.monotonic()
        if number is None or began + MARGIN * longest > end:
            return
        yield text, number
        longest = max(longest, time.monotonic() - began)
