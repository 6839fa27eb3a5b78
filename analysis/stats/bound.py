"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6).

    Theorem 4.3 [paper]    error(L') = O(eta_L eta_L' L L'^2 delta)
    improved [paper]       error(L') = O((L' / L)^2 delta)

delta is the error at trained lengths, L the longest of them, and L' > L the length that is asked for. What O() hides
(with it eta_L and eta_L', which belong to the distribution of planted positions) is a constant, which is taken from
the shorter lengths beyond L and tried at the longer ones [ours]. L and L' are tokens of the prompt. With one L both
bounds grow like L'^2 and differ by the factor L^3, so that models of several L tell them apart. Test samples with more
planted tokens than were trained on have no bound.

Shapes: n lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from analysis.stats.bootstrap import Interval
from analysis.stats.exact_match import Group, Point, Settings, differing, fact_text, scheme_labels
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
        """The error that the bounds start from."""
        return self.error.high if self.is_limit else self.error.value

    @property
    def guessing(self) -> float:
        """The error of guessing, above which a bound says nothing; 1 where that is not known."""
        return 1 - (self.group.settings.chance or 0)

    @property
    def points(self) -> tuple[Point, ...]:
        """Of the curve of k."""
        return next(curve for curve in self.group.curves if curve.k == self.k).points

    def as_dict(self) -> Json:
        """For JSON: without the group, whose curves stand elsewhere."""
        return {
            "k": self.k,
            "trained_length": self.trained_length,
            "measured_length": self.measured_length,
            "samples": self.samples,
            "error": self.error.as_dict(),
            "delta": self.delta,
            "delta_is_upper_limit": self.is_limit,
        }


def theorem_bound(lengths: ArrayLike, trained_length: float, delta: float) -> np.ndarray:
    """L L'^2 delta at ``lengths`` L', one or (n,), of that shape."""
    return trained_length * np.asarray(lengths, dtype=float) ** 2 * delta


def improved_bound(lengths: ArrayLike, trained_length: float, delta: float) -> np.ndarray:
    """(L' / L)^2 delta at ``lengths`` L', likewise."""
    return (np.asarray(lengths, dtype=float) / trained_length) ** 2 * delta


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

    Raises `UserError` where no k, or no length of it, was both, and where fewer than two lengths are beyond the trained
    ones.
    """
    name = f"{group.settings.task} with k_train {group.settings.k_train}"
    least, most = group.settings.trained.get("k_train_min", 1), group.settings.k_train or 0
    trained = [curve for curve in group.curves if least <= (curve.k or 0) <= most]
    if not trained:
        raise UserError(f"{name}: no trained k was measured, and the bound is for those; measure one")
    shortest, longest = group.settings.train_length
    inside = [point for point in trained[-1].points if shortest <= point.length <= longest]
    if not inside:
        raise UserError(
            f"{name}: no length from {shortest} to {longest} was measured for k {trained[-1].k}, "
            f"and the bound starts there; measure {longest} too"
        )
    if sum(length > longest for length in trained[-1].lengths) < 2:
        raise UserError(
            f"{name}: fewer than two lengths above {longest} were measured, one to take the constant of the bound from "
            "and one to try it at; measure longer ones"
        )
    k, worst = trained[-1].k, max(inside, key=lambda point: (error_of(point).value, point.length))
    assert k is not None
    return TrainedError(group, k, longest, worst.length, worst.samples, error_of(worst))


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

    def as_dict(self) -> Json:
        """For JSON."""
        settings = self.starts[0].group.settings
        return {
            "task": settings.task,
            "settings": self.label,
            "k_train": settings.k_train,
            "k": self.starts[0].k,
            "trained": [start.as_dict() for start in self.starts],
            **{name: asdict(fit) for name, fit in self.fits.items()},
        }


Beyond = tuple[TrainedError, Point]
"""A point beyond L, and what its bounds start from."""


def try_bounds(starts: Sequence[TrainedError]) -> list[BoundTest]:
    """For models that differ in L (and L_local with it) alone: a constant from half of the lengths, tried at the rest.

    Fitted where L'/L is smaller, tried where it is larger [ours].
    """
    tests = []
    for label, own in _by_settings(starts):
        beyond = [
            (start, point) for start in own for point in start.points if point.length > start.trained_length
        ]
        beyond.sort(key=lambda each: each[1].length / each[0].trained_length)
        half = (len(beyond) + 1) // 2
        fits = {name: _fit(name, beyond[:half], beyond[half:]) for name in BOUNDS}
        tests.append(BoundTest(label, tuple(sorted(own, key=lambda each: each.trained_length)), fits))
    return tests


def _by_settings(starts: Sequence[TrainedError]) -> list[tuple[str, list[TrainedError]]]:
    """Those that are alike but for L and L_local, and what they are called; the tables of tuples grow with both."""
    together: dict[tuple[Settings, int], list[TrainedError]] = {}
    names = []
    for start in starts:
        settings = start.group.settings
        parameters = {name: value for name, value in settings.parameters.items() if name not in _OF_LENGTH}
        options = {name: value for name, value in settings.options.items() if not name.endswith("locality")}
        named = replace(settings, options_json=json.dumps(options, sort_keys=True))
        alike = replace(named, parameters_json=json.dumps(parameters, sort_keys=True))
        if settings.family == "tuples":
            alike = replace(alike, weights=0)
        if (alike, start.k) not in together:
            names.append(named)
        together.setdefault((alike, start.k), []).append(start)
    labels = []
    for label, (settings, _) in zip(scheme_labels(names), together, strict=True):
        parameters_of = [other.parameters for other, _ in together if other.task == settings.task]
        odd, *_ = differing([settings.parameters, *parameters_of])
        odd.pop("k_train", None)  # a panel's title has it
        labels.append(", ".join([label, *(fact_text(*item) for item in odd.items())]))
    return list(zip(labels, together.values(), strict=True))


_OF_LENGTH = ("train_length", "test_length", "locality", "k_test")


def _fit(name: str, fitted: Sequence[Beyond], tested: Sequence[Beyond]) -> BoundFit:
    bound = BOUNDS[name][2]

    def shapes(points: Sequence[Beyond]) -> np.ndarray:
        """The bound with a constant of 1, (n,)."""
        return np.array([bound(point.length, start.trained_length, start.delta) for start, point in points])

    errors = [error_of(point) for _, point in fitted]
    constant = float((np.array([each.value or each.high for each in errors]) / shapes(fitted)).max())
    tried = [
        (value, error_of(point))
        for value, (start, point) in zip(constant * shapes(tested), tested, strict=True)
        if value < start.guessing
    ]
    ratios = [value / error.value for value, error in tried if error.value]
    return BoundFit(
        constant,
        fitted=len(fitted),
        fitted_to=max(point.length / start.trained_length for start, point in fitted),
        tested=len(tried),
        empty=len(tested) - len(tried),
        held=int(sum(error.low <= value for value, error in tried)),
        slack=float(np.exp(np.mean(np.log(ratios)))) if ratios and constant else None,
    )
