"""The error of planted tasks beyond the trained lengths, under the bounds of Theorem 4.3 (docs/method.md, 3.6).

Drawn as multiples: the length of L, the error of delta. So the improved bound is one line for every L, and that of
Theorem 4.3 a line for each. Both end where they reach the error of guessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from analysis.plots import style
from analysis.plots.figure1 import describe
from analysis.stats.bound import BOUNDS, BoundFit, BoundTest, TrainedError, error_of
from analysis.stats.exact_match import Group
from olmo_sparsity.util.result_files import Json

_LIMIT: Json = {
    "marker": "v",
    "markerfacecolor": "white",
    "markersize": 3.8,
    "zorder": 3.2,
    "linestyle": "none",
}
_FITTED: Json = {"color": "0.45", "linestyle": ":", "linewidth": 1, "zorder": 1.5}


def bound_figure(tests: Sequence[BoundTest]) -> Figure:
    """Error against length, both logarithmic, under both bounds: a panel per test, a curve per L with its interval.

    Up to the dotted line of a panel are the lengths that the constants were taken from. Where no sample was wrong, a
    hollow triangle stands at the upper limit of the interval.
    """
    named = [list(zip(_names(test), test.starts, strict=True)) for test in tests]
    in_order = sorted((each.trained_length, _locality(each) or 0, name) for of in named for name, each in of)
    styles = style.model_styles(dict.fromkeys(name for *_, name in in_order))
    looks: dict[str, style.Style] = {name: (*style_of[:2], "-") for name, style_of in styles.items()}
    titles = [_title(test, named=len({each.label for each in tests}) > 1) for test in tests]
    groups = [start.group for test in tests for start in test.starts]
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(tests), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, test, own, title in zip(panels, tests, named, titles, strict=True):
            axes.axhline(1, color="0.75", linewidth=0.8, zorder=1.4)
            axes.axvline(next(iter(test.fits.values())).fitted_to, **_FITTED)
            for curve, start in own:
                look = looks[curve]
                _draw_errors(axes, start, curve, look)
                for name, fit in test.fits.items():
                    colour = "black" if name == "improved" else look[0]
                    _draw_bound(axes, start, name, fit, colour)
            axes.set_title(title, loc="left")
        panels[0].set_yscale("log")
        _length_axis(panels[0], tests)
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        style.outer_labels(panels, "length L′ [multiples of L]", f"{_error_name(groups)} [multiples of δ]")
        style.add_legend(figure, _handles(looks, tests))
        style.add_heading(figure, _heading(groups))
    return figure


def _names(test: BoundTest) -> list[str]:
    """What the curves of a panel are called: L, with L_local where several have one L."""
    names = [f"L = {start.trained_length}" for start in test.starts]
    if len(set(names)) == len(names):
        return names
    return [
        f"{name}, $L_{{local}}$ = {_locality(start)}" for name, start in zip(names, test.starts, strict=True)
    ]


def _locality(start: TrainedError) -> int | None:
    return start.group.settings.parameters.get("locality")


def _draw_errors(axes: Axes, start: TrainedError, label: str, look: style.Style) -> None:
    """The error of one model as multiples of delta, at multiples of L, with its interval."""
    x = np.array([point.length for point in start.points]) / start.trained_length
    errors = [error_of(point) for point in start.points]
    value, low, high = (
        np.array([getattr(error, bound) for error in errors]) / start.delta
        for bound in ("value", "low", "high")
    )
    wrong, positive_low = (np.where(each > 0, each, np.nan) for each in (value, low))
    style.draw_band(axes, x, (wrong, positive_low, high), label, look, alpha=0.15)
    none = value == 0
    if none.any():
        axes.plot(x[none], high[none], color=look[0], label=f"{label}, none wrong", **_LIMIT)


def _draw_bound(axes: Axes, start: TrainedError, name: str, fit: BoundFit, colour: str) -> None:
    """From L to the longest length, or to where it is at the error of guessing."""
    label, _, bound, line = BOUNDS[name]
    lengths = np.geomspace(start.trained_length, start.points[-1].length, 200)
    values = fit.constant * bound(lengths, start.trained_length, start.delta)
    below = values < start.guessing
    x, y = lengths[below] / start.trained_length, values[below] / start.delta
    axes.plot(x, y, color=colour, linestyle=line, linewidth=1.1, label=label, zorder=2.5)


def _length_axis(axes: Axes, tests: Sequence[BoundTest]) -> None:
    """From half of L on: shorter samples say nothing about length generalization."""
    longest = max(start.points[-1].length / start.trained_length for test in tests for start in test.starts)
    ticks = [each for each in (1, 2, 5, 10, 20, 50, 100) if each <= longest]
    style.log_axis(axes, ticks)
    axes.set_xlim(0.5, 1.1 * longest)


def _title(test: BoundTest, *, named: bool) -> str:
    """What was trained, K_train and k, and delta of each L, in their order."""
    k_train = test.starts[0].group.settings.k_train
    deltas = ", ".join(f"{'≤ ' if start.is_limit else ''}{start.delta:.2g}" for start in test.starts)
    planted = rf"$K_{{train}}$ = {k_train}, k = {test.starts[0].k}"
    return "\n".join([*(wrap(test.label, 34) if named else []), planted, f"δ: {deltas}"])


def _error_name(groups: Sequence[Group]) -> str:
    return "expected error" if _have_expected(groups) == {True} else "error"


def _have_expected(groups: Sequence[Group]) -> set[bool]:
    points = [point for group in groups for curve in group.curves for point in curve.points]
    return {point.expected_error is not None for point in points}


def _heading(groups: Sequence[Group]) -> str:
    """As `describe` has it, with the interval of the errors that are drawn, where that is not that of exact match."""
    have, told = _have_expected(groups), describe(groups)
    if have == {False}:
        return told
    told = told.partition("; bands")[0]
    over_seeds = "Student's t over seeds, " if any(len(group.records) > 1 for group in groups) else ""
    return f"{told}; bands: 95 %, {over_seeds}normal over samples" if have == {True} else told


def _handles(looks: dict[str, style.Style], tests: Sequence[BoundTest]) -> list[Line2D]:
    handles = style.line_handles(looks)
    errors = [error_of(point) for test in tests for start in test.starts for point in start.points]
    if any(error.value == 0 for error in errors):
        handles.append(Line2D([], [], color="0.3", label="none wrong: upper limit", **_LIMIT))
    for name, (label, formula, _, line) in BOUNDS.items():
        colour = "black" if name == "improved" else "0.3"
        handles.append(
            Line2D([], [], color=colour, linestyle=line, linewidth=1.1, label=f"{label}: c {formula}")
        )
    return [*handles, Line2D([], [], label="c is from the lengths up to this", **_FITTED)]
