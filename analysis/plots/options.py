"""Exact match against an option of training, from the curves of `analysis.stats.exact_match` alone.

A panel for each option, a curve for each length: the longest trained one and `MULTIPLES` of it, as far as they were
measured. The values of an option stand evenly spaced. Intervals are 95 %.
"""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from analysis.plots import style
from analysis.plots.figure1 import K_MARKERS, MULTIPLES, axis_name, describe, draw_exact
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
    looks: dict[int, style.Style] = {
        length: (colour, marker, "-")
        for length, colour, marker in zip(lengths, shades, K_MARKERS, strict=False)
    }
    unit = axis_name(groups[0].settings).partition("[")[2].rstrip("]")
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if len(series) > 1 else style.COLUMN, 3.2)
        panels = figure.subplots(1, len(series), sharey=True, squeeze=False)[0]
        for axes, (name, of_option) in zip(panels, series.items(), strict=True):
            values = [value for value, _ in of_option]
            for length, look in looks.items():
                of_length = [
                    each for _, group in of_option for each in group.curves[0].points if each.length == length
                ]
                draw_exact(axes, range(len(values)), of_length, f"{length}", look, alpha=0.12)
            axes.set_xticks(
                range(len(values)), ["none" if value is None else f"{value:g}" for value in values]
            )
            axes.set_xlabel(NAMES.get(name, name))
        panels[0].set_ylabel("exact match [% of samples]")
        panels[0].set_ylim(-3, 103)
        names = {f"{length} {unit}, {length / longest:g}×": look for length, look in looks.items()}
        style.add_legend(figure, style.line_handles(names))
        style.add_heading(figure, describe(groups))
    return figure
