"""What a recovery consists of: selection bias, common context and the specific rest (docs/method.md, 2.3)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis.figures import style
from analysis.figures.figure2 import describe
from analysis.result import Result
from analysis.stats import numbers
from analysis.stats.measured import BEST, TRUE, choose_k

# from the target's own text to the most distant one
_FAR_CONTEXTS = {
    TRUE: "own text",
    "shuffled": "own text,\nshuffled",
    "same-group": "same group,\nelsewhere",
    "placebo": "another\ngroup",
}
_PARTS: dict[str, dict[str, Any]] = {
    "selection_bias": {"facecolor": "white", "hatch": "//////", "label": "selection bias (winner's curse)"},
    "common_context": {"facecolor": "0.75", "label": "common context"},
    "specific": {"facecolor": "0.35", "label": "specific"},
}
_EDGE: dict[str, Any] = {"edgecolor": "0.2", "linewidth": 0.6}
_RECOVERY = f"recovery {style.OF_GAIN}"


def placebos_figure(
    result: Result,
    path: str | Path | None = None,
    *,
    k: int | None = None,
    width: float = style.PAGE,
    heading: bool = True,
    **bootstrap: int,
) -> Figure | None:
    """(a) recovery of every selector in every far context at one k, (b) the parts of it, of the first signed selector
    whose target-blind form was measured. None where only one placebo was measured."""
    frame = numbers.placebos(result, **bootstrap)
    if frame.empty:
        return None
    k = choose_k(result.ks, k)
    recoveries = frame[(frame["name"] == "recovery") & (frame["k"] == k) & (frame["selector"] != BEST)]
    # the colours of all figures of this Result
    styles = style.selector_styles(numbers.Measured(result).names)
    shown = {name: styles[name] for name in recoveries["selector"].unique()}
    parts = frame[frame["blind"].notna()]
    panels = 2 if len(parts) else 1
    columns = min(style.columns_in(width, 3.2), panels)
    rows = panels // columns
    handles: list[Any] = [*style.marker_handles(shown)]
    if len(parts):
        handles += [Patch(**look, **_EDGE) for look in _PARTS.values()]
    with matplotlib.rc_context(style.STYLE):
        legend_height = 0.15 * len(handles) / style.columns_in(width, 2.2)
        figure = style.new_figure(width, 2.7 * rows + 0.9 + legend_height)
        axes = figure.subplots(rows, columns, squeeze=False).flat
        _plot_far_contexts(axes[0], recoveries, shown, "group" in result.targets)
        axes[0].set_title(f"(a) Recovery by far context, k = {k}", loc="left")
        if len(parts):
            first = parts.iloc[0]
            of_first = (parts["selector"] == first["selector"]) & (parts["blind"] == first["blind"])
            _plot_parts(axes[1], parts[of_first])
        style.add_legend(figure, handles)
        if heading:
            n_targets = frame["n_targets"].iloc[0]
            comparable = f"; shown: the {n_targets:,} over $\\tau$ that have every far context"
            style.add_heading(figure, describe(result) + comparable)
    if path is not None:
        style.save_figure(figure, path)
    return figure


def _plot_far_contexts(
    axes: Axes, frame: pd.DataFrame, shown: Mapping[str, style.Style], has_groups: bool
) -> None:
    contexts = [context for context in _FAR_CONTEXTS if context in set(frame["far_context"])]
    step = min(0.14, 0.8 / len(shown))
    for number, (name, look) in enumerate(shown.items()):
        rows = frame[frame["selector"] == name].set_index("far_context").loc[contexts]
        places = np.arange(len(contexts)) + step * (number - (len(shown) - 1) / 2)
        style.draw_points(axes, places[:1], rows[:1], name, look)
        style.draw_points(axes, places[1:], rows[1:], f"{name} placebo", look, hollow=True)
    labels = [_FAR_CONTEXTS[context] for context in contexts]
    if not has_groups:
        labels = [label.replace("same group", "same text").replace("group", "document") for label in labels]
    axes.set_xticks(range(len(contexts)), labels)
    axes.set_xlim(-0.5, len(contexts) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.axhline(0.0, **style.REFERENCE)
    axes.axhline(1.0, linestyle=":", **style.REFERENCE)
    axes.set_ylabel(_RECOVERY)


def _plot_parts(axes: Axes, parts: pd.DataFrame) -> None:
    """Bars side by side, not stacked: selection bias may be negative, and every part has an interval of its own."""
    for number, (name, look) in enumerate(_PARTS.items()):
        rows = parts[parts["name"] == name]
        if name == "common_context":
            rows = rows[rows["far_context"] == numbers.LARGEST]
        places = np.arange(len(rows)) + 0.27 * (number - 1)
        axes.bar(places, rows["value"], 0.25, **look, **_EDGE)
        bars: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
        axes.errorbar(
            places, rows["value"], style.bar_lengths(rows), label=f"{look['label']} interval", **bars
        )
        axes.set_xticks(range(len(rows)), [str(k) for k in rows["k"]])
    axes.axhline(0.0, color="0.3", linewidth=0.8)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("k [far tokens added to the short context]")
    axes.set_ylabel(_RECOVERY)
    signed, blind = parts[["selector", "blind"]].iloc[0]
    axes.set_title(f"(b) Parts of {signed};\nblind form: {blind}", loc="left")
