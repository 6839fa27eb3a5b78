"""Loss by position, panel (d) of Figure 2 (docs/method.md, 2.5), and at each length, from one tidy frame.

The frame has a row per model and bin of positions, and per model and length:

    model                       its label, which stands in the legend
    name                        "loss_nats" of a bin, "loss_at_length_nats" of a length
    from_tokens, to_tokens      positions, to_tokens not included; of a length L, to_tokens is L
    value, low, high            nats per token
    trained_window_tokens       (optional) of the model's training; NaN where unknown
    trained_reach_tokens        (optional) how far the position ids of its training reach

Many models have a panel each, with the first one in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures import style

OF_BIN, OF_LENGTH = "loss_nats", "loss_at_length_nats"
MOST_CURVES = 4
"""With more models than these each has a panel."""
_TRAINED = {
    "trained_window_tokens": (":", "trained window"),
    "trained_reach_tokens": ("-.", "reach of trained ids"),
}


def plot_length(axes: Axes, frame: pd.DataFrame, letter: str = "d") -> dict[str, style.Look]:
    """The last panel of Figure 2: mean loss per bin of positions against its centre; returns looks for the legend."""
    looks = style.model_styles(frame["model"].unique())
    lines = _plot_models(axes, frame, looks)
    axes.set(xlabel="position [tokens before it]", ylabel="held-out loss [nats per token]")
    axes.set_title(f"({letter}) Loss by position")
    return looks | lines


@matplotlib.rc_context(style.STYLE)
def length_figure(frame: pd.DataFrame, *, heading: str = "") -> Figure:
    """Loss by position: one panel, or of many models a panel each, with the first model in all of them.

    ``heading``: what was measured, above the panels.
    """
    looks = style.model_styles(frame["model"].unique())
    first, *others = looks
    models_of_panels = {"Loss by position": [first, *others]}
    width = 4.6
    in_all = ""
    if len(looks) > MOST_CURVES:
        models_of_panels = {other: [first, other] for other in others}
        width = style.PAGE
        in_all = f"in every panel: {first}"
    x, y = "position [tokens before it]", "held-out loss\n[nats per token]"
    figure, panels = style.small_panels([*models_of_panels], x, y, width=width, least=2.2)
    lines: dict[str, style.Look] = {}
    for axes, models in zip(panels, models_of_panels.values(), strict=True):
        lines |= _plot_models(axes, frame[frame["model"].isin(models)], looks)
    style.add_legend(figure, looks | lines)
    style.add_heading(figure, heading, in_all, style.says_intervals("bands", frame))
    return figure


@matplotlib.rc_context(style.STYLE)
def lengths_figure(frame: pd.DataFrame, *, heading: str = "") -> Figure:
    """The loss at each length, a panel per length, a row per model with its interval.

    The dotted line is the first model's loss at the smallest length, the same in all panels.
    """
    looks = style.model_styles(frame["model"].unique())
    at_lengths = frame[frame["name"] == OF_LENGTH]
    lengths = sorted(at_lengths["to_tokens"].unique())
    models = list(looks)
    of_first = at_lengths[(at_lengths["model"] == models[0]) & (at_lengths["to_tokens"] == lengths[0])]
    figure = style.new_figure(style.PAGE, 0.17 * len(models) + 1.1)
    panels = figure.subplots(1, len(lengths), sharex=True, sharey=True, squeeze=False)[0]
    at_lengths = at_lengths.assign(place=at_lengths["model"].map(models.index))
    for axes, length in zip(panels, lengths, strict=True):
        rows = at_lengths[at_lengths["to_tokens"] == length]
        style.draw(axes, rows, looks, "model", "place", joined=False, across=True, step=0)
        axes.axvline(of_first["value"].iloc[0], linestyle=":", **style.REFERENCE)
        axes.set_title(f"at {length:,} tokens")
    panels[0].set_yticks(range(len(models)), models)
    panels[0].set_ylim(len(models) - 0.5, -0.5)  # the first model on top
    figure.supxlabel("held-out loss [nats per token]", fontsize=style.STYLE["axes.labelsize"])
    dotted = f"dotted: {models[0]} at {lengths[0]:,} tokens"
    style.add_heading(figure, heading, style.says_intervals("bars", at_lengths), dotted)
    return figure


def _plot_models(axes: Axes, frame: pd.DataFrame, looks: Mapping[str, style.Look]) -> dict[str, style.Look]:
    """The loss of every model in bins of positions, with its band, against their geometric centres.

    Lines stand at the windows trained on, and at the reach of position ids in training; their looks are for the legend.
    """
    for model, rows in frame[frame["name"] == OF_BIN].groupby("model", sort=False):
        centres = np.sqrt(rows["from_tokens"] * (rows["to_tokens"] - 1.0))
        style.draw_band(axes, centres, rows, str(model), looks[str(model)])
    lines = {}
    for column, (line, name) in _TRAINED.items():
        if column not in frame:
            continue
        for place in sorted(frame[column].dropna().unique()):
            lines[f"{name}: {place:,.0f}"] = {**style.REFERENCE, "linestyle": line}
            axes.axvline(place, linestyle=line, **style.REFERENCE)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.08)
    return lines
