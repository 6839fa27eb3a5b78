"""The numbers of this page that need several results: python results/books/study.py

Prints net recovery of every cell alone and of both trainings together, and the paired differences of the trainings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from analysis.api import Result, load_study
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.numbers import persistence, recovery, shares
from analysis.stats.recovery import NET, PLACEBO, TRUE, Measured, over_tau_column

SELECTOR = "leave-one-out-kl"
TOGETHER = 10_000
"""Resamples of the numbers of the page's tables; those of `compare` are from 2,000."""


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
    bootstrap, one = ClusterBootstrap.of(first.targets), np.ones(len(first.targets))
    print("\nSeed 1 minus seed 2, paired")
    for name, columns in (
        ("over", [over_tau_column(result) for result in (first, second)]),
        ("gain", [result.gain_nats for result in (first, second)]),
    ):
        show_difference(name, bootstrap, [bootstrap.ratio(column, one) for column in columns])
    # the same documents, hence the same resamples
    recoveries = [Measured(result).recoveries(SELECTOR) for result in (first, second)]
    for column, k in enumerate(first.ks):
        for context in (TRUE, PLACEBO, NET):
            of_sides = [draws[context][:, column] for draws in recoveries]
            show_difference(f"{SELECTOR} {context} k={k}", bootstrap, of_sides)


def show_difference(name: str, bootstrap: ClusterBootstrap, of_sides: list[np.ndarray]) -> None:
    interval = bootstrap.interval(of_sides[0] - of_sides[1])
    print(f"  {name}: {interval.value:.5f} [{interval.low:.5f}, {interval.high:.5f}]")


if __name__ == "__main__":
    main()
