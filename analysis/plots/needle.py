"""Needles by depth and length as heat maps, and the selectors' recall of them, from `needle.json` alone."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from analysis.plots import style
from analysis.stats.bootstrap import by_clusters, by_clusters_and_seeds
from analysis.stats.recovery import and_prefixes
from olmo_sparsity.util.result_files import Json

MEASURES = {
    "exact": ("needle", "exact match [% of needles]"),
    "gain_nats": ("needle_gain", "loss without the needle - with it [nats per token]"),
}
"""What a heat map can show: the name of its figure, and what its colours mean."""
_SLANTED_FROM = 5  # lengths whose labels would touch

_LEAST_TOP_NATS = 0.1
_CHANCE: Json = {"color": "0.4", "linestyle": ":"}


def needle_figure(needle_json: Json, measure: str) -> Figure:
    """Depth against length, a panel for each model and k, the more numerous of them downwards; one scale."""
    models, settings = needle_json["models"], needle_json["settings"]
    ks, turned = settings["ks"], len(models) > len(settings["ks"])
    _, meaning = MEASURES[measure]
    grids = {
        (column, row) if turned else (row, column): _grid(model, k, settings, measure)
        for row, k in enumerate(ks)
        for column, model in enumerate(models)
    }
    # Where no model gains anything the colours still need a scale.
    gains = [_LEAST_TOP_NATS, *(float(np.nanmax(grid)) for grid in grids.values())]
    top = 100 if measure == "exact" else max(gains)
    of_ks, of_models = [f"k = {k}" for k in ks], [_titled(model) for model in models]
    down, across = (of_models, of_ks) if turned else (of_ks, of_models)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(
            max(style.PAGE, 0.9 + 1.2 * len(across)),
            1.5 + (0.3 + 0.2 * len(settings["depths"])) * len(down),
        )
        panels = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey=True)
        for place, grid in grids.items():
            image = _heat_map(panels[place], grid, settings, top)
        for axes, title in zip(panels[0], across, strict=True):
            axes.set_title(title, loc="left")
        for axes in panels[-1]:
            axes.set_xlabel("context [tokens]")
        for axes, name in zip(panels[:, 0], down, strict=True):
            axes.set_ylabel(f"{name}\ndepth of the needle")
        figure.colorbar(image, ax=panels, label=meaning, location="bottom", shrink=0.5, aspect=40, pad=0.02)
        style.add_heading(figure, describe_needle(needle_json))
    return figure


def needle_lengths_figure(needle_json: Json) -> Figure:
    """Exact match against length, the mean over depths: a panel for each model, a curve for each k."""
    models, settings = needle_json["models"], needle_json["settings"]
    colours = matplotlib.colormaps["viridis"](np.linspace(0.0, 0.8, len(settings["ks"])))
    markers = "os^DvPX<>"
    styles: dict[str, style.Style] = {
        f"k = {k}": (matplotlib.colors.to_hex(colour), markers[number % len(markers)], "-")
        for number, (k, colour) in enumerate(zip(settings["ks"], colours, strict=True))
    }
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(
            style.in_rows(len(models), style.columns_in(style.PAGE, 1.6)), title_lines=2
        )
        for axes, model in zip(panels, models, strict=True):
            curves = {
                f"k = {k}": {one["length"]: one for one in model["over_depths"] if one["value_tokens"] == k}
                for k in settings["ks"]
            }
            style.draw_curves(axes, curves, "exact", styles)
            for window in {one["training_length"] for one in model["checkpoints"]} - {None}:
                axes.axvline(window, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
            style.log_axis(axes, settings["lengths"])
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(_titled(model), loc="left")
        style.outer_labels(panels, "context [tokens]", "exact match,\nmean over depths")
        style.add_legend(figure, style.line_handles(styles))
        bars = f"bars: 95 %, {by_clusters_and_seeds(needle_json)}; dotted: trained window"
        style.add_heading(figure, f"{describe_needle(needle_json)}; {bars}")
    return figure


def recall_figure(needle_json: Json) -> Figure:
    """Recall of the needle's tokens against k, a panel per checkpoint; true solid, placebo dashed, chance dotted."""
    checkpoints = [(model["label"], one) for model in needle_json["models"] for one in model["checkpoints"]]
    measured = [(label, one["recall"]) for label, one in checkpoints if one["recall"] is not None]
    options = needle_json["settings"]["recall"]
    styles = style.selector_styles(options["selectors"])
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(
            style.in_rows(len(measured), style.columns_in(style.PAGE, 2.0))
        )
        labels = [label for label, _ in measured]
        for number, (axes, (label, recall)) in enumerate(zip(panels, measured, strict=True)):
            style.draw_curves(axes, recall["selectors"], "placebo_recall", styles, placebo=True)
            style.draw_curves(axes, recall["selectors"], "recall", styles)
            axes.plot(recall["ks"], list(recall["chance"].values()), **_CHANCE)
            style.k_axis(axes, recall["ks"])
            seed = f", {labels[:number].count(label) + 1}" if labels.count(label) > 1 else ""
            axes.set_title(label + seed, loc="left")
        first = measured[0][1]
        counts = first if "documents" in first else needle_json["settings"]  # older files do not say
        panels[0].set_ylim(-0.03, 1.03)
        style.outer_labels(
            panels, "k [selected far tokens]", f"recall of the\nneedle's {first['needle_columns']} tokens"
        )
        style.add_legend(figure, [*style.selector_handles(styles), Line2D([], [], label="chance", **_CHANCE)])
        style.add_heading(
            figure,
            f"{first['samples']} contexts of {options['length']} tokens, depth {options['depth']:g}; "
            f"bars: 95 %, {by_clusters(counts)}",
        )
    return figure


def describe_needle(needle_json: Json) -> str:
    """One line on what was measured."""
    settings = needle_json["settings"]
    return (
        f"{settings['samples_measured']:,} needles behind a key of {settings['key_tokens']} tokens, in "
        f"{settings['documents']:,} documents{and_prefixes(needle_json)}"
    )


def _grid(model: Json, k: int, settings: Json, measure: str) -> np.ndarray:
    """Values by depth (rows) and length (columns), exact match in per cent."""
    of_cell = {
        (one["depth"], one["length"]): one[measure]["value"]
        for one in model["cells"]
        if one["value_tokens"] == k
    }
    grid = np.array(
        [[of_cell[depth, length] for length in settings["lengths"]] for depth in settings["depths"]]
    )
    return 100 * grid if measure == "exact" else grid


def _heat_map(axes: Axes, grid: np.ndarray, settings: Json, top: float) -> AxesImage:
    image = axes.imshow(grid, vmin=0, vmax=top, cmap="viridis", aspect="auto")
    decimals = 0 if top == 100 else 1 if top >= 1 else 2
    for (row, column), value in np.ndenumerate(grid):
        colour = "white" if value < 0.6 * top else "0.1"  # white where the shade is dark
        text = f"{round(value, decimals) + 0.0:.{decimals}f}"  # 0.0: else -0.00
        axes.text(column, row, text, ha="center", va="center", fontsize=style.SMALL, color=colour)
    lengths = settings["lengths"]
    slanted: Json = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(
        range(len(lengths)),
        [f"{length:,}" for length in lengths],
        **(slanted if len(lengths) >= _SLANTED_FROM else {}),
    )
    axes.set_yticks(range(len(settings["depths"])), [f"{depth:g}" for depth in settings["depths"]])
    axes.grid(visible=False)
    return image


def _titled(model: Json) -> str:
    windows = {one["training_length"] for one in model["checkpoints"]} - {None}
    seeds = len(model["checkpoints"])
    lines = [
        *(f"window {window:,}" for window in sorted(windows)),
        *([f"{seeds} seeds"] if seeds > 1 else []),
    ]
    return "\n".join([model["label"], ", ".join(lines)]) if lines else model["label"]
