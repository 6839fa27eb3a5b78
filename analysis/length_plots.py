"""Panel (d) of Figure 2: held-out loss against position, from `length.json` alone: no model, no torch (METHOD 2.5).

Models differ by colour, marker and line style at once. All intervals are 95 %.
"""

from __future__ import annotations

import math
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.plots import STYLE
from analysis.result_files import ResultFile
from analysis.training_plots import curve_style

LENGTH = ResultFile(
    "length.json", "olmo-sparsity loss by position", 2, "loss by position", "scripts/length.py"
)

Json = dict[str, Any]


def plot_length(axes: Axes, length_json: Json) -> None:
    """Panel (d): mean loss per bin of positions against the bin's centre [nats per token].

    A curve per model, its interval shaded; vertical lines at the lengths and position targets of training.
    """
    for number, each in enumerate(length_json["models"]):
        colour, marker, line = curve_style(number)
        centres = [_centre(one) for one in each["bins"]]
        value, low, high = (
            [_number(one["loss_nats"][bound]) for one in each["bins"]] for bound in ("value", "low", "high")
        )
        axes.plot(
            centres, value, color=colour, marker=marker, linestyle=line, label=each["label"], zorder=3.0
        )
        axes.fill_between(centres, low, high, color=colour, alpha=0.13, linewidth=0)
    _position_axis(axes, length_json)
    _training_lines(axes, length_json)
    axes.margins(y=0.08)
    axes.legend(frameon=False, handlelength=3)
    axes.set_ylabel("held-out loss [nats per token]")
    axes.set_title("(d) Loss by position", loc="left")


def length_figure(length_json: Json) -> Figure:
    """Panel (d) by itself, and what was measured above it."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.1), layout="constrained")
        FigureCanvasAgg(figure)  # Agg whatever the backend of the process; pyplot's state is not touched
        axes = figure.subplots()
        plot_length(axes, length_json)
        axes.set_title("Loss by position", loc="left")
        figure.suptitle(describe_length(length_json), fontsize=8.5, color="0.25", x=0.01, ha="left")
    return figure


def describe_length(length_json: Json) -> str:
    """One line on what was measured: windows, documents."""
    settings = length_json["settings"]
    return (
        f"{settings['windows_measured']:,} windows of {settings['lengths'][-1]:,} tokens in "
        f"{settings['documents']:,} documents; bands: 95 % bootstrap"
    )


def _centre(one: Json) -> float:
    """Geometric centre of a bin's positions, on a logarithmic axis their middle."""
    return math.sqrt(one["from"] * (one["to"] - 1))


def _position_axis(axes: Axes, length_json: Json) -> None:
    lengths = length_json["settings"]["lengths"]
    first = _centre(length_json["models"][0]["bins"][0])
    ticks = {*lengths}
    while min(ticks) / 2 >= first:
        ticks.add(min(ticks) / 2)
    axes.set_xscale("log", base=2)
    axes.set_xlim(first / 1.2, lengths[-1] * 1.1)
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(
        sorted(ticks), [f"{tick:,.4g}" if tick < 1000 else f"{tick:,.0f}" for tick in sorted(ticks)]
    )
    axes.set_xlabel("position [tokens of the document before it]")


def _training_lines(axes: Axes, length_json: Json) -> None:
    """Dotted at the window trained on, dash-dotted at the reach of the position ids in training."""
    marks: dict[tuple[int, str], Any] = {}
    for each in [one for model in length_json["models"] for one in model["checkpoints"]]:
        if each["training_length"] is not None:
            marks[each["training_length"], "training length"] = ":"
        if each["position_target"] is not None:
            scheme = {"pose": "PoSE"}.get(each["position_scheme"], each["position_scheme"].replace("_", " "))
            marks[each["position_target"], f"{scheme} target"] = "-."
    for (length, name), line in marks.items():
        axes.axvline(length, color="0.35", linestyle=line, linewidth=1, zorder=1.5)
        place: Json = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        looks: Json = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7.5, "color": "0.35"}
        axes.annotate(f"{name} {length:,}", (length, 0.98), (-2, 0), annotation_clip=True, **looks, **place)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
