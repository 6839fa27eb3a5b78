"""The figures of the synthetic tasks: exact match against length (docs/method.md, 3.2 to 3.6).

examples:
  olmo-sparsity figure1 runs/parity-* --out runs/figure1
  olmo-sparsity figure1 runs/sparse --out runs/sparse --bound
  olmo-sparsity figure1 runs/theory --out results/theory --rows results/theory/exact_match.parquet
  olmo-sparsity figure1 results/synthetic/exact_match.parquet --only text/records --out results/synthetic/text

Reads every exact_match.json or .parquet that it is given, or that lies in a folder it is given (no model is needed),
pools the training seeds of one setting, prints the numbers and writes

  figure1-TASK.png         a planted task: accuracy against length, a panel per K_train, a curve per k
  figure1-TASK-bound.png   with --bound: its errors under Theorem 4.3, whose constant is taken from the shorter lengths
                           beyond the trained ones and tried at the longer ones
  figure1-schemes.png      tasks with coupled ids: exact match, a panel per task, a curve per position scheme
  figure1.json             every number that is drawn, and the sort of first error of what is not exact

Intervals are 95 %: Wilson's for one seed, Student's t over seeds for several. What the rows do not tell, such as
precision, heads and weight decay, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import analysis.figures.style as style
from analysis.stats.show import show
from analysis.synthetic.exact_match import (
    Group,
    describe,
    labels,
    load,
    points_frame,
    pool,
    save,
)
from olmo_sparsity.util.arguments import Parser, out_folder

MULTIPLES = (3, 5, 10)
"""Of the longest trained length, marked in the figure of the schemes."""
TASKS = {
    "sparse_parity": ("Sparse parity", "prompt length 2l [tokens]"),
    "planted": ("Planted correlations", "prompt length l [tokens]"),
    "scratchpad_parity": ("Parity with scratchpad", "length n [bits]"),
    "addition": ("Addition", "length n [digits per operand]"),
    "multi_addition": ("Addition of k numbers", "length n [digits per number]"),
    "digit_multiplication": ("Multiplication by a digit", "length n [digits]"),
    "copy": ("Copy", "length n [symbols]"),
    "variable_assignment": ("Variable assignment", "chain length [assignments]"),
}
"""Title of each task, and what its length counts, with the unit."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d", "p")
SPAN: dict[str, Any] = {"color": "0.5", "alpha": 0.13, "linewidth": 0, "label": "trained lengths"}
_UNTRAINED: dict[str, Any] = {"color": "0.3", "linestyle": (0, (4, 1.5)), "label": r"$k > K_{train}$"}
_CHANCE: dict[str, Any] = {"color": "0.3", "linewidth": 0.8, "linestyle": ":", "label": "chance"}


def accuracy_by_length_figure(groups: Sequence[Group]) -> Figure:
    """Accuracy against length [% of samples] of one planted task, a panel per group, a curve per tested k.

    The larger a k, the lighter; dashed where it is larger than those of training. Panels are in the order of
    ``groups``.
    """
    ks = sorted({k for group in groups for k in group.curves()})
    looks = dict(zip(ks, shades(len(ks)), strict=True))
    names = labels(groups) if len({*labels(groups)}) > 1 else [""] * len(groups)
    titles = [
        "\n".join([rf"$K_{{train}}$ = {group.k_train}", *wrap(name, 34)])
        for group, name in zip(groups, names, strict=True)
    ]
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(groups), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, group, title in zip(panels, groups, titles, strict=True):
            axes.axvspan(*group.train_length, **SPAN)
            if group.chance is not None:
                axes.axhline(100 * group.chance, zorder=1.5, **_CHANCE)
            for k, points in group.curves().items():
                line = _UNTRAINED["linestyle"] if k > group.k_train else "-"
                draw_exact(axes, points["length"], points, f"k = {k}", (*looks[k], line), alpha=0.08)
            axes.set_title(title, loc="left")
        length_axis(panels[0], groups, most=5)
        style.outer_labels(panels, TASKS[groups[0].task][1], "accuracy [% of samples]")
        handles = style.line_handles({f"k = {k}": (*look, "-") for k, look in looks.items()})
        handles += [Line2D([], [], **_UNTRAINED)] * any(
            max(group.curves()) > group.k_train for group in groups
        )
        chance = [Line2D([], [], **_CHANCE)] * any(group.chance is not None for group in groups)
        style.add_legend(figure, [*handles, Patch(**SPAN), *chance])
        style.add_heading(figure, f"{describe(groups)}; bands: 95 %")
    return figure


def scheme_comparison_figure(groups: Sequence[Group]) -> Figure:
    """Exact match against length [% of samples], a panel per task, a curve per position scheme.

    Args:
        groups: of tasks with coupled ids; those that differ in more than the position scheme are curves of their own.
    """
    curves = pd.DataFrame({"task": [group.task for group in groups], "name": labels(groups), "group": groups})
    schemes = {name: group.scheme for name, group in zip(curves["name"], groups, strict=True)}
    looks = style.model_styles({name: style.encoding_of(name, scheme) for name, scheme in schemes.items()})
    tasks = dict(iter(curves.groupby("task", sort=False)))
    places = style.in_rows(len(tasks), 2)
    rows, columns = (1 + max(axis) for axis in zip(*places, strict=True))
    with matplotlib.rc_context(style.STYLE):
        figure = style.new_figure(style.PAGE if columns > 1 else style.COLUMN, 2.2 * rows + 1)
        grid = figure.add_gridspec(rows, columns)
        for place, (task, members) in zip(places, tasks.items(), strict=True):
            axes = figure.add_subplot(grid[place])
            _mark_lengths(axes, list(members["group"]))
            for name, group in zip(members["name"], members["group"], strict=True):
                draw_exact(axes, group.points["length"], group.points, name, looks[name], alpha=0.12)
            axes.set_title(TASKS[task][0], loc="left")
            axes.set(xlabel=TASKS[task][1], ylabel="exact match [% of samples]")
            axes.set(ylim=(-3, 110), yticks=range(0, 101, 20))
        style.add_legend(figure, [*style.line_handles(looks), Patch(**SPAN)])
        style.add_heading(figure, f"{describe(groups)}; bands: 95 %")
    return figure


def _mark_lengths(axes: Axes, groups: Sequence[Group]) -> None:
    """The axis of one task's lengths, with the trained ones and multiples of the longest."""
    for trained in sorted({group.train_length for group in groups}):
        axes.axvspan(*trained, **SPAN)
    for times in (1, *MULTIPLES):
        if times * trained[1] <= max(lengths_of(groups)):
            axes.axvline(times * trained[1], color="0.45", linestyle=":", linewidth=1, zorder=1.5)
            text = f"1× = {trained[1]}" if times == 1 else f"{times}×"
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            place |= {"ha": "right", "va": "top", "fontsize": style.SMALL}
            axes.annotate(text, (times * trained[1], 1), (-2, -1), **place)
    length_axis(axes, groups, most=6)


# --- what studies draw with, too ---


def draw_exact(
    axes: Axes, x: Sequence[float], points: pd.DataFrame, label: str, look: style.Style, alpha: float
) -> None:
    """The exact share at some points of `Group.points` with its interval [%]."""
    interval = [100 * points[name].to_numpy() for name in ("value", "low", "high")]
    style.draw_band(axes, np.asarray(x), interval, label, look, alpha)


def shades(count: int) -> list[tuple[Any, str]]:
    """Colour and marker of numbers in their order, ever lighter."""
    colours = map(tuple, matplotlib.colormaps["viridis"](np.linspace(0, 0.86, count)))
    return [(colour, MARKERS[place % len(MARKERS)]) for place, colour in enumerate(colours)]


def length_axis(axes: Axes, groups: Sequence[Group], *, most: int) -> None:
    """A logarithmic axis that is marked at measured lengths, at no more than about ``most`` of them."""
    lengths = lengths_of(groups)
    least = math.log(lengths[-1] / lengths[0]) / most
    ticks = [lengths[-1]]
    for length in reversed(lengths):
        if math.log(ticks[-1] / length) >= least > 0:
            ticks.append(length)
    style.log_axis(axes, ticks[::-1])
    axes.set_xlim(lengths[0] / 1.08, lengths[-1] * 1.08)


def lengths_of(groups: Sequence[Group]) -> list[int]:
    """Every length that any of them has, ascending."""
    return sorted({int(length) for group in groups for length in group.points["length"]})


# --- the command ---


def parser() -> Parser:
    """Of `figure1`."""
    parser = Parser(prog="olmo-sparsity figure1", description=__doc__)
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="exact_match.json or .parquet, or a folder that holds some"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FOLDER", help="of the rows' folders, these alone"
    )
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
    parser.add_argument("--bound", action="store_true", help="draw errors of planted tasks under the bound")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep all rows that were read in one file")
    return parser


def main() -> None:
    """Read and pool the rows, then draw, write and print what they say."""
    options = parser().parse_args()
    from analysis.synthetic.bound import bound_figure, errors_frame, fit_bounds, trained_frame
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import current_commit, library_versions

    # before the figures are drawn over those of a checkout
    code = {"commit": current_commit(), "versions": library_versions()}
    rows = load(options.paths, options.only)
    groups = pool(rows)
    planted = [group for group in groups if group.k_train]
    tables = {"points": points_frame(groups)}
    if options.bound and planted:
        errors = errors_frame(planted)
        tables |= {"bounds": fit_bounds(errors), "trained": trained_frame(errors)}
    figures = {}
    for task in dict.fromkeys(group.task for group in planted):
        of_task = [group for group in planted if group.task == task]
        figures[task] = accuracy_by_length_figure(of_task)
        if options.bound:
            figures[f"{task}-bound"] = bound_figure(of_task)
    if coupled := [group for group in groups if not group.k_train]:
        figures["schemes"] = scheme_comparison_figure(coupled)
    for name, figure in figures.items():
        style.save_figure(figure, options.out, f"figure1-{name}")
    records = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records")
        for name, frame in tables.items()
    }
    write_json(options.out / "figure1.json", {**records, "provenance": code})
    if options.rows:
        save(options.rows, rows)
    shown = tables.pop("points")[["task", "name", "length", "seeds", "samples", "value", "low", "high"]]
    print(show(shown, title="exact match [%] with its 95 % interval"), end="\n\n")
    for frame in tables.values():
        print(frame.to_string(index=False), end="\n\n")
    print(f"wrote {', '.join(figures)} and figure1.json to {options.out}")
