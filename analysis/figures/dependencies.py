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
from matplotlib.ticker import FixedLocator, PercentFormatter

from analysis.figures import style
from analysis.figures.figure2 import describe, figure2, levels_figure, selectors_figure
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.bootstrap import FEW_DOCUMENTS, FEW_GROUPS
from analysis.stats.measured import BEST, NET, PLACEBO, TRUE, choose_k
from analysis.stats.show import interval_text

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
_PERCENT = PercentFormatter(1.0, decimals=0, symbol=" %")


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
    result: Result, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A row for each kind of dependency: how frequent it is, what it gains, and what k tokens recover.

    Recoveries are of the default selector and the controls. A kind with too few documents or groups for honest
    intervals is called rough.
    """
    frame = numbers.kinds(result, k, **bootstrap)
    rows = frame.drop_duplicates("kind").to_dict("records")
    styles = style.selector_styles(frame["selector"].dropna().unique())
    shown = {name: styles[name] for name in style.shown_selectors(styles)}

    def recovery(selector: str, context: str) -> pd.DataFrame:
        return frame[(frame["selector"] == selector) & (frame["far_context"] == context)]

    columns = min(style.columns_in(width, 3.2), 2)
    figure = style.new_figure(width, 4 / columns * (0.42 * len(rows) + 0.5) + 1.0)
    panels = list(figure.subplots(4 // columns, columns, sharey=True, squeeze=False).flat)
    of_name = dict(iter(frame.groupby("name")))
    share, over_tau = (of_name["share"], _WHITE), (of_name["share_over_tau"], _GREY)
    _plot_bars(panels[0], {"share": share, "share_over_tau": over_tau})
    _plot_bars(panels[1], {"gain_nats": (of_name["gain_nats"], _WHITE)})
    points = [(name, context) for name in shown for context in (TRUE, PLACEBO)]
    for shift, (name, context) in zip(style.side_by_side(len(points), 0.14), points, strict=True):
        drawn, is_placebo = recovery(name, context), context == PLACEBO
        places = np.arange(len(drawn)) + shift
        style.draw_points(panels[2], places, drawn, name, shown[name], placebo=is_placebo, across=True)
    style.recovery_axis(panels[2], "x")
    _plot_bars(panels[3], {name: (recovery(name, NET), look) for name, look in shown.items()})
    panels[0].xaxis.set_major_formatter(_PERCENT)
    of_k = f"k = {frame['k'].max():.0f}"
    for axes, title, label in (
        (panels[0], "(a) Share", "share of the targets"),
        (panels[1], "(b) Gain, all targets", r"mean $L_{short} - L_{long}$ [nats per token]"),
        (panels[2], f"(c) Recovery, {of_k}", f"recovery\n{style.OF_GAIN}"),
        (panels[3], f"(d) Net recovery, {of_k}", f"net recovery\n{style.OF_GAIN}"),
    ):
        axes.set_title(title, loc="left")
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(rows)), [_kind_label(row) for row in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles: list[Any] = [
        Patch(facecolor="white", label="of all targets", **_EDGE),
        Patch(facecolor="0.45", label=r"of those over $\tau$", **_EDGE),
    ]
    style.add_legend(figure, [*handles, *style.selector_handles(shown, joined=False)])
    return figure


def _kind_label(row: Mapping[Any, Any]) -> str:
    documents = row["n_documents_over_tau"]
    few = documents < FEW_DOCUMENTS or row["n_groups_over_tau"] < FEW_GROUPS
    return (
        f"{row['kind'].replace('_', ' ')}\n{row['n_targets_over_tau']:,} of n = {row['n_targets']:,} over $\\tau$\n"
        f"in {documents:,} document{'' if documents == 1 else 's'}{': rough' if few else ''}"
    )


def _plot_bars(axes: Axes, bars: Mapping[str, tuple[pd.DataFrame, style.Style]]) -> None:
    """Horizontal bars beside each other in each row; intervals carry the marker, which outlives a grey print."""
    step = 0.8 / max(2, len(bars))
    for shift, (label, (rows, look)) in zip(style.side_by_side(len(bars), step), bars.items(), strict=True):
        places = np.arange(len(rows)) + shift
        axes.barh(places, rows["value"], 0.85 * step, color=look[0], label=label, **_EDGE)
        style.draw_points(axes, places, rows, f"{label} interval", ("black", look[1], None), across=True)
    axes.axvline(0.0, color="0.3", linewidth=0.8)


# --- distances and tokens needed: a small panel for each selector ---


def _selector_panels(
    frame: pd.DataFrame, width: float, x: str, y: str, *further: Line2D
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame, style.Style]]]:
    """A figure with its labels and legend, and the panel, rows and look of each selector."""
    styles = style.selector_styles(frame["selector"].unique())
    places = style.in_rows(len(styles), style.columns_in(width, 2.0))
    figure, panels = style.small_multiples(places, width, 2)
    style.outer_labels(panels, x, y)
    style.add_legend(figure, [*style.selector_handles({"true far context": ("0.2", "o", "-")}), *further])
    parts = []
    for axes, (name, look) in zip(panels, styles.items(), strict=True):
        lines = style.selector_label(name).replace(", ", ",\n").replace("@", "\n@")
        axes.set_title(lines, loc="left")
        parts.append((axes, frame[frame["selector"] == name], look))
    return figure, parts


def _context_looks(marker: Any) -> dict[str, dict[str, Any]]:
    """How the curves of the true far context and of the placebo differ, whatever their colour."""
    return {PLACEBO: style.placebo_looks(marker), TRUE: {"linestyle": "-", "marker": marker}}


@matplotlib.rc_context(style.STYLE)
def distances_figure(
    result: Result, *, k: int | None = None, width: float = style.PAGE, **bootstrap: int
) -> Figure:
    """A panel for each selector: share of its first k tokens by distance from the target, over the uniform share.

    The line at 1 is what tokens drawn uniformly from the far context would have; above it the axis is logarithmic.
    """
    frame = numbers.distances(result, k, **bootstrap)
    frame[["value", "low", "high"]] = frame[["value", "low", "high"]].div(frame["uniform"], axis=0)
    edges = sorted({*frame["from_tokens"], *frame["to_tokens"]})
    share = f"share of the first {frame['k'].iloc[0]}\nover uniform"
    uniform = Line2D([], [], color="0.3", linewidth=0.8, label="1: uniform over the far context")
    figure, parts = _selector_panels(frame, width, "distance [tokens]", share, uniform)
    for axes, of_selector, (colour, marker, _) in parts:
        axes.axhline(1.0, **style.REFERENCE)
        for context, looks in _context_looks(marker).items():
            rows = of_selector[of_selector["far_context"] == context]
            place = 0.62 if context == PLACEBO else 0.38
            centres = rows["from_tokens"] * (rows["to_tokens"] / rows["from_tokens"]) ** place
            bars = style.bar_lengths(rows)
            axes.errorbar(centres, rows["value"], bars, color=colour, elinewidth=0.8, label=context, **looks)
        axes.set_yscale("symlog", linthresh=1, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1, 2, 4, 8, 16, 32]))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        style.log_axis(axes, edges[:: max(1, (len(edges) - 1) // 4)])
        axes.grid(visible=False, axis="x")
    parts[0][0].set_ylim(bottom=0)
    return figure


@matplotlib.rc_context(style.STYLE)
def tokens_needed_figure(result: Result, *, width: float = style.PAGE, **bootstrap: int) -> Figure:
    """A panel for each selector: share of the targets for which so many tokens give 90 % of the gain.

    Targets for which no measured k was enough are censored; their share stands above the curves.
    """
    frame, ks = numbers.tokens_needed(result, **bootstrap), result.ks
    share = f"targets with {100 * numbers.SHARE_NEEDED:g} %\nof the gain"
    figure, parts = _selector_panels(frame, width, "k [far tokens]", share)
    for axes, of_selector, (colour, marker, _) in parts:
        for context, looks in _context_looks(marker).items():
            rows = of_selector[(of_selector["far_context"] == context) & (of_selector["name"] == "reached")]
            axes.step(rows["k"], rows["value"], where="post", color=colour, label=context, **looks)
            style.draw_points(axes, rows["k"], rows, f"{context} interval", (colour, "none", None))
        [never] = of_selector[of_selector["name"] == "never"].to_dict("records")
        text = f"more than {ks[-1]:,}: {interval_text(never, percent=True)} %"
        axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize=style.SMALL, color="0.2")
        style.log_axis(axes, ks)
        axes.yaxis.set_major_formatter(_PERCENT)
    parts[0][0].set(ylim=(-0.03, 1.25), yticks=np.arange(0, 1.01, 0.25))
    return figure


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
    styles = style.selector_styles(recoveries["selector"].unique())
    parts = frame[frame["blind"].notna()]
    n_panels = 2 if len(parts) else 1
    columns = min(style.columns_in(width, 3.2), n_panels)
    figure = style.new_figure(width, 2.7 * (n_panels // columns) + 1.4)
    panels = figure.subplots(n_panels // columns, columns, squeeze=False).flat
    _plot_far_contexts(panels[0], recoveries, styles, "group" in result.targets)
    comparable = f"the {frame['n_targets'].iloc[0]:,} over $\\tau$ that have every far context"
    panels[0].set_title(f"(a) Recovery by far context, k = {k};\n{comparable}", loc="left")
    handles: list[Any] = style.selector_handles(styles, joined=False)
    if len(parts):
        first = parts.iloc[0]
        _plot_parts(
            panels[1], parts[(parts[["selector", "blind"]] == first[["selector", "blind"]]).all(axis=1)]
        )
        panels[1].set_title(f"(b) Parts of {first['selector']};\nblind form: {first['blind']}", loc="left")
        handles += [Patch(**look, **_EDGE) for look in _PARTS.values()]
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
        style.draw_points(axes, places[1:], rows[1:], name, look, placebo=True)
    labels = [_FAR_CONTEXTS[context] for context in contexts]
    if not has_groups:
        labels = [label.replace("same group", "same text").replace("group", "document") for label in labels]
    axes.set_xticks(range(len(contexts)), labels)
    axes.grid(visible=False, axis="x")
    style.recovery_axis(axes, "y")


def _plot_parts(axes: Axes, parts: pd.DataFrame) -> None:
    """Bars side by side, not stacked: selection bias may be negative, and every part has an interval of its own."""
    parts = parts[(parts["name"] != "common_context") | (parts["far_context"] == numbers.LARGEST)]
    for shift, (name, look) in zip(style.side_by_side(3, 0.27), _PARTS.items(), strict=True):
        rows = parts[parts["name"] == name]
        places = np.arange(len(rows)) + shift
        axes.bar(places, rows["value"], 0.25, **look, **_EDGE)
        style.draw_points(axes, places, rows, f"{look['label']} interval", ("black", "none", None))
        axes.set_xticks(range(len(rows)), [str(k) for k in rows["k"]])
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="k [far tokens added to the short context]", ylabel=f"recovery\n{style.OF_GAIN}")
