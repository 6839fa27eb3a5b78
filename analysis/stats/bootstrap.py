"""Intervals by cluster: targets of one document are not independent, nor are the documents of one group, where the
corpus names groups (docs/method.md, 2.4).

Every number is a function of column sums over targets: a mean is Σ loss / Σ 1, recovery is
Σ (L_short - L_k) / Σ (L_short - L_long). So one resample needs only the sums per document, and all
statistics of one `ClusterBootstrap` see the same resampled documents: their differences are paired.

Few units, and several trainings, have Student's t of a jackknife in place of the bootstrap's percentiles, which would
be too narrow [ours].

Shapes: n targets, C columns, D documents (clusters), G groups of them, S trainings, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

DEFAULT_RESAMPLES = 2000
LEVEL = 0.95
_CHUNK_ELEMENTS = 1 << 22  # of the (resamples, documents) counts held at once: 32 MiB of int64
FEW_UNITS = 30
"""Below so many groups or, where there are none, documents, Student's t takes the place of percentiles."""
FEW_GROUPS, FEW_DOCUMENTS = 10, 30
"""Below so many groups, or documents, figures and tables call intervals rough."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""From column sums (…, C) to values (…,); NaN where it is not defined, as a ratio over nothing is."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval.

    A bound is NaN where the data do not support one: fewer than two groups (without groups: documents), or so few
    of them have a part in the value that it is undefined in 2.5 % of the resamples or more, or without one of them.
    """

    value: float
    low: float
    high: float


class ClusterBootstrap:
    """Column sums over the sample, and over what its intervals are made from (docs/method.md, 2.4 [ours]).

    With one training and `FEW_UNITS` groups or more: over resamples of G groups, drawn with replacement, and from each
    as many of its clusters as it has. Where every cluster is a group by itself this is the same as without groups, to
    the last bit.

    Otherwise: over the sample without each group in turn, then without each training in turn.

    Args:
        columns: (n, C), a row per target; use zeros in the rows that a column does not concern.
        clusters: (n,), the document of each row.
        resamples: R, at least 1,000 for everything that is shown (docs/method.md, 2.4).
        groups: (n,), the group of each row's document; None where the corpus has none.
        trainings: (n,), number of the training that each row was measured under, 0 … S - 1; None: one.
        seeds: how many trainings each model has whose trainings are columns, see `mean_over_seeds`.
        seed: of the resampling; the same seed, documents and groups give the same resamples for any columns.
    """

    def __init__(
        self,
        columns: np.ndarray,
        clusters: np.ndarray,
        *,
        groups: np.ndarray | None = None,
        trainings: np.ndarray | None = None,
        seeds: Sequence[int] = (),
        resamples: int = DEFAULT_RESAMPLES,
        seed: int = 0,
    ):
        columns = np.asarray(columns, dtype=np.float64)
        if columns.ndim != 2 or len(columns) != len(clusters) or len(columns) == 0:
            raise ValueError(
                f"columns {columns.shape} must be (n, C) with n = {len(clusters)} clusters, n > 0"
            )
        if not np.isfinite(columns).all():
            raise ValueError("a column has values that are not finite")
        self.sums: np.ndarray = columns.sum(axis=0)
        """Sums over all targets, (C,)."""
        units = np.unique(clusters if groups is None else groups, return_inverse=True)[1]
        self.units = int(units.max()) + 1
        """How many groups there are; without groups, clusters."""
        self.levels: list[slice] = []
        """Which rows of ``resampled`` leave out a group, a training, or a seed of each model; none of a bootstrap."""
        repeated = [number for number in seeds if number > 1]
        if trainings is None and not repeated and self.units >= FEW_UNITS:
            _, first = np.unique(clusters, return_index=True)
            self.resampled = _resample(
                cluster_sums(columns, clusters), units[first], resamples, np.random.default_rng(seed)
            )
            """Sums over the targets of each resample, (R, C), or over the sample without one unit, (units, C)."""
        else:
            levels = [_without_each(cluster_sums(columns, units))]
            levels += [] if trainings is None else [_without_each(cluster_sums(columns, trainings))]
            levels += [np.tile(self.sums, (number, 1)) for number in repeated]
            ends = np.cumsum([len(level) for level in levels]).tolist()
            self.levels = [slice(end - len(level), end) for end, level in zip(ends, levels, strict=True)]
            self.resampled = np.concatenate(levels)
        self.weights: list[np.ndarray] = []
        """Of the seeds of each model in each row of ``resampled``, (rows, its seeds)."""
        of_seeds = iter(self.levels[len(self.levels) - len(repeated) :])
        for number in seeds:
            weights = np.full((len(self.resampled), number), 1 / number)
            if number > 1:
                weights[next(of_seeds)] = (1 - np.eye(number)) / (number - 1)
            self.weights.append(weights)

    def interval(self, statistic: Statistic) -> Interval:
        """Value of ``statistic`` and its 95 % interval.

        A resample in which the statistic is undefined counts as lying beyond both bounds: the interval can
        only become wider by it.
        """
        value = float(statistic(self.sums))
        if self.units < 2:
            return Interval(value, float("nan"), float("nan"))
        values = np.asarray(statistic(self.resampled), dtype=np.float64)
        if not self.levels:
            return percentile_interval(value, values)
        half = _half_width([values[level] - value for level in self.levels])
        return Interval(value, value - half, value + half)


def percentile_interval(value: float, resampled: np.ndarray) -> Interval:
    """Percentiles of a statistic in resamples, (R,). Where it is undefined, NaN, it counts as beyond both bounds."""
    tail = (1 - LEVEL) / 2
    undefined = np.isnan(resampled)
    # With method "lower"/"higher" a bound is one of the values, so it is never a mean with an infinity.
    low = np.quantile(np.where(undefined, -np.inf, resampled), tail, method="lower")
    high = np.quantile(np.where(undefined, np.inf, resampled), 1 - tail, method="higher")
    return Interval(value, *(float(x) if np.isfinite(x) else float("nan") for x in (low, high)))


def _half_width(levels: Sequence[np.ndarray]) -> float:
    """Half of the t interval from how the value changes without each unit, for each level of units; NaN spreads.

    A level of U units: variance (U - 1) / U Σ change² (jackknife), degrees of freedom (Σ change²)² / Σ change⁴, the
    effective number of units, at most U - 1 and at least 2, or a third of U - 1 where that is less [ours]: where one
    unit dominates there would be 1, whose t is three times as wide. Variances of levels add up, and their t quantiles
    are averaged in proportion (Cochran and Cox 1950).
    """
    variances, quantiles = [], []
    for changes in levels:
        squares = changes**2
        total = squares.sum()
        effective = total**2 / (squares**2).sum() if total > 0 else 1.0
        most = len(changes) - 1
        variances.append(most / len(changes) * total)
        quantiles.append(student_t(min(max(effective, 1.0, min(2.0, most / 3)), most)))
    whole = sum(variances)
    return float(np.dot(variances, quantiles) / np.sqrt(whole)) if whole != 0 else 0.0


def student_t(degrees_of_freedom: float) -> float:
    """The quantile that bounds 95 % of Student's t."""
    return float(stdtrit(degrees_of_freedom, (1 + LEVEL) / 2))


def wilson(successes: int, trials: int) -> Interval:
    """A share and its 95 % score interval of Wilson."""
    bounds = binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return Interval(successes / trials, float(bounds.low), float(bounds.high))


def ratio_of_sums(numerator: int, denominator: int) -> Statistic:
    """Σ column ``numerator`` / Σ column ``denominator``; NaN where the denominator is not positive.

    With a column of ones (or zeros and ones) below, this is a mean (over a subset).
    """

    def statistic(sums: np.ndarray) -> np.ndarray:
        below = sums[..., denominator]
        positive = below > 0
        return np.where(positive, sums[..., numerator] / np.where(positive, below, 1.0), np.nan)

    return statistic


def difference(first: Statistic, second: Statistic) -> Statistic:
    """``first - second`` on the same resamples, hence paired."""
    return lambda sums: first(sums) - second(sums)


def mean_over_seeds(of_seeds: Sequence[Statistic], weights: np.ndarray) -> Statistic:
    """Mean of the statistics of S training seeds, and weighted by ``weights`` (rows, S) over rows of sums."""

    def statistic(sums: np.ndarray) -> np.ndarray:
        values = np.stack([of_seed(sums) for of_seed in of_seeds], axis=-1)
        return values.mean(axis=-1) if sums.ndim == 1 else (values * weights).sum(axis=-1)

    return statistic


def count_clusters(documents: np.ndarray, groups: np.ndarray | None, suffix: str = "") -> dict[str, int]:
    """How many documents there are and, where they are known, groups."""
    counts = {f"documents{suffix}": len(np.unique(documents))}
    return counts if groups is None else counts | {f"groups{suffix}": len(np.unique(groups))}


def few_clusters(counts: Mapping[str, Any], suffix: str = "") -> str | None:
    """``3 groups`` where there are too few of them for more than rough intervals; without groups, of documents."""
    groups, documents = counts.get(f"groups{suffix}"), counts[f"documents{suffix}"]
    for number, enough, what in ((groups, FEW_GROUPS, "group"), (documents, FEW_DOCUMENTS, "document")):
        if number is not None and number < enough:
            return f"{number} {what}{'' if number == 1 else 's'}"
    return None


def by_clusters(counts: Mapping[str, Any], suffix: str = "") -> str:
    """``by document``, or by group where groups are known, and whether these are few; for captions of figures."""
    grouped = f"groups{suffix}" in counts
    if counts.get("trainings", 1) != 1:
        by = "by training, group and document" if grouped else "by training and document"
    else:
        by = "by group, then document" if grouped else "by document"
    few = few_clusters(counts, suffix)
    return by + (f" (only {few}: rough)" if few else "")


def cluster_sums(columns: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of ``columns`` (n, C) over the rows of each cluster, (D, C), clusters in ascending order."""
    _, index = np.unique(clusters, return_inverse=True)
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], np.arange(index.max() + 1))
    return np.add.reduceat(columns[order], starts, axis=0)


def _without_each(sums: np.ndarray) -> np.ndarray:
    """Sums over all units but one, (U, C), from those of each, as if there were U: a count is a count of as many.

    Not the total minus that unit: nothing left is exactly 0.
    """
    return (1 - np.eye(len(sums))) @ sums * (len(sums) / max(1, len(sums) - 1))


def _resample(
    per_cluster: np.ndarray, group: np.ndarray, resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Sums (D, C) over clusters, in ``group`` (D,) of G, drawn with replacement, (R, C); memory does not grow with
    R · D."""
    sums = np.zeros((resamples, per_cluster.shape[1]))
    sizes = np.bincount(group)
    groups = len(sizes)
    for rows in _chunks(resamples, len(per_cluster)):
        drawn = rng.integers(groups, size=(len(rows), groups))
        drawn += groups * np.arange(len(rows))[:, None]
        of_groups = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        counts = of_groups[:, group]
        for number in np.flatnonzero(sizes > 1):
            # so many draws from the same clusters as all of the group's turns have together
            turns = of_groups[:, number] * sizes[number]
            counts[:, group == number] = rng.multinomial(turns, np.full(sizes[number], 1 / sizes[number]))
        sums[rows.start : rows.stop] = counts.astype(np.float64) @ per_cluster
    return sums


def _chunks(resamples: int, clusters: int) -> Iterator[range]:
    """The resamples, so many at a time that a (rows, clusters) array stays small."""
    size = max(1, _CHUNK_ELEMENTS // max(1, clusters))
    for first in range(0, resamples, size):
        yield range(first, min(first + size, resamples))
