"""Exact match against an option of training, of two parts of this study.

    python results/synthetic/options_figure.py

A panel for each option, a curve for each length: the longest trained one and multiples of it, as far as they were
measured. The values of an option stand evenly spaced; where one varies, the others are at their defaults. Intervals are
95 %. Writes needs/figure1-options.* and windows/figure1-options.* in this folder, from its exact_match.parquet.
"""

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from analysis.figures import style
from analysis.synthetic.exact_match import load, pool
from analysis.synthetic.figure1 import K_MARKERS, MULTIPLES, axis_name, describe, draw_exact

HERE = Path(__file__).parent
FIGURES = {"needs": ("positions.coupled_share", "positions.id_noise"), "windows": ("model.rope_window",)}
DEFAULTS = {"positions.coupled_share": 1.0, "positions.id_noise": 0.0, "model.rope_window": None}
NAMES = {
    "positions.coupled_share": "training samples with coupled ids [share]",
    "positions.id_noise": "ids replaced by random ones [share]",
    "model.rope_window": "window of attention [ids]",
}


def by_option(groups, names):
    """Of each option its values, ascending, with their groups."""
    series = {}
    for name in names:
        others = {*names} - {name}
        alone = [group for group in groups if not others & group.settings.training_options.keys()]
        values = [(group.settings.training_options.get(name, DEFAULTS[name]), group) for group in alone]
        series[name] = sorted(values, key=lambda item: (item[0] is None, item[0] or 0))
    return series


def option_figure(groups, names):
    """Exact match [% of samples] against each option."""
    longest = groups[0].settings.train_length[1]
    marked = [times * longest for times in (1, *MULTIPLES)]
    lengths = [
        length for length in marked if all((group.points["length"] == length).any() for group in groups)
    ]
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(lengths)))
    looks = {n: (colour, marker, "-") for n, colour, marker in zip(lengths, shades, K_MARKERS, strict=False)}
    unit = axis_name(groups[0].settings).partition("[")[2].rstrip("]")
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if len(names) > 1 else style.COLUMN, 3.2)
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, (name, of_option) in zip(panels, by_option(groups, names).items(), strict=True):
            values = [value for value, _ in of_option]
            for length, look in looks.items():
                points = pd.concat([group.points[group.points["length"] == length] for _, group in of_option])
                draw_exact(axes, range(len(values)), points, f"{length}", look, alpha=0.12)
            axes.set_xticks(
                range(len(values)), ["none" if value is None else f"{value:g}" for value in values]
            )
            axes.set_xlabel(NAMES[name])
        panels[0].set_ylabel("exact match [% of samples]")
        panels[0].set_ylim(-3, 103)
        named = {f"{length} {unit}, {length / longest:g}×": look for length, look in looks.items()}
        style.add_legend(figure, style.line_handles(named))
        style.add_heading(figure, describe(groups))
    return figure


if __name__ == "__main__":
    for folder, names in FIGURES.items():
        groups = pool(load([HERE / "exact_match.parquet"], [f"{folder}/records"]))
        style.save_figure(option_figure(groups, names), HERE / folder, "figure1-options")
