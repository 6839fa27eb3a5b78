"""Which far tokens are needed, where they are and how many: figures of a Result beside Figure 2 (docs/method.md, 2.6).

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

from analysis.figures import style
from analysis.figures.figure2 import describe, figure2, levels_figure, selectors_figure
from analysis.measurement import Measurement
from analysis.stats import numbers
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS, counted
from analysis.stats.recovery import BEST, NET, PLACEBO, TRUE, at_level, choose_k, why_no_recovery
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
_ALL, _OVER_TAU = "of all targets", r"of those over $\tau$"
_GAIN = r"mean $L_{short} - L_{long}$ [nats per token]"
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
        "figure2-levels": levels_figure(result, selectors=selectors, **shown),
        "kinds": kinds_figure(result, k=k, **shown),
        "distances": distances_figure(result, k=k, **shown),
        "tokens_needed": tokens_needed_figure(result, **shown),
        "placebos": placebos_figure(result, k=k, **shown),
    }
    drawn = {name: figure for name, figure in others.items() if figure is not None}
    for figure in drawn.values() if heading else ():
        style.add_heading(figure, describe(results))
    return {"figure2": first, **drawn}


@matplotlib.rc_context(style.STYLE)
def kinds_figure(
    result: Measurement, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A row for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents or groups for honest
    intervals is called rough.
    """
    frame = numbers.kinds(at_level(result), k=k, **bootstrap)
    kinds = frame.drop_duplicates("kind").to_dict("records")
    frame["place"] = (frame["kind"] != frame["kind"].shift()).cumsum() - 1
    frame["of"] = frame["name"].map({"share": _ALL, "gain_nats": _ALL, "share_over_tau": _OVER_TAU})
    selectors = style.selector_styles(frame["selector"].dropna().unique())
    selectors = {name: selectors[name] for name in style.shown_selectors(selectors)}
    sets = {_ALL: {"color": "0.2", "marker": "|"}, _OVER_TAU: {"color": "0.2", "marker": "x"}}
    at_k = f"k = {frame['k'].max():.0f}"
    is_net = frame["far_context"] == NET
    figure, panels = style.large_panels(4, width, 0.42 * len(kinds) + 0.5, sharey=True)
    recovery = f"recovery\n{style.OF_GAIN}"
    is_gain = frame["name"] == "gain_nats"
    for axes, title, label, rows, by, looks in (
        (panels[0], "(a) Share", "share of the targets", ~is_gain, "of", sets),
        (panels[1], "(b) Gain, all targets", _GAIN, is_gain, "of", sets),
        (panels[2], f"(c) Recovery, {at_k}", recovery, ~is_net, "selector", selectors),
        (panels[3], f"(d) Net recovery, {at_k}", f"net {recovery}", is_net, "selector", selectors),
    ):
        style.draw(axes, frame[rows], looks, by, "place", joined=False, across=True, step=0.14)
        axes.axvline(0.0, **style.REFERENCE)
        axes.set(title=title, xlabel=label)
        axes.tick_params(axis="y", length=0)
    panels[0].xaxis.set_major_formatter(_PERCENT)
    panels[2].axvline(1.0, linestyle=":", **style.REFERENCE)
    panels[0].set_yticks(range(len(kinds)), [_kind_label(row) for row in kinds])
    panels[0].set_ylim(len(kinds) - 0.5, -0.5)
    style.add_legend(figure, sets | selectors | style.IN_LEGEND)
    return figure


def _kind_label(row: Mapping[Any, Any]) -> str:
    documents = row["n_documents_over_tau"]
    few = documents < FEW_DOCUMENTS or row["n_groups_over_tau"] < FEW_GROUPS
    return (
        f"{row['kind'].replace('_', ' ')}\n{row['n_targets_over_tau']:,} of n = {row['n_targets']:,} over $\\tau$\n"
        f"in {counted(documents, 'document')}{': rough' if few else ''}"
    )


# --- distances and tokens needed: a small panel for each selector ---


def _selector_panels(
    frame: pd.DataFrame, width: float, x: str, y: str, **further: style.Look
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame, dict[str, style.Look]]]]:
    """A figure with its legend, and the panel, rows and look of each selector."""
    looks = style.selector_styles(frame["selector"].unique())
    titles = [style.selector_label(name).replace(", ", ",\n").replace("@", "\n@") for name in looks]
    figure, panels = style.small_panels(titles, x, y, width=width)
    true = {"true far context": {"color": "0.2", "marker": "o"}}
    style.add_legend(figure, true | style.IN_LEGEND | further)
    rows = [(frame[frame["selector"] == name], {name: look}) for name, look in looks.items()]
    return figure, [(axes, *of_selector) for axes, of_selector in zip(panels, rows, strict=True)]


@matplotlib.rc_context(style.STYLE)
def distances_figure(
    result: Measurement, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have; above it the axis is logarithmic.
    """
    frame = numbers.distances(at_level(result), k=k, **bootstrap)
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].div(frame["uniform"], axis=0)
    frame["distance"] = (frame["from_tokens"] * frame["to_tokens"]) ** 0.5
    edges = sorted({*frame["from_tokens"], *frame["to_tokens"]})
    share = f"share of the first {frame['k'].iloc[0]}\nover uniform"
    uniform = {"1: uniform over the far context": style.REFERENCE}
    figure, parts = _selector_panels(frame, width, "distance [tokens]", share, **uniform)
    for axes, rows, look in parts:
        axes.axhline(1.0, **style.REFERENCE)
        style.draw(axes, rows, look, "selector", "distance")
        axes.set_yscale("symlog", linthresh=1, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1, 2, 4, 8, 16, 32]))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        style.log_axis(axes, edges[:: max(1, (len(edges) - 1) // 4)])
        axes.grid(visible=False, axis="x")
    parts[0][0].set_ylim(bottom=0)
    return figure


@matplotlib.rc_context(style.STYLE)
def tokens_needed_figure(result: Measurement, *, width: float = style.PAGE, **bootstrap: int) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    frame = numbers.tokens_needed(at_level(result), **bootstrap)
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
    frame = numbers.placebos(at_level(result), **bootstrap)
    if frame.empty:
        return None
    k = choose_k(result.ks, k)
    recoveries = frame[(frame["name"] == "recovery") & (frame["k"] == k) & (frame["selector"] != BEST)]
    contexts = [context for context in _FAR_CONTEXTS if context in set(recoveries["far_context"])]
    looks = style.selector_styles(recoveries["selector"].unique())
    places = recoveries["far_context"].map(contexts.index)
    recoveries = recoveries.assign(place=places).sort_values("place", kind="stable")
    parts = frame[frame["blind"].notna()]
    figure, panels = style.large_panels(2 if len(parts) else 1, width, 2.8)
    style.draw(
        panels[0], recoveries, looks, "selector", "place", joined=False, step=min(0.07, 0.4 / len(looks))
    )
    labels = [_FAR_CONTEXTS[context] for context in contexts]
    if "group" not in result.targets:
        labels = [label.replace("same group", "same text").replace("group", "document") for label in labels]
    panels[0].set_xticks(range(len(contexts)), labels)
    panels[0].grid(visible=False, axis="x")
    comparable = f"the {frame['n_targets'].iloc[0]:,} over $\\tau$ that have every far context"
    panels[0].set_title(f"(a) Recovery by far context, k = {k};\n{comparable}")
    panels[0].set_ylabel(f"recovery\n{style.OF_GAIN}")
    style.recovery_lines(panels[0])
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
    names = parts["name"].map({name: label for name, (label, _, _) in _PARTS.items()})
    looks = {label: {"color": colour, "marker": marker} for label, colour, marker in _PARTS.values()}
    style.draw(axes, parts.assign(part=names, far_context=TRUE), looks, "part", "k")
    axes.axhline(0.0, **style.REFERENCE)
    axes.set_title(f"(b) Parts of {first['selector']};\nblind form: {first['blind']}")
    axes.set(xlabel=style.OF_K, ylabel=f"recovery\n{style.OF_GAIN}")
    return looks
