"""The figures of the synthetic tasks: exact match against length (docs/method.md, 3.2 to 3.6).

examples:
  olmo-sparsity figure1 runs/parity-* --out runs/figure1
  olmo-sparsity figure1 runs/theory --out runs/theory --rows runs/theory/exact_match.parquet
  olmo-sparsity figure1 runs/theory/exact_match.parquet --only text/records --out runs/theory/text

Reads every exact_match.json or .parquet that it is given, or that lies in a folder it is given (no model is needed),
pools the training seeds of one setting, prints the numbers and writes

  figure1-TASK.png      a planted task: accuracy against length, a panel per K_train, a curve per k
  figure1-schemes.png   tasks with coupled ids: exact match, a panel per task, a curve per position scheme
  figure1.json          every number, and of what is not exact the sort of first error

Intervals are 95 %: Wilson's of the samples of one seed, or of two together, Student's t over three seeds or more. What
the rows do not tell, such as precision, heads and weight decay, is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import analysis.figures.style as style
from analysis.stats.tables import INTERVAL, OF_RUNS, show
from analysis.synthetic.exact_match import GROUP, describe, describe_bands, load, pool, save
from olmo_sparsity.util.arguments import Parser, out_folder, path
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.provenance import current_commit, library_versions

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
SPAN: dict[str, Any] = {"color": "0.5", "alpha": 0.13, "linewidth": 0, "label": "trained lengths"}
_UNTRAINED: dict[str, Any] = {"linestyle": (0, (4, 1.5))}
_CHANCE: dict[str, Any] = {"color": "0.3", "linewidth": 0.8, "linestyle": ":", "label": "chance"}


@matplotlib.rc_context(style.STYLE)
def accuracy_by_length_figure(points: pd.DataFrame) -> Figure:
    """Accuracy against length [% of samples] of one planted task, a panel per group, a curve per tested k.

    The larger a k, the lighter; dashed where it is larger than those of training. ``points``: of `pool`.
    """
    looks = style.shades(f"k = {k}" for k in sorted(points["k"].unique()))
    groups = dict(iter(points.groupby(GROUP, sort=False)))
    named = points["model"].nunique() > 1
    titles = []
    for _, k_train, model in groups:
        if named:
            titles.append(k_title(k_train, model))
        else:
            titles.append(k_title(k_train))
    figure, panels = style.small_panels(titles, TASKS[points["task"].iloc[0]][1], "accuracy [% of samples]")
    for axes, group in zip(panels, groups.values(), strict=True):
        first = group.iloc[0]
        axes.axvspan(first["shortest"], first["longest"], **SPAN)
        axes.axhline(100 * first["chance"], zorder=1.5, **_CHANCE)  # NaN, hence none, where it is unknown
        for k, curve in group.groupby("k"):
            look = looks[f"k = {k}"]
            if k > first["k_train"]:
                look = look | _UNTRAINED
            style.draw_band(axes, curve["length"], curve, f"k = {k}", look, alpha=0.08, scale=100)
    length_axis(panels[0], points["length"], most=5)
    if (points["k"] > points["k_train"]).any():
        looks[r"$k > K_{train}$"] = {"color": "0.3", **_UNTRAINED}
    style.add_legend(figure, looks, Patch(**SPAN), Line2D([], [], **_CHANCE))
    style.add_heading(figure, describe(points), describe_bands(points))
    return figure


def k_title(k_train: int, *further: str) -> str:
    """K_train of a panel, and below it what else is said."""
    lines = [rf"$K_{{train}}$ = {k_train}"]
    for text in further:
        lines += wrap(text, 34)
    return "\n".join(lines)


@matplotlib.rc_context(style.STYLE)
def scheme_comparison_figure(points: pd.DataFrame) -> Figure:
    """Exact match against length [% of samples], a panel per task, a curve per position scheme.

    ``points``: of tasks with coupled ids (`pool`); those that differ in more than the scheme are curves of their own.
    """
    looks = style.model_styles(points["model"].unique())
    tasks = dict(iter(points.groupby("task", sort=False)))
    width = style.COLUMN
    if len(tasks) > 1:
        width = style.PAGE
    figure, panels = style.large_panels(len(tasks), width, 2.2)
    for axes, (task, of_task) in zip(panels, tasks.items(), strict=True):
        _mark_lengths(axes, of_task)
        for name, curve in of_task.groupby("model", sort=False):
            style.draw_band(axes, curve["length"], curve, name, looks[name], scale=100)
        title, length = TASKS[task]
        axes.set(title=title, xlabel=length, ylabel="exact match [% of samples]")
        axes.set(ylim=(-3, 110), yticks=range(0, 101, 20))
    style.add_legend(figure, looks, Patch(**SPAN))
    style.add_heading(figure, describe(points), describe_bands(points))
    return figure


def _mark_lengths(axes: Axes, points: pd.DataFrame) -> None:
    """The axis of one task's lengths, with the trained ones and multiples of the longest."""
    for trained in points[["shortest", "longest"]].drop_duplicates().to_numpy():
        axes.axvspan(*trained, **SPAN)
    longest = points["longest"].max()
    place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
    place |= {"ha": "right", "va": "top", "fontsize": style.SMALL}
    for times in (1, *MULTIPLES):
        length = times * longest
        if length > points["length"].max():
            break
        label = f"{times}×"
        if times == 1:
            label = f"1× = {longest}"
        axes.axvline(length, linestyle=":", **style.REFERENCE)
        axes.annotate(label, (length, 1), (-2, -1), **place)
    length_axis(axes, points["length"], most=6)


# --- what studies draw with, too ---


def length_axis(axes: Axes, measured: pd.Series, *, most: int) -> None:
    """A logarithmic axis that is marked at measured lengths, at no more than about ``most`` of them."""
    lengths = sorted(measured.unique(), reverse=True)
    least = math.log(lengths[0] / lengths[-1]) / most
    ticks = lengths[:1]
    for length in lengths:
        if math.log(ticks[-1] / length) >= least > 0:
            ticks.append(length)
    style.log_axis(axes, ticks[::-1])
    axes.set_xlim(lengths[-1] / 1.08, lengths[0] * 1.08)


def write_tables(path: Path, tables: Mapping[str, pd.DataFrame], others: Mapping[str, Any]) -> None:
    """Write tables as lists of rows into a JSON file, with ``others`` before them, and the code that made them."""
    rows = {}
    for name, frame in tables.items():
        with_none = frame.astype(object).where(frame.notna(), None)
        rows[name] = with_none.to_dict("records")
    code = {"commit": current_commit(), "versions": library_versions()}
    write_json(path, {**others, **rows, "provenance": code})


# --- the command ---


def main() -> None:
    """Read and pool the rows, then draw, write and print what they say."""
    parser = Parser(prog="olmo-sparsity figure1", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="exact_match.json, .parquet, or a folder")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FOLDER", help="folders whose rows are used (default: all)"
    )
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--rows",
        type=path,
        metavar="FILE",
        help="also write all rows that were read to this .parquet file (default: none)",
    )
    options = parser.parse_args()
    rows = load(options.paths, options.only)
    points = pool(rows)
    # before the figures are drawn over those of a checkout, whose commit it tells
    not_in_file = ["parameters", "trained", "options", *OF_RUNS]  # runs stand in of_seeds
    table = points.drop(columns=not_in_file, errors="ignore")
    write_tables(options.out / "figure1.json", {"points": table}, {})
    planted = points[points["k_train"] > 0]
    figures = {}
    for task, of_task in planted.groupby("task", sort=False):
        figures[f"figure1-{task}"] = accuracy_by_length_figure(of_task)
    if len(planted) < len(points):
        figures["figure1-schemes"] = scheme_comparison_figure(points[points["k_train"] == 0])
    for name, figure in figures.items():
        style.save_figure(figure, options.out, f"{name}.png")
    if options.rows:
        save(options.rows, rows)
    shown = [*GROUP, "k", "length", "seeds", "samples", *INTERVAL, *OF_RUNS]
    print(show(points.filter(shown), title="exact match [%] with its 95 % interval"), end="\n\n")
    print(f"wrote {', '.join(figures)} and figure1.json to {options.out}")
