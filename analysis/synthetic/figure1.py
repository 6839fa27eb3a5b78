"""The figures of the synthetic tasks: exact match against length (docs/method.md, 3.2 to 3.5).

(a) planted tasks: accuracy, a panel per K_train, a curve per tested k; (b) tasks with coupled ids: exact match, a panel
per task, a curve per position scheme; (c) what the first error of the wrong samples is. Curves differ by
colour and marker; line styles tell schemes apart too, or whether a k was trained on. All intervals are 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    ERROR_SORTS,
    Group,
    Settings,
    describe,
    differing,
    fact_text,
    facts,
    load,
    points_frame,
    pool,
    save,
    scheme_labels,
    task_facts,
)
from olmo_sparsity.util.arguments import Parser, out_folder

Members = list[tuple[Group, str]]
"""The groups of one task and the labels of their curves."""
KStyles = dict[int, tuple[Any, str]]
"""Colour and marker of each tested k."""

MULTIPLES = (3, 5, 10)
"""Of the longest trained length, marked in (b)."""

_TASKS = {
    "sparse_parity": ("Sparse parity", "prompt length 2l [tokens]"),
    "planted": ("Planted correlations", "prompt length l [tokens]"),
    "scratchpad_parity": ("Parity with scratchpad", "length n [bits]"),
    "addition": ("Addition", "length n [digits per operand]"),
    "multi_addition": ("Addition of k numbers", "length n [digits per number]"),
    "digit_multiplication": ("Multiplication by a digit", "length n [digits]"),
    "copy": ("Copy", "length n [symbols]"),
    "variable_assignment": ("Variable assignment", "chain length [assignments]"),
}
K_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d", "p")
_UNTRAINED = (0, (4, 1.5))
_ERRORS_IN_A_ROW = 6
_TITLE_WIDTH = 17  # characters over a panel of those; one more touches the next title
_SORTS: dict[str, dict[str, Any]] = {
    "token": {"label": "wrong token", "facecolor": "#56B4E9", "hatch": ""},
    "id": {"label": "wrong id", "facecolor": "#F0D060", "hatch": "////"},
    "stop": {"label": "stops too early or late", "facecolor": "0.55", "hatch": "...."},
}
_EDGES: dict[str, Any] = {"edgecolor": "0.25", "linewidth": 0.4}
SPAN: dict[str, Any] = {"color": "0.5", "alpha": 0.13, "linewidth": 0}


def accuracy_by_length_figure(groups: Sequence[Group]) -> Figure:
    """(a): accuracy against length [% of samples], a panel per group (K_train), a curve per tested k.

    Args:
        groups: of one planted task, in the order of their panels.
    """
    styles, titles = k_styles(groups), k_titles(groups)
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(groups), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, group, title in zip(panels, groups, titles, strict=True):
            axes.axvspan(*group.settings.train_length, **SPAN)
            if group.settings.chance is not None:
                axes.axhline(
                    100 * group.settings.chance, color="0.3", linewidth=0.8, linestyle=":", zorder=1.5
                )
            for k, points in group.curves.items():
                line = _UNTRAINED if k > group.settings.k_train else "-"
                draw_exact(axes, points["length"], points, f"k = {k}", (*styles[k], line), alpha=0.08)
            axes.set_title(title, loc="left")
        length_axis(panels[0], all_lengths(groups), most=5)
        style.outer_labels(panels, axis_name(groups[0].settings), "accuracy [% of samples]")
        style.add_legend(figure, [*_k_handles(styles, groups), *frame_handles(groups)])
        style.add_heading(figure, describe(groups))
    return figure


def scheme_comparison_figure(groups: Sequence[Group]) -> Figure:
    """(b): exact match against length [% of samples], a panel per task, a curve per position scheme.

    Args:
        groups: of tasks with coupled ids; those that differ in more than the position scheme are curves of their own.
    """
    labels, tasks = _by_task(groups)
    encodings = {
        label: style.encoding_of(label, group.settings.scheme)
        for label, group in zip(labels, groups, strict=True)
    }
    styles = style.model_styles(encodings)
    places = style.in_rows(len(tasks), 2)
    with matplotlib.rc_context(style.STYLE):
        rows, columns = (1 + max(axis) for axis in zip(*places, strict=True))
        figure = style.new_figure(style.PAGE if columns > 1 else style.COLUMN, 2.2 * rows + 1)
        grid = figure.add_gridspec(rows, columns)
        for place, (title, members) in zip(places, tasks.items(), strict=True):
            axes = figure.add_subplot(grid[place])
            _plot_schemes(axes, members, styles)
            axes.set_title(title, loc="left")
        style.add_legend(figure, [*style.line_handles(styles), *frame_handles(groups, chance=False)])
        style.add_heading(figure, describe(groups))
    return figure


def first_errors_figure(groups: Sequence[Group]) -> Figure:
    """(c): what the first error is [% of samples], a row per task, a panel per position scheme, a bar per length.

    Args:
        groups: as of `scheme_comparison_figure`.
    """
    _, tasks = _by_task(groups)
    places = [style.in_rows(len(members), _ERRORS_IN_A_ROW) for members in tasks.values()]
    starts = np.cumsum([0, *(1 + of_task[-1][0] for of_task in places)]).tolist()
    columns = 1 + max(column for of_task in places for _, column in of_task)
    with matplotlib.rc_context(style.STYLE):
        width = min(style.PAGE, max(style.COLUMN, 1.3 * columns))
        figure = style.new_figure(width, 1.35 * starts[-1] + 0.9)
        grid = figure.add_gridspec(starts[-1], columns)
        for of_task, start, (title, members) in zip(places, starts[:-1], tasks.items(), strict=True):
            panels = [figure.add_subplot(grid[start + row, column]) for row, column in of_task]
            _plot_errors(panels, members)
            length = axis_name(members[0][0].settings).partition(" [")[0]
            style.outer_labels(panels, length, f"{title}:\nwrong [%]")
        sorts = [Patch(**looks, **_EDGES) for looks in _SORTS.values()]
        style.add_legend(figure, [*sorts, *frame_handles(groups, chance=False)])
        style.add_heading(figure, describe(groups).partition("; bands")[0])
    return figure


def _by_task(groups: Sequence[Group]) -> tuple[list[str], dict[str, Members]]:
    """The label of each group, and the groups of each task by its title."""
    labels = scheme_labels([group.settings for group in groups])
    tasks: dict[tuple[str, str, str], Members] = {}
    for group, label in zip(groups, labels, strict=True):
        settings = group.settings
        others = {name: value for name, value in task_facts(settings).items() if name.startswith("trained ")}
        tasks.setdefault((settings.task, settings.parameters, str(others)), []).append((group, label))
    return labels, dict(zip(_task_titles(tasks.values()), tasks.values(), strict=True))


# --- curves ---


def draw_exact(
    axes: Axes, x: Sequence[float], points: pd.DataFrame, label: str, look: style.Style, alpha: float
) -> None:
    """The exact share at some points of `Group.points` with its interval [%]."""
    interval = [100 * points[name].to_numpy() for name in ("value", "low", "high")]
    style.draw_band(axes, np.asarray(x), interval, label, look, alpha)


def _plot_schemes(axes: Axes, members: Members, styles: dict[str, style.Style]) -> None:
    """(b): exact match [%] of the schemes of one task."""
    settings = members[0][0].settings
    longest = settings.train_length[1]
    lengths = all_lengths([group for group, _ in members])
    axes.axvspan(*settings.train_length, **SPAN)
    for times in (1, *MULTIPLES):
        if times * longest <= lengths[-1]:
            text = f"1× = {longest}" if times == 1 else f"{times}×"
            axes.axvline(times * longest, color="0.45", linestyle=":", linewidth=1, zorder=1.5)
            place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate(
                text, (times * longest, 1), (-2, -1), ha="right", va="top", fontsize=style.SMALL, **place
            )
    for group, label in members:
        draw_exact(axes, group.points["length"], group.points, label, styles[label], alpha=0.12)
    length_axis(axes, lengths, most=6)
    axes.set_ylim(-3, 110)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlabel(axis_name(settings))
    axes.set_ylabel("exact match [% of samples]")


def _plot_errors(panels: Sequence[Axes], members: Members) -> None:
    """(c): a panel per scheme of one task: share of samples [%] by first error, stacked, a bar per length."""
    lengths = all_lengths([group for group, _ in members])
    for axes, (group, label) in zip(panels, members, strict=True):
        x = [lengths.index(length) for length in group.points["length"]]
        bottom = np.zeros(len(x))
        for sort in ERROR_SORTS:
            share = 100 * group.points[f"wrong_{sort}"].to_numpy()
            axes.bar(x, share, 0.86, bottom=bottom, **_SORTS[sort], **_EDGES)
            bottom += share
        shortest, longest = group.settings.train_length
        trained = [place for place, length in enumerate(lengths) if shortest <= length <= longest]
        if trained:
            axes.axvspan(trained[0] - 0.5, trained[-1] + 0.5, zorder=0, **SPAN)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(-0.5, len(lengths) - 0.5)
        axes.set_ylim(0, 104)
        axes.set_yticks((0, 50, 100))
        every = math.ceil(len(lengths) / 3)
        axes.set_xticks(range(0, len(lengths), every), [f"{length}" for length in lengths[::every]])
        axes.set_title("\n".join(wrap(label, _TITLE_WIDTH)), loc="left", fontsize=style.SMALL)


# --- axes, styles, words ---


def length_axis(axes: Axes, lengths: Sequence[int], *, most: int) -> None:
    """A logarithmic axis that is marked at measured lengths, at no more than about ``most`` of them."""
    least = math.log(lengths[-1] / lengths[0]) / most
    ticks = [lengths[-1]]
    for length in reversed(lengths):
        if math.log(ticks[-1] / length) >= least > 0:
            ticks.append(length)
    style.log_axis(axes, ticks[::-1])
    axes.set_xlim(lengths[0] / 1.08, lengths[-1] * 1.08)


def all_lengths(groups: Sequence[Group]) -> list[int]:
    """Every length that any of them has, ascending."""
    return sorted({int(length) for group in groups for length in group.points["length"]})


def axis_name(settings: Settings) -> str:
    """What the length of a task counts, with its unit."""
    return _TASKS.get(settings.task, ("", "length [the task's unit]"))[1]


def k_styles(groups: Sequence[Group]) -> KStyles:
    """Colour and marker of each tested k, the same in all panels: the larger, the lighter."""
    ks = sorted({k for group in groups for k in group.curves})
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(ks)))
    return {k: (tuple(shades[i]), K_MARKERS[i % len(K_MARKERS)]) for i, k in enumerate(ks)}


def k_titles(groups: Sequence[Group]) -> list[str]:
    """K_train of each panel, and below it what else tells panels apart."""
    all_facts = [facts(group.settings) for group in groups]
    names = ["k_train"]
    for name in dict.fromkeys(name for known in all_facts for name in known):
        if len(_combinations(all_facts, [*names, name])) > len(_combinations(all_facts, names)):
            names.append(name)
    titles = []
    for group, known in zip(groups, all_facts, strict=True):
        further = ", ".join(fact_text(name, known[name]) for name in names[1:] if name in known)
        titles.append(rf"$K_{{train}}$ = {group.settings.k_train}" + (f"\n{further}" if further else ""))
    return titles


def _combinations(all_facts: Sequence[dict[str, Any]], names: Sequence[str]) -> set[str]:
    """The combinations of values that occur."""
    return {str([known.get(name) for name in names]) for known in all_facts}


def _task_titles(tasks: Iterable[Members]) -> list[str]:
    """Name of each task, and the parameters in which those of one name differ."""
    titles = []
    all_settings = [members[0][0].settings for members in tasks]
    for settings in all_settings:
        alike = [task_facts(other) for other in all_settings if other.task == settings.task]
        odd = differing(alike)[alike.index(task_facts(settings))]
        name = _TASKS.get(settings.task, (settings.task, ""))[0]
        titles.append(", ".join([name, *(fact_text(*item) for item in odd.items())]))
    return titles


def _k_handles(styles: KStyles, groups: Sequence[Group]) -> list[Line2D]:
    """A line for each k, and how one is drawn that was not trained on."""
    handles = [
        Line2D([], [], color=colour, marker=marker, label=f"k = {k}")
        for k, (colour, marker) in styles.items()
    ]
    if any(k > group.settings.k_train for group in groups for k in group.curves):
        handles.append(Line2D([], [], color="0.3", linestyle=_UNTRAINED, label=r"$k > K_{train}$"))
    return handles


def frame_handles(groups: Sequence[Group], *, chance: bool = True) -> list[Any]:
    """The shaded span of trained lengths, and the line of guessing."""
    handles: list[Any] = [Patch(label="trained lengths", **SPAN)]
    if chance and any(group.settings.chance is not None for group in groups):
        handles.append(Line2D([], [], color="0.3", linewidth=0.8, linestyle=":", label="chance"))
    return handles


# --- the command ---


def parser() -> Parser:
    """Of `figure1`."""
    parser = Parser(
        prog="olmo-sparsity figure1",
        description="""The figures of the synthetic tasks: accuracy against length, and the bound.

examples:
  olmo-sparsity figure1 runs/parity-* --out runs/figure1
  olmo-sparsity figure1 runs/sparse --out runs/sparse --bound
  olmo-sparsity figure1 runs/theory --out results/theory --rows results/theory/exact_match.parquet
  olmo-sparsity figure1 results/synthetic/exact_match.parquet --only text/records --out results/synthetic/text

reads every exact_match.json or .parquet that it is given, or that lies in a folder it is given (no model is needed),
pools the training seeds of one setting, prints the numbers and writes, each as PNG and PDF,

  figure1-TASK.*         a planted task: accuracy against length, a panel per K_train, a curve per k
  figure1-TASK-bound.*   with --bound: its errors under Theorem 4.3, whose constant is taken from the shorter lengths
                         beyond the trained ones and tried at the longer ones
  figure1-schemes.*      tasks with coupled ids: exact match by position scheme
  figure1-errors.*       and what the first errors are
  figure1.json           every number that is drawn

Intervals are 95 %: Wilson's for one seed, Student's t over seeds for several. What the rows do not tell, such as
precision, heads and weight decay, is not compared.""",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="exact_match.json or .parquet, or a folder that holds some"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FOLDER", help="of the rows' folders, these alone"
    )
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where to write")
    parser.add_argument(
        "--bound", action="store_true", help="draw the errors of planted tasks under the bound, too"
    )
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep all rows that were read in one file, too"
    )
    return parser


def main() -> None:
    """Read and pool the rows, then draw, write and print what they say."""
    options = parser().parse_args()
    from analysis.synthetic.bound import bound_figure, bounds_frames, trained_error, try_bounds
    from olmo_sparsity.util.files import write_json
    from olmo_sparsity.util.provenance import current_commit, library_versions

    code = {
        "commit": current_commit(),
        "versions": library_versions(),
    }  # before the figures are drawn over those of a checkout
    rows = load(options.paths, options.only)
    groups = pool(rows)
    planted = [group for group in groups if group.settings.k_train]
    coupled = [group for group in groups if not group.settings.k_train]
    tests = try_bounds([trained_error(group) for group in planted if options.bound])
    figures = {}
    for task in dict.fromkeys(group.settings.task for group in planted):
        figures[task] = accuracy_by_length_figure([group for group in planted if group.settings.task == task])
        if of_task := [test for test in tests if test.starts[0].group.settings.task == task]:
            figures[f"{task}-bound"] = bound_figure(of_task)
    if coupled:
        figures |= {"schemes": scheme_comparison_figure(coupled), "errors": first_errors_figure(coupled)}
    for name, figure in figures.items():
        style.save_figure(figure, options.out, f"figure1-{name}")
    points, bounds = points_frame(groups), bounds_frames(tests)
    written = {"points": points.drop(columns=["parameters", "trained", "options"]), **bounds}
    tables = {name: _records(frame) for name, frame in written.items()}
    write_json(options.out / "figure1.json", {**tables, "provenance": code})
    if options.rows:
        save(options.rows, rows)
    shown = points[["task", "name", "length", "seeds", "samples", "value", "low", "high"]]
    print(show(shown, title="exact match [%] with its 95 % interval"), end="\n\n")
    for frame in bounds.values() if tests else ():
        print(frame.to_string(index=False), end="\n\n")
    print(f"wrote {', '.join(figures)} and figure1.json to {options.out}")


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON has them: None for what is undefined."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")
