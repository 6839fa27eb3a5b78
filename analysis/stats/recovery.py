"""What is summed over targets, and the statistics that are made of these sums.

A *group* names a set of targets over tau: all of them, a bin of the gain, a kind of dependency. Every recovery is

    Σ (L_short - L_k) / Σ (L_short - L_long)     over a group (paper Eq. 20, docs/method.md 2.2)

so it needs two columns, and columns are summed by document once, for everything (`analysis.stats.bootstrap`).
Under cross-fitting (docs/method.md, 2.3) the selecting model alone decides which targets are over tau. All losses,
hence all sums, are the evaluating model's.
Shapes: n sampled targets, m of them over tau with finished selections, K values of k.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from analysis.records.schema import FAR_CONTEXTS, PREFIX, TARGETS_PER_BLOCK
from analysis.records.store import Records
from analysis.stats.bootstrap import (
    ClusterBootstrap,
    Interval,
    Statistic,
    mean_over_seeds,
    ratio_of_sums,
    wilson,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import Json

CONTROLS = ("random", "nearest")
"""Selectors that do not look at the model."""
DEFAULT_SELECTOR, SIGNED_SELECTOR = "leave-one-out-kl", "leave-one-out"
"""Our Eq. 20 (docs/method.md, 2.2 [ours]): the one that others are compared with, which never looks at the target; and
its signed form, which stands beside it, and for it in records that have no other."""
BEST = "best"
"""Name of the lowest L_k over all selectors, see `losses_with_best`."""
RECOVERIES = ("recovery", "placebo_recovery", "net_recovery")
"""Keys of what `SumsBootstrap.recoveries` gives."""
ALL = "over tau"
"""The group of all targets over tau."""

Columns = dict[Hashable, np.ndarray]
"""Name to a value per sampled target, (n,); zero where a target does not belong to the sum."""


class MeasuredTargets:
    """The targets over tau with finished selections: their losses in nats, and columns made of them."""

    def __init__(self, records: Records):
        targets, over = records.targets, records.over
        self.sampled = len(targets)
        """n."""
        self.over = over
        """(m,) indices into all targets."""
        self.document = targets.document[over]
        self.short_nats = targets.loss_short_nats[over]
        self.long_nats = targets.loss_long_nats[over]
        self.gain_nats = self.short_nats - self.long_nats
        """L_short - L_long of the model that evaluates, (m,); under cross-fitting some are negative."""
        self.ks = records.manifest.ks
        self.loss_nats = losses_with_best(records)

    def column(self, values: np.ndarray | float) -> np.ndarray:
        """Values of these targets, (m,), as a column of all targets, (n,)."""
        column = np.zeros(self.sampled)
        column[self.over] = values
        return column

    def of_group(
        self,
        group: Hashable,
        ks: Iterable[int],
        members: np.ndarray | float = 1.0,
        far_contexts: Sequence[str] = FAR_CONTEXTS,
    ) -> Columns:
        """The columns that the recoveries of one group need at ``ks``; ``members``, (m,), is 1 in the group, else 0.

        All members must have the far contexts.
        """
        columns: Columns = {
            ("targets", group): self.column(members),
            ("gain", group): self.column(self.gain_nats * members),
        }
        for selector, losses in self.loss_nats.items():
            for context in far_contexts:
                for k in ks:
                    saved = np.nan_to_num(self.short_nats - losses[context][:, self.ks.index(k)])
                    columns["saved", selector, context, k, group] = self.column(saved * members)
        return columns


class SumsBootstrap:
    """A cluster bootstrap whose columns have names; all its intervals share their resamples."""

    def __init__(
        self,
        columns: Columns,
        documents: np.ndarray,
        resamples: int,
        seed: int,
        document_groups: np.ndarray | None = None,
        trainings: np.ndarray | None = None,
        labels: Sequence[str] = (),
    ):
        self.columns, self.labels = columns, labels
        self.index = {name: number for number, name in enumerate(columns)}
        matrix = np.stack(list(columns.values()), axis=1)
        self.bootstrap = ClusterBootstrap(
            matrix,
            documents,
            groups=document_groups,
            trainings=trainings,
            seeds=[labels.count(label) for label in dict.fromkeys(labels)],
            resamples=resamples,
            seed=seed,
        )

    def statistic(self, numerator: Hashable, denominator: Hashable) -> Statistic:
        """Σ numerator / Σ denominator."""
        return ratio_of_sums(self.index[numerator], self.index[denominator])

    def mean_over_seeds(self, number: int, name: Hashable, denominator: Hashable) -> Statistic:
        """Mean ratio of a model's checkpoints, which share its label; checkpoint c has the column (c, ``name``).

        ``number`` counts the models, in the order of first appearance of their labels.
        """
        model = list(dict.fromkeys(self.labels))[number]
        of_seeds = [
            self.statistic((c, name), denominator) for c, label in enumerate(self.labels) if label == model
        ]
        return mean_over_seeds(of_seeds, self.bootstrap.weights[number])

    def interval(self, statistic: Statistic) -> Json:
        """Value and 95 % interval as JSON has them."""
        return self.bootstrap.interval(statistic).as_dict()

    def ratio(self, numerator: Hashable, denominator: Hashable) -> Json:
        """Interval of Σ numerator / Σ denominator, of a share where no row's numerator is beyond 0 … denominator."""
        above, below = self.columns[numerator], self.columns[denominator]
        is_share = bool(((above >= 0) & (above <= below)).all())
        statistic = self.statistic(numerator, denominator)
        return self.share(statistic, denominator) if is_share else self.interval(statistic)

    def share(self, statistic: Statistic, denominator: Hashable) -> Json:
        """Interval of a share of Σ denominator, from 0 to 1. It has no width where no unit has any, or every one all:
        Wilson's then."""
        found = self.bootstrap.interval(statistic)
        if found.high - found.low < 1e-9 and found.value in (0, 1):
            trials = round(self.bootstrap.sums[self.index[denominator]])
            return wilson(round(found.value) * trials, trials).as_dict()
        low, high = np.clip((found.low, found.high), 0, 1)
        return Interval(found.value, float(low), float(high)).as_dict()

    def recovery_statistics(self, selector: str, k: int, group: Hashable = ALL) -> dict[str, Statistic]:
        """Recovery, its placebo (same denominator), and `net_recovery` of both."""
        true, placebo = (
            self.statistic(("saved", selector, context, k, group), ("gain", group))
            for context in FAR_CONTEXTS
        )
        return {
            "recovery": true,
            "placebo_recovery": placebo,
            "net_recovery": net_recovery(true, placebo),
        }

    def recoveries(self, selector: str, k: int, group: Hashable = ALL) -> Json:
        """The intervals of `recovery_statistics`; no bound of net recovery exceeds that of the recovery."""
        statistics = self.recovery_statistics(selector, k, group)
        found = {name: self.interval(each) for name, each in statistics.items()}
        recovery, net = found["recovery"], found["net_recovery"]
        for bound in ("low", "high"):
            net[bound] = net[bound] and min(net[bound], recovery[bound])
        return found


def net_recovery(recovery: Statistic, placebo: Statistic) -> Statistic:
    """`without_placebo` of the sample, and of every resample by itself: bounds never exceed those of the recovery."""
    return lambda sums: without_placebo(recovery(sums), placebo(sums))


def without_placebo(recovery: Any, placebo: Any) -> Any:
    """Recovery minus that of the placebo where it is positive, of numbers or arrays (docs/method.md, 2.3 [ours])."""
    return recovery - np.maximum(placebo, 0.0)


def losses_with_best(records: Records) -> dict[str, dict[str, np.ndarray]]:
    """L_k of every selector by far context, (m, K) nats, and of `BEST` where two or more are no controls.

    `BEST` is the lowest L_k over all selectors, chosen for each target, k and far context by itself. It says that k
    tokens exist which recover so much, not how to find them without the answer; the placebo's best is what the
    same search finds in text that has nothing to do with the target. Under cross-fitting it is the evaluating model
    that takes the lowest, so `BEST` is not cross-fitted.
    """
    losses = {selector: records.loss_nats[selector] for selector in records.manifest.selectors}
    if sum(selector not in CONTROLS for selector in losses) < 2:
        return losses
    best = {
        context: np.min([each[context] for each in losses.values()], axis=0)
        for context in records.manifest.far_contexts
    }
    return {**losses, BEST: best}


def over_tau_column(records: Records) -> np.ndarray:
    """1 for every target over tau, finished or not, else 0, (n,)."""
    return np.isin(np.arange(len(records.targets)), records.over_tau) * 1.0


def default_selector(names: Iterable[str]) -> str:
    """The selector that others are compared with: `DEFAULT_SELECTOR`, else its signed form, else the first that is no
    control."""
    names = list(names)
    for name in (DEFAULT_SELECTOR, SIGNED_SELECTOR):
        if name in names:
            return name
    return next((name for name in names if name not in CONTROLS), names[0])


def refuse_without_gain(records: Records) -> None:
    """Raise `UserError` where no recovery is defined: no target over tau, or gains that sum to nothing."""
    targets, tau = records.targets, records.manifest.tau_nats
    if len(targets) == 0:
        raise UserError(
            f"{records.folder} has no targets; measure again with a shorter --n-long or longer documents"
        )
    if len(records.over) == 0:
        raise UserError(
            f"no target above tau: 0 % of the {len(targets):,} targets of {records.folder} gain more than "
            f"{nats(tau)} from the long context (the largest gain is {targets.selecting_gain_nats.max():.3g}); "
            "measure with a lower --tau, with more --targets, or with a model trained for longer"
        )
    gain = targets.gain_nats[records.over].sum()
    if gain > 0:
        return
    if records.manifest.crossfit:
        raise UserError(
            f"recovery is undefined: over the {len(records.over):,} targets of {records.folder} that the selecting "
            f"model puts over tau, the evaluating model's gains sum to {gain:.3g} nats; measure with more --targets, "
            "or evaluate with a model trained for longer"
        )
    raise UserError(
        f"recovery is undefined: with tau {tau:g} the gains sum to nothing; measure with tau >= 0"
    )


def and_blocks(settings: Json) -> str:
    """What stands behind N and M in a caption: B, where it is not 1, and the prefix (docs/method.md, 2.1)."""
    options = settings.get("options", {})
    size, prefix = options.get(TARGETS_PER_BLOCK, 1), options.get(PREFIX)
    return (f", B = {size}" if size > 1 else "") + and_prefix(prefix)


def and_prefixes(result: Json) -> str:
    """What a caption says of the prefixes of several models; nothing where none has one."""
    having = {
        model["label"]: each.get("prefix") for model in result["models"] for each in model["checkpoints"]
    }
    return "".join(f"; {label}{and_prefix(prefix)}" for label, prefix in having.items() if prefix)


def and_prefix(prefix: Sequence[int] | None) -> str:
    """What stands behind N and M in a caption where every context has a prefix, given its token ids."""
    return f", prefix {' '.join(map(str, prefix))}" if prefix else ""


def nats(value: float) -> str:
    """``1 nat``, ``0.5 nats``."""
    return f"{value:g} nat" if value == 1 else f"{value:g} nats"
