"""The numbers of this page, from the records in this folder; no model is needed.

    python results/books/study.py
    python results/books/study.py --numbers results/books/numbers.csv

Prints recoveries of every cell alone and of both runs together, the paired differences of the runs, and of the largest
cell all numbers, as `olmo-sparsity figure2` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import Result, load_study
from analysis.stats.comparisons import refuse_other_targets, result_differences
from analysis.stats.numbers import persistence, recovery, shares
from analysis.stats.summary import every_number, summary
from analysis.stats.tables import interval_text, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
SELECTOR, K = "leave-one-out-kl", 4
LARGEST = "n128-m32, both runs"
RESAMPLES = 10_000
"""Of the numbers of the page's tables; those of the differences are from 2,000."""
FEW = 30
"""Recoveries of fewer targets over tau are not printed."""


def print_cell(name: str, result: Result) -> pd.DataFrame:
    """Print targets over tau, the mean gain, and recovery of every selector at every k, in per cent; returns them."""
    print(f"\n{name}: {len(result.over):,} of {len(result.targets):,} over tau")
    of_all = pd.concat([numbers(result, resamples=RESAMPLES) for numbers in (shares, persistence)])
    for row in of_all.to_dict("records"):
        print(f"  {row['name']} {interval_text(row, digits=3)}")
    if len(result.over) < FEW:
        return of_all
    recoveries = recovery(result, resamples=RESAMPLES)
    for row in recoveries.to_dict("records"):
        shown = interval_text(row, percent=True, digits=0)
        print(f"  {row['selector']} {row['far_context']} k={row['k']}: {shown} %")
    return pd.concat([of_all, recoveries])


def compare(first: Result, second: Result) -> pd.DataFrame:
    """Print paired differences of two models on the same targets, first minus second; returns them."""
    refuse_other_targets(first, second)
    frame = result_differences(first, second, selectors=(SELECTOR, SELECTOR))
    print("\nSeed 1 minus seed 2, paired")
    for name, title in (("share_over_tau", "over"), ("gain_nats", "gain")):
        [row] = frame[frame["name"] == name].to_dict("records")
        print(f"  {title}: {interval_text(row, digits=4)}")
    recoveries = frame[frame["name"] == "recovery"].astype({"k": int})
    for row in recoveries.sort_values("k", kind="stable").to_dict("records"):
        print(f"  {SELECTOR} {row['far_context']} k={row['k']}: {interval_text(row, digits=4)}")
    return frame


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    study = load_study(given.records)
    results = dict(study)
    for cell in [cell for cell in study if cell.endswith("seed-1") and cell[:-1] + "2" in study]:
        both = [study[cell], study[cell[:-1] + "2"]]
        results[f"{cell.removesuffix('-seed-1')}, both runs"] = Result.join(both)
    frames = {name: print_cell(name, result) for name, result in results.items()}
    frames["seed 1 minus seed 2"] = compare(study["n128-m32-seed-1"], study["n128-m32-seed-2"])
    print(f"\n{LARGEST}, all numbers\n{summary(results[LARGEST], K, resamples=RESAMPLES)}")
    if given.numbers:
        # no page shows those by bins of the target, which would be most of the rows
        frames[LARGEST] = every_number(
            {"": results[LARGEST]}, K, without=["target_bins"], resamples=RESAMPLES
        )
        save_numbers(given.numbers, frames)


if __name__ == "__main__":
    main()
