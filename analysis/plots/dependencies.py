"""Which far tokens are needed, where they stand and how many: three figures from a summary (docs/method.md, 2.6).

`kinds_figure`: recovery by kind of dependency. `distances_figure`: how far back the chosen tokens stand.
`tokens_needed_figure`: how many of them give 90 % of the gain. Placebo and controls are in each, as in Figure 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from analysis.plots import style
from analysis.plots.figure2 import describe, figure2, further_figure
from analysis.plots.placebos import placebos_figure
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS, divided, few_clusters
from analysis.tables.cells import percent_text
from olmo_sparsity.util.result_files import Json

_FEW_LOOKS: Json = {"facecolor": "0.95", "hatch": "////", "edgecolor": "0.82", "linewidth": 0, "zorder": 0.4}
_WHITE: style.Style = ("white", "none", None)
_GREY: style.Style = ("0.45", "none", None)


def all_figures(
    summary: Json,
    length: Json | None = None,
    *,
    selectors: Sequence[str] | None = None,
    width: float = style.PAGE,
    heading: bool = True,
) -> dict[str, Figure]:
    """Every figure of one measurement by the name it is saved under; arguments as of `figure2`."""
    options: Json = {"width": width, "heading": heading}
    further = further_figure(summary, selectors=selectors, **options)
    placebos = placebos_figure(summary, **options)
    return {
        "figure2": figure2(summary, length, selectors=selectors, **options),
        **({"figure2-selectors": further} if further else {}),
        "kinds": kinds_figure(summary, **options),
        "distances": distances_figure(summary, **options),
        "tokens_needed": tokens_needed_figure(summary, **options),
        **({"placebos": placebos} if placebos else {}),
    }


# --- kinds ---


def kinds_figure(summary: Json, *, width: float = style.PAGE, heading: bool = True) -> Figure:
    """A row of bars for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents for honest intervals has a
    grey, hatched row.
    """
    kinds = summary["kinds"]["kinds"]
    styles = style.selector_styles(summary["selectors"])
    shown = {name: styles[name] for name in style.shown_selectors(summary["selectors"])}
    few = [row for row, each in enumerate(kinds) if few_clusters(each, "_over_tau")]
    columns = min(style.columns_in(width, 3.2), 2)
    of_k = f"k = {summary['kinds']['k']}"
    titles = ("(a) Share", "(b) Gain, all targets", f"(c) Recovery, {of_k}", f"(d) Net recovery, {of_k}")
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, 4 / columns * (0.42 * len(kinds) + 0.5) + 1.0)
        panels = figure.subplots(4 // columns, columns, sharey=True, squeeze=False).flat
        _plot_shares(panels[0], kinds)
        _plot_gains(panels[1], kinds)
        _plot_recoveries(panels[2], kinds, shown)
        _plot_net(panels[3], kinds, shown)
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, loc="left")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            for row in few:
                axes.axhspan(row - 0.5, row + 0.5, **_FEW_LOOKS)
        panels[0].set_yticks(range(len(kinds)), [_kind_label(each) for each in kinds])
        panels[0].set_ylim(len(kinds) - 0.5, -0.5)
        few_of_what = (
            f"{FEW_GROUPS} groups or " * ("groups_over_tau" in kinds[0]) + f"{FEW_DOCUMENTS} documents"
        )
        style.add_legend(figure, _kinds_legend(shown, few_of_what if few else None))
        if heading:
            style.add_heading(figure, describe(summary))
    return figure


def _kind_label(each: Json) -> str:
    documents = each["documents_over_tau"]
    return (
        f"{each['kind'].replace('_', ' ')}\n{each['targets_over_tau']:,} of n = {each['targets']:,} over $\\tau$\n"
        f"in {documents:,} document{'' if documents == 1 else 's'}"
    )


def _plot_shares(axes: Axes, kinds: list[Json]) -> None:
    for shift, key, look in ((-0.19, "share", _WHITE), (0.19, "share_over_tau", _GREY)):
        _bars(axes, [each[key] for each in kinds], key, look, shift=shift, height=0.34)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("share of the targets")


def _plot_gains(axes: Axes, kinds: list[Json]) -> None:
    key = "gap_short_minus_long"
    _bars(axes, [each[key] for each in kinds], key, _WHITE, height=0.5)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(r"mean $L_{short} - L_{long}$ [nats per token]")


def _plot_recoveries(axes: Axes, kinds: list[Json], shown: dict[str, style.Style]) -> None:
    rows = [(name, key) for name in shown for key in ("recovery", "placebo_recovery")]
    for number, (name, key) in enumerate(rows):
        places = [row + 0.14 * (number - (len(rows) - 1) / 2) for row in range(len(kinds))]
        intervals = [each["selectors"][name][key] for each in kinds]
        style.draw_points(axes, places, intervals, f"{name} {key}", shown[name], across=True)
    axes.axvline(0.0, **style.REFERENCE)
    axes.axvline(1.0, linestyle=":", **style.REFERENCE)
    axes.set_xlabel("recovery\n" + r"[fraction of $L_{short} - L_{long}$]")


def _plot_net(axes: Axes, kinds: list[Json], shown: dict[str, style.Style]) -> None:
    height = 0.8 / len(shown)
    for number, (name, look) in enumerate(shown.items()):
        intervals = [each["selectors"][name]["net_recovery"] for each in kinds]
        shift = height * (number - (len(shown) - 1) / 2)
        _bars(axes, intervals, f"{name} net_recovery", look, shift=shift, height=0.85 * height)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel("net recovery\n" + r"[fraction of $L_{short} - L_{long}$]")


def _bars(
    axes: Axes, intervals: list[Json], label: str, look: style.Style, *, shift: float = 0.0, height: float
) -> None:
    """A horizontal bar per kind; its interval carries the selector's marker, which outlives a grey print."""
    colour, marker, _ = look
    values = style.numbers_of(intervals)
    places = [row + shift for row in range(len(intervals))]
    axes.barh(places, values, height, color=colour, edgecolor="0.2", linewidth=0.6, label=label)
    looks: Json = {"color": "black", "linestyle": "none", "marker": marker, "markerfacecolor": colour}
    lengths = style.bar_lengths(intervals)
    axes.errorbar(
        values, places, xerr=lengths, elinewidth=0.8, capsize=1.5, label=f"{label} interval", **looks
    )


def _kinds_legend(shown: dict[str, style.Style], few: str | None) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor="0.2", label="of all targets"),
        Patch(facecolor="0.45", edgecolor="0.2", label=r"of those over $\tau$"),
    ]
    handles += style.marker_handles(shown)
    if few:
        handles.append(Patch(label=f"fewer than {few} over $\\tau$", **_FEW_LOOKS))
    return handles


# --- distances ---


def distances_figure(summary: Json, *, width: float = style.PAGE, heading: bool = True) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have.
    """
    distances = summary["distances"]
    styles = style.selector_styles(summary["selectors"])
    widths = np.diff(distances["edges"])
    uniform = widths / widths.sum()
    over_uniform = {
        name: {
            context: list(map(divided, intervals, uniform.tolist())) for context, intervals in shares.items()
        }
        for name, shares in distances["selectors"].items()
    }
    top = 1.1 * _tallest(over_uniform)
    places = style.in_rows(len(over_uniform), style.columns_in(width, 1.6))
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places, width, 2)
        for axes, (name, ratios) in zip(panels, over_uniform.items(), strict=True):
            _plot_distances(axes, ratios, distances["edges"], styles[name], top)
            axes.set_title(style.panel_title(name), loc="left")
        style.outer_labels(panels, "distance [tokens]", f"share of the first {distances['k']}\nover uniform")
        uniform_line = Line2D([], [], color="0.3", linewidth=0.8, label="1: uniform over the far context")
        style.add_legend(figure, [*style.far_context_handles(), uniform_line])
        if heading:
            style.add_heading(figure, describe(summary))
    return figure


def _tallest(selectors: Json) -> float:
    """The highest upper end; `nearest` has all in one bin and would flatten every other panel."""
    others = [ratios for name, ratios in selectors.items() if name != "nearest"] or list(selectors.values())
    bins = [each for ratios in others for context in ("true", "placebo") for each in ratios[context]]
    return max(end for each in bins for end in (each["value"], each["high"]) if end is not None)


def _plot_distances(axes: Axes, ratios: Json, edges: list[int], look: style.Style, top: float) -> None:
    colour, marker, _ = look
    low, high = np.array(edges[:-1]), np.array(edges[1:])
    axes.axhline(1.0, **style.REFERENCE)
    for context, place, looks in (
        ("placebo", 0.62, style.placebo_looks(marker)),
        ("true", 0.38, {"linestyle": "-", "marker": marker}),
    ):
        centres = low * (high / low) ** place
        values = style.numbers_of(ratios[context])
        bars = style.bar_lengths(ratios[context])
        axes.errorbar(centres, values, bars, color=colour, elinewidth=0.8, label=context, **looks)
        above = [f"{edge}: {value:.0f}" for edge, value in zip(edges, values, strict=False) if value > top]
        if above and context == "true":  # these points are above the panel
            text = f"from {', '.join(above)}"
            axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=style.SMALL)
    axes.set_ylim(0, top)
    style.log_axis(axes, edges[:: max(1, (len(edges) - 1) // 4)])
    axes.grid(visible=False, axis="x")


# --- tokens needed ---


def tokens_needed_figure(summary: Json, *, width: float = style.PAGE, heading: bool = True) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    needed = summary["tokens_needed"]
    styles = style.selector_styles(summary["selectors"])
    places = style.in_rows(len(needed["selectors"]), style.columns_in(width, 2.0))
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places, width, 2)
        for axes, (name, shares) in zip(panels, needed["selectors"].items(), strict=True):
            _plot_tokens_needed(axes, shares, needed["ks"], styles[name])
            axes.set_title(style.panel_title(name), loc="left")
        style.outer_labels(panels, "k [far tokens]", f"targets with {100 * needed['share']:g} %\nof the gain")
        style.add_legend(figure, style.far_context_handles())
        if heading:
            style.add_heading(figure, describe(summary))
    return figure


def _plot_tokens_needed(axes: Axes, shares: Json, ks: Sequence[int], look: style.Style) -> None:
    colour, marker, _ = look
    looks = {"placebo": style.placebo_looks(marker), "true": {"linestyle": "-", "marker": marker}}
    for context, drawn in looks.items():
        values = style.numbers_of(shares[context])
        axes.step(ks, values, where="post", color=colour, label=context, **drawn)
        bars: Json = {"fmt": "none", "ecolor": colour, "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(ks, values, style.bar_lengths(shares[context]), label=f"{context} interval", **bars)
    style.k_axis(axes, ks)
    axes.set_xlabel("")
    axes.set_ylim(-0.03, 1.25)
    axes.set_yticks(np.arange(0, 1.01, 0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    text = f"more than {ks[-1]:,}: {percent_text(shares['censored'])} %"
    axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=style.SMALL, color="0.2")
