"""Needles by depth and length as heat maps, and the selectors' recall of them, from tidy frames.

Cells have a row per model, name, value_tokens (k of the needle), length (of the context, in tokens) and depth (NaN:
mean over depths), with value, low and high. Names: "exact" (exact match, a fraction of the needles), "gain_nats" (loss
without the needle minus with it, per token). Optional: trained_window_tokens of the model.

Recalls have a row per model, selector, far_context ("true", "placebo") and k (selected far tokens), with value, low and
high: of the tokens that a prediction needs the share that is selected. Selector `CHANCE` is a random choice, `MOST` the
most that k tokens can find.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from analysis.figures import style
from analysis.stats.measured import PLACEBO, TRUE
from analysis.stats.numbers import CHANCE

MEASURES = {
    "exact": "exact match [% of needles]",
    "gain_nats": "loss without the needle - with it [nats per token]",
}
"""What a heat map can show, and what its colours mean."""
_SLANTED_FROM = 5  # lengths whose labels would touch
_LEAST_TOP_NATS = 0.1
MOST = "the most that k tokens can find"
_REFERENCES: dict[str, dict[str, Any]] = {
    CHANCE: {"color": "0.4", "linestyle": ":"},
    MOST: {"color": "0.75", "linewidth": 2.2, "zorder": 1.5},
}


def needle_figure(cells: pd.DataFrame, *, measure: str = "exact", heading: str = "") -> Figure:
    """Depth against length, a row of panels for each model and a column for each k; one scale.

    ``measure``: one of `MEASURES`; ``heading``: what was measured, above the panels.
    """
    scale = 100 if measure == "exact" else 1
    of_measure = cells[(cells["name"] == measure) & cells["depth"].notna()]
    models, ks = list(of_measure["model"].unique()), sorted(of_measure["value_tokens"].unique())
    # where no model gains anything the colours still need a scale
    top = 100.0 if measure == "exact" else max(_LEAST_TOP_NATS, float(of_measure["value"].max()))
    width = max(style.PAGE, 0.9 + 1.2 * len(ks))
    height = 1.5 + max(1.1, 0.3 + 0.2 * of_measure["depth"].nunique()) * len(models)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(width, height)
        panels = figure.subplots(len(models), len(ks), squeeze=False, sharex=True, sharey=True)
        for (model, k), rows in of_measure.groupby(["model", "value_tokens"]):
            axes = panels[models.index(model), ks.index(k)]
            grid = scale * rows.pivot(index="depth", columns="length", values="value")
            image = _heat_map(axes, grid, top)
            axes.set_title(f"k = {k}", loc="left")
            axes.set(xlabel="context [tokens]", ylabel=f"{_title(cells, model)}\ndepth of the needle")
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


def needle_lengths_figure(cells: pd.DataFrame, *, heading: str = "") -> Figure:
    """Exact match against length, the mean over depths: a panel for each model, a curve for each k."""
    means = cells[(cells["name"] == "exact") & cells["depth"].isna()]
    models, ks = list(means["model"].unique()), sorted(means["value_tokens"].unique())
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.8, len(ks)))
    looks = zip(ks, map(tuple, colours), cycle("os^DvPX<>"), strict=False)
    styles: dict[str, style.Style] = {f"k = {k}": (colour, marker, "-") for k, colour, marker in looks}
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(models), style.columns_in(style.PAGE, 1.6))
        figure, panels = style.small_multiples(places, title_lines=2)
        for axes, model in zip(panels, models, strict=True):
            rows = means[means["model"] == model].sort_values("length")
            curves = {f"k = {k}": rows[rows["value_tokens"] == k] for k in ks}
            style.draw_curves(axes, curves, styles, x="length")
            for window in _windows(cells, model):
                axes.axvline(window, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
            style.log_axis(axes, sorted(means["length"].unique()))
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(_title(cells, model), loc="left")
        style.outer_labels(panels, "context [tokens]", "exact match,\nmean over depths")
        style.add_legend(figure, style.line_handles(styles))
        style.add_heading(figure, heading, "bars: 95 %; dotted: trained window")
    return figure


def recall_figure(recalls: pd.DataFrame, *, of: str = "the needle's tokens", heading: str = "") -> Figure:
    """Recall of these tokens against k, a panel per model; true solid, placebo dashed, chance dotted."""
    chosen = recalls[~recalls["selector"].isin(_REFERENCES)]
    styles = style.selector_styles(chosen["selector"].unique())
    references = {name: looks for name, looks in _REFERENCES.items() if name in {*recalls["selector"]}}
    models = list(recalls["model"].unique())
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(style.in_rows(len(models), style.columns_in(style.PAGE, 2.0)))
        for axes, model in zip(panels, models, strict=True):
            of_model = recalls[recalls["model"] == model]
            for context in (PLACEBO, TRUE):
                rows = of_model[of_model["far_context"] == context]
                curves = {name: rows[rows["selector"] == name] for name in styles}
                style.draw_curves(axes, curves, styles, placebo=context == PLACEBO)
            for name, looks in references.items():
                reference = of_model[of_model["selector"] == name]
                axes.plot(reference["k"], reference["value"], label=name, **looks)
            style.k_axis(axes, sorted(of_model["k"].unique()))
            axes.set_title(model, loc="left")
        panels[0].set_ylim(-0.03, 1.03)
        style.outer_labels(panels, "k [selected far tokens]", f"recall of\n{of}")
        lines = [Line2D([], [], label=name, **looks) for name, looks in references.items()]
        style.add_legend(figure, [*style.selector_handles(styles), *lines])
        style.add_heading(figure, heading, "bars: 95 %")
    return figure


def _windows(cells: pd.DataFrame, model: str) -> list[float]:
    """The windows that a model was trained on, where they are known."""
    if "trained_window_tokens" not in cells:
        return []
    return sorted(cells["trained_window_tokens"][cells["model"] == model].dropna().unique())


def _title(cells: pd.DataFrame, model: str) -> str:
    return "\n".join([model, *(f"window {window:,.0f}" for window in _windows(cells, model))])
