"""Which far tokens are needed, where they stand and how many: three figures from a summary (METHOD 2.6), no torch.

`kinds_figure`: recovery by kind of dependency. `distances_figure`: how far back the chosen tokens stand.
`tokens_needed_figure`: how many of them bring back 90 % of the gain. Placebo and controls are in each of them, and all
intervals are 95 %, as in Figure 2 (`analysis.plots.figure2`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator, NullLocator, PercentFormatter

from analysis.plots.figure2 import describe, figure2
from analysis.plots.style import (
    PLACEBO_LABEL,
    PLACEBO_LINE,
    STYLE,
    Style,
    add_heading,
    add_legend,
    bar_lengths,
    in_rows,
    k_axis,
    new_figure,
    outer_labels,
    placebo_looks,
    selector_label,
    selector_styles,
    shown_selectors,
    small_multiples,
    to_number,
)
from analysis.stats.recovery import Json
from analysis.stats.summary import FEW_DOCUMENTS
from analysis.stats.tables import percent_text

KINDS_TITLES = ("(a) Share", "(b) Gain, all targets", "(c) Recovery, k = {k}", "(d) Net recovery, k = {k}")
_FEW_LOOKS: Json = {"facecolor": "0.95", "hatch": "////", "edgecolor": "0.82", "linewidth": 0, "zorder": 0.4}
_WHITE: Style = ("white", "none", None)
_GREY: Style = ("0.45", "none", None)


def all_figures(summary: Json, length: Json | None = None) -> dict[str, Figure]:
    """Every figure of one measurement by the name it is saved under; ``length`` adds panel (d) to Figure 2."""
    return {
        "figure2": figure2(summary, length),
        "kinds": kinds_figure(summary),
        "distances": distances_figure(summary),
        "tokens_needed": tokens_needed_figure(summary),
    }


def kinds_figure(summary: Json) -> Figure:
    """A row of bars for each kind of dependency: how frequent it is, what it gains, and what k tokens bring back.

    Recoveries are of the default selector and the controls. A kind with too few documents for honest intervals has a
    grey, hatched row.
    """
    kinds = summary["kinds"]["kinds"]
    styles = selector_styles(list(summary["selectors"]))
    shown = {name: styles[name] for name in shown_selectors(list(summary["selectors"]))}
    few = [row for row, each in enumerate(kinds) if each["documents_over_tau"] < FEW_DOCUMENTS]
    with matplotlib.rc_context(STYLE):
        figure = new_figure(13.0, 1.6 + 0.7 * len(kinds))
        panels = figure.subplots(1, 4, sharey=True, gridspec_kw={"width_ratios": (1, 1, 1.35, 1.35)})
        _plot_shares(panels[0], kinds)
        _plot_gains(panels[1], kinds)
        _plot_recoveries(panels[2], kinds, shown)
        _plot_net(panels[3], kinds, shown)
        for axes, title in zip(panels, KINDS_TITLES, strict=True):
            axes.set_title(title.format(k=summary["kinds"]["k"]), loc="left")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            for row in few:
                axes.axhspan(row - 0.5, row + 0.5, **_FEW_LOOKS)
        panels[0].set_yticks(range(len(kinds)), [_kind_label(each) for each in kinds])
        panels[0].set_ylim(len(kinds) - 0.5, -0.5)
        add_legend(figure, _kinds_legend(shown, bool(few)))
        add_heading(figure, describe(summary))
    return figure


def distances_figure(summary: Json) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, and what chance would give.

    Bars are the true far context, the dashed outline is the placebo, the dotted one tokens drawn uniformly.
    """
    distances = summary["distances"]
    styles = selector_styles(list(summary["selectors"]))
    top = 1.1 * _tallest(distances["selectors"])
    with matplotlib.rc_context(STYLE):
        figure, panels = small_multiples(in_rows(len(distances["selectors"])))
        for axes, (name, shares) in zip(panels, distances["selectors"].items(), strict=True):
            _plot_distances(axes, shares, distances["edges"], styles[name], top)
            axes.set_title(name, loc="left")
        outer_labels(
            panels, "distance before the target [tokens]", f"share of the first {distances['k']} tokens"
        )
        handles = [
            Patch(facecolor="0.6", edgecolor="0.2", label="true far context"),
            Line2D([], [], color="0.2", label=PLACEBO_LABEL, **placebo_looks("o")),
            Line2D([], [], color="black", linestyle=":", linewidth=1, label="uniform over the far context"),
        ]
        add_legend(figure, handles)
        add_heading(figure, describe(summary))
    return figure


def tokens_needed_figure(summary: Json) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens bring back 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    needed = summary["tokens_needed"]
    styles = selector_styles(list(summary["selectors"]))
    with matplotlib.rc_context(STYLE):
        figure, panels = small_multiples(in_rows(len(needed["selectors"])))
        for axes, (name, shares) in zip(panels, needed["selectors"].items(), strict=True):
            _plot_tokens_needed(axes, shares, needed["ks"], styles[name])
            axes.set_title(selector_label(name), loc="left")
        outer_labels(panels, "k [far tokens]", f"targets with {100 * needed['share']:g} %\nof the gain back")
        handles = [
            Line2D([], [], color="0.2", marker="o", label="true far context"),
            Line2D([], [], color="0.2", label=PLACEBO_LABEL, **placebo_looks("o")),
        ]
        add_legend(figure, handles)
        add_heading(figure, describe(summary))
    return figure


def _kind_label(each: Json) -> str:
    documents = each["documents_over_tau"]
    return (
        f"{each['kind'].replace('_', ' ')}\n{each['targets_over_tau']:,} of n = {each['targets']:,} over $\\tau$\n"
        f"in {documents:,} document{'' if documents == 1 else 's'}"
    )


def _plot_shares(axes: Axes, kinds: list[Json]) -> None:
    for shift, key, style in ((-0.19, "share", _WHITE), (0.19, "share_over_tau", _GREY)):
        _bars(axes, [each[key] for each in kinds], key, style, shift=shift, height=0.34)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("share of the targets")


def _plot_gains(axes: Axes, kinds: list[Json]) -> None:
    key = "gap_short_minus_long"
    _bars(axes, [each[key] for each in kinds], key, _WHITE, height=0.5)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(r"mean $L_{short} - L_{long}$ [nats per token]")


def _plot_recoveries(axes: Axes, kinds: list[Json], shown: dict[str, Style]) -> None:
    rows = [(name, key) for name in shown for key in ("recovery", "placebo_recovery")]
    for number, (name, key) in enumerate(rows):
        colour, marker, _ = shown[name]
        intervals = [each["selectors"][name][key] for each in kinds]
        axes.errorbar(
            [to_number(each["value"]) for each in intervals],
            [row + 0.13 * (number - (len(rows) - 1) / 2) for row in range(len(kinds))],
            xerr=bar_lengths(intervals),
            fmt=marker,
            color=colour,
            markerfacecolor="white" if key == "placebo_recovery" else colour,
            capsize=2,
            elinewidth=1,
            label=f"{name} {key}",
        )
    axes.axvline(0.0, color="0.3", linewidth=0.8, zorder=1.5)
    axes.axvline(1.0, color="0.3", linewidth=0.8, linestyle=":", zorder=1.5)
    axes.set_xlabel(r"recovery [fraction of $L_{short} - L_{long}$]")


def _plot_net(axes: Axes, kinds: list[Json], shown: dict[str, Style]) -> None:
    height = 0.8 / len(shown)
    for number, (name, style) in enumerate(shown.items()):
        intervals = [each["selectors"][name]["net_recovery"] for each in kinds]
        shift = height * (number - (len(shown) - 1) / 2)
        _bars(axes, intervals, f"{name} net_recovery", style, shift=shift, height=0.85 * height)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(r"recovery − placebo [fraction of $L_{short} - L_{long}$]")


def _bars(
    axes: Axes, intervals: list[Json], label: str, style: Style, *, shift: float = 0.0, height: float
) -> None:
    """A horizontal bar per kind; its interval carries the selector's marker, which outlives a grey print."""
    colour, marker, _ = style
    values = [to_number(each["value"]) for each in intervals]
    places = [row + shift for row in range(len(intervals))]
    axes.barh(places, values, height, color=colour, edgecolor="0.2", linewidth=0.8, label=label)
    looks: Json = {"color": "black", "linestyle": "none", "marker": marker, "markerfacecolor": colour}
    lengths = bar_lengths(intervals)
    axes.errorbar(values, places, xerr=lengths, elinewidth=0.9, capsize=2, label=f"{label} interval", **looks)


def _kinds_legend(shown: dict[str, Style], any_few: bool) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor="0.2", label="of all targets"),
        Patch(facecolor="0.45", edgecolor="0.2", label=r"of those over $\tau$"),
    ]
    for name, (colour, marker, _) in shown.items():
        handles.append(Line2D([], [], color=colour, marker=marker, linestyle="none", label=name))
    hollow: Json = {"color": "0.2", "marker": "o", "markerfacecolor": "white", "linestyle": "none"}
    handles.append(Line2D([], [], label="placebo far context: hollow", **hollow))
    if any_few:
        text = f"fewer than {FEW_DOCUMENTS} documents over $\\tau$: intervals too narrow"
        handles.append(Patch(label=text, **_FEW_LOOKS))
    return handles


def _tallest(selectors: Json) -> float:
    """The upper end of the highest bar; `nearest` has all in one bin and would flatten every other panel."""
    others = [shares for name, shares in selectors.items() if name != "nearest"] or list(selectors.values())
    bins = [each for shares in others for context in ("true", "placebo") for each in shares[context]]
    ends = [end for each in bins for end in (each["value"], each["high"]) if end is not None]
    return max(ends)


def _plot_distances(axes: Axes, shares: Json, edges: list[int], style: Style, top: float) -> None:
    colour, marker, _ = style
    true, placebo = (
        [to_number(each["value"]) for each in shares[context]] for context in ("true", "placebo")
    )
    width = np.diff(edges)
    log_x = width.max() > 2 * width.min()
    axes.bar(edges[:-1], true, width, align="edge", color=colour, alpha=0.55, edgecolor="0.2", label="true")
    axes.stairs(placebo, edges, color="0.1", linestyle=PLACEBO_LINE, label="placebo", baseline=None)
    axes.stairs(width / width.sum(), edges, color="black", linestyle=":", label="uniform", baseline=None)
    for context, values, place, looks in (
        ("true", true, 0.35, {"linestyle": "none", "marker": "none"}),
        ("placebo", placebo, 0.65, placebo_looks(marker) | {"linestyle": "none"}),
    ):
        x = edges[:-1] * (edges[1:] / np.array(edges[:-1])) ** place if log_x else edges[:-1] + place * width
        lengths = bar_lengths(shares[context])
        axes.errorbar(x, values, lengths, color="0.1", elinewidth=0.9, label=f"{context} interval", **looks)
    for left, right, value in zip(edges[:-1], edges[1:], true, strict=True):
        if value > top:
            axes.text(
                (left * right) ** 0.5, 0.97 * top, f"{100 * value:.0f} %", ha="center", va="top", fontsize=7.5
            )
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    if log_x:
        axes.set_xscale("log")
    ticks = edges[:: math.ceil(len(edges) / 8)]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.grid(visible=False, axis="x")


def _plot_tokens_needed(axes: Axes, shares: Json, ks: Sequence[int], style: Style) -> None:
    colour, marker, _ = style
    looks = {"placebo": placebo_looks(marker), "true": {"linestyle": "-", "marker": marker}}
    for context, look in looks.items():
        values = [to_number(each["value"]) for each in shares[context]]
        axes.step(ks, values, where="post", color=colour, label=context, **look)
        bars: Json = {"fmt": "none", "ecolor": colour, "elinewidth": 0.9, "capsize": 2}
        axes.errorbar(ks, values, bar_lengths(shares[context]), label=f"{context} interval", **bars)
    k_axis(axes, ks)
    axes.set_xlabel("")
    axes.set_ylim(-0.03, 1.2)
    axes.yaxis.set_major_locator(MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    text = f"censored at k = {ks[-1]:,}: {percent_text(shares['censored'])} %"
    axes.text(0.02, 0.97, text, transform=axes.transAxes, va="top", fontsize=7.5, color="0.2")
