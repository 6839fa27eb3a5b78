"""A cluster bootstrap whose columns have names: what every number of a measurement is made of.

A mean, a share and a recovery are each a sum over targets divided by another. Columns are summed by document once, so
all intervals of one `Sums` share their resamples and differences of them are paired (`analysis.stats.bootstrap`).
Shapes: n targets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from analysis.stats.bootstrap import (
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Interval,
    Statistic,
    mean_over_seeds,
    ratio_of_sums,
    wilson,
)

Columns = dict[Hashable, np.ndarray]
"""Name to a value per target, (n,); zero where a target does not belong to the sum."""


class Sums:
    """The columns and their bootstrap.

    Args:
        columns: of n targets, see `Columns`.
        documents: (n,), the document of each target.
        groups: (n,), the group of each document; None where the texts have none.
        trainings: (n,), the training that each target was measured under; None: one.
        labels: of checkpoint c that the columns (c, name) belong to; those of one label are trainings of one model.
        resamples: R of the bootstrap.
        seed: of the bootstrap.
    """

    def __init__(
        self,
        columns: Columns,
        documents: np.ndarray,
        *,
        groups: np.ndarray | None = None,
        trainings: np.ndarray | None = None,
        labels: Sequence[str] = (),
        resamples: int = DEFAULT_RESAMPLES,
        seed: int = 0,
    ):
        self.columns, self.labels = columns, labels
        self.index = {name: number for number, name in enumerate(columns)}
        self.bootstrap = ClusterBootstrap(
            np.stack(list(columns.values()), axis=1),
            documents,
            groups=groups,
            trainings=trainings,
            seeds=[labels.count(label) for label in dict.fromkeys(labels)],
            resamples=resamples,
            seed=seed,
        )

    def total(self, name: Hashable) -> float:
        """Sum of a column over all targets."""
        return float(self.bootstrap.sums[self.index[name]])

    def statistic(self, numerator: Hashable, denominator: Hashable) -> Statistic:
        """Σ numerator / Σ denominator."""
        return ratio_of_sums(self.index[numerator], self.index[denominator])

    def mean_over_seeds(self, number: int, name: Hashable, denominator: Hashable) -> Statistic:
        """Mean ratio of the checkpoints of a model, of which checkpoint c has the column (c, ``name``).

        ``number`` counts the models, in the order in which their labels first appear.
        """
        model = list(dict.fromkeys(self.labels))[number]
        of_seeds = [
            self.statistic((c, name), denominator) for c, label in enumerate(self.labels) if label == model
        ]
        return mean_over_seeds(of_seeds, self.bootstrap.weights[number])

    def interval(self, statistic: Statistic) -> Interval:
        """Value and 95 % interval of any statistic of the columns."""
        return self.bootstrap.interval(statistic)

    def ratio(self, numerator: Hashable, denominator: Hashable) -> Interval:
        """Interval of Σ numerator / Σ denominator; of a share where every numerator is in 0 … denominator."""
        above, below = self.columns[numerator], self.columns[denominator]
        statistic = self.statistic(numerator, denominator)
        is_share = bool(((above >= 0) & (above <= below)).all())
        return self.share(statistic, denominator) if is_share else self.interval(statistic)

    def share(self, statistic: Statistic, denominator: Hashable) -> Interval:
        """Interval of a share of Σ denominator, cut at 0 and 1.

        Where no unit has any, or every one all, resamples do not differ: then it is Wilson's.
        """
        interval = self.interval(statistic)
        if interval.high - interval.low < 1e-9 and interval.value in (0, 1):
            trials = round(self.total(denominator))
            return wilson(round(interval.value) * trials, trials)
        low, high = np.clip((interval.low, interval.high), 0, 1)
        return Interval(interval.value, float(low), float(high))
