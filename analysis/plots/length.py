"""Loss by position, panel (d) of Figure 2 (METHOD 2.5), and at each length: from `length.json`, no model, no torch.

Models differ by colour, marker and line style at once. All intervals are 95 %.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from analysis.plots.style import (
    STYLE,
    add_heading,
    bar_lengths,
    curve_style,
    new_figure,
    save_figure,
    to_number,
)

Json = dict[str, Any]


MANY_MODELS = 7
"""With more models than these the legend stands beside the panel: it would hide curves."""


def plot_length(axes: Axes, length_json: Json) -> None:
    """Panel (d): mean loss per bin of positions against the bin's centre [nats per token].

    A curve per model, its interval shaded; vertical lines at the lengths and position targets of training.
    """
    for number, each in enumerate(length_json["models"]):
        colour, marker, line = curve_style(number)
        centres = [_centre(one) for one in each["bins"]]
        value, low, high = (
            [to_number(one["loss_nats"][bound]) for one in each["bins"]] for bound in ("value", "low", "high")
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
        legend = axes.get_legend()
        if legend is not None and len(length_json["models"]) > MANY_MODELS:
            legend.remove()
            figure.legend(loc="outside right center", frameon=False, handlelength=3)
            figure.set_figwidth(7.4)
        figure.suptitle(describe_length(length_json), fontsize=8.5, color="0.25", x=0.01, ha="left")
    return figure


def lengths_figure(length_json: Json) -> Figure:
    """The loss at each length, a panel per length, a row per model with its interval.

    The dotted line is the first model's loss at the smallest length, the same in all panels.
    """
    models, lengths = length_json["models"], length_json["settings"]["lengths"]
    reference = to_number(models[0]["at_lengths"][0]["loss_nats"]["value"])
    with matplotlib.rc_context(STYLE):
        figure = new_figure(1.9 * len(lengths) + 1.6, 0.24 * len(models) + 1.3)
        panels = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)[0]
        for place, (axes, length) in enumerate(zip(panels, lengths, strict=True)):
            for number, each in enumerate(models):
                loss = each["at_lengths"][place]["loss_nats"]
                colour, marker, _ = curve_style(number)
                looks: Json = {"color": colour, "marker": marker, "capsize": 2, "elinewidth": 1}
                axes.errorbar([to_number(loss["value"])], [number], xerr=bar_lengths([loss]), **looks)
            axes.axvline(reference, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
            axes.set_title(f"at {length:,} tokens", loc="left")
        panels[0].set_yticks(range(len(models)), [each["label"] for each in models])
        panels[0].set_ylim(len(models) - 0.5, -0.5)  # the first model on top
        figure.supxlabel("held-out loss [nats per token]", fontsize=9)
        add_heading(
            figure, f"{describe_length(length_json)}; dotted: {models[0]['label']} at {lengths[0]:,} tokens"
        )
    return figure


def save_length_figures(length_json: Json, folder: str | Path) -> list[Path]:
    """Write length.png (`length_figure`) and lengths.png (`lengths_figure`), both also as pdf; returns the paths."""
    by_position = save_figure(length_figure(length_json), folder, "length")
    return by_position + save_figure(lengths_figure(length_json), folder, "lengths")


def describe_length(length_json: Json) -> str:
    """One line on what was measured: windows, documents."""
    settings = length_json["settings"]
    return (
        f"{settings['windows_measured']:,} windows of {settings['lengths'][-1]:,} tokens in "
        f"{settings['documents']:,} documents; bands and bars: 95 % bootstrap"
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
    marks: dict[tuple[int, str], list[str]] = {}  # names of each place and line style
    for each in [one for model in length_json["models"] for one in model["checkpoints"]]:
        if each["training_length"] is not None:
            marks.setdefault((each["training_length"], ":"), []).append("training length")
        if each["position_target"] is not None:
            scheme = {"pose": "PoSE"}.get(each["position_scheme"], each["position_scheme"].replace("_", " "))
            marks.setdefault((each["position_target"], "-."), []).append(f"{scheme} target")
    for (length, line), names in marks.items():
        name = ", ".join(dict.fromkeys(names))
        axes.axvline(length, color="0.35", linestyle=line, linewidth=1, zorder=1.5)
        place: Json = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        looks: Json = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 7.5, "color": "0.35"}
        axes.annotate(f"{name} {length:,}", (length, 0.98), (-2, 0), annotation_clip=True, **looks, **place)
