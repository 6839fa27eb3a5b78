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
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from analysis.figures import style
from analysis.figures.figure2 import describe, figure2, levels_figure, selectors_figure
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS
from analysis.stats.measured import BEST, NET, PLACEBO, TRUE, choose_k
from analysis.stats.show import interval_text

_FEW_LOOKS: dict[str, Any] = {
    "facecolor": "0.95", "hatch": "////", "edgecolor": "0.82", "linewidth": 0, "zorder": 0.4,
}  # fmt: skip
_WHITE: style.Style = ("white", "none", None)
_GREY: style.Style = ("0.45", "none", None)
_EDGE: dict[str, Any] = {"edgecolor": "0.2", "linewidth": 0.6}
# from the target's own text to the most distant one
_FAR_CONTEXTS = {
    TRUE: "own text",
    "shuffled": "own text,\nshuffled",
    "same-group": "same group,\nelsewhere",
    PLACEBO: "another\ngroup",
}
_PARTS: dict[str, dict[str, Any]] = {
    "selection_bias": {"facecolor": "white", "hatch": "//////", "label": "selection bias (winner's curse)"},
    "common_context": {"facecolor": "0.75", "label": "common context"},
    "specific": {"facecolor": "0.35", "label": "specific"},
}


def all_figures(
    results: Mapping[str, Result],
    *,
    length: pd.DataFrame | None = None,
    selectors: Sequence[str] | None = None,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> dict[str, Figure]:
    """Every figure that can be drawn, by the name to save it under: of several Results Figure 2 alone.

    Arguments are those of `figure2`.
    """
    shown: dict[str, Any] = {"width": width, **bootstrap}
    first = figure2(results, length=length, selectors=selectors, k=k, heading=heading, **shown)
    if len(results) > 1:
        return {"figure2": first}
    [result] = results.values()
    others = {
        "figure2-selectors": selectors_figure(result, selectors=selectors, **shown),
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


# --- kinds ---


@matplotlib.rc_context(style.STYLE)
def kinds_figure(
    result: Result, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A row of bars for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents or groups for honest
    intervals has a grey, hatched row.
    """
    frame = numbers.kinds(result, k, **bootstrap)
    rows = frame.drop_duplicates("kind").reset_index(drop=True)
    few = (rows["n_groups_over_tau"] < FEW_GROUPS) | (rows["n_documents_over_tau"] < FEW_DOCUMENTS)
    styles = style.selector_styles(frame["selector"].dropna().unique())
    shown = {name: styles[name] for name in style.shown_selectors(styles)}
    columns = min(style.columns_in(width, 3.2), 2)
    of_k = f"k = {frame['k'].max():.0f}"
    titles = ("(a) Share", "(b) Gain, all targets", f"(c) Recovery, {of_k}", f"(d) Net recovery, {of_k}")
    figure = style.new_figure(width, 4 / columns * (0.42 * len(rows) + 0.5) + 1.0)
    panels = list(figure.subplots(4 // columns, columns, sharey=True, squeeze=False).flat)
    _plot_shares(panels[0], frame)
    _plot_gains(panels[1], frame)
    _plot_recoveries(panels[2], frame, shown)
    _plot_net(panels[3], frame, shown)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        for row in np.flatnonzero(few):
            axes.axhspan(row - 0.5, row + 0.5, **_FEW_LOOKS)
    panels[0].set_yticks(range(len(rows)), [_kind_label(row) for row in rows.to_dict("records")])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles: list[Any] = [
        Patch(facecolor="white", edgecolor="0.2", label="of all targets"),
        Patch(facecolor="0.45", edgecolor="0.2", label=r"of those over $\tau$"),
        *style.selector_handles(shown, joined=False),
    ]
    if few.any():
        of_groups = f"{FEW_GROUPS} groups or " if rows["n_groups_over_tau"].notna().any() else ""
        label = f"fewer than {of_groups}{FEW_DOCUMENTS} documents over $\\tau$"
        handles.append(Patch(label=label, **_FEW_LOOKS))
    style.add_legend(figure, handles)
    return figure


def _kind_label(row: Mapping[Any, Any]) -> str:
    documents = row["n_documents_over_tau"]
    return (
        f"{row['kind'].replace('_', ' ')}\n{row['n_targets_over_tau']:,} of n = {row['n_targets']:,} over $\\tau$\n"
        f"in {documents:,} document{'' if documents == 1 else 's'}"
    )


def _plot_shares(axes: Axes, frame: pd.DataFrame) -> None:
    _bars(axes, frame[frame["name"] == "share"], "share", _WHITE, shift=-0.19, height=0.34)
    _bars(axes, frame[frame["name"] == "share_over_tau"], "share_over_tau", _GREY, shift=0.19, height=0.34)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    axes.set_xlabel("share of the targets")


def _plot_gains(axes: Axes, frame: pd.DataFrame) -> None:
    _bars(axes, frame[frame["name"] == "gain_nats"], "gain_nats", _WHITE, height=0.5)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(r"mean $L_{short} - L_{long}$ [nats per token]")


def _plot_recoveries(axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style]) -> None:
    points = [(name, context) for name in shown for context in (TRUE, PLACEBO)]
    for shift, (name, context) in zip(style.side_by_side(len(points), 0.14), points, strict=True):
        rows = frame[(frame["selector"] == name) & (frame["far_context"] == context)]
        hollow = context == PLACEBO
        label = f"{name} placebo" if hollow else name
        places = np.arange(len(rows)) + shift
        style.draw_points(axes, places, rows, label, shown[name], hollow=hollow, across=True)
    style.recovery_axis(axes, "x")


def _plot_net(axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style]) -> None:
    step = 0.8 / len(shown)
    for shift, (name, look) in zip(style.side_by_side(len(shown), step), shown.items(), strict=True):
        rows = frame[(frame["selector"] == name) & (frame["far_context"] == NET)]
        _bars(axes, rows, name, look, shift=shift, height=0.85 * step)
    axes.axvline(0.0, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"net recovery\n{style.OF_GAIN}")


def _bars(
    axes: Axes, rows: pd.DataFrame, label: str, look: style.Style, *, shift: float = 0.0, height: float
) -> None:
    """A horizontal bar per kind; its interval carries the selector's marker, which outlives a grey print."""
    colour, marker, _ = look
    places = np.arange(len(rows)) + shift
    axes.barh(places, rows["value"], height, color=colour, label=label, **_EDGE)
    looks: dict[str, Any] = {"color": "black", "linestyle": "none", "marker": marker}
    looks |= {"markerfacecolor": colour, "elinewidth": 0.8, "capsize": 1.5, "label": f"{label} interval"}
    axes.errorbar(rows["value"], places, xerr=style.bar_lengths(rows), **looks)


# --- distances and tokens needed: a small panel for each selector ---


def _selector_panels(
    frame: pd.DataFrame, width: float, least: float
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame, style.Style]]]:
    """A figure, and the panel, rows and look of each selector; panels are at least ``least`` inches wide."""
    styles = style.selector_styles(frame["selector"].unique())
    places = style.in_rows(len(styles), style.columns_in(width, least))
    figure, panels = style.small_multiples(places, width, 2)
    parts = []
    for axes, (name, look) in zip(panels, styles.items(), strict=True):
        lines = style.selector_label(name).replace(", ", ",\n").replace("@", "\n@")
        axes.set_title(lines, loc="left")
        parts.append((axes, frame[frame["selector"] == name], look))
    return figure, parts


def _context_looks(marker: Any) -> dict[str, dict[str, Any]]:
    """How the curves of the true far context and of the placebo differ, whatever their colour."""
    return {PLACEBO: style.placebo_looks(marker), TRUE: {"linestyle": "-", "marker": marker}}


def _context_handles() -> list[Line2D]:
    return style.selector_handles({"true far context": ("0.2", "o", "-")})


@matplotlib.rc_context(style.STYLE)
def distances_figure(
    result: Result, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have.
    """
    frame = numbers.distances(result, k, **bootstrap)
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].div(frame["uniform"], axis=0)
    # `nearest` has all in one bin and would flatten every other panel
    others = frame[frame["selector"] != "nearest"]
    top = 1.1 * np.nanmax((others if len(others) else frame)[["value", "high"]])
    figure, parts = _selector_panels(frame, width, 1.6)
    for axes, rows, look in parts:
        _plot_distances(axes, rows, look, top)
    share = f"share of the first {frame['k'].iloc[0]}\nover uniform"
    style.outer_labels([axes for axes, *_ in parts], "distance [tokens]", share)
    uniform_line = Line2D([], [], color="0.3", linewidth=0.8, label="1: uniform over the far context")
    style.add_legend(figure, [*_context_handles(), uniform_line])
    return figure


def _plot_distances(axes: Axes, frame: pd.DataFrame, look: style.Style, top: float) -> None:
    colour, marker, _ = look
    axes.axhline(1.0, **style.REFERENCE)
    for context, looks in _context_looks(marker).items():
        rows = frame[frame["far_context"] == context]
        place = 0.62 if context == PLACEBO else 0.38
        centres = rows["from_tokens"] * (rows["to_tokens"] / rows["from_tokens"]) ** place
        bars = style.bar_lengths(rows)
        axes.errorbar(centres, rows["value"], bars, color=colour, elinewidth=0.8, label=context, **looks)
    above = frame[(frame["far_context"] == TRUE) & (frame["value"] > top)]
    if len(above):  # these points are above the panel
        values = zip(above["from_tokens"], above["value"], strict=True)
        text = f"from {', '.join(f'{edge}: {value:.0f}' for edge, value in values)}"
        axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=style.SMALL)
    axes.set_ylim(0, top)
    edges = sorted({*frame["from_tokens"], *frame["to_tokens"]})
    style.log_axis(axes, edges[:: max(1, (len(edges) - 1) // 4)])
    axes.grid(visible=False, axis="x")


@matplotlib.rc_context(style.STYLE)
def tokens_needed_figure(result: Result, *, width: float = style.PAGE, **bootstrap: int) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    figure, parts = _selector_panels(numbers.tokens_needed(result, **bootstrap), width, 2.0)
    for axes, rows, look in parts:
        _plot_tokens_needed(axes, rows, result.ks, look)
    share = f"targets with {100 * numbers.SHARE_NEEDED:g} %\nof the gain"
    style.outer_labels([axes for axes, *_ in parts], "k [far tokens]", share)
    style.add_legend(figure, _context_handles())
    return figure


def _plot_tokens_needed(axes: Axes, frame: pd.DataFrame, ks: list[int], look: style.Style) -> None:
    colour, marker, _ = look
    for context, looks in _context_looks(marker).items():
        rows = frame[(frame["far_context"] == context) & (frame["name"] == "reached")]
        axes.step(rows["k"], rows["value"], where="post", color=colour, label=context, **looks)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": colour, "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(rows["k"], rows["value"], style.bar_lengths(rows), label=f"{context} interval", **bars)
    style.log_axis(axes, ks)
    axes.set_ylim(-0.03, 1.25)
    axes.set_yticks(np.arange(0, 1.01, 0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    [never] = frame[frame["name"] == "never"].to_dict("records")
    text = f"more than {ks[-1]:,}: {interval_text(never, percent=True)} %"
    axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=style.SMALL, color="0.2")


# --- placebos ---


@matplotlib.rc_context(style.STYLE)
def placebos_figure(
    result: Result, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure | None:
    """(a) recovery of every selector in every far context at one k, (b) the parts of it (docs/method.md, 2.3), of the
    first signed selector whose target-blind form was measured. None where only one placebo was measured."""
    frame = numbers.placebos(result, **bootstrap)
    if frame.empty:
        return None
    k = choose_k(result.ks, k)
    recoveries = frame[(frame["name"] == "recovery") & (frame["k"] == k) & (frame["selector"] != BEST)]
    # the colours of all figures of this Result
    styles = style.selector_styles(numbers.Measured(result).names)
    shown = {name: styles[name] for name in recoveries["selector"].unique()}
    parts = frame[frame["blind"].notna()]
    handles: list[Any] = style.selector_handles(shown, joined=False)
    if len(parts):
        handles += [Patch(**look, **_EDGE) for look in _PARTS.values()]
    n_panels = 2 if len(parts) else 1
    columns = min(style.columns_in(width, 3.2), n_panels)
    legend_height = 0.15 * len(handles) / style.columns_in(width, 2.2)
    figure = style.new_figure(width, 2.7 * (n_panels // columns) + 0.9 + legend_height)
    panels = figure.subplots(n_panels // columns, columns, squeeze=False).flat
    _plot_far_contexts(panels[0], recoveries, shown, "group" in result.targets)
    n_targets = frame["n_targets"].iloc[0]
    comparable = f"the {n_targets:,} over $\\tau$ that have every far context"
    panels[0].set_title(f"(a) Recovery by far context, k = {k};\n{comparable}", loc="left")
    if len(parts):
        first = parts.iloc[0]
        of_first = (parts["selector"] == first["selector"]) & (parts["blind"] == first["blind"])
        _plot_parts(panels[1], parts[of_first])
        panels[1].set_title(f"(b) Parts of {first['selector']};\nblind form: {first['blind']}", loc="left")
    style.add_legend(figure, handles)
    return figure


def _plot_far_contexts(
    axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style], has_groups: bool
) -> None:
    contexts = [context for context in _FAR_CONTEXTS if context in set(frame["far_context"])]
    shifts = style.side_by_side(len(shown), min(0.14, 0.8 / len(shown)))
    for shift, (name, look) in zip(shifts, shown.items(), strict=True):
        rows = frame[frame["selector"] == name].set_index("far_context").loc[contexts]
        places = np.arange(len(contexts)) + shift
        style.draw_points(axes, places[:1], rows[:1], name, look)
        style.draw_points(axes, places[1:], rows[1:], f"{name} placebo", look, hollow=True)
    labels = [_FAR_CONTEXTS[context] for context in contexts]
    if not has_groups:
        labels = [label.replace("same group", "same text").replace("group", "document") for label in labels]
    axes.set_xticks(range(len(contexts)), labels)
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.grid(visible=False, axis="x")
    style.recovery_axis(axes, "y")


def _plot_parts(axes: Axes, parts: pd.DataFrame) -> None:
    """Bars side by side, not stacked: selection bias may be negative, and every part has an interval of its own."""
    for shift, (name, look) in zip(style.side_by_side(3, 0.27), _PARTS.items(), strict=True):
        rows = parts[parts["name"] == name]
        if name == "common_context":
            rows = rows[rows["far_context"] == numbers.LARGEST]
        places = np.arange(len(rows)) + shift
        axes.bar(places, rows["value"], 0.25, **look, **_EDGE)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
        label = f"{look['label']} interval"
        axes.errorbar(places, rows["value"], style.bar_lengths(rows), label=label, **bars)
        axes.set_xticks(range(len(rows)), [str(k) for k in rows["k"]])
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("k [far tokens added to the short context]")
    axes.set_ylabel(f"recovery\n{style.OF_GAIN}")
