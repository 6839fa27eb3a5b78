"""Recovery broken down, and which far tokens are needed: figures of a Result beside Figure 2 (docs/method.md, 2.6).

`kinds_figure`: recovery by kind of dependency. `distances_figure`: how far back the chosen tokens are.
`tokens_needed_figure`: how many of them give 90 % of the gain. `placebos_figure`: what a recovery consists of.
Placebo and controls are in each, as in Figure 2. `all_figures`: these and Figure 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from analysis.contexts import PLACEBO, TRUE
from analysis.figures import style
from analysis.figures.figure2 import describe, figure2, kept_as_figure, selectors_figure
from analysis.measurement import Measurement
from analysis.stats import numbers
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS, counted
from analysis.stats.comparisons import distances_beside_uniform
from analysis.stats.recovery import BEST, NET, choose_k, of_one_way, why_no_recovery
from analysis.stats.tables import interval_text

# from the target's own text to the most distant one
_FAR_CONTEXTS = {
    TRUE: "own text",
    "shuffled": "own text,\nshuffled",
    "same-group": "same group,\nelsewhere",
    PLACEBO: "another\ngroup",
}
_PARTS = {
    "selection_bias": ("selection bias (winner's curse)", "#B2182B", "X"),
    "common_context": ("common context", "0.6", "s"),
    "specific": ("specific", "black", "^"),
}
"""Names of the parts of a recovery, their colours and markers."""
_ALL = "of all targets"
_OVER_TAU = r"of those over $\tau$"
_TARGETS: dict[str, style.Look] = {
    _ALL: {"color": "0.2", "marker": "|"},
    _OVER_TAU: {"color": "0.2", "marker": "x"},
}
"""What a share of the targets is of."""
_GAIN = r"mean $L_{short} - L_{long}$ [nats per token]"
_RECOVERY = f"recovery\n{style.OF_GAIN}"
_PERCENT = PercentFormatter(1.0, decimals=0, symbol=" %")


def all_figures(
    results: Mapping[str, Measurement],
    *,
    length: pd.DataFrame | None = None,
    selectors: Sequence[str] | None = None,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> dict[str, Figure]:
    """Every figure that can be drawn, by the name to save it under: Figure 2 alone of several Results, and of one
    without recovery.

    Arguments are those of `figure2`.
    """
    shown: dict[str, Any] = {"width": width, **bootstrap}
    first = figure2(results, length=length, selectors=selectors, k=k, heading=heading, **shown)
    if len(results) > 1:
        return {"figure2": first}
    [result] = results.values()
    if why_no_recovery(result):
        return {"figure2": first}
    others = {
        "figure2-selectors": selectors_figure(result, selectors=selectors, k=k, heading=False, **shown),
        "figure2-kept-as": kept_as_figure(result, selectors=selectors, **shown),
        "kinds": kinds_figure(result, k=k, **shown),
        "distances": distances_figure(result, k=k, **shown),
        "tokens_needed": tokens_needed_figure(result, **shown),
        "placebos": placebos_figure(result, k=k, **shown),
    }
    drawn = {"figure2": first}
    for name, figure in others.items():
        if figure is None:
            continue
        if heading:
            style.add_heading(figure, describe(results))
        drawn[name] = figure
    return drawn


@matplotlib.rc_context(style.STYLE)
def kinds_figure(
    result: Measurement, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A row for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents or groups for honest
    intervals is called rough.
    """
    frame = numbers.kinds(of_one_way(result), k=k, **bootstrap)
    kinds = frame.drop_duplicates("kind").to_dict("records")
    frame["place"] = (frame["kind"] != frame["kind"].shift()).cumsum() - 1
    frame["of"] = frame["name"].map({"share": _ALL, "gain_nats": _ALL, "share_over_tau": _OVER_TAU})
    all_selectors = style.selector_styles(frame["selector"].dropna().unique())
    shown = style.shown_selectors(all_selectors)
    selectors = {name: all_selectors[name] for name in shown}
    is_gain = frame["name"] == "gain_nats"
    is_net = frame["far_context"] == NET
    figure, panels = style.large_panels(4, width, 0.42 * len(kinds) + 0.5, sharey=True)
    shares, gains, recoveries, net_recoveries = panels
    _draw_kinds(shares, frame[~is_gain], "of", _TARGETS)
    _draw_kinds(gains, frame[is_gain], "of", _TARGETS)
    _draw_kinds(recoveries, frame[~is_net], "selector", selectors)
    _draw_kinds(net_recoveries, frame[is_net], "selector", selectors)
    at_k = f"k = {frame['k'].max():.0f}"
    shares.set(title="(a) Share", xlabel="share of the targets")
    gains.set(title="(b) Gain, all targets", xlabel=_GAIN)
    recoveries.set(title=f"(c) Recovery, {at_k}", xlabel=_RECOVERY)
    net_recoveries.set(title=f"(d) Net recovery, {at_k}", xlabel=f"net {_RECOVERY}")
    shares.xaxis.set_major_formatter(_PERCENT)
    recoveries.axvline(1.0, linestyle=":", **style.REFERENCE)
    shares.set_yticks(range(len(kinds)), [_kind_label(row) for row in kinds])
    shares.set_ylim(len(kinds) - 0.5, -0.5)
    style.add_legend(figure, _TARGETS | selectors | style.IN_LEGEND)
    return figure


def _draw_kinds(axes: Axes, rows: pd.DataFrame, by: str, looks: Mapping[str, style.Look]) -> None:
    """A panel of the kinds, a row for each."""
    style.draw(axes, rows, looks, by, "place", joined=False, across=True, step=0.14)
    axes.axvline(0.0, **style.REFERENCE)
    axes.tick_params(axis="y", length=0)


def _kind_label(row: Mapping[Any, Any]) -> str:
    kind = row["kind"].replace("_", " ")
    documents = row["n_documents_over_tau"]
    rough = ""
    if documents < FEW_DOCUMENTS or row["n_groups_over_tau"] < FEW_GROUPS:
        rough = ": rough"
    return (
        f"{kind}\n{row['n_targets_over_tau']:,} of n = {row['n_targets']:,} over $\\tau$\n"
        f"in {counted(documents, 'document')}{rough}"
    )


# --- distances and tokens needed: a small panel for each selector ---


def _selector_panels(
    frame: pd.DataFrame, width: float, x: str, y: str, **further: style.Look
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame, dict[str, style.Look]]]]:
    """A figure with its legend, and the panel, rows and look of each selector."""
    looks = style.selector_styles(frame["selector"].unique())
    titles = []
    for name in looks:
        label = style.selector_label(name)
        titles.append(label.replace(", ", ",\n").replace("@", "\n@"))
    figure, panels = style.small_panels(titles, x, y, width=width)
    true = {"true far context": {"color": "0.2", "marker": "o"}}
    style.add_legend(figure, true | style.IN_LEGEND | further)
    parts = []
    for axes, (name, look) in zip(panels, looks.items(), strict=True):
        rows = frame[frame["selector"] == name]
        parts.append((axes, rows, {name: look}))
    return figure, parts


@matplotlib.rc_context(style.STYLE)
def distances_figure(
    result: Measurement, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have; above it the axis is logarithmic.
    """
    frame = distances_beside_uniform(of_one_way(result), k=k, **bootstrap)
    frame["distance"] = (frame["from_tokens"] * frame["to_tokens"]) ** 0.5
    edges = sorted({*frame["from_tokens"], *frame["to_tokens"]})
    share = f"share of the first {frame['k'].iloc[0]}\nover uniform"
    uniform = {"1: uniform over the far context": style.REFERENCE}
    figure, parts = _selector_panels(frame, width, "distance [tokens]", share, **uniform)
    every = max(1, (len(edges) - 1) // 4)
    for axes, rows, look in parts:
        axes.axhline(1.0, **style.REFERENCE)
        style.draw(axes, rows, look, "selector", "distance")
        axes.set_yscale("symlog", linthresh=1, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1, 2, 4, 8, 16, 32]))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        style.log_axis(axes, edges[::every])
        axes.grid(visible=False, axis="x")
    parts[0][0].set_ylim(bottom=0)
    return figure


@matplotlib.rc_context(style.STYLE)
def tokens_needed_figure(result: Measurement, *, width: float = style.PAGE, **bootstrap: int) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    frame = numbers.tokens_needed(of_one_way(result), **bootstrap)
    ks = result.ks
    share = f"targets with {100 * numbers.SHARE_NEEDED:g} %\nof the gain"
    figure, parts = _selector_panels(frame, width, "k [far tokens]", share)
    for axes, rows, look in parts:
        reached = rows[rows["name"] == "reached"]
        never = rows[rows["name"] == "never"].iloc[0]
        looks = {name: of_name | {"drawstyle": "steps-post"} for name, of_name in look.items()}
        style.draw(axes, reached, looks, "selector", "k")
        text = f"more than {ks[-1]:,}: {interval_text(never, percent=True)} %"
        axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=style.SMALL, color="0.2")
        style.log_axis(axes, ks)
        axes.yaxis.set_major_formatter(_PERCENT)
    parts[0][0].set(ylim=(-0.03, 1.25), yticks=np.arange(0, 1.01, 0.25))
    return figure


# --- placebos ---


@matplotlib.rc_context(style.STYLE)
def placebos_figure(
    result: Measurement, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure | None:
    """(a) recovery of every selector in every far context at one k, (b) the parts of it (docs/method.md, 2.3), of the
    first signed selector whose target-blind form was measured. None where only one placebo was measured."""
    frame = numbers.placebos(of_one_way(result), **bootstrap)
    if frame.empty:
        return None
    k = choose_k(result.ks, k)
    recoveries = frame[(frame["name"] == "recovery") & (frame["k"] == k) & (frame["selector"] != BEST)]
    there = set(recoveries["far_context"])
    contexts = [context for context in _FAR_CONTEXTS if context in there]
    looks = style.selector_styles(recoveries["selector"].unique())
    places = recoveries["far_context"].map(contexts.index)
    recoveries = recoveries.assign(place=places).sort_values("place", kind="stable")
    parts = frame[frame["blind"].notna()]
    count = 1
    if len(parts):
        count = 2
    figure, panels = style.large_panels(count, width, 2.8)
    axes = panels[0]
    step = min(0.07, 0.4 / len(looks))
    style.draw(axes, recoveries, looks, "selector", "place", joined=False, step=step)
    labels = []
    for context in contexts:
        label = _FAR_CONTEXTS[context]
        if "group" not in result.targets:
            label = label.replace("same group", "same text").replace("group", "document")
        labels.append(label)
    axes.set_xticks(range(len(contexts)), labels)
    axes.grid(visible=False, axis="x")
    comparable = f"the {frame['n_targets'].iloc[0]:,} over $\\tau$ that have every far context"
    axes.set_title(f"(a) Recovery by far context, k = {k};\n{comparable}")
    axes.set_ylabel(_RECOVERY)
    style.recovery_lines(axes)
    of_parts = {}
    if len(parts):
        of_parts = _plot_parts(panels[1], parts)
        style.log_axis(panels[1], result.ks)
    style.add_legend(figure, looks | style.IN_LEGEND | of_parts)
    return figure


def _plot_parts(axes: Axes, parts: pd.DataFrame) -> dict[str, style.Look]:
    """The parts of the recovery of the first selector that has them, against k; for the legend."""
    first = parts.iloc[0]
    parts = parts[(parts["selector"] == first["selector"]) & (parts["blind"] == first["blind"])]
    parts = parts[(parts["name"] != "common_context") | (parts["far_context"] == numbers.LARGEST)]
    labels = {}
    looks = {}
    for name, (label, colour, marker) in _PARTS.items():
        labels[name] = label
        looks[label] = {"color": colour, "marker": marker}
    parts = parts.assign(part=parts["name"].map(labels), far_context=TRUE)
    style.draw(axes, parts, looks, "part", "k")
    axes.axhline(0.0, **style.REFERENCE)
    axes.set_title(f"(b) Parts of {first['selector']};\nblind form: {first['blind']}")
    axes.set(xlabel=style.OF_K, ylabel=_RECOVERY)
    return looks
