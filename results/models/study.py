"""The numbers and the figures of the study: what far context gives real models, and how much of it a few tokens hold.

    python results/models/study.py collect runs/models     joins the batches that are measured into this folder
    python results/models/study.py                         prints the tables and draws a figure of each cell

A run folder of a measurement in shards holds parts/batch-*, each a saved result; those of every fifth batch are spread
over all texts. Intervals are 95 %, by group and text.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

from analysis import load, load_study
from analysis.figures.figure2 import levels_figure
from analysis.parts import stacked
from analysis.result import FRAMES, save_study
from analysis.stats import numbers

HERE = Path(__file__).parent
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


def main():
    """Print all tables of every cell, and draw its figure."""
    study = load_study(HERE)
    for cell, result in study.items():
        print(f"\n## {cell}: {len(result.over)} targets over 1 nat of {len(result.targets)}\n")
        print(shares_by_tau(result).to_markdown(index=False))
        recovery = numbers.recovery(result)
        for level in LEVELS:
            for k in (4, 16, 64):
                print(f"\nas {level}, k = {k}\n")
                print(recovery_table(recovery, level, k).to_markdown())
        levels_figure(result).savefig(HERE / f"{cell}.png", dpi=200)


if __name__ == "__main__":
    collect(sys.argv[2]) if sys.argv[1:2] == ["collect"] else main()
