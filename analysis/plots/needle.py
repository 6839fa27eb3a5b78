"""Needles by depth and length as heat maps, and the selectors' recall of them, from `needle.json` alone: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from analysis.plots.style import STYLE

MEASURES = {
    "exact": ("needle", "exact match [share of needles]"),
    "gain_nats": ("needle_gain", "loss without the needle - with it [nats per token]"),
}
"""What a heat map can show: the name of its figure, and what its colours mean."""

_LEAST_TOP_NATS = 0.1
Json = dict[str, Any]


def needle_figure(needle_json: Json, measure: str) -> Figure:
    """Depth against length, a column of panels per model and a row per k; one scale of colours."""
    models, ks = needle_json["models"], needle_json["settings"]["ks"]
    _, meaning = MEASURES[measure]
    grids = {
        (k, number): _grid(model, k, needle_json["settings"], measure)
        for k in ks
        for number, model in enumerate(models)
    }
    # Where no model gains anything the colours still need a scale.
    gains = [_LEAST_TOP_NATS, *(float(np.nanmax(grid)) for grid in grids.values())]
    top = 1.0 if measure == "exact" else max(gains)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.6 + 2.3 * len(models), 1.0 + 1.75 * len(ks)), layout="constrained")
        FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
        panels = figure.subplots(len(ks), len(models), squeeze=False, sharex=True, sharey=True)
        for row, k in enumerate(ks):
            for column, model in enumerate(models):
                axes = panels[row, column]
                image = _heat_map(axes, grids[k, column], needle_json["settings"], top)
                if row == 0:
                    axes.set_title(_titled(model), loc="left")
                if row == len(ks) - 1:
                    axes.set_xlabel("context [tokens]")
                if column == 0:
                    axes.set_ylabel(f"k = {k}\ndepth of the needle")
        figure.colorbar(image, ax=panels, label=meaning, shrink=0.9)
        figure.suptitle(describe_needle(needle_json), fontsize=8.5, color="0.25", x=0.01, ha="left")
    return figure


def describe_needle(needle_json: Json) -> str:
    """One line on what was measured."""
    settings = needle_json["settings"]
    return (
        f"{settings['samples_measured']:,} needles behind a key of {settings['key_tokens']} tokens, in "
        f"{settings['documents']:,} documents"
    )


def recall_figure(needle_json: Json) -> Figure:
    """Recall of the needle's tokens against k, a panel per checkpoint; true solid, placebo dashed, chance dotted."""
    from analysis.plots.style import selector_styles

    checkpoints = [(model["label"], one) for model in needle_json["models"] for one in model["checkpoints"]]
    measured = [(label, one["recall"]) for label, one in checkpoints if one["recall"] is not None]
    styles = selector_styles(list(needle_json["settings"]["recall"]["selectors"]))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.2 + 2.6 * len(measured), 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0]
        for axes, (label, recall) in zip(panels, measured, strict=True):
            _plot_recall(axes, recall, styles)
            axes.set_title(label, loc="left")
            axes.set_xlabel("k selected far tokens")
        panels[0].set_ylabel(f"recall of the needle's {measured[0][1]['needle_columns']} tokens")
        panels[-1].legend(frameon=False, fontsize=7)
        options = needle_json["settings"]["recall"]
        figure.suptitle(
            f"{measured[0][1]['samples']} contexts of {options['length']} tokens, depth {options['depth']:g}; dashed: "
            "placebo; dotted: chance; bands: 95 % bootstrap by document",
            fontsize=8.5, color="0.25", x=0.01, ha="left",
        )  # fmt: skip
    return figure


def _plot_recall(axes: Axes, recall: Json, styles: dict[str, tuple[Any, Any, Any]]) -> None:
    ks = recall["ks"]
    for name, by_k in recall["selectors"].items():
        colour, marker, _ = styles[name]
        for kind, line in (("recall", "-"), ("placebo_recall", "--")):
            value, low, high = (
                [float("nan") if by_k[str(k)][kind][bound] is None else by_k[str(k)][kind][bound] for k in ks]
                for bound in ("value", "low", "high")
            )
            label = name if kind == "recall" else None
            axes.plot(ks, value, color=colour, marker=marker, linestyle=line, label=label)
            axes.fill_between(ks, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.plot(ks, list(recall["chance"].values()), color="0.4", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_ylim(-0.02, 1.02)


def _grid(model: Json, k: int, settings: Json, measure: str) -> np.ndarray:
    """Values by depth (rows) and length (columns)."""
    of_cell = {
        (one["depth"], one["length"]): one[measure]["value"]
        for one in model["cells"]
        if one["value_tokens"] == k
    }
    return np.array(
        [[of_cell[depth, length] for length in settings["lengths"]] for depth in settings["depths"]]
    )


def _heat_map(axes: Axes, grid: np.ndarray, settings: Json, top: float) -> AxesImage:
    image = axes.imshow(grid, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        dark = value < 0.6 * top  # where the colour is dark the figure is white
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=6,
            color="white" if dark else "0.1",
        )
    axes.set_xticks(range(len(settings["lengths"])), [f"{length:,}" for length in settings["lengths"]])
    axes.set_yticks(range(len(settings["depths"])), [f"{depth:g}" for depth in settings["depths"]])
    axes.grid(visible=False)
    return image


def _titled(model: Json) -> str:
    windows = {one["training_length"] for one in model["checkpoints"]} - {None}
    seeds = len(model["checkpoints"])
    told: Sequence[str] = [
        *(f"window {window:,}" for window in sorted(windows)),
        *([f"{seeds} seeds"] if seeds > 1 else []),
    ]
    return model["label"] + (f"\n{', '.join(told)}" if told else "")
