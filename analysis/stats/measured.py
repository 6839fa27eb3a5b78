"""What is summed over the targets of a Result: the columns that recoveries are made of.

A *group* names a set of targets over tau: all of them, a bin of the gain, a kind of dependency. Every recovery is

    Σ (L_short - L_k) / Σ (L_short - L_long)     over a group (paper Eq. 20, docs/method.md 2.2)

Under cross-fitting (docs/method.md, 2.3) the selecting model alone decides which targets are over tau. All losses,
hence all sums, are the evaluating model's.
Shapes: n sampled targets, m of them over tau with finished choices, K values of k.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from analysis.result import Result
from analysis.stats.bootstrap import Interval, Statistic, difference
from analysis.stats.sums import Columns, Sums
from olmo_sparsity.util.errors import UserError

CONTROLS = ("random", "nearest")
"""Selectors that do not look at the model."""
DEFAULT_SELECTOR, SIGNED_SELECTOR = "leave-one-out-kl", "leave-one-out"
"""Our Eq. 20 (docs/method.md, 2.2 [ours]): the one that others are compared with, which never looks at the target; and
its signed form, which stands beside it, and for it where there is no other."""
BEST = "best"
"""Name of the lowest L_k of all selectors, see `Measured`."""
TRUE, PLACEBO, NET = "true", "placebo", "net"
DEFAULT_K = 4
"""The k of everything that is shown at one k only, where it was measured."""
ALL = "over tau"
"""The group of all targets over tau."""


class Measured:
    """The targets over tau whose choices are finished, their losses, and columns made of them.

    ``losses`` has L_k, (m, K) nats, by selector and far context; NaN where a target has no such far context. `BEST` is
    there where two or more selectors are no controls: the lowest L_k, taken for each target, k and far context by
    itself. It says that k tokens exist which recover so much, not how to find them without the answer; the placebo's
    best is what the same search finds in text that has nothing to do with the target. It is the evaluating model that
    takes the lowest, so `BEST` is never cross-fitted.

    ``given_back``: level, unit and sinks of the choices (`Result.loss_nats`).
    """

    def __init__(self, result: Result, **given_back: Any):
        self.result, self.given_back = result, given_back
        self.ks = result.ks
        self.selectors = _selectors_of(result, **given_back)
        first = result.loss_nats(self.selectors[0], **given_back)
        self.finished = np.isfinite(first).all(axis=1)
        """Which of the targets in ``result.over`` have choices."""
        self.over = result.over[self.finished]
        """(m,) rows of the targets."""
        targets = result.targets.iloc[self.over]
        self.document = targets["text"].to_numpy()
        self.group = targets["group"].to_numpy() if "group" in targets else None
        self.short_nats = targets["loss_short_nats"].to_numpy(np.float64)
        self.long_nats = targets["loss_long_nats"].to_numpy(np.float64)
        self.gain_nats = self.short_nats - self.long_nats
        """L_short - L_long of the model that evaluates, (m,); under cross-fitting some are negative."""
        self.losses = {
            (selector, context): self.of_choices("loss_nats", selector, context)
            for selector in self.selectors
            for context in result.far_contexts
        }
        if sum(selector not in CONTROLS for selector in self.selectors) >= 2:
            for context in result.far_contexts:
                of_context = [self.losses[selector, context] for selector in self.selectors]
                self.losses[BEST, context] = np.min(of_context, axis=0)

    @property
    def names(self) -> list[str]:
        """The selectors, and `BEST` where it is there."""
        return list(dict.fromkeys(selector for selector, _ in self.losses))

    @property
    def far_contexts(self) -> list[str]:
        """`TRUE`, and `PLACEBO` where it was measured."""
        return [context for context in (TRUE, PLACEBO) if context in self.result.far_contexts]

    def of_choices(self, column: str, selector: str, far_context: str) -> np.ndarray:
        """A column of the choices for these targets, (m,) or (m, length)."""
        return self.result.of_choices(column, selector, far_context, **self.given_back)[self.finished]

    def column(self, values: np.ndarray | float) -> np.ndarray:
        """Values of these targets, (m,), as a column of all targets, (n,)."""
        column = np.zeros(len(self.result.targets))
        column[self.over] = values
        return column

    def of_group(
        self,
        group: Hashable,
        ks: Iterable[int],
        members: np.ndarray | float = 1.0,
        far_contexts: Sequence[str] | None = None,
    ) -> Columns:
        """The columns that the recoveries of one group need at ``ks``; ``members``, (m,), is 1 in the group, else 0.

        All members must have the far contexts, by default `TRUE` and `PLACEBO`.
        """
        columns: Columns = {
            ("targets", group): self.column(members),
            ("gain", group): self.column(self.gain_nats * members),
        }
        for (selector, context), losses in self.losses.items():
            if context in (far_contexts or self.far_contexts):
                for k in ks:
                    saved = np.nan_to_num(self.short_nats - losses[:, self.ks.index(k)])
                    columns["saved", selector, context, k, group] = self.column(saved * members)
        return columns


def _selectors_of(result: Result, level: str = "text", unit: str = "token", sinks: int = 0) -> list[str]:
    """Those with choices that were given back in this way, in the order of the settings."""
    choices = result.choices
    rows = (choices["level"] == level) & (choices["unit"] == unit) & (choices["sinks"] == sinks)
    there = set(choices["selector"][rows].unique())
    return [selector for selector in result.selectors if selector in there]


def sums_of(result: Result, columns: Columns, **bootstrap: Any) -> Sums:
    """The bootstrap of columns of all targets of a result: by group and document, and by training where it is of
    several; ``bootstrap``: resamples and seed."""
    targets = result.targets
    groups, trainings = (
        targets[name].to_numpy() if name in targets else None for name in ("group", "training")
    )
    return Sums(columns, targets["text"].to_numpy(), groups=groups, trainings=trainings, **bootstrap)


def recovery_of(sums: Sums, selector: str, far_context: str, k: int, group: Hashable = ALL) -> Statistic:
    """Recovery in any far context, relative to the gain by the true one; or `NET`."""
    if far_context == NET:
        true, placebo = (recovery_of(sums, selector, context, k, group) for context in (TRUE, PLACEBO))
        return net_recovery(true, placebo)
    return sums.statistic(("saved", selector, far_context, k, group), ("gain", group))


def net_recovery(recovery: Statistic, placebo: Statistic) -> Statistic:
    """Recovery minus that of the placebo where it is positive, in the sample and in every resample by itself
    (docs/method.md, 2.3 [ours])."""
    return lambda sums: recovery(sums) - np.maximum(placebo(sums), 0.0)


def recoveries(sums: Sums, selector: str, k: int, group: Hashable = ALL) -> dict[str, Interval]:
    """Intervals by far context, with `NET`, no bound of which exceeds that of the recovery."""
    measured = [
        context for context in (TRUE, PLACEBO) if ("saved", selector, context, k, group) in sums.index
    ]
    contexts = [*measured, NET] if PLACEBO in measured else measured
    intervals = {
        context: sums.interval(recovery_of(sums, selector, context, k, group)) for context in contexts
    }
    if NET in intervals:
        true, net = intervals[TRUE], intervals[NET]
        low, high = (float(np.minimum(*bounds)) for bounds in ((net.low, true.low), (net.high, true.high)))
        intervals[NET] = Interval(net.value, low, high)
    return intervals


def mean_loss(sums: Sums, selector: str, far_context: str, k: int) -> Statistic:
    """Mean L_k over the targets over tau: what is left of L_short. Needs the column ``short over tau``."""
    targets = ("targets", ALL)
    saved = sums.statistic(("saved", selector, far_context, k, ALL), targets)
    return difference(sums.statistic("short over tau", targets), saved)


def over_tau_column(result: Result) -> np.ndarray:
    """1 for every target over tau, finished or not, else 0, (n,)."""
    return result.targets["over_tau"].to_numpy(np.float64)


def selecting_gain_nats(result: Result) -> np.ndarray:
    """L_short - L_long of the model that selects, (n,)."""
    targets = result.targets
    return targets["selecting_gain_nats"].to_numpy() if "selecting_gain_nats" in targets else result.gain_nats


def default_selector(names: Iterable[str]) -> str:
    """The selector that others are compared with: `DEFAULT_SELECTOR`, else its signed form, else the first that is no
    control."""
    names = list(names)
    for name in (DEFAULT_SELECTOR, SIGNED_SELECTOR):
        if name in names:
            return name
    return next((name for name in names if name not in CONTROLS), names[0])


def choose_k(ks: Sequence[int], wanted: int | None = None) -> int:
    """The k of what is shown at one k only: ``wanted``, else `DEFAULT_K`, else the closest (the smallest of two)."""
    if wanted is None:
        return min(ks, key=lambda k: (abs(k - DEFAULT_K), k))
    if wanted not in ks:
        raise UserError(f"k = {wanted} was not measured; choose one of {', '.join(map(str, ks))}")
    return wanted


def refuse_without_gain(result: Result) -> None:
    """Raise `UserError` where no recovery is defined: no target over tau, or gains that sum to nothing."""
    n, tau = len(result.targets), nats(result.settings["tau_nats"])
    if n == 0:
        raise UserError("there are no targets; measure again with a shorter n_long or longer texts")
    if len(result.over) == 0:
        raise UserError(
            f"no target above tau: none of {n:,} gains more than {tau} from the long context (the largest gain is "
            f"{selecting_gain_nats(result).max():.3g}); measure with a lower tau, or with more targets"
        )
    gain = result.gain_nats[result.over].sum()
    if gain <= 0:
        raise UserError(
            f"recovery is undefined: the gains of the {len(result.over):,} targets over tau sum to {gain:.3g} nats"
            f"{' under the evaluating model' if result.crossfit else ''}; measure with more targets, or tau >= 0"
        )


def nats(value: float) -> str:
    """``1 nat``, ``0.5 nats``."""
    return f"{value:g} nat" if value == 1 else f"{value:g} nats"
