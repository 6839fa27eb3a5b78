"""Figure 2 from records: mean loss and recovery against the number k of influential far tokens.

example:
  python scripts/figure2.py runs/demo/influence

reads the records that scripts/influence.py wrote (no model is needed), writes figure2.png, figure2.pdf and
summary.json beside them and prints the numbers. It takes seconds and may be repeated at will: the same
records and seed give the same files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from analysis.plots import figure2, save_figure
from analysis.records import load_records
from analysis.statistics import DEFAULT_RESAMPLES
from analysis.summary import render_table, summarize, write_summary
from olmo_sparsity.errors import UserError, run_script

LEAST_RESAMPLES = 1000


def main() -> None:
    """Read the records, then write and print what they say."""
    arguments = _parser().parse_args()
    if arguments.resamples < LEAST_RESAMPLES:
        raise UserError(f"--resamples {arguments.resamples} is too few for 95 % intervals; give 1000 or more")
    records = load_records(arguments.records)
    summary = summarize(records, arguments.resamples, arguments.seed, k_of_bins=arguments.k)
    folder = arguments.out or arguments.records
    write_summary(summary, folder / "summary.json")
    paths = [*save_figure(figure2(summary), folder), folder / "summary.json"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(render_table(summary))
    console.print(f"wrote {', '.join(map(str, paths))}", markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "records", type=Path, metavar="RECORDS", help="folder that scripts/influence.py wrote"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: the records folder)"
    )
    parser.add_argument(
        "--k", type=int, help="k of panel (c), one that was measured (default: 4, or the closest to it)"
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=DEFAULT_RESAMPLES,
        help="bootstrap resamples of documents, at least 1000 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: %(default)s)")
    return parser


if __name__ == "__main__":
    run_script(main)
