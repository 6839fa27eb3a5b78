"""Needles by depth and length as heat maps, and against the length, from a tidy frame.

Cells have a row per model, name, value_tokens (k of the needle), length (of the context, in tokens) and depth (NaN:
mean over depths), with value, low and high. Names: "exact" (exact match, a fraction of the needles), "gain_nats" (loss
without the needle minus with it, per token). Optional: trained_window_tokens of the model.
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

MEASURES = {
    "exact": "exact match [% of needles]",
    "gain_nats": "loss without the needle - with it [nats per token]",
}
"""What a heat map can show, and what its colours mean."""
_SLANTED_FROM = 5  # lengths whose labels would touch
_LEAST_TOP_NATS = 0.1


@matplotlib.rc_context(style.STYLE)
def needle_figure(cells: pd.DataFrame, *, measure: str = "exact", heading: str = "") -> Figure:
    """Depth against length, a row of panels for each model and a column for each k; one scale.

    ``measure``: one of `MEASURES`; ``heading``: what was measured, above the panels.
    """
    of_measure = cells[(cells["name"] == measure) & cells["depth"].notna()]
    models, ks = list(of_measure["model"].unique()), sorted(of_measure["value_tokens"].unique())
    # where no model gains anything the colours still need a scale
    scale, top = (100, 100.0) if measure == "exact" else (1, max(_LEAST_TOP_NATS, of_measure["value"].max()))
    width = max(style.PAGE, 0.9 + 1.2 * len(ks))
    height = 1.5 + max(1.1, 0.3 + 0.2 * of_measure["depth"].nunique()) * len(models)
    figure = style.new_figure(width, height)
    panels = figure.subplots(len(models), len(ks), squeeze=False, sharex=True, sharey=True)
    for (model, k), rows in of_measure.groupby(["model", "value_tokens"]):
        axes = panels[models.index(model), ks.index(k)]
        image = _heat_map(axes, scale * rows.pivot(index="depth", columns="length", values="value"), top)
        axes.set(title=f"k = {k}", xlabel="context [tokens]")
        axes.set_ylabel(f"{_title(cells, model)}\ndepth of the needle")
        axes.label_outer()
    bar: dict[str, Any] = {"location": "bottom", "shrink": 0.5, "aspect": 40, "pad": 0.02}
    figure.colorbar(image, ax=panels, label=MEASURES[measure], **bar)
    style.add_heading(figure, heading)
    return figure


def _heat_map(axes: Axes, grid: pd.DataFrame, top: float) -> AxesImage:
    """``grid``: values by depth (rows) and length (columns)."""
    image = axes.imshow(grid, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    decimals = 0 if top == 100 else 1 if top >= 1 else 2
    for (row, column), value in np.ndenumerate(grid.to_numpy()):
        colour = "white" if value < 0.6 * top else "0.1"  # white where the shade is dark
        text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # 0.0: else -0.00
        axes.text(column, row, text, ha="center", va="center", fontsize=style.SMALL, color=colour)
    axes.set_xticks(range(len(grid.columns)), [f"{length:,}" for length in grid.columns])
    if len(grid.columns) >= _SLANTED_FROM:
        axes.tick_params("x", rotation=45)
    axes.set_yticks(range(len(grid.index)), [f"{depth:g}" for depth in grid.index])
    axes.grid(visible=False)
    return image


@matplotlib.rc_context(style.STYLE)
def needle_lengths_figure(cells: pd.DataFrame, *, heading: str = "") -> Figure:
    """Exact match against length, the mean over depths: a panel for each model, a curve for each k."""
    means = cells[(cells["name"] == "exact") & cells["depth"].isna()].sort_values("length", kind="stable")
    means = means.assign(curve=means["value_tokens"].map("k = {}".format))
    looks = style.shades(f"k = {k}" for k in sorted(means["value_tokens"].unique()))
    models = list(means["model"].unique())
    labels = ("context [tokens]", "exact match,\nmean over depths")
    figure, panels = style.small_panels([_title(cells, model) for model in models], *labels, least=1.6)
    for axes, model in zip(panels, models, strict=True):
        style.draw(axes, means[means["model"] == model], looks, "curve", "length")
        for window in _windows(cells, model):
            axes.axvline(window, linestyle=":", **style.REFERENCE)
        style.log_axis(axes, sorted(means["length"].unique()))
        axes.set_ylim(-0.03, 1.03)
    style.add_legend(figure, looks)
    style.add_heading(figure, heading, "bars: 95 %; dotted: trained window")
    return figure


def _windows(cells: pd.DataFrame, model: str) -> list[float]:
    """The windows that a model was trained on, where they are known."""
    if "trained_window_tokens" not in cells:
        return []
    return sorted(cells["trained_window_tokens"][cells["model"] == model].dropna().unique())


def _title(cells: pd.DataFrame, model: str) -> str:
    return "\n".join([model, *(f"window {window:,.0f}" for window in _windows(cells, model))])
