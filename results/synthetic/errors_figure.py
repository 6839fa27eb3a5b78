"""What the first error of a wrong sample is, a row per task, a panel per position scheme, a bar per length.

    python results/synthetic/errors_figure.py [OUT]             by default figure1-errors.png in this folder

Of the tasks with coupled ids in ``records`` of exact_match.parquet.
"""

import math
from pathlib import Path
from textwrap import wrap

import matplotlib
import numpy as np
from matplotlib.patches import Patch

from analysis.figures import style
from analysis.synthetic.exact_match import describe, load, pool
from analysis.synthetic.figure1 import SPAN, TASKS
from olmo_sparsity.util.arguments import Parser

HERE = Path(__file__).parent
LOOKS: dict[str, style.Look] = {
    "wrong_token": {"label": "wrong token", "facecolor": "#56B4E9", "hatch": ""},
    "wrong_id": {"label": "wrong id", "facecolor": "#F0D060", "hatch": "////"},
    "wrong_stop": {"label": "stops too early or late", "facecolor": "0.55", "hatch": "...."},
}
EDGES: style.Look = {"edgecolor": "0.25", "linewidth": 0.4}


def errors_figure(points):
    """Shares of samples [%], stacked, from points of `pool`."""
    tasks, schemes = points["task"].unique(), points["model"].unique()
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE, 1.35 * len(tasks) + 0.9)
        grid = figure.subplots(len(tasks), len(schemes), squeeze=False)
        for panels, task in zip(grid, tasks, strict=True):
            title, unit = TASKS[task]
            for axes, scheme in zip(panels, schemes, strict=True):
                draw_errors(axes, points[(points["task"] == task) & (points["model"] == scheme)])
                axes.set_title("\n".join(wrap(scheme, 17)), loc="left", fontsize=style.SMALL)
                axes.set_xlabel(unit.partition(" [")[0])
                axes.tick_params(labelleft=axes is panels[0])
            panels[0].set_ylabel(f"{title}:\nwrong [%]")
        bars = [Patch(**looks, **EDGES) for looks in LOOKS.values()]
        style.add_legend(figure, {}, *bars, Patch(**SPAN))
        style.add_heading(figure, describe(points))
    return figure


def draw_errors(axes, curve):
    """A bar per length of one scheme; shaded behind those that are trained."""
    places, lengths = np.arange(len(curve)), curve["length"].tolist()
    bottom = np.zeros(len(curve))
    for name, looks in LOOKS.items():
        axes.bar(places, 100 * curve[name], 0.86, bottom=bottom, **looks, **EDGES)
        bottom += 100 * curve[name].to_numpy()
    trained = places[curve["length"].between(curve["shortest"], curve["longest"])]
    if len(trained):
        axes.axvspan(trained[0] - 0.5, trained[-1] + 0.5, zorder=0, **SPAN)
    axes.grid(visible=False, axis="x")
    axes.set(xlim=(-0.5, len(lengths) - 0.5), ylim=(0, 104), yticks=(0, 50, 100))
    every = math.ceil(len(lengths) / 3)
    axes.set_xticks(places[::every], [f"{length}" for length in lengths[::every]])


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("out", nargs="?", default=HERE / "figure1-errors.png")
    pooled = pool(load([HERE / "exact_match.parquet"], ["records"]))
    style.save_figure(errors_figure(pooled[pooled["k_train"] == 0]), parser.parse_args().out)
