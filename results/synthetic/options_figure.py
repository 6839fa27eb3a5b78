"""Exact match against an option of training, of two parts of this study.

    python results/synthetic/options_figure.py [OUT]

A panel for each option, a curve for each length: the longest trained one and multiples of it, as far as they were
measured. The values of an option stand evenly spaced; where one varies, the others are at their defaults. Intervals are
95 %. Writes needs/figure1-options.png and windows/figure1-options.png in this folder, or OUT, from exact_match.parquet.
"""

import json
from pathlib import Path

import matplotlib
import pandas as pd

from analysis.figures import style
from analysis.synthetic.exact_match import GROUP, describe, describe_bands, load, pool
from analysis.synthetic.figure1 import MULTIPLES, TASKS
from olmo_sparsity.util.arguments import Parser

HERE = Path(__file__).parent
FIGURES = {"needs": ("positions.coupled_share", "positions.id_noise"), "windows": ("model.rope_window",)}
DEFAULTS = {"positions.coupled_share": 1.0, "positions.id_noise": 0.0, "model.rope_window": None}
NAMES = {
    "positions.coupled_share": "training samples with coupled ids [share]",
    "positions.id_noise": "ids replaced by random ones [share]",
    "model.rope_window": "window of attention [ids]",
}


def by_option(points, names):
    """Of each option its values, ascending, with the points of each."""
    groups = [(json.loads(group["options"].iloc[0]), group) for _, group in points.groupby(GROUP, sort=False)]
    series = {}
    for name in names:
        others = {*names} - {name}
        values = [
            (options.get(name, DEFAULTS[name]), group) for options, group in groups if not others & {*options}
        ]
        series[name] = sorted(values, key=lambda item: (item[0] is None, item[0] or 0))
    return series


def option_figure(points, names):
    """Exact match [% of samples] against each option, from points of `pool`."""
    longest = points["longest"].iloc[0]
    groups = points.groupby(GROUP).ngroups
    marked = [times * longest for times in (1, *MULTIPLES)]
    lengths = [length for length in marked if (points["length"] == length).sum() == groups]
    unit = TASKS[points["task"].iloc[0]][1].partition("[")[2].rstrip("]")
    looks = style.shades(f"{length} {unit}, {length / longest:g}×" for length in lengths)
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if len(names) > 1 else style.COLUMN, 3.2)
        panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for axes, (name, of_option) in zip(panels, by_option(points, names).items(), strict=True):
            values = [value for value, _ in of_option]
            for length, (label, look) in zip(lengths, looks.items(), strict=True):
                curve = pd.concat([group[group["length"] == length] for _, group in of_option])
                style.draw_band(axes, range(len(values)), curve, label, look, scale=100)
            axes.set_xticks(
                range(len(values)), ["none" if value is None else f"{value:g}" for value in values]
            )
            axes.set_xlabel(NAMES[name])
        panels[0].set_ylabel("exact match [% of samples]")
        panels[0].set_ylim(-3, 103)
        style.add_legend(figure, looks)
        style.add_heading(figure, describe(points), describe_bands(points))
    return figure


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=HERE)
    out = parser.parse_args().out
    for folder, names in FIGURES.items():
        points = pool(load([HERE / "exact_match.parquet"], [f"{folder}/records"]))
        style.save_figure(option_figure(points, names), out / folder, "figure1-options.png")
