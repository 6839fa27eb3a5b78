"""Intervals by cluster: targets of one document are not independent, nor are the documents of one group, where the
corpus names groups (docs/method.md, 2.4).

A number is made of sums over targets: a mean is Σ loss / Σ 1, recovery is Σ (L_short - L_k) / Σ (L_short - L_long).
It is held as *draws*, (1 + R,): first its value in the sample, then in each resample. Arithmetic on draws gives draws,
so a difference of two numbers is paired. Of two runs draws are (1 + R + 2,), the value in either run at the end.

Up to a hundred units, and three runs or more, have Student's t of a jackknife in place of the bootstrap's
percentiles, which would be too narrow; two runs are pooled [ours].

Shapes: n targets, D documents (clusters), G groups of them, S runs, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtrit
from scipy.stats import binomtest

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_RESAMPLES = 2000
CONFIDENCE = 0.95
_ROUNDING = 1e-12
"""Values that differ by less, relative to 1 or to themselves if that is more, are the same."""
_LEAST_P = 1e-12
_MOST_CONDITION = 1e12
"""Of the normal equations of a least-squares fit: beyond it predictors determine one another, but for rounding."""
_CHUNK_ELEMENTS = 1 << 22  # of (resamples, documents) that are drawn, or multiplied, at once: 32 MiB of int64
MOST_UNITS_OF_T = 100
"""Up to so many groups or, where there are none, documents, Student's t takes the place of percentiles [ours]."""
LEAST_RUNS = 3
"""Fewer runs have no variance of their own in an interval: that of two would be from one degree of freedom, and
held the truth in 81 to 95 % of its narrowest tenth in simulations [ours]. They are pooled."""
FEW_GROUPS, FEW_DOCUMENTS = 10, 30
"""Below so many groups, or documents, figures and tables call intervals rough."""
LEAST_UNITS = 4
"""Below so many groups or, where there are none, documents, there is no interval: it would say nothing [ours]."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval.

    A bound is NaN where the data do not support one: fewer than `LEAST_UNITS` groups (without groups: documents) have a
    part in the value, or so few that it is undefined in 2.5 % of the resamples or more, or without one of them; or all
    resamples give the same value, which says nothing of how it varies.
    """

    value: float
    low: float
    high: float
    first_run: float | None = None
    """The value in the first of two pooled runs by itself; None where there are not two."""
    second_run: float | None = None


class ClusterBootstrap:
    """The resamples that all intervals of a measurement rest on (docs/method.md, 2.4 [ours]).

    With more than `MOST_UNITS_OF_T` groups, and fewer than `LEAST_RUNS` runs, a resample is G groups, drawn
    with replacement, and from each as many of its documents as it has. Where every document is a group by itself this
    is the same as without groups.

    Otherwise: the sample without each group in turn, then, of three or more, without each run, then without each
    seed of each model.

    Args:
        documents: (n,), the document of each target.
        groups: (n,), the group of each target's document; None where the corpus has none.
        runs: (n,), number of the run that each target was measured under, 0 … S - 1; None: one.
        labels: of the checkpoints whose draws `over_seeds` averages; those of one label are seeds of one model.
        resamples: R, at least 1,000 for everything that is shown (docs/method.md, 2.4).
        seed: of the resampling; the same seed, documents and groups give the same resamples.
        confidence: of intervals; of several tests, that of Bonferroni is 1 - 0.05 / tests.
    """

    @classmethod
    def of(cls, rows: pd.DataFrame, **options: Any) -> Self:
        """That of rows by their columns text and, where they are there, group and run."""
        groups = None
        if "group" in rows:
            groups = rows["group"].to_numpy()
        runs = None
        if "run" in rows:
            runs = rows["run"].to_numpy()
        return cls(rows["text"].to_numpy(), groups=groups, runs=runs, **options)

    def __init__(
        self,
        documents: np.ndarray,
        *,
        groups: np.ndarray | None = None,
        runs: np.ndarray | None = None,
        labels: Sequence[str] = (),
        resamples: int = DEFAULT_RESAMPLES,
        seed: int = 0,
        confidence: float = CONFIDENCE,
    ):
        self.confidence = confidence
        unit = _numbered(documents if groups is None else groups)
        self._unit = unit
        self.units = int(unit.max()) + 1
        """How many groups there are; without groups, documents."""
        seeds = [labels.count(label) for label in dict.fromkeys(labels)]
        repeated = [number for number in seeds if number >= LEAST_RUNS]
        self._of_two_runs: tuple[np.ndarray, np.ndarray] | None = None
        """As a part below: each of two runs by itself, counted twice so that sums stay comparable."""
        if 2 in seeds:
            self._of_two_runs = (np.zeros_like(unit), np.ones((2, 1)))  # `over_seeds` picks the seed
        if runs is not None:
            runs = _numbered(runs)
            if runs.max() + 1 == 2:
                self._of_two_runs = (runs, 2 * np.eye(2))
            if runs.max() + 1 < LEAST_RUNS:
                runs = None
        self.is_jackknife = runs is not None or bool(repeated) or self.units <= MOST_UNITS_OF_T
        self._parts: list[tuple[np.ndarray, list[np.ndarray]]]
        """The cluster of each target, (n,), and how often each counts in some resamples, (resamples, clusters)."""
        if self.is_jackknife:
            self._parts = _parts_of_jackknife(unit, runs, repeated)
        else:
            document = _numbered(documents)
            _, first_target = np.unique(document, return_index=True)
            group_of_document = unit[first_target]
            drawn = _resample(group_of_document, resamples, np.random.default_rng(seed))
            self._parts = [(document, list(drawn))]
        sizes = [sum(map(len, counts)) for _, counts in self._parts]
        self._ends = np.cumsum([1, *sizes]).tolist()
        """Of the sample and each part in draws, rows."""
        rows = self._ends[-1]
        if self._of_two_runs is not None:
            rows += 2
        self._weights = [np.full((rows, number), 1 / number) for number in seeds]
        """Of the seeds of each model in each draw, (1 + R, seeds)."""
        first = self._ends[-1] - sum(repeated)
        for weights, seed_count in zip(self._weights, seeds, strict=True):
            if seed_count >= LEAST_RUNS:
                weights[first : first + seed_count] = (1 - np.eye(seed_count)) / (seed_count - 1)
                first += seed_count
            elif seed_count == 2:
                weights[-2:] = np.eye(2)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Σ of ``values`` over the targets of the sample and of each resample: (n,) to (1 + R,), (n, C) to (1 + R, C).

        Raises `ValueError` for values that are not finite.
        """
        values = np.asarray(values, dtype=np.float64)
        if not np.isfinite(values).all():
            raise ValueError("a value is not finite")
        rows = [values.sum(axis=0, keepdims=True)]
        columns = values.reshape(len(values), -1).T
        parts = list(self._parts)
        if self._of_two_runs is not None:
            cluster, of_runs = self._of_two_runs
            parts.append((cluster, [of_runs]))
        for cluster, counts in parts:
            of_clusters = np.stack([np.bincount(cluster, column) for column in columns], axis=1)
            for part in counts:
                sums = part @ of_clusters
                rows.append(sums.reshape(-1, *values.shape[1:]))
        return np.concatenate(rows)

    def ratio(self, above: np.ndarray, below: np.ndarray) -> np.ndarray:
        """Draws of Σ above / Σ below, NaN where that is not positive; ``above`` may have columns, ``below`` too.

        With ones (or zeros and ones) below, this is a mean (over a subset). Where fewer than `LEAST_UNITS` units have
        anything below, all resamples are NaN, so that there is no interval.
        """
        numerator = self.sums(above)
        denominator = self.sums(below)
        if denominator.ndim < numerator.ndim:
            denominator = denominator[:, None]
        positive = denominator > 0
        divisor = np.where(positive, denominator, 1.0)
        draws = np.where(positive, numerator / divisor, np.nan)
        too_few = self._units_with(below) < LEAST_UNITS
        draws[1 : self._ends[-1], ..., too_few] = np.nan
        return draws

    def slopes(self, outcome: np.ndarray, predictors: np.ndarray) -> np.ndarray:
        """Draws of the coefficients of a least-squares fit with an intercept, (1 + R, P), the intercept left out.

        NaN where a sample does not determine them, as where a predictor is constant. Where there are fewer than
        `LEAST_UNITS` units, all resamples are NaN, so that there is no interval.

        Args:
            outcome: (n,).
            predictors: (n, P).
        """
        predictors = np.asarray(predictors, dtype=np.float64)
        # centered and scaled, so that the normal equations lose no digits
        scale = predictors.std(axis=0)
        scale[scale == 0] = 1.0
        scaled = (predictors - predictors.mean(axis=0)) / scale
        design = np.column_stack([np.ones(len(scaled)), scaled])
        size = design.shape[1]
        products = design[:, :, None] * design[:, None, :]
        gram = self.sums(products.reshape(len(design), -1)).reshape(-1, size, size)
        moment = self.sums(design * outcome[:, None])
        draws = np.full((len(gram), size - 1), np.nan)
        determined = np.linalg.cond(gram) < _MOST_CONDITION
        solved = np.linalg.solve(gram[determined], moment[determined][:, :, None])
        draws[determined] = solved[:, 1:, 0] / scale
        if self.units < LEAST_UNITS:
            draws[1 : self._ends[-1]] = np.nan
        return draws

    def _units_with(self, values: np.ndarray) -> np.ndarray:
        """How many units have a target whose value is not 0, of (n,) a scalar, of (n, C) for every column."""
        present = np.zeros((self.units, *np.shape(values)[1:]), dtype=bool)
        np.logical_or.at(present, self._unit, np.asarray(values) != 0)
        return present.sum(axis=0)

    def over_seeds(self, model: int, of_seeds: Sequence[np.ndarray]) -> np.ndarray:
        """Mean of the draws of a model's seeds; models are counted as their labels first appear."""
        weighted = np.stack(of_seeds, axis=1) * self._weights[model]
        return weighted.sum(axis=1)

    def interval(self, draws: np.ndarray) -> Interval:
        """Value and interval of draws (1 + R,).

        A resample in which the number is undefined counts as lying beyond both bounds: the interval can only become
        wider by it.
        """
        value = float(draws[0])
        first_run = second_run = None
        if self._of_two_runs is not None:
            first_run, second_run = draws[-2:].tolist()
        low, high = self._bounds(value, draws[1 : self._ends[-1]], self.confidence)
        return Interval(value, low, high, first_run, second_run)

    def detectable(self, draws: np.ndarray, power: float = 0.8) -> float:
        """The smallest number, of either sign, that such samples would have told from 0 in this share of cases.

        Half of the interval plus what chance takes away in 1 - ``power`` of the cases; NaN where there is no interval.
        """
        value = float(draws[0])
        resampled = draws[1 : self._ends[-1]]
        low, high = self._bounds(value, resampled, self.confidence)
        below, above = self._bounds(value, resampled, 2 * power - 1)
        return (high - low) / 2 + (above - below) / 2

    def _bounds(self, value: float, resampled: np.ndarray, confidence: float) -> tuple[float, float]:
        """Both ends of the interval of a value, NaN where there is none; ``resampled``: (R,)."""
        if self.units < LEAST_UNITS or _is_constant(resampled):
            return math.nan, math.nan
        if not self.is_jackknife:
            interval = percentile_interval(value, resampled, confidence)
            return interval.low, interval.high
        half = _half_width(self._changes(value, resampled), confidence)
        return value - half, value + half

    def _changes(self, value: float, resampled: np.ndarray) -> list[np.ndarray]:
        """How a value changes without each unit, for each kind of unit; ``resampled``: (R,), of a jackknife."""
        return np.split(resampled - value, np.array(self._ends[1:-1]) - 1)

    def p_value(self, draws: np.ndarray) -> float:
        """How likely a number is this far from 0, to either side, where it is 0: its interval at 1 - p ends at 0.

        NaN where it has no interval, at least 1e-12 of Student's t, and 1 / R of percentiles.
        """
        value = float(draws[0])
        resampled = draws[1 : self._ends[-1]]
        if self.units < LEAST_UNITS or _is_constant(resampled):
            return math.nan
        if not self.is_jackknife:
            undefined = np.isnan(resampled).mean()
            beyond = min((resampled <= 0).mean(), (resampled >= 0).mean()) + undefined
            return float(np.clip(2 * beyond, 1 / len(resampled), 1))
        if not np.isfinite(resampled).all():
            return math.nan
        changes = self._changes(value, resampled)

        def reach(p: float) -> float:
            return _half_width(changes, 1 - p) - abs(value)

        if reach(_LEAST_P) <= 0:
            return _LEAST_P
        return float(brentq(reach, _LEAST_P, 1.0, xtol=_LEAST_P))

    def share(self, draws: np.ndarray, trials: float) -> Interval:
        """Interval of a share of so many ``trials``, cut at 0 and 1.

        Where no unit has any, or every one all, resamples do not differ: then it is Wilson's.
        """
        interval = self.interval(draws)
        is_none_or_all = interval.value in (0, 1) and _is_constant(draws[1 : self._ends[-1]])
        if is_none_or_all and self.units >= LEAST_UNITS:
            of_trials = wilson(round(interval.value) * round(trials), round(trials), self.confidence)
            return replace(interval, low=of_trials.low, high=of_trials.high)
        low, high = np.clip((interval.low, interval.high), 0, 1)
        return replace(interval, low=float(low), high=float(high))

    def ratio_interval(self, above: np.ndarray, below: np.ndarray) -> Interval:
        """Interval of Σ above / Σ below, (n,) both; of a share where every numerator counts some of its denominator.

        It does where it is a whole number up to the denominator, or 0 or the denominator itself: a mean of losses
        between 0 and 1 is no share.
        """
        draws = self.ratio(above, below)
        counts = (above == np.rint(above)) | (above == below)
        if (counts & (above >= 0) & (above <= below)).all():
            return self.share(draws, float(below.sum()))
        return self.interval(draws)


def _is_constant(resampled: np.ndarray) -> bool:
    """Whether all resamples give the same value, but for rounding; False where one is undefined."""
    return bool(np.ptp(resampled) <= _ROUNDING * max(1.0, abs(resampled[0])))


def percentile_interval(value: float, resampled: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """Percentiles of a statistic in resamples, (R,). Where it is undefined, NaN, it counts as beyond both bounds."""
    tail = (1 - confidence) / 2
    undefined = np.isnan(resampled)
    # With method "lower"/"higher" a bound is one of the values, so it is never a mean with an infinity.
    low = np.quantile(np.where(undefined, -np.inf, resampled), tail, method="lower")
    high = np.quantile(np.where(undefined, np.inf, resampled), 1 - tail, method="higher")
    if not np.isfinite(low):
        low = np.nan
    if not np.isfinite(high):
        high = np.nan
    return Interval(value, float(low), float(high))


def _half_width(changes_of_kinds: Sequence[np.ndarray], confidence: float) -> float:
    """Half of the t interval from how the value changes without each unit, for each kind of unit; NaN spreads.

    Of U units of a kind: variance (U - 1) / U Σ change² (jackknife), degrees of freedom (Σ change²)² / Σ change⁴, the
    effective number of units, at most U - 1 and at least 2, or a third of U - 1 where that is less [ours]: where one
    unit dominates there would be 1, whose t is three times as wide. Variances of kinds add up, and their t quantiles
    are averaged in proportion (Cochran and Cox 1950).
    """
    variances = []
    quantiles = []
    for changes in changes_of_kinds:
        most = len(changes) - 1
        least = max(1.0, min(2.0, most / 3))
        variances.append(most / len(changes) * (changes**2).sum())
        quantiles.append(student_t(min(max(effective_units(changes), least), most), confidence))
    variance = sum(variances)
    if variance == 0:
        return 0.0
    return float(np.dot(variances, quantiles) / np.sqrt(variance))


def effective_units(changes: np.ndarray) -> float:
    """(Σ change²)² / Σ change⁴ of how a value changes without each unit, (U,): how many of them count; 1 of none."""
    squares = changes**2
    total = squares.sum()
    if total == 0:
        return 1.0
    return float(total**2 / (squares**2).sum())


def student_t(degrees_of_freedom: float, confidence: float = CONFIDENCE) -> float:
    """The quantile that bounds so much of Student's t, by default 95 %."""
    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> Interval:
    """A share and its score interval of Wilson, by default of 95 %."""
    bounds = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def holm(p_values: np.ndarray, num_tests: int | None = None) -> np.ndarray:
    """p of some tests, (n,), adjusted for their number as Holm (1979) does; tests whose p is NaN do not count.

    ``num_tests``: how many tests there are with those that are not measured yet, whose p is taken to be 1.
    """
    p_values = np.asarray(p_values, dtype=float)
    adjusted = np.full(p_values.shape, np.nan)
    tests = np.flatnonzero(~np.isnan(p_values))
    ascending = tests[np.argsort(p_values[tests], kind="stable")]
    tests_left = (num_tests or len(ascending)) - np.arange(len(ascending))
    stepwise = np.maximum.accumulate(tests_left * p_values[ascending])
    adjusted[ascending] = np.minimum(stepwise, 1.0)
    return adjusted


def count_clusters(rows: pd.DataFrame, suffix: str = "") -> dict[str, int]:
    """How many documents rows are of by their column text and, where they are known, how many groups."""
    counts = {f"documents{suffix}": rows["text"].nunique()}
    if "group" in rows:
        counts[f"groups{suffix}"] = rows["group"].nunique()
    return counts


def enough_for_intervals(counts: Mapping[str, Any], suffix: str = "") -> bool:
    """Whether there are `LEAST_UNITS` groups or, where none are known, documents."""
    units, _ = _units(counts, suffix)
    return units >= LEAST_UNITS


def by_clusters(counts: Mapping[str, Any], suffix: str = "") -> str:
    """What intervals are by, for captions of figures: ``by document``, or by group where groups are known.

    It says whether these are few, or too few for an interval.
    """
    count, unit = _units(counts, suffix)
    if count < LEAST_UNITS:
        return f"{counted(count, unit)}: too few for an interval"
    has_groups = unit == "group"
    runs = counts.get("runs", 1)
    by = "by document"
    if has_groups and runs >= LEAST_RUNS:
        by = "by run, group and document"
    elif has_groups:
        by = "by group, then document"
    elif runs >= LEAST_RUNS:
        by = "by run and document"
    if runs == 2:
        by += "; two runs pooled"
    for unit, enough in (("group", FEW_GROUPS), ("document", FEW_DOCUMENTS)):
        count = counts.get(f"{unit}s{suffix}", enough)
        if count < enough:
            return f"{by} (only {counted(count, unit)}: rough)"
    return by


def interval_caption(label: str, counts: Mapping[str, Any]) -> str:
    """``label``, such as "bars: 95 %,", and what intervals are by; without it where nothing has one.

    ``counts``: those of a Result, `analysis.stats.numbers.counts`. Most of its numbers are of the targets over tau,
    which may be of fewer units than all targets.
    """
    if not enough_for_intervals(counts):
        return by_clusters(counts)
    if not counts["documents_over_tau"]:
        return f"{label} {by_clusters(counts)}"
    of_over = by_clusters(counts, "_over_tau")
    if enough_for_intervals(counts, "_over_tau"):
        return f"{label} {of_over}"
    return f"{label} {by_clusters(counts)}; over tau only {of_over}"


def _units(counts: Mapping[str, Any], suffix: str) -> tuple[int, str]:
    """How many units there are, and what they are: groups or, where none are known, documents."""
    if f"groups{suffix}" in counts:
        return counts[f"groups{suffix}"], "group"
    return counts[f"documents{suffix}"], "document"


def counted(count: int, noun: str) -> str:
    """Such as "1 document", "1,200 documents"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def _numbered(names: np.ndarray) -> np.ndarray:
    """The number of each name among them in ascending order, (n,)."""
    _, index = np.unique(names, return_inverse=True)
    return index


def _parts_of_jackknife(
    unit: np.ndarray, runs: np.ndarray | None, seeds: Sequence[int]
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """The parts of a `ClusterBootstrap` that leaves out one unit, one run, and one seed of every model at a time."""
    parts = []
    clusters = [unit]
    if runs is not None:
        clusters.append(runs)
    for cluster in clusters:
        units = int(cluster.max()) + 1
        # as if there were as many where one is left out: a count stays comparable
        without_each = (1 - np.eye(units)) * (units / max(1, units - 1))
        parts.append((cluster, [without_each]))
    # without a seed all targets stay: `over_seeds` leaves it out
    for number in seeds:
        parts.append((np.zeros_like(unit), [np.ones((number, 1))]))
    return parts


def _resample(group: np.ndarray, resamples: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each document, in ``group`` (D,) of G, is drawn: (rows, D) for so many resamples at a time.

    In the smallest type of integers: a byte for each resample and document.
    """
    sizes = np.bincount(group)
    groups = len(sizes)
    rows = max(1, _CHUNK_ELEMENTS // len(group))
    for first in range(0, resamples, rows):
        drawn = rng.integers(groups, size=(min(rows, resamples - first), groups))
        drawn += groups * np.arange(len(drawn))[:, None]
        of_groups = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        counts = of_groups[:, group]
        for number in np.flatnonzero(sizes > 1):
            # so many draws from the same documents as all of the group's turns have together
            turns = of_groups[:, number] * sizes[number]
            counts[:, group == number] = rng.multinomial(turns, np.full(sizes[number], 1 / sizes[number]))
        yield counts.astype(np.min_scalar_type(counts.max()))
