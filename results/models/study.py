"""The numbers and the figure of this page: what far context gives real models, and how much of it a few tokens hold.

    python results/models/study.py collect runs/models     joins the batches that are measured into this folder
    python results/models/study.py                         prints the tables and draws recovery.png

A run folder of a measurement in shards holds parts/batch-*, each a saved result; those of every fifth batch are spread
over all texts. Intervals are 95 %, by group and text.
"""

import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from analysis import load, load_study
from analysis.parts import stacked
from analysis.result import FRAMES, save_study
from analysis.stats import numbers

HERE = Path(__file__).parent
TEXTS = {"books": "13 novels", "code": "Python source", "releases": "release notes of 2025-09 and later"}
LEVELS = {
    "text": ("text", "token", 0),
    "cache, 4 sinks": ("cache", "token", 4),
    "text, words": ("text", "word", 0),
}
SHOWN = ("leave-one-out-kl", "attention", "h2o", "snapkv", "input-x-gradient", "nearest", "random")


def collect(runs):
    """Write what is measured of every run as a cell of this study, without the texts."""
    study = {}
    for folder in sorted(Path(runs).glob("*-n*")):
        parts = [load(path.parent) for path in sorted(folder.glob("parts/batch-*/result.json"))]
        if parts:
            frames = {name: stacked([getattr(part, name) for part in parts]) for name in FRAMES[:2]}
            seconds = sum(part.provenance["seconds"] for part in parts)
            provenance = {**parts[0].provenance, "seconds": seconds}
            study[folder.name] = replace(parts[0], provenance=provenance, texts=None, trainings=[], **frames)
    save_study(HERE, study)


def percent(row):
    """A share with its interval."""
    return f"{100 * row['value']:.0f} [{100 * row['low']:.0f}, {100 * row['high']:.0f}]"


def shares_by_tau(result):
    """How many targets gain more than tau, and lose more, for several tau; the first is that of the choices."""
    rows = []
    for tau in (1, 2, 4):
        targets = result.targets.assign(over_tau=result.gain_nats > tau)
        at_tau = replace(
            result,
            settings={**result.settings, "tau_nats": tau},
            targets=targets,
            choices=result.choices.iloc[:0],
            trainings=[],
        )
        shares = numbers.shares(at_tau).set_index("name")
        rows.append(
            {
                "tau [nats]": tau,
                "targets": f"{targets['over_tau'].sum()} of {len(targets)}",
                "gain > tau [%]": percent(shares.loc["share_over_tau"]),
                "gain < -tau [%]": percent(shares.loc["share_below_minus_tau"]),
                "of the net gain [%]": percent(shares.loc["share_of_gain"]),
            }
        )
    return pd.DataFrame(rows)


def recovery_table(recovery, level, k):
    """Recovery, placebo and net of every selector at one level and k."""
    of_level = recovery[
        (recovery[["level", "unit", "sinks"]] == LEVELS[level]).all(axis=1) & (recovery["k"] == k)
    ]
    cells = of_level.assign(text=of_level.apply(percent, axis=1))
    table = cells.pivot(index="selector", columns="far_context", values="text")
    return table.reindex(SHOWN)[["true", "placebo", "net"]]


def draw(study):
    """Recovery against k: a row for each cell, a column for each level, placebos dashed."""
    figure, axes = plt.subplots(
        len(study),
        len(LEVELS),
        figsize=(9, 2.6 * len(study)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for row, (cell, result) in zip(axes, study.items(), strict=True):
        recovery = numbers.recovery(result)
        for panel, (level, key) in zip(row, LEVELS.items(), strict=True):
            of_level = recovery[(recovery[["level", "unit", "sinks"]] == key).all(axis=1)]
            for number, selector in enumerate(SHOWN):
                for context, style in (("true", "-"), ("placebo", "--")):
                    line = of_level[(of_level["selector"] == selector) & (of_level["far_context"] == context)]
                    label = selector if context == "true" else None
                    panel.plot(line["k"], 100 * line["value"], style, color=f"C{number}", label=label)
                    if context == "true":
                        panel.fill_between(
                            line["k"], 100 * line["low"], 100 * line["high"], color=f"C{number}", alpha=0.1
                        )
            panel.set_xscale("log", base=2)
            panel.set_xticks(result.ks, map(str, result.ks))
            panel.axhline(0, color="0.7", linewidth=0.8)
            panel.axhline(100, color="0.7", linewidth=0.8)
            panel.set_title(f"{cell}: as {level}", fontsize=9)
        row[0].set_ylabel("recovered gain [%]")
    for panel in axes[-1]:
        panel.set_xlabel("k")
    axes[0, 0].legend(fontsize=7)
    figure.savefig(HERE / "recovery.png", dpi=200)


def main():
    """Print all tables of every cell, and draw the figure."""
    study = load_study(HERE)
    for cell, result in study.items():
        print(f"\n## {cell}: {len(result.over)} targets over 1 nat of {len(result.targets)}\n")
        print(shares_by_tau(result).to_markdown(index=False))
        recovery = numbers.recovery(result)
        for level in LEVELS:
            for k in (4, 16, 64):
                print(f"\nas {level}, k = {k}\n")
                print(recovery_table(recovery, level, k).to_markdown())
    draw(study)


if __name__ == "__main__":
    collect(sys.argv[2]) if sys.argv[1:2] == ["collect"] else main()
