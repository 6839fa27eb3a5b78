"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6), and its figure.

    Theorem 4.3 [paper]    error(L') = O(eta_L eta_L' L L'^2 delta)
    improved [paper]       error(L') = O((L' / L)^2 delta)

delta is the error at trained lengths, L the longest of them, and L' > L the length that is asked for. What O() hides
(with it eta_L and eta_L', which belong to the distribution of planted positions) is a constant, which is taken from
the shorter lengths beyond L and tried at the longer ones [ours]. L and L' are tokens of the prompt. With one L both
bounds grow like L'^2 and differ by the factor L^3, so that models of different L tell them apart. Test samples
with more planted tokens than were trained on have no bound.

Shapes: n lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from numpy.typing import ArrayLike

import analysis.figures.style as style
from analysis.synthetic.exact_match import Group, Settings, describe, differing, fact_text, scheme_labels
from olmo_sparsity.util.errors import UserError


@dataclass(frozen=True)
class TrainedError:
    """What the bounds of a group start from."""

    group: Group
    k: int
    """Planted tokens: the largest number that was both trained and tested."""
    trained_length: int
    """L, the longest trained length."""
    measured_length: int
    """The trained length whose error is largest, and the longest of those with the same error."""
    error: float
    """There."""
    error_high: float
    """Upper end of its 95 % interval."""

    @property
    def is_limit(self) -> bool:
        """Whether no sample was wrong, so that delta is an upper limit."""
        return self.error == 0

    @property
    def delta(self) -> float:
        """The error that the bounds start from."""
        return self.error_high if self.is_limit else self.error

    @property
    def guessing(self) -> float:
        """The error of guessing, above which a bound says nothing; 1 where that is not known."""
        return 1 - (self.group.settings.chance or 0)

    @property
    def points(self) -> pd.DataFrame:
        """Of the curve of k, as in `Group.points`."""
        return self.group.curves[self.k]


def theorem_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """L L'^2 delta at ``lengths`` L', one or (n,), of that shape; L and delta likewise."""
    return np.asarray(trained_length) * np.asarray(lengths, dtype=float) ** 2 * np.asarray(delta)


def improved_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """(L' / L)^2 delta at ``lengths`` L', likewise."""
    return (np.asarray(lengths, dtype=float) / np.asarray(trained_length)) ** 2 * np.asarray(delta)


BOUNDS: dict[str, tuple[str, str, Any, Any]] = {
    "theorem_4_3": ("Theorem 4.3", "L L′² δ", theorem_bound, (0, (6, 2))),
    "improved": ("improved", "(L′/L)² δ", improved_bound, (0, (1, 1))),
}
"""The bounds by their names in frames: name and formula (the etas in its constant), function, line style."""


def trained_error(group: Group) -> TrainedError:
    """Error of a group of a planted task at trained lengths, for the largest k that was trained and tested.

    Raises `UserError` where no k, or no length of it, was both, and where fewer than two lengths are beyond the trained
    ones.
    """
    settings = group.settings
    shortest, longest = settings.train_length
    least = settings.trained_parameters.get("k_train_min", 1)
    k = max((k for k in group.curves if least <= k <= settings.k_train), default=0)
    points = group.points[group.points["k"] == k]
    inside = points[points["length"].between(shortest, longest)]
    if inside.empty or (points["length"] > longest).sum() < 2:
        raise UserError(
            f"{settings.task} with k_train {settings.k_train}: the bound needs a trained k measured at a length from "
            f"{shortest} to {longest}, where it starts, and at two or more above {longest}, one to take its constant "
            "from and one to try it at; measure those too"
        )
    worst = inside.sort_values(["error", "length"]).iloc[-1]
    return TrainedError(
        group, k, longest, int(worst["length"]), float(worst["error"]), float(worst["error_high"])
    )


@dataclass(frozen=True)
class BoundFit:
    """A bound whose constant was taken from some lengths, tried on longer ones."""

    constant: float
    """The smallest with which the bound holds wherever it was fitted: for the upper limit where no sample was wrong."""
    fitted: int
    """Points that it was fitted on."""
    fitted_to: float
    """The largest L'/L of those."""
    tested: int
    """Points that it was tried on: those where it is below the error of guessing."""
    empty: int
    """Points that it says nothing about, because it is at the error of guessing or above."""
    held: int
    """Of those it was tried on, those whose error (the lower end of its 95 % interval) is not above the bound."""
    slack: float | None
    """Geometric mean of bound / error over the tested points with an error above 0; None where there are none."""


@dataclass(frozen=True)
class BoundTest:
    """Models that differ in L (and L_local with it) alone, and both bounds with one constant for all of them."""

    label: str
    """What was trained, as in `scheme_labels`."""
    starts: tuple[TrainedError, ...]
    """Of each L, ascending."""
    fits: dict[str, BoundFit]
    """By name in `BOUNDS`."""


def try_bounds(starts: Sequence[TrainedError]) -> list[BoundTest]:
    """For models that differ in L (and L_local with it) alone: a constant from half of the lengths, tried at the rest.

    Fitted where L'/L is smaller, tried where it is larger [ours].
    """
    tests = []
    for label, members in _by_settings(starts):
        beyond = pd.concat(
            [
                start.points.assign(
                    trained_length=start.trained_length, delta=start.delta, guessing=start.guessing
                )
                for start in members
            ]
        )
        beyond["multiple"] = beyond["length"] / beyond["trained_length"]
        beyond = beyond[beyond["multiple"] > 1].sort_values("multiple", kind="stable")
        half = (len(beyond) + 1) // 2
        fits = {name: _fit(name, beyond.iloc[:half], beyond.iloc[half:]) for name in BOUNDS}
        tests.append(BoundTest(label, tuple(sorted(members, key=lambda each: each.trained_length)), fits))
    return tests


def _fit(name: str, fitted: pd.DataFrame, tested: pd.DataFrame) -> BoundFit:
    def with_constant_1(points: pd.DataFrame) -> np.ndarray:
        return BOUNDS[name][2](points["length"], points["trained_length"], points["delta"])

    errors = np.where(fitted["error"] > 0, fitted["error"], fitted["error_high"])
    constant = float((errors / with_constant_1(fitted)).max())
    bound = constant * with_constant_1(tested)
    below = bound < tested["guessing"].to_numpy()
    bound, tried = bound[below], tested[below]
    wrong = tried["error"].to_numpy() > 0
    ratios = bound[wrong] / tried["error"].to_numpy()[wrong]
    return BoundFit(
        constant,
        fitted=len(fitted),
        fitted_to=float(fitted["multiple"].max()),
        tested=len(tried),
        empty=len(tested) - len(tried),
        held=int((tried["error_low"].to_numpy() <= bound).sum()),
        slack=float(np.exp(np.mean(np.log(ratios)))) if len(ratios) and constant else None,
    )


_OF_LENGTH = ("train_length", "test_length", "locality", "k_test")


def _by_settings(starts: Sequence[TrainedError]) -> list[tuple[str, list[TrainedError]]]:
    """Those that are alike but for L and L_local, and what they are called; the tables of tuples grow with both."""
    together: dict[tuple[Settings, int], list[TrainedError]] = {}
    names = []
    for start in starts:
        settings = start.group.settings
        parameters, trained = (
            json.dumps({name: value for name, value in parameters.items() if name not in _OF_LENGTH})
            for parameters in (settings.task_parameters, settings.trained_parameters)
        )
        options = {
            name: value for name, value in settings.training_options.items() if not name.endswith("locality")
        }
        named = replace(settings, options=json.dumps(options))
        alike = replace(named, parameters=parameters, trained=trained)
        if settings.family == "tuples":
            alike = replace(alike, weights=0)
        if (alike, start.k) not in together:
            names.append(named)
        together.setdefault((alike, start.k), []).append(start)
    labels = []
    for label, (settings, _) in zip(scheme_labels(names), together, strict=True):
        of_task = [other.task_parameters for other, _ in together if other.task == settings.task]
        odd, *_ = differing([settings.task_parameters, *of_task])
        odd.pop("k_train", None)  # a panel's title has it
        labels.append(", ".join([label, *(fact_text(*item) for item in odd.items())]))
    return list(zip(labels, together.values(), strict=True))


def bounds_frames(tests: Sequence[BoundTest]) -> dict[str, pd.DataFrame]:
    """Tidy frames: ``bounds``, a row per test and bound with `BoundFit`, and ``trained``, a row per test and L."""
    bounds, trained = [], []
    for test in tests:
        settings = test.starts[0].group.settings
        which = {
            "task": settings.task,
            "name": test.label,
            "k_train": settings.k_train,
            "k": test.starts[0].k,
        }
        bounds += [{**which, "bound": name, **asdict(fit)} for name, fit in test.fits.items()]
        for start in test.starts:
            numbers = {name: value for name, value in vars(start).items() if name not in ("group", "k")}
            trained.append({**which, **numbers, "delta": start.delta, "delta_is_upper_limit": start.is_limit})
    return {"bounds": pd.DataFrame(bounds), "trained": pd.DataFrame(trained)}


# --- the figure ---

_HOLLOW: dict[str, Any] = {"marker": "v", "markerfacecolor": "white", "markersize": 3.8}
_LIMIT: dict[str, Any] = {**_HOLLOW, "zorder": 3.2, "linestyle": "none"}
_FITTED: dict[str, Any] = {"color": "0.45", "linestyle": ":", "linewidth": 1, "zorder": 1.5}


def bound_figure(tests: Sequence[BoundTest]) -> Figure:
    """Error against length, both logarithmic, under both bounds: a panel per test, a curve per L with its interval.

    Drawn as multiples: the length of L, the error of delta. So the improved bound is one line for every L, and that of
    Theorem 4.3 a line for each. Both end where they reach the error of guessing. Up to the dotted line of a panel are
    the lengths that the constants were taken from. Where no sample was wrong, a hollow triangle stands at the upper
    limit of the interval.
    """
    named = [list(zip(_names(test), test.starts, strict=True)) for test in tests]
    in_order = sorted(
        (start.trained_length, _locality(start) or 0, name) for curves in named for name, start in curves
    )
    styles = style.model_styles(dict.fromkeys(name for *_, name in in_order))
    looks: dict[str, style.Style] = {name: (*style_of[:2], "-") for name, style_of in styles.items()}
    titles = [_title(test, named=len({test.label for test in tests}) > 1) for test in tests]
    groups = [start.group for test in tests for start in test.starts]
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(tests), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, test, curves, title in zip(panels, tests, named, titles, strict=True):
            axes.axhline(1, color="0.75", linewidth=0.8, zorder=1.4)
            axes.axvline(next(iter(test.fits.values())).fitted_to, **_FITTED)
            for name, start in curves:
                _draw_errors(axes, start, name, looks[name])
                for bound, fit in test.fits.items():
                    _draw_bound(axes, start, bound, fit, "black" if bound == "improved" else looks[name][0])
            axes.set_title(title, loc="left")
        panels[0].set_yscale("log")
        _length_axis(panels[0], tests)
        panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        error = "expected error" if _expected(groups) == {True} else "error"
        style.outer_labels(panels, "length L′ [multiples of L]", f"{error} [multiples of δ]")
        style.add_legend(figure, _handles(looks, tests))
        style.add_heading(figure, _heading(groups))
    return figure


def _names(test: BoundTest) -> list[str]:
    """What the curves of a panel are called: L, with L_local where curves have one L."""
    names = [f"L = {start.trained_length}" for start in test.starts]
    if len(set(names)) == len(names):
        return names
    return [
        f"{name}, $L_{{local}}$ = {_locality(start)}" for name, start in zip(names, test.starts, strict=True)
    ]


def _locality(start: TrainedError) -> int | None:
    return start.group.settings.task_parameters.get("locality")


def _draw_errors(axes: Axes, start: TrainedError, label: str, look: style.Style) -> None:
    """The error of one model as multiples of delta, at multiples of L, with its interval."""
    x = start.points["length"].to_numpy() / start.trained_length
    names = "error", "error_low", "error_high"
    value, low, high = (start.points[name].to_numpy() / start.delta for name in names)
    wrong, positive_low = (np.where(values > 0, values, np.nan) for values in (value, low))
    style.draw_band(axes, x, (wrong, positive_low, high), label, look, alpha=0.15)
    none = value == 0
    if none.any():
        axes.plot(x[none], high[none], color=look[0], label=f"{label}, none wrong", **_LIMIT)


def _draw_bound(axes: Axes, start: TrainedError, name: str, fit: BoundFit, colour: str) -> None:
    """From L to the longest length, or to where it is at the error of guessing."""
    label, _, bound, line = BOUNDS[name]
    lengths = np.geomspace(start.trained_length, start.points["length"].max(), 200)
    values = fit.constant * bound(lengths, start.trained_length, start.delta)
    below = values < start.guessing
    x, y = lengths[below] / start.trained_length, values[below] / start.delta
    axes.plot(x, y, color=colour, linestyle=line, linewidth=1.1, label=label, zorder=2.5)


def _length_axis(axes: Axes, tests: Sequence[BoundTest]) -> None:
    """From half of L on: shorter samples say nothing about length generalization."""
    longest = max(
        start.points["length"].max() / start.trained_length for test in tests for start in test.starts
    )
    style.log_axis(axes, [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= longest])
    axes.set_xlim(0.5, 1.1 * longest)


def _title(test: BoundTest, *, named: bool) -> str:
    """What was trained, K_train and k, and delta of each L, in their order."""
    k_train = test.starts[0].group.settings.k_train
    deltas = ", ".join(f"{'≤ ' if start.is_limit else ''}{start.delta:.2g}" for start in test.starts)
    planted = rf"$K_{{train}}$ = {k_train}, k = {test.starts[0].k}"
    return "\n".join([*(wrap(test.label, 34) if named else []), planted, f"δ: {deltas}"])


def _expected(groups: Sequence[Group]) -> set[bool]:
    return {bool(value) for group in groups for value in group.points["is_expected"]}


def _heading(groups: Sequence[Group]) -> str:
    """As `describe` has it, with the interval of the errors that are drawn, where that is not that of exact match."""
    expected, words = _expected(groups), describe(groups)
    if expected == {False}:
        return words
    words = words.partition("; bands")[0]
    over_seeds = (
        "Student's t over seeds, " if any(group.points["seeds"].max() > 1 for group in groups) else ""
    )
    return f"{words}; bands: 95 %, {over_seeds}normal over samples" if expected == {True} else words


def _handles(looks: dict[str, style.Style], tests: Sequence[BoundTest]) -> list[Line2D]:
    handles = style.line_handles(looks)
    if any((start.points["error"] == 0).any() for test in tests for start in test.starts):
        handles.append(Line2D([], [], color="0.3", label="none wrong: upper limit", **_LIMIT))
    for name, (label, formula, _, line) in BOUNDS.items():
        colour = "black" if name == "improved" else "0.3"
        handles.append(
            Line2D([], [], color=colour, linestyle=line, linewidth=1.1, label=f"{label}: c {formula}")
        )
    return [*handles, Line2D([], [], label="c is from the lengths up to this", **_FITTED)]
