"""Recall of planted tokens against k, drawn from the `recall.json` of a checkpoint (`scripts/recall.py`): no torch.

A panel for each number p of planted tokens, a curve per selector: true far contexts solid, placebos dashed, chance
dotted, and in grey the most that k tokens can find. Where the task has places of several tokens, such as the pairs of
sparse parity, a second block of panels counts either token of a place (see `analysis.measure.planted`).
"""

from __future__ import annotations

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.plots import style
from olmo_sparsity.util.result_files import Json

_COUNTINGS = {"token": "planted tokens", "place": "planted pairs, by either token"}
_CHANCE: Json = {"color": "0.3", "linewidth": 1, "linestyle": ":", "zorder": 1.6}
_MOST: Json = {"color": "0.75", "linewidth": 2.2, "zorder": 1.5}


def recall_figure(result: Json) -> Figure:
    """Recall against k: a panel for each number of planted tokens, and for each way of counting."""
    cells, styles = result["cells"], style.selector_styles(result["cells"][0]["selectors"])
    block = style.in_rows(len(cells), style.columns_in(style.PAGE, 2.0))
    rows = 1 + block[-1][0]
    places = [
        (row + rows * number, column) for number in range(len(result["chance"])) for row, column in block
    ]
    with matplotlib.rc_context(style.STYLE):
        figure, panels = style.small_multiples(places)
        for number, what in enumerate(result["chance"]):
            own = panels[number * len(cells) : (number + 1) * len(cells)]
            for axes, cell in zip(own, cells, strict=True):
                _draw_cell(axes, cell, what, result["chance"][what], styles)
                style.k_axis(axes, result["ks"])
            style.outer_labels(own, "k [selected far tokens]", f"recall [share of\n{_COUNTINGS[what]}]")
        panels[0].set_ylim(-0.04, 1.04)
        lines = [
            Line2D([], [], label="chance", **_CHANCE),
            Line2D([], [], label="the most that k tokens can find", **_MOST),
        ]
        style.add_legend(figure, [*style.selector_handles(styles), *lines])
        style.add_heading(figure, describe_recall(result))
    return figure


def describe_recall(result: Json) -> str:
    """One line on what was measured."""
    return (
        f"{result['run']}, step {result['step']:,}: {result['task']['name']}, N = {result['n_long']}, "
        f"M = {result['n_short']}; {result['samples']:,} samples a panel, planted tokens all far; "
        "placebo: far context of a sample with another label, recall of its own planted tokens; "
        "bars: 95 % bootstrap by sample"
    )


def _draw_cell(axes: Axes, cell: Json, what: str, chance: Json, styles: Json) -> None:
    """Recall of one number of planted tokens; ``what``: token or place; ``chance``: by k."""
    ks = [int(k) for k in chance]
    axes.plot(ks, list(chance.values()), label="chance", **_CHANCE)
    axes.plot(ks, [min(k, cell["planted"]) / cell["planted"] for k in ks], label="most", **_MOST)
    style.draw_curves(axes, cell["selectors"], f"{what}_placebo_recall", styles, placebo=True)
    style.draw_curves(axes, cell["selectors"], f"{what}_recall", styles)
    axes.set_title(f"p = {cell['planted']} (accuracy {100 * cell['accuracy']['value']:.0f} %)", loc="left")
