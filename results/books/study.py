"""The numbers of this page that need several results: python results/books/study.py

Prints net recovery of every cell alone and of both runs together, and the paired differences of the runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import Result, load_study
from analysis.stats.comparisons import result_differences
from analysis.stats.numbers import persistence, recovery, shares
from analysis.stats.tables import interval_text

HERE = Path(__file__).parent
SELECTOR = "leave-one-out-kl"
RESAMPLES = 10_000
"""Of the numbers of the page's tables; those of the differences are from 2,000."""
FEW = 30
"""Recoveries of fewer targets over tau are not printed."""


def show(name: str, result: Result) -> None:
    """Print targets over tau, the mean gain, and recovery of every selector at every k, in per cent."""
    print(f"\n{name}: {len(result.over):,} of {len(result.targets):,} over tau")
    of_all = [numbers(result, resamples=RESAMPLES) for numbers in (shares, persistence)]
    for row in pd.concat(of_all).to_dict("records"):
        print(f"  {row['name']} {interval_text(row, digits=3)}")
    if len(result.over) < FEW:
        return
    for row in recovery(result, resamples=RESAMPLES).to_dict("records"):
        shown = interval_text(row, percent=True, digits=0)
        print(f"  {row['selector']} {row['far_context']} k={row['k']}: {shown} %")


def compare(first: Result, second: Result) -> None:
    """Print paired differences of two models on the same targets, first minus second."""
    for column in ("text", "position"):
        assert first.targets[column].equals(second.targets[column]), "other targets"
    frame = result_differences(first, second, selectors=(SELECTOR, SELECTOR))
    print("\nSeed 1 minus seed 2, paired")
    for name, title in (("share_over_tau", "over"), ("gain_nats", "gain")):
        [row] = frame[frame["name"] == name].to_dict("records")
        print(f"  {title}: {interval_text(row, digits=4)}")
    recoveries = frame[frame["name"] == "recovery"].astype({"k": int})
    for row in recoveries.sort_values("k", kind="stable").to_dict("records"):
        print(f"  {SELECTOR} {row['far_context']} k={row['k']}: {interval_text(row, digits=4)}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    study = load_study(parser.parse_args(arguments).records)
    for cell, result in study.items():
        show(cell, result)
    for cell in [cell for cell in study if cell.endswith("seed-1") and cell[:-1] + "2" in study]:
        both = [study[cell], study[cell[:-1] + "2"]]
        show(f"{cell.removesuffix('-seed-1')}, both runs", Result.join(both))
    compare(study["n128-m32-seed-1"], study["n128-m32-seed-2"])


if __name__ == "__main__":
    main()
