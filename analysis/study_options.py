"""The options that all scripts of studies in `results/` have, which print their page's numbers from its records."""

from __future__ import annotations

import argparse
from pathlib import Path


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
