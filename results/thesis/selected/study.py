"""The numbers of the study of chosen training text: scores of documents, and what training on thirds of them gives.

    python results/thesis/selected/study.py                                    prints the tables
    python results/thesis/selected/study.py --figures results/thesis/selected  draws the figure, too
    python results/thesis/selected/study.py --numbers numbers.csv              writes all numbers, too

`collect.py` makes the records of what run.sh has measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from analysis.figures.style import (
    REFERENCE,
    STYLE,
    add_legend,
    draw,
    log_axis,
    model_styles,
    new_figure,
    save_figure,
)
from analysis.probes.length import DIFFERENCE, OF_LENGTH
from analysis.saved import read_head
from analysis.stats.bootstrap import ClusterBootstrap, holm
from analysis.stats.tables import INTERVAL, save_numbers, show
from analysis.study_options import study_parser

HERE = Path(__file__).parent
HEAD, KIND, VERSION = "records.json", "olmo-sparsity records of chosen training text", 1
"""As in `collect.py`: scripts of a study do not import one another, and a test reads what that one writes."""
THIRDS = {"random": "random third", "top": "largest net gain", "easy": "lowest loss"}
SUBSETS = ("top", "easy", "random-2", "random-3", "random-4")
SCORES = ("gain_nats", "net_gain_nats", "long_nats")
QUANTILES = (0.05, 0.25, 1 / 3, 0.5, 2 / 3, 0.75, 0.95)
OUTCOMES = {
    "gain_nats": ("short", "long"),
    "net_gain_nats": ("placebo", "long"),
    "long_nats": ("long", None),
    "short_nats": ("short", None),
}
"""Of each outcome the loss that it is, less another."""
TESTS = (
    ("primary", "gain_nats", "top", "random"),
    ("secondary", "gain_nats", "top", "easy"),
    ("secondary", "long_nats", "top", "random"),
    ("secondary", "long_nats", "top", "easy"),
    ("secondary", "net_gain_nats", "top", "random"),
    ("beside", "short_nats", "top", "random"),
    ("beside", "short_nats", "top", "easy"),
    ("beside", "gain_nats", "easy", "random"),
    ("beside", "long_nats", "easy", "random"),
)


@dataclass(frozen=True)
class Records:
    """What is kept of all cells."""

    scores: pd.DataFrame
    """A row a training document: text (its number), group, tokens, n_targets, gain_nats, net_gain_nats and their
    standard errors (gain_error_nats, net_gain_error_nats), long_nats, and for each of `SUBSETS` how many of its tokens
    that has."""
    losses: pd.DataFrame
    """third, seed, text, group, n_targets, and sums over its targets: short, long, placebo (nats)."""
    positions: pd.DataFrame
    """`analysis.probes.length.LossByPosition.numbers` of the thirds, random first; empty where not measured."""
    about: dict[str, Any]
    """Settings, command, commit and machine of every cell."""

    @classmethod
    def load(cls, folder: Path) -> Records:
        """Those of a folder."""
        head = read_head(folder / HEAD, KIND, VERSION, "collect.py makes it")
        positions = pd.DataFrame()
        if (folder / "positions.parquet").is_file():
            positions = pd.read_parquet(folder / "positions.parquet")
        scores = pd.read_parquet(folder / "scores.parquet")
        losses = pd.read_parquet(folder / "losses.parquet")
        return cls(scores, losses, positions, head["cells"])


# --- scores of documents ---


def score_frame(scores: pd.DataFrame) -> pd.DataFrame:
    """A row a score: mean_nats, deviation_nats over documents, quantiles (q05 …), and reliability.

    Reliability is the share of the variance over documents that is not the error of their means, which is taken to be
    that of independent targets: at most so much. NaN of L_long, whose error is not recorded.
    """
    rows = []
    for name in SCORES:
        values = scores[name]
        row: dict[str, Any] = {"score": name, "mean_nats": values.mean(), "deviation_nats": values.std()}
        for quantile in QUANTILES:
            row[f"q{100 * quantile:02.0f}"] = values.quantile(quantile)
        row["reliability"] = np.nan
        error = name.replace("_nats", "_error_nats")
        if error in scores:
            row["reliability"] = 1 - (scores[error] ** 2).mean() / values.var()
        rows.append(row)
    return pd.DataFrame(rows)


def relation_frame(scores: pd.DataFrame) -> pd.DataFrame:
    """Rank correlations of the net gain over documents: with, spearman."""
    rows = []
    for other in ("gain_nats", "long_nats", "tokens"):
        correlation = spearmanr(scores["net_gain_nats"], scores[other]).statistic
        rows.append({"with": other, "spearman": float(correlation)})
    return pd.DataFrame(rows)


def subset_frame(scores: pd.DataFrame) -> pd.DataFrame:
    """What each subset is made of.

    Columns: subset, documents, packages, tokens, net_gain_nats and long_nats (means over documents), also_top and
    also_easy (shares of its documents), largest_package, its_share (of the tokens).
    """
    rows = []
    for name in SUBSETS:
        chosen = scores[scores[name] > 0]
        by_package = chosen.groupby("group")[name].sum()
        rows.append(
            {
                "subset": name,
                "documents": len(chosen),
                "packages": len(by_package),
                "tokens": int(chosen[name].sum()),
                "net_gain_nats": chosen["net_gain_nats"].mean(),
                "long_nats": chosen["long_nats"].mean(),
                "also_top": (chosen["top"] > 0).mean(),
                "also_easy": (chosen["easy"] > 0).mean(),
                "largest_package": by_package.idxmax(),
                "its_share": by_package.max() / by_package.sum(),
            }
        )
    return pd.DataFrame(rows)


# --- what training on them gives ---


def with_outcomes(losses: pd.DataFrame) -> pd.DataFrame:
    """Losses with a column for each of `OUTCOMES`: its sum over the targets of the row, in nats."""
    sums = {}
    for name, (loss, less) in OUTCOMES.items():
        sums[name] = losses[loss]
        if less is not None:
            sums[name] = losses[loss] - losses[less]
    return losses.assign(**sums)


def mean_frame(losses: pd.DataFrame) -> pd.DataFrame:
    """Means over all held-out targets and seeds: third, name, value, low, high."""
    rows = []
    for third, of_third in with_outcomes(losses).groupby("third", sort=False):
        bootstrap = ClusterBootstrap.of(of_third.assign(run=of_third["seed"]))
        for name in OUTCOMES:
            draws = bootstrap.ratio(of_third[name].to_numpy(), of_third["n_targets"].to_numpy())
            interval = bootstrap.interval(draws)
            rows.append(
                {
                    "third": third,
                    "name": name,
                    "value": interval.value,
                    "low": interval.low,
                    "high": interval.high,
                }
            )
    return pd.DataFrame(rows)


def paired(losses: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """A row a document and seed of both thirds: what it is, and sums of `OUTCOMES` of the first less the second."""
    keys = ["seed", "text", "group", "n_targets"]
    columns = [*keys, *OUTCOMES]
    losses = with_outcomes(losses)
    of_first = losses.loc[losses["third"] == first, columns]
    of_second = losses.loc[losses["third"] == second, columns]
    pairs = of_first.merge(of_second, on=keys, suffixes=("", "_of_second"), validate="one_to_one")
    for name in OUTCOMES:
        pairs[name] -= pairs.pop(f"{name}_of_second")
    return pairs


def difference_frame(losses: pd.DataFrame) -> pd.DataFrame:
    """A row for each of `TESTS`: test, name, first, second, what `difference` gives, and p_holm of the secondary."""
    rows = []
    for test, name, first, second in TESTS:
        pairs = paired(losses, first, second)
        if len(pairs):
            rows.append(
                {"test": test, "name": name, "first": first, "second": second, **difference(pairs, name)}
            )
    frame = pd.DataFrame(rows)
    frame.insert(frame.columns.get_loc("p") + 1, "p_holm", np.nan)
    is_secondary = frame["test"] == "secondary"
    frame.loc[is_secondary, "p_holm"] = holm(frame.loc[is_secondary, "p"].to_numpy())
    return frame


def difference(pairs: pd.DataFrame, name: str) -> dict[str, float]:
    """The mean over targets and seeds of an outcome of the first third less that of the second, see `paired`.

    value, low, high, p (by package and seed); detectable (the smallest difference that would have been shown in four of
    five cases); low_by_package and high_by_package (of these trainings alone); seed_2 … (the value of each seed).
    """
    sums = pairs[name].to_numpy()
    count = pairs["n_targets"].to_numpy()
    bootstrap = ClusterBootstrap.of(pairs.assign(run=pairs["seed"]))
    draws = bootstrap.ratio(sums, count)
    interval = bootstrap.interval(draws)
    by_package = ClusterBootstrap.of(pairs)
    of_these = by_package.interval(by_package.ratio(sums, count))
    row = {
        "value": interval.value,
        "low": interval.low,
        "high": interval.high,
        "p": bootstrap.p_value(draws),
        "detectable": bootstrap.detectable(draws),
        "low_by_package": of_these.low,
        "high_by_package": of_these.high,
    }
    for seed, of_seed in pairs.groupby("seed"):
        row[f"seed_{seed}"] = of_seed[name].sum() / of_seed["n_targets"].sum()
    return row


# --- output ---


@matplotlib.rc_context(STYLE)
def figure(records: Records, differences: pd.DataFrame) -> Figure:
    """Net gains of the documents of every third, differences to the random third, and these by position."""
    looks = model_styles(THIRDS.values())
    drawn = new_figure(6.75, 2.6)
    of_documents, of_outcomes, of_positions = drawn.subplots(1, 3)
    for third, label in THIRDS.items():
        subset = "random-2" if third == "random" else third  # one draw of three stands for all
        chosen = records.scores.loc[records.scores[subset] > 0, "net_gain_nats"]
        of_documents.ecdf(
            chosen, label=label, color=looks[label]["color"], linestyle=looks[label]["linestyle"]
        )
    of_documents.set(xlabel="net gain of a document [nats]", ylabel="share of documents")
    names = ["gain_nats", "long_nats"]
    shown = differences[(differences["second"] == "random") & differences["name"].isin(names)]
    shown = shown.assign(third=shown["first"].map(THIRDS), place=shown["name"].map(names.index))
    draw(of_outcomes, shown, looks, "third", "place", joined=False, step=0.2)
    of_outcomes.set_xticks(range(len(names)), ["gain", "L_long"])
    of_outcomes.set_xlim(-0.6, len(names) - 0.4)
    of_outcomes.set_ylabel("less random third [nats]")
    _draw_positions(of_positions, records.positions, looks)
    for axes in (of_outcomes, of_positions):
        axes.axhline(0, **REFERENCE)
    add_legend(drawn, looks)
    return drawn


def _draw_positions(axes: Axes, positions: pd.DataFrame, looks: dict[str, Any]) -> None:
    axes.set(xlabel="position [tokens]", ylabel="loss less random third")
    if positions.empty:
        return
    is_shown = (positions["name"] == DIFFERENCE) & (positions["model"] != "random")
    shown = positions[is_shown].copy()
    shown["third"] = shown["model"].map(THIRDS)
    shown["place"] = np.sqrt(shown["from_tokens"].clip(lower=1) * shown["to_tokens"])
    draw(axes, shown, looks, "third", "place")
    log_axis(axes, [16, 64, 256, 1024])


def print_all(records: Records, numbers: Path | None) -> pd.DataFrame:
    """Print all tables, and write them; returns the differences."""
    frames = {
        "scores": score_frame(records.scores),
        "relations": relation_frame(records.scores),
        "subsets": subset_frame(records.scores),
        "means": mean_frame(records.losses),
        "differences": difference_frame(records.losses),
    }
    for name, frame in frames.items():
        if name == "means":
            print("\n" + show(frame, across="third", digits=3, title="held-out targets"))
        else:
            print(f"\n{name}\n{frame.to_string(index=False, float_format='{:.4g}'.format)}")
    if len(records.positions):
        frames["positions"] = records.positions
        of_lengths = records.positions[records.positions["name"] == OF_LENGTH]
        of_lengths = of_lengths[["model", "name", "to_tokens", *INTERVAL]]
        print("\n" + show(of_lengths, across="to_tokens", digits=2, title="held-out loss at each length"))
    if numbers:
        save_numbers(numbers, frames)
    return frames["differences"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables, and draw the figure where a folder for it is given."""
    options = study_parser(__doc__, HERE, figures=True).parse_args(arguments)
    records = Records.load(options.records)
    differences = print_all(records, options.numbers)
    if options.figures:
        save_figure(figure(records, differences), options.figures / "chosen.png")


if __name__ == "__main__":
    main()
