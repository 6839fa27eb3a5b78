"""Loss by position, panel (d) of Figure 2 (docs/method.md, 2.5), and at each length: from `length.json` alone.

A model has the colour and marker of its position encoding. Many models have a panel for each family of encodings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.plots import style
from analysis.stats.bootstrap import by_clusters_and_seeds
from analysis.stats.recovery import and_prefixes
from olmo_sparsity.util.result_files import Json

MOST_CURVES = 4
"""With more models than these each family of encodings has a panel."""
_FAMILIES = {
    "contiguous": "contiguous ids", "random_start": "contiguous ids", "pose": "ids with gaps",
    "random_float": "ids with gaps", "nope": "NoPE, ALiBi",
    "alibi": "NoPE, ALiBi", "linear": "RoPE scaled linearly", "ntk": "RoPE scaled by NTK", "yarn": "RoPE with YaRN",
}  # fmt: skip
_TRAINED: Json = {"color": "0.35", "linewidth": 1, "zorder": 1.5}


def plot_length(axes: Axes, length_json: Json) -> None:
    """Panel (d): mean loss per bin of positions against the bin's centre [nats per token], with its own legend."""
    styles = _styles(length_json)
    for model in length_json["models"]:
        draw_bins(axes, model["bins"], "loss_nats", model["label"], styles)
    lines = _training_lines(axes, length_json["models"])
    _position_axis(axes, length_json, most=6)
    axes.set_xlabel("position [tokens before it]")
    axes.set_ylabel("held-out loss [nats per token]")
    axes.set_title("(d) Loss by position", loc="left")
    place: Json = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.26), "borderaxespad": 0.0}
    axes.legend(handles=[*style.line_handles(styles), *lines], frameon=False, handlelength=2.6, **place)


def length_figure(length_json: Json) -> Figure:
    """Loss by position: one panel, or of many models a panel per family of encodings, with the first model in each."""
    models, styles = length_json["models"], _styles(length_json)
    first = models[0]
    families = _families(models) if len(models) > MOST_CURVES else {"Loss by position": models}
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(
            style.in_rows(len(families), style.columns_in(style.PAGE, 2.2))
        )
        if len(families) == 1:
            figure.set_size_inches(4.6, 3.6)
        lines = []
        for axes, (family, members) in zip(panels, families.items(), strict=True):
            for model in [first, *(model for model in members if model is not first)]:
                draw_bins(axes, model["bins"], "loss_nats", model["label"], styles)
            lines += _training_lines(axes, [first, *members])
            _position_axis(axes, length_json, most=5 if len(families) > 1 else 12)
            axes.set_title(family, loc="left")
        style.outer_labels(panels, "position [tokens before it]", "held-out loss\n[nats per token]")
        by_name = {line.get_label(): line for line in lines}
        style.add_legend(figure, [*style.line_handles(styles), *by_name.values()])
        more = f"; in every panel: {first['label']}" if len(families) > 1 else ""
        style.add_heading(figure, describe_length(length_json) + more)
    return figure


def lengths_figure(length_json: Json) -> Figure:
    """The loss at each length, a panel per length, a row per model with its interval.

    The dotted line is the first model's loss at the smallest length, the same in all panels.
    """
    models, lengths = length_json["models"], length_json["settings"]["lengths"]
    [reference] = style.numbers_of([models[0]["at_lengths"][0]["loss_nats"]])
    styles = _styles(length_json)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 0.17 * len(models) + 1.1)
        panels = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)[0]
        for place, (axes, length) in enumerate(zip(panels, lengths, strict=True)):
            for number, each in enumerate(models):
                loss = each["at_lengths"][place]["loss_nats"]
                colour, marker, _ = styles[each["label"]]
                looks: Json = {"color": colour, "marker": marker, "capsize": 1.5, "elinewidth": 0.8}
                axes.errorbar(style.numbers_of([loss]), [number], xerr=style.bar_lengths([loss]), **looks)
            axes.axvline(reference, color="0.35", linestyle=":", linewidth=1, zorder=1.5)
            axes.set_title(f"at {length:,} tokens", loc="left")
        panels[0].set_yticks(range(len(models)), [each["label"] for each in models])
        panels[0].set_ylim(len(models) - 0.5, -0.5)  # the first model on top
        figure.supxlabel("held-out loss [nats per token]", fontsize=style.STYLE["axes.labelsize"])
        dotted = f"dotted: {models[0]['label']} at {lengths[0]:,} tokens"
        style.add_heading(figure, f"{describe_length(length_json)}; {dotted}")
    return figure


def save_length_figures(length_json: Json, folder: str | Path) -> list[Path]:
    """Write length.png (`length_figure`) and lengths.png (`lengths_figure`), both also as pdf; returns the paths."""
    by_position = style.save_figure(length_figure(length_json), folder, "length")
    return by_position + style.save_figure(lengths_figure(length_json), folder, "lengths")


def describe_length(length_json: Json) -> str:
    """One line on what was measured: windows, documents."""
    settings = length_json["settings"]
    return (
        f"{settings['windows_measured']:,} windows of {settings['lengths'][-1]:,} tokens in "
        f"{settings['documents']:,} documents{and_prefixes(length_json)}; bands and bars: 95 %, "
        f"{by_clusters_and_seeds(length_json)}"
    )


def _styles(length_json: Json) -> dict[str, style.Style]:
    return style.model_styles({model["label"]: _encoding(model) for model in length_json["models"]})


def _encoding(model: Json) -> str | None:
    return style.encoding_of(model["label"], model["checkpoints"][0]["position_scheme"])


def _families(models: Sequence[Json]) -> dict[str, list[Json]]:
    """Models by family, in their order; not a family of the first model alone, which is in every panel."""
    found: dict[str, list[Json]] = {}
    for model in models:
        found.setdefault(_FAMILIES.get(_encoding(model) or "", "Others"), []).append(model)
    return {family: members for family, members in found.items() if members != [models[0]]}


def draw_bins(
    axes: Axes, bins: Sequence[Json], loss: str, label: str, styles: dict[str, style.Style], unit: float = 1
) -> None:
    """A loss of bins of positions, with its band, against their centres, ``unit`` to a token."""
    centres = [unit * _centre(one) for one in bins]
    intervals = [one[loss] for one in bins]
    drawn = [style.numbers_of(intervals, bound) for bound in ("value", "low", "high")]
    style.draw_band(axes, centres, drawn, label, styles[label], alpha=0.13)


def _centre(one: Json) -> float:
    """Geometric centre of a bin's positions, on a logarithmic axis their middle."""
    return math.sqrt(one["from"] * (one["to"] - 1))


def _position_axis(axes: Axes, length_json: Json, most: int) -> None:
    """Powers of two below the lengths, and the lengths; every second one where they would be more than ``most``."""
    lengths = length_json["settings"]["lengths"]
    first = _centre(length_json["models"][0]["bins"][0])
    ticks = sorted(lengths)
    while ticks[0] / 2 >= first:
        ticks.insert(0, ticks[0] / 2)
    style.log_axis(axes, ticks[:: -math.ceil(len(ticks) / most)][::-1])
    axes.set_xlim(first / 1.2, lengths[-1] * 1.1)
    axes.margins(y=0.08)


def _training_lines(axes: Axes, models: Sequence[Json]) -> list[Line2D]:
    """Dotted at the window trained on, dash-dotted at the reach of the position ids in training, for the legend."""
    handles = []
    line: Any
    checkpoints = [one for model in models for one in model["checkpoints"]]
    for key, line, name in (
        ("training_length", ":", "trained window"),
        ("position_target", "-.", "reach of trained ids"),
    ):
        for place in sorted({one[key] for one in checkpoints if one[key] is not None}):
            axes.axvline(place, linestyle=line, **_TRAINED)
            handles.append(Line2D([], [], linestyle=line, label=f"{name}: {place:,}", **_TRAINED))
    return handles
