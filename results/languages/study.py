"""The numbers of this page, from the result and the loss by position of six kinds of text.

    python results/languages/study.py
    python results/languages/study.py --numbers results/languages/numbers.csv
    python results/languages/study.py --figures results/languages      draws languages.png, too

Both runs of each together; 95 % intervals by work and document. What is per token is told per byte too,
by the UTF-8 bytes per token of the text that was measured. Last, the share over tau with equal weight of every group,
of both runs and of each, that of each package of Python, and how many times as frequent as under uniform choice
the chosen tokens are at each distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import Result, load_study
from analysis.figures import style
from analysis.probes.length import OF_LENGTH, LossByPosition
from analysis.stats import numbers
from analysis.stats.comparisons import distances_beside_uniform, with_equal_groups
from analysis.stats.summary import every_number
from analysis.stats.tables import INTERVAL, OF_RUNS, interval_text, save_numbers, show
from analysis.study_options import study_parser

HERE = Path(__file__).parent
CORPORA = ("english", "french", "german", "spanish", "russian", "python")
SELECTOR, K = "leave-one-out-kl", 4
RESAMPLES = 10_000
NUMBERS = [*INTERVAL, *OF_RUNS]
LARGE = ("multiprocessing", "unittest")
"""The packages that hold most of Python's targets."""
Row = dict[str, Any]
percent = partial(interval_text, percent=True, digits=0)


def row_with(frame: pd.DataFrame, /, **wanted: Any) -> Row:
    """The row of a frame in which the columns have these values."""
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    [row] = frame.to_dict("records")
    return row


def nats(row: Row, digits: int, bytes_per_token: float = 1.0) -> str:
    """Value and interval in nats per token, or per byte."""
    scaled = {name: row[name] / bytes_per_token for name in NUMBERS if name in row}
    return interval_text(scaled, digits=digits - 1)


def far_row(corpus: str, result: Result, every: pd.DataFrame, bytes_per_token: float) -> Row:
    """A row of the first table: targets over tau and what is recovered of their gain, of ``every`` number."""
    recovery = every[(every["frame"] == "recovery") & (every["selector"] == SELECTOR)]
    needed = every[(every["frame"] == "tokens_needed") & (every["selector"] == SELECTOR)]
    row = {
        "": corpus,
        "bytes / token": round(bytes_per_token, 2),
        "targets over tau": f"{len(result.over):,} of {len(result.targets):,}",
        "share [%]": percent(row_with(every, frame="shares", name="share_over_tau"), digits=1),
    }
    for name in ("true", "placebo", "net"):
        row[f"{name} [%]"] = percent(row_with(recovery, far_context=name, k=K))
    row["net at k = 1 [%]"] = percent(row_with(recovery, far_context="net", k=1))
    reached = row_with(needed, name="reached", far_context="true", k=K)
    return row | {"4 tokens give 90 % [% of them]": percent(reached)}


def near_row(corpus: str, every: pd.DataFrame, losses: pd.DataFrame, bytes_per_token: float) -> Row:
    """A row of the second table: the gain of all targets, and the loss by position."""
    gain = row_with(every, frame="shares", name="gain_nats")
    at = {tokens: row_with(losses, name=OF_LENGTH, to_tokens=tokens) for tokens in (256, 512, 1024)}
    return {
        "": corpus,
        "gain [nats / token]": nats(gain, 3),
        "gain [nats / byte]": nats(gain, 4, bytes_per_token),
        "loss at 256 [nats / token]": nats(at[256], 2),
        **{
            f"loss at {tokens:,} [nats / byte]": nats(loss, 3, bytes_per_token) for tokens, loss in at.items()
        },
    }


def print_equal_groups(study: Mapping[str, Result]) -> dict[str, pd.DataFrame]:
    """Print the share over tau with equal weight of every work or package, and that of each package; returns them."""
    frames: dict[str, pd.DataFrame] = {}
    print("\nshare over tau with equal weight of every group [%]; seed 1, seed 2")
    for corpus in CORPORA:
        runs = [study[f"{corpus}/seed-{seed}"] for seed in (1, 2)]
        frames |= print_equal_row(corpus, runs)
        if corpus == "python":
            some = [without_large(result) for result in runs]
            frames |= print_equal_row(f"python without {' and '.join(LARGE)}", some)
    targets = pd.concat([study[f"python/seed-{seed}"].targets for seed in (1, 2)])
    by_package = targets.groupby(packages_of(targets))["over_tau"].agg(["size", "sum", "mean"])
    by_package["of targets [%]"] = (100 * by_package["size"] / len(targets)).round(1)
    by_package["of those over tau [%]"] = (100 * by_package["sum"] / targets["over_tau"].sum()).round(1)
    by_package["share over tau [%]"] = (100 * by_package["mean"]).round(1)
    by_package = by_package.drop(columns=["size", "sum", "mean"])
    print("\nPython's packages, both runs\n" + by_package.to_string())
    return frames | {"packages of Python": by_package.reset_index()}


def without_large(result: Result) -> Result:
    """The targets of Python without those of the large packages, and no choices: for shares of targets alone."""
    targets = result.targets[~packages_of(result.targets).isin(LARGE)].reset_index(drop=True)
    return replace(result, targets=targets, choices=result.choices.iloc[:0])


def packages_of(targets: pd.DataFrame) -> pd.Series:
    """The package of each target of Python; groups are addresses that end in its name."""
    return targets["group"].str.split("#").str[-1].rename("package")


def print_equal_row(name: str, runs: Sequence[Result]) -> dict[str, pd.DataFrame]:
    """Print a share of runs together, and of each; returns all shares, with equal weight and without."""
    targets = pd.concat([one.targets.assign(run=number) for number, one in enumerate(runs)])
    together = replace(runs[0], targets=targets.reset_index(drop=True), choices=runs[0].choices.iloc[:0])
    shown = []
    frames: dict[str, pd.DataFrame] = {}
    weights = {"equal weight of every group": with_equal_groups, "every target": numbers.shares}
    for weight, frame_of in weights.items():
        of_results = [frame_of(result, resamples=RESAMPLES) for result in (together, *runs)]
        shares = [percent(row_with(frame, name="share_over_tau"), digits=1) for frame in of_results]
        shown.append(f"{shares[0]}; {', '.join(shares[1:])}")
        for run, frame in zip(("both runs", "seed 1", "seed 2"), of_results, strict=True):
            frames[f"{name}, {run}, {weight}"] = frame
    print(f"  {name}: {shown[0]} (of every target: {shown[1]})")
    return frames


def draw(frames: Mapping[str, pd.DataFrame], path: Path) -> None:
    """languages.png: targets over tau, and net recovery by k, of every kind of text."""
    looks = style.model_styles([corpus.capitalize() for corpus in CORPORA])
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 2.9)
        of_shares, of_recovery = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 1.4]})
        for place, (corpus, look) in enumerate(zip(CORPORA, looks.values(), strict=True)):
            frame = frames[corpus]
            share = frame[frame["frame"].eq("shares") & frame["name"].eq("share_over_tau")]
            bar(of_shares, [place], share, look)
            net = frame[
                frame["frame"].eq("recovery")
                & frame["selector"].eq(SELECTOR)
                & frame["far_context"].eq("net")
            ]
            beside = 1.03 ** (place - 2.5)  # so that bars do not hide each other
            bar(of_recovery, net["k"].to_numpy() * beside, net, look)
        of_shares.set_xticks(range(len(CORPORA)), looks, rotation=30, ha="right")
        of_shares.set_title("(a) Targets that gain more than 1 nat")
        of_shares.set_ylabel("share of all targets [%]")
        of_recovery.set_title("(b) Net recovery of these targets")
        of_recovery.set_ylabel("net recovery [% of the gain]")
        of_recovery.set_xlabel(style.OF_K)
        style.log_axis(of_recovery, [1, 2, 4, 8, 16])
        style.add_legend(figure, looks)
    style.save_figure(figure, path)


def bar(axes: Axes, x: Sequence[float] | np.ndarray, frame: pd.DataFrame, look: style.Look) -> None:
    """Points in per cent with their intervals."""
    axes.errorbar(x, 100 * frame["value"], yerr=100 * style.bar_lengths(frame), elinewidth=0.8, **look)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all tables."""
    given = study_parser(__doc__, HERE, figures=True).parse_args(arguments)
    study = load_study(given.records)
    far, near, distances = [], [], []
    frames: dict[str, pd.DataFrame] = {}
    for corpus in CORPORA:
        result = Result.join([study[f"{corpus}/seed-{seed}"] for seed in (1, 2)])
        # function words are known of English only
        result.targets["kind"] = result.targets["kind"].replace("function word", "content word")
        # no page shows those by bins of the target, which would be most of the rows
        every = every_number({"": result}, K, without=["target_bins"], resamples=RESAMPLES)
        frames[corpus] = every
        length = LossByPosition.load(given.records / corpus / "length")
        losses = length.with_training(length.numbers)
        frames[f"{corpus}, loss by position"] = losses
        bytes_per_token = length.settings["bytes_per_token"]
        far.append(far_row(corpus, result, every, bytes_per_token))
        near.append(near_row(corpus, every, losses, bytes_per_token))
        beside = distances_beside_uniform(
            result, selector=SELECTOR, far_context="true", k=K, resamples=RESAMPLES
        )
        distances.append(beside.assign(corpus=corpus))
    for rows in (far, near):
        print(pd.DataFrame(rows).to_string(index=False), end="\n\n")
    of_all = pd.concat(frames[corpus].assign(corpus=corpus) for corpus in CORPORA)
    kinds = of_all[of_all["frame"].eq("kinds") & of_all["name"].isin(["share", "share_over_tau"])]
    texts = [interval_text(row, percent=True) for row in kinds.to_dict("records")]
    table = kinds.assign(text=texts).pivot(index=["name", "kind"], columns="corpus", values="text")
    print(table.to_string())
    frames |= print_equal_groups(study)
    of_distances = pd.concat(distances)
    title = f"first four tokens of {SELECTOR}, times as frequent as under uniform choice"
    shown = of_distances.filter(["corpus", "from_tokens", "to_tokens", *NUMBERS])
    print("\n" + show(shown, across="corpus", percent=False, title=title))
    thresholds = of_all[of_all["name"].isin(["share_below_minus_tau", "share_of_gain"])]
    shown = thresholds.filter(["corpus", "name", *NUMBERS])
    print("\n" + show(shown, across="name", title="what the threshold leaves out [%]"))
    recoveries = of_all[of_all["frame"].eq("recovery") & of_all["selector"].eq(SELECTOR)]
    shown = recoveries.filter(["corpus", "far_context", "k", *NUMBERS])
    print("\n" + show(shown, across="corpus", digits=0, title=f"recovery by {SELECTOR} [%]"))
    if given.figures:
        draw(frames, given.figures / "languages.png")
    if given.numbers:
        frames["beside uniform choice"] = of_distances
        save_numbers(given.numbers, frames)


if __name__ == "__main__":
    main()
