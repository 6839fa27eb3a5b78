"""The numbers of this page that need several results: python results/books/study.py

Prints net recovery of every cell alone and of both trainings together, and the paired differences of the trainings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.result import Result, load_study
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, Statistic, difference
from analysis.stats.measured import ALL, NET, PLACEBO, TRUE, Measured, over_tau_column, recovery_of, sums_of
from analysis.stats.numbers import persistence, recovery, shares
from analysis.stats.sums import Sums

SELECTOR = "leave-one-out-kl"
TOGETHER = 10_000
"""Resamples of the numbers of the page's tables; those of `compare` are from `DEFAULT_RESAMPLES`."""


def main() -> None:
    study = load_study(Path(__file__).parent)
    for cell, result in study.items():
        show(cell, result)
    for cell in [cell for cell in study if cell.endswith("seed-1") and cell[:-1] + "2" in study]:
        both = [study[cell], study[cell[:-1] + "2"]]
        show(f"{cell.removesuffix('-seed-1')}, both trainings", Result.join(both))
    compare(study["n128-m32-seed-1"], study["n128-m32-seed-2"])


def show(name: str, result: Result) -> None:
    """Targets over tau, the mean gain, and recovery of every selector at every k, in per cent."""
    print(f"\n{name}: {len(result.over):,} of {len(result.targets):,} over tau")
    of_all = [
        numbers(result, resamples=TOGETHER) for numbers in (shares, persistence)
    ]  # the latter of crossfits
    for row in pd.concat(of_all).to_dict("records"):
        print(f"  {row['name']} {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}]")
    if len(result.over) < 30:
        return
    for row in recovery(result, resamples=TOGETHER).to_dict("records"):
        numbers = (100 * row[column] for column in ("value", "low", "high"))
        print(
            "  {} {} k={}: {:.0f} [{:.0f}, {:.0f}] %".format(
                row["selector"], row["far_context"], row["k"], *numbers
            )
        )


def compare(first: Result, second: Result) -> None:
    """Paired differences of two models on the same targets, first minus second."""
    for column in ("text", "position"):
        assert np.array_equal(first.targets[column], second.targets[column]), "other targets"
    columns = {"one": np.ones(len(first.targets))}
    for side, result in enumerate((first, second)):
        columns[side, "over"] = over_tau_column(result)
        columns[side, "gain"] = result.gain_nats
        of_side = Measured(result).of_group((side, ALL), result.ks)
        columns |= of_side
    sums = sums_of(first, columns, resamples=DEFAULT_RESAMPLES)
    print("\nSeed 1 minus seed 2, paired")
    for name in ("over", "gain"):
        show_difference(name, sums, [sums.statistic((side, name), "one") for side in (0, 1)])
    for k in first.ks:
        for context in (TRUE, PLACEBO, NET):
            of_sides = [recovery_of(sums, SELECTOR, context, k, (side, ALL)) for side in (0, 1)]
            show_difference(f"{SELECTOR} {context} k={k}", sums, of_sides)


def show_difference(name: str, sums: Sums, of_sides: list[Statistic]) -> None:
    interval = sums.interval(difference(*of_sides))
    print(f"  {name}: {interval.value:.5f} [{interval.low:.5f}, {interval.high:.5f}]")


if __name__ == "__main__":
    main()
