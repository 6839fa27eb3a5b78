"""Exact match against an option of training, from the curves of `analysis.stats.exact_match` alone.

A panel for each option, a curve for each length: the longest trained one and `MULTIPLES` of it, as far as they were
measured. The values of an option stand evenly spaced. Intervals are 95 %.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.plots import style
from analysis.plots.figure1 import K_MARKERS, MULTIPLES, axis_name, describe
from analysis.stats.exact_match import Group
from olmo_sparsity.util.errors import UserError

NAMES = {
    "positions.coupled_share": "training samples with coupled ids [share]",
    "positions.id_noise": "ids replaced by random ones [share]",
    "model.rope_window": "window of attention [ids]",
}
"""What the axis of an option is called, where that is not its name."""


def option_figure(series: dict[str, list[tuple[Any, Group]]]) -> Figure:
    """Exact match [% of samples] against each option.

    Args:
        series: by the option's dotted name, its values, ascending, and the group of each (`by_option`); of one task.

    Raises `UserError` where all groups have none of the lengths in common.
    """
    groups = [group for of_option in series.values() for _, group in of_option]
    longest = groups[0].settings.train_length[1]
    marked = [times * longest for times in (1, *MULTIPLES)]
    lengths = [length for length in marked if all(length in group.lengths for group in groups)]
    if not lengths:
        raise UserError(
            f"--by: no length of {', '.join(map(str, marked))} (the longest trained one and multiples of it) is in all "
            "records; measure one"
        )
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(lengths)))
    looks = dict(zip(lengths, zip(shades, K_MARKERS, strict=False), strict=True))
    unit = axis_name(groups[0].settings).partition("[")[2].rstrip("]")
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if len(series) > 1 else style.COLUMN, 3.2)
        panels = figure.subplots(1, len(series), sharey=True, squeeze=False)[0]
        for axes, (name, of_option) in zip(panels, series.items(), strict=True):
            for length, (colour, marker) in looks.items():
                _draw(axes, of_option, length, {"color": colour, "marker": marker})
            values = [value for value, _ in of_option]
            axes.set_xticks(
                range(len(values)), ["none" if value is None else f"{value:g}" for value in values]
            )
            axes.set_xlabel(NAMES.get(name, name))
        panels[0].set_ylabel("exact match [% of samples]")
        panels[0].set_ylim(-3, 103)
        handles = [
            Line2D([], [], color=colour, marker=marker, label=f"{length} {unit}, {length / longest:g}×")
            for length, (colour, marker) in looks.items()
        ]
        style.add_legend(figure, handles)
        style.add_heading(figure, describe(groups))
    return figure


def _draw(axes: Axes, of_option: list[tuple[Any, Group]], length: int, look: dict[str, Any]) -> None:
    """The exact share at one length [%], with its interval, by value."""
    points = [point for _, group in of_option for point in group.curves[0].points if point.length == length]
    value, low, high = (
        [100 * getattr(point.exact, bound) for point in points] for bound in ("value", "low", "high")
    )
    axes.plot(range(len(points)), value, label=f"{length}", zorder=3, **look)
    axes.fill_between(range(len(points)), low, high, color=look["color"], alpha=0.12, linewidth=0)
