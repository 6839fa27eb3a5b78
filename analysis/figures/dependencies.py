"""Which far tokens are needed, where they are and how many: three figures of a Result (docs/method.md, 2.6).

`kinds_figure`: recovery by kind of dependency. `distances_figure`: how far back the chosen tokens are.
`tokens_needed_figure`: how many of them give 90 % of the gain. Placebo and controls are in each, as in Figure 2.
`all_figures`: these, Figure 2 and the placebos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from analysis.figures import style
from analysis.figures.figure2 import describe, figure2, selectors_figure
from analysis.figures.placebos import placebos_figure
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS
from analysis.stats.measured import NET, PLACEBO, TRUE
from analysis.stats.show import interval_text

_FEW_LOOKS: dict[str, Any] = {
    "facecolor": "0.95", "hatch": "////", "edgecolor": "0.82", "linewidth": 0, "zorder": 0.4,
}  # fmt: skip
_WHITE: style.Style = ("white", "none", None)
_GREY: style.Style = ("0.45", "none", None)


def all_figures(
    result: Result,
    *,
    length: pd.DataFrame | None = None,
    selectors: Sequence[str] | None = None,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> dict[str, Figure]:
    """Every figure of one Result that can be drawn of it, by the name to save it under; arguments as of `figure2`."""
    common: dict[str, Any] = {"width": width, "heading": heading, **bootstrap}
    figures = {
        "figure2": figure2({"": result}, length=length, selectors=selectors, k=k, **common),
        "figure2-selectors": selectors_figure(result, selectors=selectors, **common),
        "kinds": kinds_figure(result, k=k, **common),
        "distances": distances_figure(result, k=k, **common),
        "tokens_needed": tokens_needed_figure(result, **common),
        "placebos": placebos_figure(result, k=k, **common),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


# --- kinds ---


def kinds_figure(
    result: Result,
    path: str | Path | None = None,
    *,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure:
    """A row of bars for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents or groups for honest
    intervals has a grey, hatched row.
    """
    frame = numbers.kinds(result, k, **bootstrap)
    rows = frame.drop_duplicates("kind").reset_index(drop=True)
    few = np.flatnonzero(
        (rows["n_groups_over_tau"] < FEW_GROUPS) | (rows["n_documents_over_tau"] < FEW_DOCUMENTS)
    )
    styles = style.selector_styles(frame["selector"].dropna().unique())
    shown = {name: styles[name] for name in style.shown_selectors(styles)}
    columns = min(style.columns_in(width, 3.2), 2)
    of_k = f"k = {frame['k'].max():.0f}"
    titles = ("(a) Share", "(b) Gain, all targets", f"(c) Recovery, {of_k}", f"(d) Net recovery, {of_k}")
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, 4 / columns * (0.42 * len(rows) + 0.5) + 1.0)
        panels = figure.subplots(4 // columns, columns, sharey=True, squeeze=False).flat
        _plot_shares(panels[0], frame)
        _plot_gains(panels[1], frame)
        _plot_recoveries(panels[2], frame, shown)
        _plot_net(panels[3], frame, shown)
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, loc="left")
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            for row in few:
                axes.axhspan(row - 0.5, row + 0.5, **_FEW_LOOKS)
        panels[0].set_yticks(range(len(rows)), [_kind_label(row) for row in rows.to_dict("records")])
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        of_groups = f"{FEW_GROUPS} groups or " if rows["n_groups_over_tau"].notna().any() else ""
        few_of_what = f"{of_groups}{FEW_DOCUMENTS} documents" if len(few) else None
        style.add_legend(figure, _kinds_legend(shown, few_of_what))
        _finish(figure, result, path, heading)
    return figure


def _kind_label(row: Mapping[Any, Any]) -> str:
    documents = row["n_documents_over_tau"]
    return (
        f"{row['kind'].replace('_', ' ')}\n{row['n_targets_over_tau']:,} of n = {row['n_targets']:,} over $\\tau$\n"
        f"in {documents:,} document{'' if documents == 1 else 's'}"
    )


def _plot_shares(axes: Axes, frame: pd.DataFrame) -> None:
    for shift, name, look in ((-0.19, "share", _WHITE), (0.19, "share_over_tau", _GREY)):
        _bars(axes, frame[frame["name"] == name], name, look, shift=shift, height=0.34)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("share of the targets")


def _plot_gains(axes: Axes, frame: pd.DataFrame) -> None:
    _bars(axes, frame[frame["name"] == "gain_nats"], "gain_nats", _WHITE, height=0.5)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(r"mean $L_{short} - L_{long}$ [nats per token]")


def _plot_recoveries(axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style]) -> None:
    points = [(name, context) for name in shown for context in (TRUE, PLACEBO)]
    for number, (name, context) in enumerate(points):
        rows = frame[(frame["selector"] == name) & (frame["far_context"] == context)]
        places = np.arange(len(rows)) + 0.14 * (number - (len(points) - 1) / 2)
        hollow = context == PLACEBO
        label = f"{name} placebo" if hollow else name
        style.draw_points(axes, places, rows, label, shown[name], hollow=hollow, across=True)
    axes.axvline(0.0, **style.REFERENCE)
    axes.axvline(1.0, linestyle=":", **style.REFERENCE)
    axes.set_xlabel(f"recovery\n{style.OF_GAIN}")


def _plot_net(axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style]) -> None:
    height = 0.8 / len(shown)
    for number, (name, look) in enumerate(shown.items()):
        rows = frame[(frame["selector"] == name) & (frame["far_context"] == NET)]
        shift = height * (number - (len(shown) - 1) / 2)
        _bars(axes, rows, name, look, shift=shift, height=0.85 * height)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"net recovery\n{style.OF_GAIN}")


def _bars(
    axes: Axes, rows: pd.DataFrame, label: str, look: style.Style, *, shift: float = 0.0, height: float
) -> None:
    """A horizontal bar per kind; its interval carries the selector's marker, which outlives a grey print."""
    colour, marker, _ = look
    places = np.arange(len(rows)) + shift
    axes.barh(places, rows["value"], height, color=colour, edgecolor="0.2", linewidth=0.6, label=label)
    looks: dict[str, Any] = {"color": "black", "linestyle": "none", "marker": marker}
    looks |= {"markerfacecolor": colour, "elinewidth": 0.8, "capsize": 1.5, "label": f"{label} interval"}
    axes.errorbar(rows["value"], places, xerr=style.bar_lengths(rows), **looks)


def _kinds_legend(shown: Mapping[str, style.Style], few: str | None) -> list[Any]:
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor="0.2", label="of all targets"),
        Patch(facecolor="0.45", edgecolor="0.2", label=r"of those over $\tau$"),
    ]
    handles += style.marker_handles(shown)
    if few:
        handles.append(Patch(label=f"fewer than {few} over $\\tau$", **_FEW_LOOKS))
    return handles


# --- distances ---


def distances_figure(
    result: Result,
    path: str | Path | None = None,
    *,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have.
    """
    frame = numbers.distances(result, k, **bootstrap)
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].div(frame["uniform"], axis=0)
    # `nearest` has all in one bin and would flatten every other panel
    others = frame[frame["selector"] != "nearest"]
    top = 1.1 * np.nanmax((others if len(others) else frame)[["value", "high"]])
    styles = style.selector_styles(frame["selector"].unique())
    places = style.in_rows(len(styles), style.columns_in(width, 1.6))
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places, width, 2)
        for axes, (name, look) in zip(panels, styles.items(), strict=True):
            _plot_distances(axes, frame[frame["selector"] == name], look, top)
            axes.set_title(style.panel_title(name), loc="left")
        share = f"share of the first {frame['k'].iloc[0]}\nover uniform"
        style.outer_labels(panels, "distance [tokens]", share)
        uniform_line = Line2D([], [], color="0.3", linewidth=0.8, label="1: uniform over the far context")
        style.add_legend(figure, [*style.far_context_handles(), uniform_line])
        _finish(figure, result, path, heading)
    return figure


def _plot_distances(axes: Axes, frame: pd.DataFrame, look: style.Style, top: float) -> None:
    colour, marker, _ = look
    axes.axhline(1.0, **style.REFERENCE)
    for context, place, looks in (
        (PLACEBO, 0.62, style.placebo_looks(marker)),
        (TRUE, 0.38, {"linestyle": "-", "marker": marker}),
    ):
        rows = frame[frame["far_context"] == context]
        centres = rows["from_tokens"] * (rows["to_tokens"] / rows["from_tokens"]) ** place
        bars = style.bar_lengths(rows)
        axes.errorbar(centres, rows["value"], bars, color=colour, elinewidth=0.8, label=context, **looks)
        above = rows[rows["value"] > top]
        if len(above) and context == TRUE:  # these points are above the panel
            values = zip(above["from_tokens"], above["value"], strict=True)
            text = f"from {', '.join(f'{edge}: {value:.0f}' for edge, value in values)}"
            axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=style.SMALL)
    axes.set_ylim(0, top)
    edges = sorted({*frame["from_tokens"], *frame["to_tokens"]})
    style.log_axis(axes, edges[:: max(1, (len(edges) - 1) // 4)])
    axes.grid(visible=False, axis="x")


# --- tokens needed ---


def tokens_needed_figure(
    result: Result,
    path: str | Path | None = None,
    *,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    frame = numbers.tokens_needed(result, **bootstrap)
    styles = style.selector_styles(frame["selector"].unique())
    places = style.in_rows(len(styles), style.columns_in(width, 2.0))
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places, width, 2)
        for axes, (name, look) in zip(panels, styles.items(), strict=True):
            _plot_tokens_needed(axes, frame[frame["selector"] == name], result.ks, look)
            axes.set_title(style.panel_title(name), loc="left")
        share = f"targets with {100 * numbers.SHARE_NEEDED:g} %\nof the gain"
        style.outer_labels(panels, "k [far tokens]", share)
        style.add_legend(figure, style.far_context_handles())
        _finish(figure, result, path, heading)
    return figure


def _plot_tokens_needed(axes: Axes, frame: pd.DataFrame, ks: list[int], look: style.Style) -> None:
    colour, marker, _ = look
    looks = {PLACEBO: style.placebo_looks(marker), TRUE: {"linestyle": "-", "marker": marker}}
    for context, drawn in looks.items():
        rows = frame[(frame["far_context"] == context) & (frame["name"] == "reached")]
        axes.step(rows["k"], rows["value"], where="post", color=colour, label=context, **drawn)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(rows["k"], rows["value"], style.bar_lengths(rows), label=f"{context} interval", **bars)
    style.k_axis(axes, ks)
    axes.set_xlabel("")
    axes.set_ylim(-0.03, 1.25)
    axes.set_yticks(np.arange(0, 1.01, 0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    [never] = frame[frame["name"] == "never"].to_dict("records")
    text = f"more than {ks[-1]:,}: {interval_text(never, percent=True)} %"
    axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=style.SMALL, color="0.2")


def _finish(figure: Figure, result: Result, path: str | Path | None, heading: bool) -> None:
    if heading:
        style.add_heading(figure, describe(result))
    if path is not None:
        style.save_figure(figure, path)
