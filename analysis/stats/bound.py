"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6).

    Theorem 4.3 [paper]    error(L') = O(eta_L eta_L' L L'^2 delta)
    improved [paper]       error(L') = O((L' / L)^2 delta)

delta is the error at trained lengths, L the longest of them, and L' > L the length that is asked for. What these are in
a figure [ours] says docs/method.md, 3.6: the constants that O() hides (with them eta_L and eta_L', which belong to the
distribution of planted positions) are 1, so that a curve shows how the bound grows, its height up to a constant only;
`fit_bounds` takes the constant from the shorter lengths and tries it on the longer ones.
Above 1 a bound says nothing: it is cut to 1. L and L' are tokens of the prompt. With one L in a panel both bounds grow
like L'^2 and differ by the factor L^3. Test samples with more planted tokens than were trained on have no bound.

Shapes: n lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.bootstrap import Interval
from analysis.stats.exact_match import Group, Point, scheme_labels
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json


@dataclass(frozen=True)
class TrainedError:
    """What the bounds of a group start from."""

    group: Group
    k: int
    """Planted tokens: the largest number that was both trained and tested."""
    trained_length: int
    """L, the longest trained length."""
    measured_length: int
    """The trained length whose error is largest, and the longest of several."""
    samples: int
    error: Interval
    """There, with its 95 % interval; see `error_of`."""

    @property
    def is_limit(self) -> bool:
        """Whether no sample was wrong, so that delta is an upper limit."""
        return self.error.value == 0

    @property
    def delta(self) -> float:
        """The error that the bounds are drawn for."""
        return self.error.high if self.is_limit else self.error.value


def theorem_bound(
    lengths: Sequence[float] | np.ndarray, trained_length: float, delta: float, most: float = 1.0
) -> np.ndarray:
    """min(most, L L'^2 delta) at ``lengths`` L' (n,), (n,)."""
    return np.minimum(most, trained_length * np.asarray(lengths, dtype=float) ** 2 * delta)


def improved_bound(
    lengths: Sequence[float] | np.ndarray, trained_length: float, delta: float, most: float = 1.0
) -> np.ndarray:
    """min(most, (L' / L)^2 delta) at ``lengths`` L' (n,), (n,)."""
    return np.minimum(most, (np.asarray(lengths, dtype=float) / trained_length) ** 2 * delta)


BOUNDS = {
    "theorem_4_3": ("Theorem 4.3", "L L′² δ", theorem_bound, (0, (6, 2))),
    "improved": ("improved", "(L′/L)² δ", improved_bound, (0, (1, 1))),
}
"""The bounds by their names in JSON: name and formula (the etas in its constant), function, line style."""


def error_of(point: Point) -> Interval:
    """The expected error, or of older records, which have none, the share that is not exact."""
    if point.expected_error is not None:
        return point.expected_error
    return Interval(1 - point.exact.value, 1 - point.exact.high, 1 - point.exact.low)


def trained_error(group: Group) -> TrainedError:
    """Error of a group of a planted task at trained lengths, for the largest k that was trained and tested.

    Raises `UserError` where no k, or no length of it, was both, and where no length is beyond the trained ones.
    """
    name = f"{group.settings.task} with k_train {group.settings.k_train}"
    trained = [curve for curve in group.curves if curve.k and curve.k <= (group.settings.k_train or 0)]
    if not trained:
        raise UserError(f"{name}: every measured k is larger, and the bound is for trained ones; measure one")
    shortest, longest = group.settings.train_length
    inside = [point for point in trained[-1].points if shortest <= point.length <= longest]
    if not inside:
        raise UserError(
            f"{name}: no length from {shortest} to {longest} was measured for k {trained[-1].k}, "
            f"and the bound starts there; measure {longest} too"
        )
    if group.lengths[-1] <= longest:
        raise UserError(
            f"{name}: nothing longer than {longest} was measured, which leaves nothing to bound; measure longer ones"
        )
    k, worst = trained[-1].k, max(inside, key=lambda point: (error_of(point).value, point.length))
    assert k is not None
    return TrainedError(group, k, longest, worst.length, worst.samples, error_of(worst))


def bounds_json(start: TrainedError) -> Json:
    """The bounds of a group at its measured lengths from L on, with what they start from; lengths in the task's unit.

    ``low`` and ``high`` of a bound are those of the measured error put in place of delta.
    """
    lengths = [length for length in start.group.lengths if length >= start.trained_length]
    deltas = {"value": start.delta, "low": start.error.low, "high": start.error.high}
    return {
        "task": start.group.settings.task,
        "k_train": start.group.settings.k_train,
        "k": start.k,
        "trained_length": start.trained_length,
        "measured_length": start.measured_length,
        "samples": start.samples,
        "error": start.error.as_dict(),
        "delta": start.delta,
        "delta_is_upper_limit": start.is_limit,
        "constant": 1,
        "lengths": lengths,
        **{
            name: {
                each: bound(lengths, start.trained_length, delta).tolist() for each, delta in deltas.items()
            }
            for name, (_, _, bound, _) in BOUNDS.items()
        },
    }


@dataclass(frozen=True)
class BoundFit:
    """A bound whose constant was taken from some lengths, tried on longer ones."""

    name: str
    """Of `BOUNDS`."""
    settings: str
    """What was trained, as in `scheme_labels`, and k."""
    constant: float
    """The smallest with which the bound holds wherever it was fitted: for the upper limit where no sample was wrong."""
    fitted: int
    """Points that it was fitted on."""
    tested: int
    """Points that it was tried on: those where it is below the error of guessing."""
    empty: int
    """Points that it says nothing about, because it is at the error of guessing or above."""
    held: int
    """Of those it was tried on, those whose error (the lower end of its 95 % interval) is not above the bound."""
    slack: float | None
    """Geometric mean of bound / error over the tested points with an error above 0; None where there are none."""


Beyond = tuple[TrainedError, Point]
"""A point beyond L, and what its bounds start from."""


def fit_bounds(starts: Sequence[TrainedError]) -> list[BoundFit]:
    """For models that differ in L (and L_local with it) alone: a constant from half of the lengths, tried at the rest.

    Fitted where L'/L is smaller, tried where it is larger [ours]. Several L tell the bounds apart: with a single one
    both grow alike, and differ by their constants. Empty where nothing was measured at two lengths beyond L or more.
    """
    fits = []
    for settings, own in _by_settings(starts):
        beyond = sorted(_beyond(own), key=lambda each: each[1].length / each[0].trained_length)
        fitted, tested = beyond[: (len(beyond) + 1) // 2], beyond[(len(beyond) + 1) // 2 :]
        fits += [_fit(name, settings, fitted, tested) for name in BOUNDS] if tested else []
    return fits


def _by_settings(starts: Sequence[TrainedError]) -> list[tuple[str, list[TrainedError]]]:
    """Those that are alike but for L and L_local, and what they are called; the tables of tuples grow with both."""
    together: dict[tuple, list[TrainedError]] = {}
    for start in starts:
        settings = start.group.settings
        weights = None if settings.family == "tuples" else settings.weights
        model = settings.scheme, settings.rotate, settings.skip_probability, settings.family, weights
        parameters = {name: value for name, value in settings.parameters.items() if name not in _OF_LENGTH}
        options = {name: value for name, value in settings.options.items() if not name.endswith("locality")}
        key = (*model, json.dumps([parameters, options], sort_keys=True), start.k)
        together.setdefault(key, []).append(start)
    labels = scheme_labels([members[0].group.settings for members in together.values()])
    return [
        (f"{label}, K_train {members[0].group.settings.k_train}, k {members[0].k}", members)
        for label, members in zip(labels, together.values(), strict=True)
    ]


_OF_LENGTH = ("train_length", "test_length", "locality", "k_test")


def _beyond(starts: Sequence[TrainedError]) -> list[Beyond]:
    curves = [next(each for each in start.group.curves if each.k == start.k) for start in starts]
    return [
        (start, point)
        for start, curve in zip(starts, curves, strict=True)
        for point in curve.points
        if point.length > start.trained_length
    ]


def _fit(name: str, settings: str, fitted: Sequence[Beyond], tested: Sequence[Beyond]) -> BoundFit:
    bound = BOUNDS[name][2]

    def shapes(points: Sequence[Beyond]) -> np.ndarray:
        """The bound with a constant of 1, not cut, (n,)."""
        values = [
            bound([point.length], start.trained_length, start.delta, most=np.inf) for start, point in points
        ]
        return np.concatenate(values)

    guessing = 1 - (fitted[0][0].group.settings.chance or 0)
    errors = [error_of(point) for _, point in fitted]
    constant = float((np.array([each.value or each.high for each in errors]) / shapes(fitted)).max())
    tried = [
        (value, error_of(point))
        for value, (_, point) in zip(constant * shapes(tested), tested, strict=True)
        if value < guessing
    ]
    ratios = [value / error.value for value, error in tried if error.value]
    return BoundFit(
        name,
        settings,
        constant,
        fitted=len(fitted),
        tested=len(tried),
        empty=len(tested) - len(tried),
        held=int(sum(error.low <= value for value, error in tried)),
        slack=float(np.exp(np.mean(np.log(ratios)))) if ratios and constant else None,
    )
