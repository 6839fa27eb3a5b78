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

from collections.abc import Sequence
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
from analysis.synthetic.exact_match import Group, describe, facts, labels
from olmo_sparsity.util.errors import UserError

_TESTED = ["task", "name", "k_train", "k"]
"""Models that are alike in these differ in L (and L_local with it) alone: one constant for all of them."""
_OF_LENGTH = ("train_length", "test_length", "locality", "k_test")


def theorem_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """L L'^2 delta at ``lengths`` L', one or (n,), of that shape; L and delta likewise."""
    return np.asarray(trained_length) * np.asarray(lengths, dtype=float) ** 2 * np.asarray(delta)


def improved_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """(L' / L)^2 delta at ``lengths`` L', likewise."""
    return (np.asarray(lengths, dtype=float) / np.asarray(trained_length)) ** 2 * np.asarray(delta)


BOUNDS = {"theorem_4_3": theorem_bound, "improved": improved_bound}


def errors_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """The errors of groups of planted tasks by length, for the largest k that was trained and tested: `Group.points`.

    Further columns: task, name, k_train (models that are alike in these and k differ in L and L_local alone), curve
    (its name), trained_length (L), locality, delta, delta_is_upper_limit (whether no sample was wrong), guessing (the
    error of guessing, above which a bound says nothing; 1 where that is not known), measured_length (the trained length
    that delta is of: the one whose error is largest, and the longest of those), multiple (L' / L).

    Raises `UserError` where no k, or no length of it, was both trained and tested, and where fewer than two lengths are
    beyond the trained ones.
    """
    frames = []
    for group, name in zip(groups, labels(groups, _facts), strict=True):
        shortest, longest = group.train_length
        trained_ks = range(group.trained.get("k_train_min", 1), group.k_train + 1)
        points = group.points[group.points["k"] == max({*group.points["k"]} & {*trained_ks}, default=0)]
        inside = points[points["length"].between(shortest, longest)]
        if inside.empty or (points["length"] > longest).sum() < 2:
            raise UserError(
                f"{group.task} with k_train {group.k_train}: the bound needs a trained k measured at a length from "
                f"{shortest} to {longest}, where it starts, and at two or more above {longest}; measure those too"
            )
        worst = inside.sort_values(["error", "length"]).iloc[-1]
        locality = group.parameters.get("locality")
        frames.append(
            points.assign(
                task=group.task,
                name=name,
                k_train=group.k_train,
                curve=f"L = {longest}" + (f", $L_{{local}}$ = {locality}" if locality else ""),
                trained_length=longest,
                locality=locality or 0,
                delta=worst["error"] or worst["error_high"],
                delta_is_upper_limit=worst["error"] == 0,
                guessing=1 - (group.chance or 0),
                measured_length=worst["length"],
                multiple=points["length"] / longest,
            )
        )
    return pd.concat(frames, ignore_index=True)


def _facts(group: Group) -> dict[str, str]:
    """What models may not differ in that share a constant; the tables of tuples grow with the length."""
    without = {*_OF_LENGTH, "weights"} if group.family == "tuples" else {*_OF_LENGTH}
    ends = {name: name.removeprefix("trained ").split(".")[-1] for name in facts(group)}
    return {name: text for name, text in facts(group).items() if ends[name] not in without}


def trained_frame(errors: pd.DataFrame) -> pd.DataFrame:
    """What the bounds start from: a row for each curve of `errors_frame`, by L among those that share a constant."""
    starts = errors[errors["length"] == errors["measured_length"]]
    together = [
        rows.sort_values("trained_length", kind="stable") for _, rows in starts.groupby(_TESTED, sort=False)
    ]
    numbers = ["trained_length", "measured_length", "error", "error_high", "delta", "delta_is_upper_limit"]
    return pd.concat(together, ignore_index=True)[[*_TESTED, *numbers]]


def fit_bounds(errors: pd.DataFrame) -> pd.DataFrame:
    """Both bounds with a constant from the smaller half of all L'/L, tried at the larger half [ours].

    A row for each bound and models that differ in L alone: ``constant``, the smallest with which the bound holds where
    it was fitted (for the upper limit where no sample was wrong); ``fitted`` points, ``fitted_to`` the largest L'/L of
    them; ``tested`` points, where the bound is below the error of guessing, and ``empty`` ones, where it is not and
    says nothing; ``held`` of the tested ones, whose error (the lower end of its 95 % interval) is not above the bound;
    ``slack``, geometric mean of bound / error over the tested points with an error above 0, NaN where there are none.
    """
    fits = []
    for which, points in errors.groupby(_TESTED, sort=False):
        beyond = points[points["multiple"] > 1].sort_values("multiple", kind="stable")
        half = (len(beyond) + 1) // 2
        for name in BOUNDS:
            fit = _fit(name, beyond.iloc[:half], beyond.iloc[half:])
            fits.append({**dict(zip(_TESTED, which, strict=True)), "bound": name, **fit})
    return pd.DataFrame(fits)


def _fit(name: str, fitted: pd.DataFrame, tested: pd.DataFrame) -> dict[str, Any]:
    def with_constant_1(points: pd.DataFrame) -> np.ndarray:
        return BOUNDS[name](points["length"], points["trained_length"], points["delta"])

    errors = np.where(fitted["error"] > 0, fitted["error"], fitted["error_high"])
    constant = float((errors / with_constant_1(fitted)).max())
    bound = constant * with_constant_1(tested)
    below = bound < tested["guessing"].to_numpy()
    bound, tried = bound[below], tested[below]
    wrong = tried["error"].to_numpy() > 0
    ratios = bound[wrong] / tried["error"].to_numpy()[wrong]
    return {
        "constant": constant,
        "fitted": len(fitted),
        "fitted_to": float(fitted["multiple"].max()),
        "tested": len(tried),
        "empty": len(tested) - len(tried),
        "held": int((tried["error_low"].to_numpy() <= bound).sum()),
        "slack": float(np.exp(np.mean(np.log(ratios)))) if len(ratios) and constant else np.nan,
    }


# --- the figure ---

_LIMIT: dict[str, Any] = {"marker": "v", "markerfacecolor": "white", "markersize": 3.8, "linestyle": "none"}
_FITTED: dict[str, Any] = {"color": "0.45", "linestyle": ":", "linewidth": 1, "zorder": 1.5}
_THEOREM: dict[str, Any] = {"linestyle": (0, (6, 2)), "linewidth": 1.1, "label": "Theorem 4.3: c L L′² δ"}
_IMPROVED: dict[str, Any] = {"linestyle": (0, (1, 1)), "linewidth": 1.1, "label": "improved: c (L′/L)² δ"}


def bound_figure(groups: Sequence[Group]) -> Figure:
    """Error against length, both logarithmic, under both bounds: a panel per K_train, a curve per L with its interval.

    Drawn as multiples: the length of L, the error of delta. So the improved bound is one line for every L, and that of
    Theorem 4.3 a line for each. Both end where they reach the error of guessing. Up to the dotted line of a panel are
    the lengths that the constants were taken from. Where no sample was wrong, a hollow triangle stands at the upper
    limit of the interval.
    """
    errors = errors_frame(groups)
    fits = fit_bounds(errors).set_index([*_TESTED, "bound"])
    tests = dict(iter(errors.groupby(_TESTED, sort=False)))
    names = errors.sort_values(["trained_length", "locality"])["curve"].unique()
    styles = style.model_styles(dict.fromkeys(names))
    looks: dict[str, style.Style] = {name: (*look[:2], "-") for name, look in styles.items()}
    titles = [_title(points, named=errors["name"].nunique() > 1) for points in tests.values()]
    with matplotlib.rc_context(style.STYLE):
        places = style.in_rows(len(tests), style.columns_in(style.PAGE, 2.0))
        figure, panels = style.small_multiples(places, title_lines=style.lines_of(titles))
        for axes, (test, points), title in zip(panels, tests.items(), titles, strict=True):
            axes.axhline(1, color="0.75", linewidth=0.8, zorder=1.4)
            axes.axvline(fits.loc[(*test, "improved"), "fitted_to"], **_FITTED)
            for name, curve in points.groupby("curve", sort=False):
                _draw_errors(axes, curve, looks[name])
                constants = fits["constant"].loc[test]
                _draw_bound(axes, curve, theorem_bound, constants["theorem_4_3"], looks[name][0], _THEOREM)
                _draw_bound(axes, curve, improved_bound, constants["improved"], "black", _IMPROVED)
            axes.set_title(title, loc="left")
        _draw_axes(panels, errors)
        handles = style.line_handles(looks)
        if (errors["error"] == 0).any():
            handles.append(Line2D([], [], color="0.3", label="none wrong: upper limit", **_LIMIT))
        handles += [Line2D([], [], color="0.3", **_THEOREM), Line2D([], [], color="black", **_IMPROVED)]
        handles.append(Line2D([], [], label="c is from the lengths up to this", **_FITTED))
        style.add_legend(figure, handles)
        style.add_heading(figure, f"{describe(groups)}; bands: 95 %")
    return figure


def _title(points: pd.DataFrame, *, named: bool) -> str:
    """K_train and k, what was trained, and delta of each L, in their order."""
    first, starts = points.iloc[0], trained_frame(points)
    limits = np.where(starts["delta_is_upper_limit"], "≤ ", "")
    deltas = ", ".join(f"{limit}{delta:.2g}" for limit, delta in zip(limits, starts["delta"], strict=True))
    planted = rf"$K_{{train}}$ = {first['k_train']}, k = {first['k']}"
    return "\n".join([planted, *(wrap(first["name"], 34) if named else ()), f"δ: {deltas}"])


def _draw_errors(axes: Axes, curve: pd.DataFrame, look: style.Style) -> None:
    """The error of one model as multiples of delta, at multiples of L, with its interval."""
    x, label, delta = curve["multiple"].to_numpy(), curve["curve"].iloc[0], curve["delta"]
    value, low, high = ((curve[name] / delta).to_numpy() for name in ("error", "error_low", "error_high"))
    wrong, positive_low = (np.where(values > 0, values, np.nan) for values in (value, low))
    style.draw_band(axes, x, (wrong, positive_low, high), label, look, alpha=0.15)
    if (none := value == 0).any():
        axes.plot(x[none], high[none], color=look[0], label=f"{label}, none wrong", zorder=3.2, **_LIMIT)


def _draw_bound(
    axes: Axes, curve: pd.DataFrame, bound: Any, constant: float, colour: Any, looks: dict[str, Any]
) -> None:
    """From L to the longest length, or to where it is at the error of guessing."""
    first = curve.iloc[0]
    lengths = np.geomspace(first["trained_length"], curve["length"].max(), 200)
    values = constant * bound(lengths, first["trained_length"], first["delta"])
    below = values < first["guessing"]
    x, y = lengths[below] / first["trained_length"], values[below] / first["delta"]
    axes.plot(x, y, color=colour, zorder=2.5, **looks)


def _draw_axes(panels: Sequence[Axes], errors: pd.DataFrame) -> None:
    """From half of L on: shorter samples say nothing about length generalization."""
    longest = errors["multiple"].max()
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    style.log_axis(panels[0], [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick <= longest])
    panels[0].set_xlim(0.5, 1.1 * longest)
    error = "expected error" if errors["is_expected"].all() else "error"
    style.outer_labels(panels, "length L′ [multiples of L]", f"{error} [multiples of δ]")
