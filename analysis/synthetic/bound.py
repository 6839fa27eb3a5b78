"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6).

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
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.synthetic.exact_match import GROUP, Settings, facts, labels
from olmo_sparsity.util.errors import UserError

TESTED = ["task", "k_train", "model", "k"]
"""Models that are alike in these differ in L (and L_local with it) alone: one constant for all of them."""
_OF_LENGTH = ("train_length", "test_length", "locality", "k_test")


def theorem_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """L L'^2 delta at ``lengths`` L', one or (n,), of that shape; L and delta likewise."""
    return np.asarray(trained_length) * np.asarray(lengths, dtype=float) ** 2 * np.asarray(delta)


def improved_bound(lengths: ArrayLike, trained_length: ArrayLike, delta: ArrayLike) -> np.ndarray:
    """(L' / L)^2 delta at ``lengths`` L', likewise."""
    return (np.asarray(lengths, dtype=float) / np.asarray(trained_length)) ** 2 * np.asarray(delta)


BOUNDS = {"theorem_4_3": theorem_bound, "improved": improved_bound}


def errors_frame(points: pd.DataFrame) -> pd.DataFrame:
    """Of the points of planted tasks (`pool`) the curves of the largest k that was trained and tested.

    ``model`` is without what belongs to the length, so that models with one task, K_train, k and name differ in L and
    L_local alone. Further columns: locality, delta, delta_is_upper_limit (whether no sample was wrong), guessing (the
    error of guessing, above which a bound says nothing; 1 where that is not known), measured_length (the trained length
    that delta is of: the one whose error is largest, and the longest of those), multiple (L' / L).

    Raises `UserError` where no k, or no length of it, was both trained and tested, and where fewer than two lengths are
    beyond the trained ones.
    """
    groups = [group for _, group in points.groupby(GROUP, sort=False)]
    frames = []
    models = labels([group.iloc[0] for group in groups], _facts)
    for group, model in zip(groups, models, strict=True):
        first = group.iloc[0]
        shortest, longest, k_train = first["shortest"], first["longest"], first["k_train"]
        trained_ks = range(json.loads(first["trained"]).get("k_train_min", 1), k_train + 1)
        curve = group[group["k"] == max({*group["k"]} & {*trained_ks}, default=0)]
        inside = curve[curve["length"].between(shortest, longest)]
        if inside.empty or (curve["length"] > longest).sum() < 2:
            raise UserError(
                f"{first['task']} with k_train {k_train}: the bound needs a trained k measured at a length from "
                f"{shortest} to {longest}, where it starts, and at two or more above {longest}; measure those too"
            )
        worst = inside.sort_values(["error", "length"]).iloc[-1]
        frames.append(
            curve.assign(
                model=model,
                locality=json.loads(first["parameters"]).get("locality") or 0,
                delta=worst["error"] or worst["error_high"],
                delta_is_upper_limit=worst["error"] == 0,
                guessing=1 - (0 if np.isnan(first["chance"]) else first["chance"]),
                measured_length=worst["length"],
                multiple=curve["length"] / longest,
            )
        )
    return pd.concat(frames, ignore_index=True)


def _facts(settings: Settings) -> dict[str, str]:
    """What models may not differ in that share a constant; the tables of tuples grow with the length."""
    without = {*_OF_LENGTH, "weights"} if settings["family"] == "tuples" else {*_OF_LENGTH}
    known = facts(settings)
    ends = {name: name.removeprefix("trained ").split(".")[-1] for name in known}
    return {name: text for name, text in known.items() if ends[name] not in without}


def trained_frame(errors: pd.DataFrame) -> pd.DataFrame:
    """What the bounds start from: a row for each curve of `errors_frame`, by L among those that share a constant."""
    starts = errors[errors["length"] == errors["measured_length"]]
    together = [rows.sort_values("longest", kind="stable") for _, rows in starts.groupby(TESTED, sort=False)]
    numbers = ["longest", "measured_length", "error", "error_high", "delta", "delta_is_upper_limit"]
    return pd.concat(together, ignore_index=True)[[*TESTED, *numbers]]


def fit_bounds(errors: pd.DataFrame) -> pd.DataFrame:
    """Both bounds with a constant from the smaller half of all L'/L, tried at the larger half [ours].

    A row for each bound and models that differ in L alone: ``constant``, the smallest with which the bound holds where
    it was fitted (for the upper limit where no sample was wrong); ``fitted`` points, ``fitted_to`` the largest L'/L of
    them; ``tested`` points, where the bound is below the error of guessing, and ``empty`` ones, where it is not and
    says nothing; ``held`` of the tested ones, whose error (the lower end of its 95 % interval) is not above the bound;
    ``slack``, geometric mean of bound / error over the tested points with an error above 0, NaN where there are none.
    """
    fits = []
    for which, points in errors.groupby(TESTED, sort=False):
        beyond = points[points["multiple"] > 1].sort_values("multiple", kind="stable")
        half = (len(beyond) + 1) // 2
        for name in BOUNDS:
            fit = _fit(name, beyond.iloc[:half], beyond.iloc[half:])
            fits.append({**dict(zip(TESTED, which, strict=True)), "bound": name, **fit})
    return pd.DataFrame(fits)


def _fit(name: str, fitted: pd.DataFrame, tested: pd.DataFrame) -> dict[str, Any]:
    def with_constant_1(points: pd.DataFrame) -> np.ndarray:
        return BOUNDS[name](points["length"], points["longest"], points["delta"])

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
