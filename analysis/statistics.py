"""Cluster bootstrap: 95 % intervals that know that targets of one document are not independent (METHOD 2.4).

Every figure is a function of column sums over targets: a mean is Σ loss / Σ 1, recovery is
Σ (L_short - L_k) / Σ (L_short - L_long). So one resample needs only the sums per document, and all
statistics of one `ClusterBootstrap` see the same resampled documents: their differences are paired.

Shapes: n targets, C columns, D documents (clusters), R resamples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DEFAULT_RESAMPLES = 2000
LEVEL = 0.95
_CHUNK_ELEMENTS = 1 << 22  # of the (resamples, documents) counts held at once: 32 MiB of int64

Statistic = Callable[[np.ndarray], np.ndarray]
"""From column sums (…, C) to values (…,); NaN where it is not defined, as a ratio over nothing is."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % percentile interval.

    A bound is NaN where the data do not support one: fewer than two documents, or so few of them bear on the
    value that it is undefined in 2.5 % of the resamples or more.
    """

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float | None]:
        """As JSON has it: None for a bound, or a value, that does not exist."""
        names = ("value", "low", "high")
        return {name: x if np.isfinite(x := getattr(self, name)) else None for name in names}


class ClusterBootstrap:
    """Column sums over the sample and over resamples of whole clusters, drawn with replacement.

    Args:
        columns: (n, C), a row per target; use zeros in the rows that a column does not concern.
        clusters: (n,), the document of each row.
        resamples: R; METHOD 2.4 asks for at least 1,000 for everything that is shown.
        seed: of the resampling; the same seed and documents give the same resamples for any columns.
    """

    def __init__(
        self, columns: np.ndarray, clusters: np.ndarray, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
    ):
        columns = np.asarray(columns, dtype=np.float64)
        if columns.ndim != 2 or len(columns) != len(clusters) or len(columns) == 0:
            raise ValueError(
                f"columns {columns.shape} must be (n, C) with n = {len(clusters)} clusters, n > 0"
            )
        if not np.isfinite(columns).all():
            raise ValueError("a column has values that are not finite")
        self.per_cluster = cluster_sums(columns, clusters)
        self.sums: np.ndarray = self.per_cluster.sum(axis=0)
        """Sums over all targets, (C,)."""
        self.resampled = _resample(self.per_cluster, resamples, np.random.default_rng(seed))
        """Sums over the targets of each resample, (R, C)."""

    def interval(self, statistic: Statistic) -> Interval:
        """Value of ``statistic`` and its 95 % percentile interval.

        A resample in which the statistic is undefined counts as lying beyond both bounds: the interval can
        only become wider by it.
        """
        value = float(statistic(self.sums))
        if len(self.per_cluster) < 2:
            return Interval(value, float("nan"), float("nan"))
        values = np.asarray(statistic(self.resampled), dtype=np.float64)
        tail = (1 - LEVEL) / 2
        undefined = np.isnan(values)
        # With method "lower"/"higher" a bound is one of the values, so it is never a mean with an infinity.
        low = np.quantile(np.where(undefined, -np.inf, values), tail, method="lower")
        high = np.quantile(np.where(undefined, np.inf, values), 1 - tail, method="higher")
        return Interval(value, *(float(x) if np.isfinite(x) else float("nan") for x in (low, high)))


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


def cluster_bootstrap(
    columns: np.ndarray,
    clusters: np.ndarray,
    statistic: Statistic,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Interval of one statistic; see `ClusterBootstrap` for the arguments and for several at once."""
    return ClusterBootstrap(columns, clusters, resamples=resamples, seed=seed).interval(statistic)


def cluster_sums(columns: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of ``columns`` (n, C) over the rows of each cluster, (D, C), clusters in ascending order."""
    _, index = np.unique(clusters, return_inverse=True)
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], np.arange(index.max() + 1))
    return np.add.reduceat(columns[order], starts, axis=0)


def _resample(per_cluster: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Sums over D clusters drawn with replacement, (R, C); memory does not grow with R · D."""
    clusters = len(per_cluster)
    chunk = max(1, _CHUNK_ELEMENTS // clusters)
    sums = np.empty((resamples, per_cluster.shape[1]))
    for first in range(0, resamples, chunk):
        rows = min(chunk, resamples - first)
        drawn = rng.integers(clusters, size=(rows, clusters)) + clusters * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * clusters).reshape(rows, clusters)
        sums[first : first + rows] = counts.astype(np.float64) @ per_cluster
    return sums
