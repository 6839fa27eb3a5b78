"""Needles by depth and length as heat maps, and against the length, from a tidy frame.

Cells have a row per model, name, value_tokens (k of the needle), length (of the context, in tokens) and depth (NaN:
mean over depths), with value, low and high, and trained_window_tokens of the model (NaN: unknown). Drawn is the name
"exact": exact match, a fraction of the needles.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from analysis.figures import style

_SLANTED_FROM = 5  # lengths whose labels would touch


@matplotlib.rc_context(style.STYLE)
def needle_figure(cells: pd.DataFrame, *, heading: str = "") -> Figure:
    """Exact match by depth and length, a row of panels for each model and a column for each k; one scale.

    ``heading``: what was measured, above the panels.
    """
    exact = cells[(cells["name"] == "exact") & cells["depth"].notna()]
    models = list(exact["model"].unique())
    ks = sorted(exact["value_tokens"].unique())
    width = max(style.PAGE, 0.9 + 1.2 * len(ks))
    height = 1.5 + max(1.1, 0.3 + 0.2 * exact["depth"].nunique()) * len(models)
    figure = style.new_figure(width, height)
    panels = figure.subplots(len(models), len(ks), squeeze=False, sharex=True, sharey=True)
    for (model, k), rows in exact.groupby(["model", "value_tokens"]):
        axes = panels[models.index(model), ks.index(k)]
        by_depth = rows.pivot(index="depth", columns="length", values="value")
        image = _heat_map(axes, 100 * by_depth)
        axes.set(title=f"k = {k}", xlabel="context [tokens]")
        label = "depth of the needle"
        if len(models) > 1:
            label = f"{_title(cells, model)}\n{label}"
        axes.set_ylabel(label)
        axes.label_outer()
    bar: dict[str, Any] = {"location": "bottom", "shrink": 0.5, "aspect": 40, "pad": 0.02}
    figure.colorbar(image, ax=panels, label="exact match [% of needles]", **bar)
    if len(models) == 1:
        model = _title(cells, models[0]).replace("\n", ", ")
        heading = f"{model}: {heading}"
    style.add_heading(figure, heading)
    return figure


def _heat_map(axes: Axes, percent: pd.DataFrame) -> AxesImage:
    """``percent``: values by depth (rows) and length (columns)."""
    image = axes.imshow(percent, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(percent.to_numpy()):
        colour = "0.1"
        if value < 60:
            colour = "white"  # the shade is dark
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=style.SMALL, color=colour)
    axes.set_xticks(range(len(percent.columns)), [f"{length:,}" for length in percent.columns])
    if len(percent.columns) >= _SLANTED_FROM:
        axes.tick_params("x", rotation=45)
    axes.set_yticks(range(len(percent.index)), [f"{depth:g}" for depth in percent.index])
    axes.grid(visible=False)
    return image


@matplotlib.rc_context(style.STYLE)
def needle_lengths_figure(cells: pd.DataFrame, *, heading: str = "") -> Figure:
    """Exact match against length, the mean over depths: a panel for each model, a curve for each k."""
    means = cells[(cells["name"] == "exact") & cells["depth"].isna()].sort_values("length", kind="stable")
    means = means.assign(curve=means["value_tokens"].map("k = {}".format))
    looks = style.shades(f"k = {k}" for k in sorted(means["value_tokens"].unique()))
    models = list(means["model"].unique())
    titles = [_title(cells, model) for model in models]
    figure, panels = style.small_panels(
        titles, "context [tokens]", "exact match,\nmean over depths", least=1.6
    )
    for axes, model in zip(panels, models, strict=True):
        style.draw(axes, means[means["model"] == model], looks, "curve", "length")
        for window in _windows(cells, model):
            axes.axvline(window, linestyle=":", **style.REFERENCE)
        style.log_axis(axes, sorted(means["length"].unique()))
        axes.set_ylim(-0.03, 1.03)
    style.add_legend(figure, looks)
    style.add_heading(figure, heading, style.says_intervals("bars", means), "dotted: trained window")
    return figure


def _windows(cells: pd.DataFrame, model: str) -> list[float]:
    """The windows that a model was trained on, where they are known."""
    windows = cells["trained_window_tokens"][cells["model"] == model]
    return sorted(windows.dropna().unique())


def _title(cells: pd.DataFrame, model: str) -> str:
    lines = [model]
    for window in _windows(cells, model):
        lines.append(f"window {window:,.0f}")
    return "\n".join(lines)
