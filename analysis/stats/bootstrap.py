"""Cluster bootstrap: targets of one document are not independent, nor are the documents of one
group, where the corpus names groups (docs/method.md, 2.4).

Every figure is a function of column sums over targets: a mean is Σ loss / Σ 1, recovery is
Σ (L_short - L_k) / Σ (L_short - L_long). So one resample needs only the sums per document, and all
statistics of one `ClusterBootstrap` see the same resampled documents: their differences are paired.

Shapes: n targets, C columns, D documents (clusters), G groups of them, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.util.result_files import Json
from olmo_sparsity.util.streams import Stream

DEFAULT_RESAMPLES = 2000
LEVEL = 0.95
_CHUNK_ELEMENTS = 1 << 22  # of the (resamples, documents) counts held at once: 32 MiB of int64
FEW_GROUPS, FEW_DOCUMENTS = 10, 30
"""Below so many groups or, where there are none, documents, percentile intervals are known to be too narrow."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""From column sums (…, C) to values (…,); NaN where it is not defined, as a ratio over nothing is."""


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % percentile interval.

    A bound is NaN where the data do not support one: fewer than two groups (without groups: documents), or so few
    of them have a part in the value that it is undefined in 2.5 % of the resamples or more.
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

    With groups, G groups are drawn, and from each as many of its clusters as it has. Where every cluster is a group by
    itself this is the same as without groups, to the last bit.

    With S trainings, every one of them measured on the same clusters, S trainings are drawn as well, apart from the
    clusters, and a resample has the drawn clusters of each drawn training (Owen 2007, arXiv 0712.1111).

    Args:
        columns: (n, C), a row per target; use zeros in the rows that a column does not concern.
        clusters: (n,), the document of each row.
        resamples: R, at least 1,000 for everything that is shown (docs/method.md, 2.4).
        groups: (n,), the group of each row's document; None where the corpus has none.
        trainings: (n,), number of the training that each row was measured under, 0 … S - 1; None: one.
        seed: of the resampling; the same seed, documents and groups give the same resamples for any columns.
    """

    def __init__(
        self,
        columns: np.ndarray,
        clusters: np.ndarray,
        *,
        groups: np.ndarray | None = None,
        trainings: np.ndarray | None = None,
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
        trainings = np.zeros(len(columns), dtype=int) if trainings is None else trainings
        of_trainings = [trainings == number for number in range(trainings.max() + 1)]
        per_cluster = np.stack([cluster_sums(columns[rows], clusters[rows]) for rows in of_trainings])
        self.sums: np.ndarray = per_cluster.sum(axis=1).sum(axis=0)
        """Sums over all targets, (C,)."""
        _, first = np.unique(clusters, return_index=True)
        of_clusters = np.arange(len(first))
        if groups is not None:
            of_clusters = np.unique(groups[first], return_inverse=True)[1]
        self.units = int(of_clusters.max()) + 1
        """How many groups there are; without groups, clusters."""
        drawn = draw_seeds(len(per_cluster), resamples, seed, 0)
        turns = (drawn[:, :, None] == np.arange(len(per_cluster))).sum(axis=1)
        self.resampled = _resample(per_cluster, of_clusters, turns, np.random.default_rng(seed))
        """Sums over the targets of each resample, (R, C)."""

    def interval(self, statistic: Statistic) -> Interval:
        """Value of ``statistic`` and its 95 % percentile interval.

        A resample in which the statistic is undefined counts as lying beyond both bounds: the interval can
        only become wider by it.
        """
        value = float(statistic(self.sums))
        if self.units < 2:
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


def draw_seeds(seeds: int, resamples: int, seed: int, number: int) -> np.ndarray:
    """Which of the S training seeds of a model stand for it in each resample, with replacement, (R, S).

    ``number`` is the model's own: models are drawn apart from each other, and apart from the documents.
    """
    generator = np.random.default_rng([Stream.TRAINING_SEEDS, seed, number])
    return generator.integers(seeds, size=(resamples, seeds))


def mean_over_seeds(of_seeds: Sequence[Statistic], drawn: np.ndarray) -> Statistic:
    """Mean of the statistics of S training seeds; over resamples (R, C) of those that were ``drawn`` (R, S) for each.

    Together with documents that are drawn too it is a bootstrap of two levels [ours]. It underrates few seeds, as any
    bootstrap does: see `analysis.stats.exact_match.exact_interval` for how far.
    """

    def statistic(sums: np.ndarray) -> np.ndarray:
        values = np.stack([of_seed(sums) for of_seed in of_seeds], axis=-1)
        return (values if sums.ndim == 1 else np.take_along_axis(values, drawn, axis=-1)).mean(axis=-1)

    return statistic


def mean_of(statistics: Sequence[Statistic]) -> Statistic:
    """Their mean, all of them over the same resamples."""
    return lambda sums: np.mean([each(sums) for each in statistics], axis=0)


def divided(interval: Json, by: float) -> Json:
    """Value and bounds of an `Interval.as_dict` over a number above 0; None stays None."""
    return {bound: None if value is None else value / by for bound, value in interval.items()}


def count_clusters(documents: np.ndarray, groups: np.ndarray | None, suffix: str = "") -> Json:
    """How many documents there are and, where they are known, groups; for the settings of a result."""
    counts = {f"documents{suffix}": len(np.unique(documents))}
    return counts if groups is None else counts | {f"groups{suffix}": len(np.unique(groups))}


def few_clusters(counts: Json, suffix: str = "") -> str | None:
    """``3 groups`` where there are too few of them for more than rough intervals; without groups, of documents."""
    groups, documents = counts.get(f"groups{suffix}"), counts[f"documents{suffix}"]
    for number, enough, what in ((groups, FEW_GROUPS, "group"), (documents, FEW_DOCUMENTS, "document")):
        if number is not None and number < enough:
            return f"{number} {what}{'' if number == 1 else 's'}"
    return None


def by_clusters(counts: Json, suffix: str = "") -> str:
    """``by document``, or by group where groups are known, and whether these are few; for captions of figures."""
    several, grouped = counts.get("trainings", 1) != 1, f"groups{suffix}" in counts
    by = {
        (False, False): "by document",
        (False, True): "by group, then document",
        (True, False): "by training and document",
        (True, True): "by training, group and document",
    }[several, grouped]
    few = few_clusters(counts, suffix)
    return by + (f" (only {few}: rough)" if few else "")


def by_clusters_and_seeds(result: Json) -> str:
    """As `by_clusters`, of several models, whose seeds (``checkpoints``) are drawn as well."""
    seeds = max((len(model["checkpoints"]) for model in result["models"]), default=1)
    return by_clusters({**result["settings"], "trainings": seeds})


def interval_words(groups: np.ndarray | None, trainings: np.ndarray | None = None) -> str:
    """How the intervals of a result were made, for its settings."""
    by = "document (no groups are known)" if groups is None else "group, then document"
    return f"95 % percentile, cluster bootstrap by {'' if trainings is None else 'training, and by '}{by}"


def cluster_sums(columns: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of ``columns`` (n, C) over the rows of each cluster, (D, C), clusters in ascending order."""
    _, index = np.unique(clusters, return_inverse=True)
    order = np.argsort(index, kind="stable")
    starts = np.searchsorted(index[order], np.arange(index.max() + 1))
    return np.add.reduceat(columns[order], starts, axis=0)


def _resample(
    per_cluster: np.ndarray, group: np.ndarray, turns_of_trainings: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Sums over D clusters, in ``group`` (D,) of G, drawn with replacement, (R, C); memory does not grow with R · D.

    ``per_cluster`` is (S, D, C), ``turns_of_trainings`` (R, S) how often each training was drawn.
    """
    resamples = len(turns_of_trainings)
    sums = np.zeros((resamples, per_cluster.shape[2]))
    sizes = np.bincount(group)
    groups = len(sizes)
    for rows in _chunks(resamples, per_cluster.shape[1]):
        drawn = rng.integers(groups, size=(len(rows), groups))
        drawn += groups * np.arange(len(rows))[:, None]
        of_groups = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        counts = of_groups[:, group]
        for one in np.flatnonzero(sizes > 1):
            # so many draws from the same clusters as all of the group's turns have together
            turns = of_groups[:, one] * sizes[one]
            counts[:, group == one] = rng.multinomial(turns, np.full(sizes[one], 1 / sizes[one]))
        for each, of_training in zip(turns_of_trainings[rows.start : rows.stop].T, per_cluster, strict=True):
            sums[rows.start : rows.stop] += each[:, None] * (counts.astype(np.float64) @ of_training)
    return sums


def _chunks(resamples: int, clusters: int) -> Iterator[range]:
    """The resamples, so many at a time that a (rows, clusters) array stays small."""
    size = max(1, _CHUNK_ELEMENTS // max(1, clusters))
    for first in range(0, resamples, size):
        yield range(first, min(first + size, resamples))
