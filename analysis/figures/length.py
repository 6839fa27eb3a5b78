"""Loss by position, panel (d) of Figure 2 (docs/method.md, 2.5), and at each length, from one tidy frame.

The frame has a row per model and bin of positions, and per model and length:

    model                       its label, which stands in the legend
    name                        "loss_nats" of a bin, "loss_at_length_nats" of a length
    from_tokens, to_tokens      positions, to_tokens not included; of a length L, to_tokens is L
    value, low, high            nats per token
    trained_window_tokens       (optional) of the model's training; NaN where unknown
    trained_reach_tokens        (optional) how far the position ids of its training reach
    encoding                    (optional) of its positions, where the label does not name it (`style.encoding_of`)

A model has the colour and marker of its position encoding. Many models have a panel for each family of encodings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.figures import style

OF_BIN, OF_LENGTH = "loss_nats", "loss_at_length_nats"
MOST_CURVES = 4
"""With more models than these each family of encodings has a panel."""
_FAMILIES = {
    "contiguous": "contiguous ids", "random_start": "contiguous ids", "pose": "ids with gaps",
    "random_float": "ids with gaps", "nope": "NoPE, ALiBi",
    "alibi": "NoPE, ALiBi", "linear": "RoPE scaled linearly", "ntk": "RoPE scaled by NTK", "yarn": "RoPE with YaRN",
}  # fmt: skip
_TRAINED: dict[str, Any] = {"color": "0.35", "linewidth": 1, "zorder": 1.5}
_TRAINED_LINES: dict[str, tuple[Any, str]] = {
    "trained_window_tokens": (":", "trained window"),
    "trained_reach_tokens": ("-.", "reach of trained ids"),
}


def plot_length(axes: Axes, frame: pd.DataFrame) -> list[Line2D]:
    """Panel (d): mean loss per bin of positions against its centre [nats per token]; for the legend."""
    styles = style.model_styles(_encodings(frame))
    _plot_models(axes, frame, styles)
    lines = _plot_trained(axes, frame)
    _position_axis(axes)
    axes.set(xlabel="position [tokens before it]", ylabel="held-out loss [nats per token]")
    axes.set_title("(d) Loss by position", loc="left")
    return [*style.line_handles(styles), *lines]


def length_figure(frame: pd.DataFrame, *, heading: str = "") -> Figure:
    """Loss by position: one panel, or of many models a panel per family of encodings, with the first model in each.

    ``heading``: what was measured, above the panels.
    """
    styles, first = style.model_styles(_encodings(frame)), frame["model"].iloc[0]
    families = _families(frame) if len(styles) > MOST_CURVES else {"Loss by position": list(styles)}
    with matplotlib.rc_context(style.STYLE):
        width = style.PAGE if len(families) > 1 else 4.6
        figure, panels = style.small_multiples(
            style.in_rows(len(families), style.columns_in(width, 2.2)), width
        )
        trained: dict[Any, Line2D] = {}
        for axes, (family, members) in zip(panels, families.items(), strict=True):
            shown = frame[frame["model"].isin([first, *members])]
            _plot_models(axes, shown, styles)
            trained |= {line.get_label(): line for line in _plot_trained(axes, shown)}
            _position_axis(axes)
            axes.set_title(family, loc="left")
        style.outer_labels(panels, "position [tokens before it]", "held-out loss\n[nats per token]")
        style.add_legend(figure, [*style.line_handles(styles), *trained.values()])
        in_all = f"in every panel: {first}" if len(families) > 1 else ""
        style.add_heading(figure, heading, in_all, "bands: 95 %")
    return figure


def lengths_figure(frame: pd.DataFrame, *, heading: str = "") -> Figure:
    """The loss at each length, a panel per length, a row per model with its interval.

    The dotted line is the first model's loss at the smallest length, the same in all panels.
    """
    styles, at_lengths = style.model_styles(_encodings(frame)), frame[frame["name"] == OF_LENGTH]
    lengths, models = sorted(at_lengths["to_tokens"].unique()), list(styles)
    of_first = at_lengths[(at_lengths["model"] == models[0]) & (at_lengths["to_tokens"] == lengths[0])]
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 0.17 * len(models) + 1.1)
        panels = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            for number, model in enumerate(models):
                rows = at_lengths[(at_lengths["model"] == model) & (at_lengths["to_tokens"] == length)]
                style.draw_points(axes, [number] * len(rows), rows, model, styles[model], across=True)
            axes.axvline(of_first["value"].iloc[0], color="0.35", linestyle=":", linewidth=1, zorder=1.5)
            axes.set_title(f"at {length:,} tokens", loc="left")
        panels[0].set_yticks(range(len(models)), models)
        panels[0].set_ylim(len(models) - 0.5, -0.5)  # the first model on top
        figure.supxlabel("held-out loss [nats per token]", fontsize=style.STYLE["axes.labelsize"])
        style.add_heading(figure, heading, f"bars: 95 %; dotted: {models[0]} at {lengths[0]:,} tokens")
    return figure


def _encodings(frame: pd.DataFrame) -> dict[str, str | None]:
    """The position encoding of each model, by label, in the frame's order."""
    rows = frame.drop_duplicates("model").to_dict("records")
    return {row["model"]: style.encoding_of(row["model"], row.get("encoding")) for row in rows}


def _families(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Models by family, in their order; not a family of the first model alone, which is in every panel."""
    families: dict[str, list[str]] = {}
    for model, encoding in _encodings(frame).items():
        families.setdefault(_FAMILIES.get(encoding or "", "Others"), []).append(model)
    first = frame["model"].iloc[0]
    return {family: members for family, members in families.items() if members != [first]}


def _plot_models(axes: Axes, frame: pd.DataFrame, styles: Mapping[str, style.Style]) -> None:
    """The loss of every model in bins of positions, with its band, against their geometric centres."""
    for model, rows in frame[frame["name"] == OF_BIN].groupby("model", sort=False):
        centres = np.sqrt(rows["from_tokens"] * (rows["to_tokens"] - 1.0)).to_numpy()
        interval = rows[["value", "low", "high"]].to_numpy(dtype=float).T
        style.draw_band(axes, centres, list(interval), str(model), styles[str(model)], alpha=0.13)


def _position_axis(axes: Axes) -> None:
    """Positions on a logarithmic axis, marked at powers of two as plain numbers."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.08)


def _plot_trained(axes: Axes, frame: pd.DataFrame) -> list[Line2D]:
    """Dotted at the window trained on, dash-dotted at the reach of the position ids in training, for the legend."""
    handles = []
    for column, (line, name) in _TRAINED_LINES.items():
        places = sorted(frame[column].dropna().unique()) if column in frame else []
        for place in places:
            axes.axvline(place, linestyle=line, **_TRAINED)
            handles.append(Line2D([], [], linestyle=line, label=f"{name}: {place:,.0f}", **_TRAINED))
    return handles
