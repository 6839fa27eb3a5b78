"""The bound of Theorem 4.3 on the error at lengths beyond the trained ones (docs/method.md, 3.6).

    Theorem 4.3 [paper]    error(L') = O(eta_L eta_L' L L'^2 delta)
    improved [paper]       error(L') = O((L' / L)^2 delta)

delta is the error at trained lengths, L the longest of them, and L' > L the length that is asked for. What these are in
a figure [ours] says docs/method.md, 3.6: the constants that O() hides (with them eta_L and eta_L', which belong to the
distribution of planted positions) are 1, so that a curve shows how the bound grows, its height up to a constant only;
`fit_bounds` takes the constant from some of the lengths and tries it on the others.
Above 1 a bound says nothing: it is cut to 1. L and L' are tokens of the prompt. With one L in a panel both bounds grow
like L'^2 and differ by the factor L^3. Test samples with more planted tokens than were trained on have no bound.

Shapes: n lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.stats.bootstrap import Interval
from analysis.stats.exact_match import Group, Point
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
    """Where the error was measured: at L, or below it if nothing was measured at L."""
    samples: int
    error: Interval
    """1 - accuracy, with its 95 % interval."""

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


def error_of(exact: Interval) -> Interval:
    """1 minus a share that is exact, the interval turned round."""
    return Interval(1 - exact.value, 1 - exact.high, 1 - exact.low)


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
    k, last = trained[-1].k, inside[-1]
    assert k is not None
    return TrainedError(group, k, longest, last.length, last.samples, error_of(last.exact))


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
    """A bound whose constant was taken from some lengths, tried on others."""

    name: str
    """Of `BOUNDS`."""
    constant: float
    """The smallest with which the bound holds wherever it was fitted."""
    fitted: int
    """Points that it was fitted on."""
    tested: int
    """Points that it was tried on."""
    held: int
    """Of these, those whose error (the lower end of its 95 % interval) is not above the bound."""
    slack: float | None
    """Geometric mean of bound / error over the tested points with an error above 0; None where there are none."""


def fit_bounds(starts: Sequence[TrainedError]) -> list[BoundFit]:
    """One constant for all groups, from every other length beyond L, tried at the lengths between [ours].

    Groups of several L tell the bounds apart: with a single one both grow alike, and differ by their constants.
    Empty where no group was measured at two lengths beyond L or more.
    """
    fitted, tested = [], []
    for start in starts:
        [curve] = [each for each in start.group.curves if each.k == start.k]
        beyond = [(start, point) for point in curve.points if point.length > start.trained_length]
        fitted += beyond[::2]
        tested += beyond[1::2]
    return [_fit(name, fitted, tested) for name in BOUNDS] if tested else []


def _fit(
    name: str, fitted: Sequence[tuple[TrainedError, Point]], tested: Sequence[tuple[TrainedError, Point]]
) -> BoundFit:
    bound = BOUNDS[name][2]

    def shapes(points: Sequence[tuple[TrainedError, Point]]) -> np.ndarray:
        """The bound with a constant of 1, not cut, (n,)."""
        values = [
            bound([point.length], start.trained_length, start.delta, most=np.inf) for start, point in points
        ]
        return np.concatenate(values)

    errors = [error_of(point.exact) for _, point in tested]
    constant = float((np.array([error_of(point.exact).value for _, point in fitted]) / shapes(fitted)).max())
    tried = np.minimum(1.0, constant * shapes(tested))
    ratios = [value / error.value for value, error in zip(tried, errors, strict=True) if error.value]
    return BoundFit(
        name,
        constant,
        len(fitted),
        len(tested),
        held=int(sum(error.low <= value for value, error in zip(tried, errors, strict=True))),
        slack=float(np.exp(np.mean(np.log(ratios)))) if ratios and constant else None,
    )
