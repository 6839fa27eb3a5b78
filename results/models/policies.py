"""What a KV cache may drop: the loss of all targets when an eviction policy chooses which far keys and values are left.

    python results/models/policies.py collect runs/models/policies      keeps what is measured in policies/
    python results/models/policies.py                                   prints the tables
    python results/models/policies.py --figures results/models          draws policies.png, too
    python results/models/policies.py --numbers results/models/policies/numbers.csv   writes all numbers, too

run.sh measures: N 256, M 32, B 16; the first four tokens are kept, too. Every target counts, whatever it gains: tau is
so low that all are over it. Intervals are 95 %, by group and text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis import Result, load_study
from analysis.figures import style
from analysis.measurement import save_study
from analysis.stats import numbers
from analysis.stats.recovery import Measured, Row
from analysis.stats.tables import Tables
from analysis.study_options import study_parser

HERE = Path(__file__).parent
RECORDS = HERE / "policies"
SELECTORS = ("h2o", "snapkv", "attention", "nearest", "random")
FIRST = 16  # chosen tokens that the record names; its losses are of all


def collect(runs: str) -> None:
    """Keep every cell, finished or not, without its texts."""
    study = {}
    for folder in sorted(path for path in Path(runs).iterdir() if path.is_dir()):
        result = Result.of_parts(Result.load_parts(folder))
        choices = result.choices
        lists = {name: choices[name].map(lambda row: row[:FIRST]) for name in ("selected", "influence")}
        study[folder.name] = replace(result, choices=choices.assign(**lists), texts=None)
    save_study(RECORDS, study)


def differences(result: Result) -> pd.DataFrame:
    """Tidy: mean loss of each policy minus that of attention, paired, in nats."""
    measured = Measured(result)
    rows: list[Row] = []
    for selector in SELECTORS:
        if selector != "attention":
            apart = measured.losses[selector, "true"] - measured.losses["attention", "true"]
            rows += measured.rows(measured.draws(apart), selector=selector)
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of every cell; write them, and draw all of them, where that is asked for."""
    given = study_parser(__doc__, RECORDS, figures=True).parse_args(arguments)
    study = load_study(given.records)
    figure, panels = plt.subplots(1, len(study), figsize=(8, 3.4), layout="constrained", squeeze=False)
    tables = Tables()
    for axes, (cell, result) in zip(panels[0], study.items(), strict=True):
        title = f"{cell}: {len(result.targets)} targets in {result.targets['group'].nunique()} groups"
        shares = numbers.shares(result)
        means = shares[shares["name"].isin(["loss_long_nats", "loss_short_nats", "gain_nats"])]
        recovery = numbers.recovery(result, selector=SELECTORS)
        tables.add(title, means, percent=False)
        tables.add(f"{cell}, loss", numbers.losses(result), across="k", percent=False)
        tables.add(f"{cell}, share of the gain", recovery, across="k", digits=0)
        apart = differences(result)
        tables.add(f"{cell}, loss less that of attention", apart, across="k", percent=False)
        looks = style.selector_styles(SELECTORS)
        style.draw(axes, recovery, looks, "selector", "k")
        axes.axhline(1.0, linestyle=":", color="0.3")
        axes.axhline(0.0, color="0.3", linewidth=0.8)
        axes.set(title=title, xlabel="far tokens kept", ylim=(-0.6, 1.5))
        axes.set_ylabel("share of mean $L_{short} - L_{long}$")
        style.log_axis(axes, result.ks)
    lines = dict(zip(*reversed(panels[0, 0].get_legend_handles_labels()), strict=True))
    panels[0, 0].legend(lines.values(), lines, fontsize=7, loc="lower right")
    if given.numbers:
        tables.save(given.numbers)
    if given.figures:
        style.save_figure(figure, given.figures, "policies.png")
    plt.close(figure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(sys.argv[2])
    else:
        main()
