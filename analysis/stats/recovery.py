"""What every number is computed from: the losses of the targets over tau, kept in one way, and their bootstrap.

A *way* is how chosen tokens were kept: the columns level, unit and sinks of the choices together (`analysis.kept`).
A set of targets over tau is given by its ``members``, (m,), 1 inside and else 0: a bin of the gain, a kind. Recovery is

    Σ (L_short - L_k) / Σ (L_short - L_long)     over the members (paper Eq. 20, docs/method.md 2.2)

Under cross-fitting (docs/method.md, 2.3) the selecting model alone decides which targets are over tau. All losses,
hence all sums, are the evaluating model's.
Shapes: n sampled targets, m of them over tau with finished choices, K values of k, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import PLACEBO, TRUE
from analysis.measurement import Measurement
from analysis.stats.bootstrap import ClusterBootstrap
from olmo_sparsity.util.errors import UserError

CONTROLS = ("random", "nearest")
"""Selectors that do not look at the model."""
DEFAULT_SELECTOR, SIGNED_SELECTOR = "leave-one-out-kl", "leave-one-out"
"""Our Eq. 20 (docs/method.md, 2.2 [ours]): the one that others are compared with, which never looks at the target; and
its signed form, which stands beside it, and for it where there is no other."""
BEST = "best"
"""Name of the lowest L_k of all selectors, see `Measured`."""
NET = "net"
"""Beside the far contexts: recovery minus that of the placebo where it is positive."""
DEFAULT_K = 4
"""The k of everything that is shown at one k only, where it was measured."""
AS_TEXT = {"level": "text", "unit": "token", "sinks": 0}
"""The way that is shown where nothing else is said, and a result has it."""
KEPT_AS_COLUMNS = tuple(AS_TEXT)
UNITS_IN_WORDS = {
    "word": "words",
    "neighbors": "tokens with their neighbors",
    "before": "each with {width} before it",
    "behind": "each with {width} behind it",
    "ranked": "as many by rank as with {width} before each",
    "drawn": "as many drawn as with {width} before each",
    "read": "each read with {width} before it",
    "read-behind": "each read with {width} behind it",
    "read-ranked": "read with as many by rank as {width} before each",
    "read-drawn": "read with as many drawn as {width} before each",
}
"""Units of `analysis.kept` for people to read, by their names."""
Row = dict[str, Any]
"""Of a frame of numbers, by column."""


def ways_kept(result: Measurement) -> list[dict[str, Any]]:
    """Level, unit and sinks of the choices, each once, in the order in which they were measured."""
    return result.choices[list(KEPT_AS_COLUMNS)].drop_duplicates().to_dict("records")


def usual_way(result: Measurement) -> dict[str, Any]:
    """The way of keeping that is shown where one is: `AS_TEXT` where the result has it, else its first."""
    ways = ways_kept(result)
    return AS_TEXT if AS_TEXT in ways else ways[0]


def way_in_words(level: str, unit: str, sinks: int) -> str:
    """Such as "cache, 4 sinks" or "text, each with 2 before it"."""
    words = [level]
    name, _, width = unit.partition(":")
    if unit != "token":
        words.append(UNITS_IN_WORDS.get(name, unit).format(width=width))
    if sinks:
        words.append(f"{sinks} sinks")
    return ", ".join(words)


def of_one_way(result: Measurement, way: Mapping[str, Any] | None = None) -> Measurement:
    """The result with the choices kept in one way alone, and of their columns those that were measured of it.

    ``way``: by default the `usual_way`; then raises `UserError` where recovery is undefined.
    """
    if way is None:
        refuse_without_gain(result)
        way = usual_way(result)
    is_way = result.choices[list(way)] == list(way.values())
    chosen = is_way.all(axis=1)
    runs = tuple(of_one_way(run, way) for run in result.runs)
    choices = result.choices[chosen]
    if len(choices):
        choices = choices.dropna(axis="columns", how="all")
    return replace(result, choices=choices, runs=runs)


def with_over_tau(result: Measurement, is_over: Callable[[Measurement], np.ndarray]) -> Measurement:
    """The result with other targets over tau, (n,) bool of a result or of one of its runs, and their choices.

    All targets stay, so that its numbers rest on the same resamples.
    """
    targets = result.targets.assign(over_tau=is_over(result))
    over = targets[targets["over_tau"]]
    keys = [name for name in ("run", "target_id") if name in result.choices and name in over]
    of_choices = pd.MultiIndex.from_frame(result.choices[keys])
    kept = of_choices.isin(pd.MultiIndex.from_frame(over[keys]))
    runs = tuple(with_over_tau(run, is_over) for run in result.runs)
    return replace(result, targets=targets, choices=result.choices[kept], runs=runs)


class Measured:
    """The targets over tau whose choices are finished, and what is computed from their losses, kept in one way.

    ``losses`` has L_k, (m, K) nats, by selector and far context; NaN where a target has no such far context. `BEST` is
    there where two or more selectors are no controls: the lowest L_k, taken for each target, k and far context by
    itself. It says that k tokens exist which recover so much, not how to find them without the answer; the placebo's
    best is what the same search finds in text that has nothing to do with the target. It is the evaluating model that
    takes the lowest, so `BEST` is never cross-fitted.

    ``way``: that of keeping, by default the `usual_way`; ``k``: that of what is shown at one k, see `choose_k`;
    ``bootstrap``: its resamples and seed. Raises `UserError` where recovery is undefined.
    """

    @classmethod
    def of_all_ways(cls, result: Measurement, k: int | None = None, **bootstrap: int) -> list[Measured]:
        """One for every way."""
        refuse_without_gain(result)
        return [cls(result, k, way, **bootstrap) for way in ways_kept(result)]

    def __init__(
        self,
        result: Measurement,
        k: int | None = None,
        way: Mapping[str, Any] | None = None,
        **bootstrap: int,
    ):
        refuse_without_gain(result)
        self.way = dict(way or usual_way(result))
        self.result = of_one_way(result, self.way)
        self.options = bootstrap
        self.ks = result.ks
        self.k = choose_k(result.ks, k)
        chosen_by = self.result.choices["selector"].unique()
        self.selectors = [selector for selector in result.selectors if selector in chosen_by]
        self.finished = np.unique(self.result.over_of_choice)
        """Which of the targets in ``result.over`` have choices, (m,); ``over``: their rows in ``targets``."""
        self.over = result.over[self.finished]
        targets = result.targets.iloc[self.over]
        self.document = targets["text"].to_numpy()
        self.short_nats = targets["loss_short_nats"].to_numpy(np.float64)
        self.long_nats = targets["loss_long_nats"].to_numpy(np.float64)
        self.gain_nats = self.short_nats - self.long_nats
        """L_short - L_long of the model that evaluates, (m,); under cross-fitting some are negative."""
        self.losses = {}
        for selector in self.selectors:
            for context in result.far_contexts:
                self.losses[selector, context] = self._losses_of(selector, context)
        no_controls = [selector for selector in self.selectors if selector not in CONTROLS]
        if len(no_controls) >= 2:
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

    @cached_property
    def bootstrap(self) -> ClusterBootstrap:
        """That of all targets of the result."""
        return ClusterBootstrap.of(self.result.targets, **self.options)

    def of_choices(self, column: str, selector: str, far_context: str) -> np.ndarray:
        """A column of the choices for these targets, (m,) or (m, length)."""
        of_over = self.result.of_choices(column, selector, far_context, **self.way)
        return of_over[self.finished]

    def _losses_of(self, selector: str, far_context: str) -> np.ndarray:
        """L_k of these targets, (m, K); NaN where none of them has such a far context."""
        if (selector, far_context, *self.way.values()) not in self.result.rows_of_choices:
            return np.full((len(self.finished), len(self.ks)), np.nan)
        return self.of_choices("loss_nats", selector, far_context)

    def column(self, values: np.ndarray | float) -> np.ndarray:
        """Values of these targets, (m,) or (m, C), as columns of all targets, (n,) or (n, C)."""
        column = np.zeros((len(self.result.targets), *np.shape(values)[1:]))
        column[self.over] = values
        return column

    def draws(self, above: np.ndarray, below: np.ndarray | float = 1.0) -> np.ndarray:
        """Draws of Σ above / Σ below over these targets, see `ClusterBootstrap.ratio`."""
        return self.bootstrap.ratio(self.column(above), self.column(below))

    def interval(self, draws: np.ndarray) -> dict[str, float]:
        """Value, low and high of draws, (1 + R,)."""
        return asdict(self.bootstrap.interval(draws))

    def ratio(self, above: np.ndarray, below: np.ndarray | float = 1.0) -> dict[str, float]:
        """Value, low and high of Σ above / Σ below over these targets, (m,) both; cut where it is a share."""
        return self.ratio_of_all(self.column(above), self.column(below))

    def ratio_of_all(self, above: np.ndarray, below: np.ndarray | float = 1.0) -> dict[str, float]:
        """`ratio` over all targets of the result, (n,) both."""
        below = np.broadcast_to(below, above.shape)
        return asdict(self.bootstrap.ratio_interval(above, below))

    def recoveries(
        self, selector: str, members: np.ndarray | float = 1.0, far_contexts: Sequence[str] | None = None
    ) -> dict[str, np.ndarray]:
        """Draws of recovery at every k, (1 + R, K), by far context; with a placebo also `NET`.

        Each is relative to the gain by the true far context. `NET` is recovery minus that of the placebo where it is
        positive, in the sample and in every resample by itself (docs/method.md, 2.3 [ours]).
        """
        members = np.broadcast_to(members, self.gain_nats.shape)
        draws = {}
        for context in far_contexts or self.far_contexts:
            saved = np.nan_to_num(self.short_nats[:, None] - self.losses[selector, context])
            draws[context] = self.draws(saved * members[:, None], self.gain_nats * members)
        if PLACEBO in draws:
            draws[NET] = draws[TRUE] - np.maximum(draws[PLACEBO], 0.0)
        return draws

    def at_k(self, draws: np.ndarray, k: int) -> dict[str, float]:
        """Value, low and high of draws at every k, (1 + R, K), at one of them."""
        return self.interval(draws[:, self.ks.index(k)])

    def net_at_k(self, net: np.ndarray, recovery: np.ndarray, k: int) -> dict[str, float]:
        """`at_k` of draws of a net recovery: no bound exceeds that of the recovery, and is NaN where that is."""
        interval = self.at_k(net, k)
        of_recovery = self.at_k(recovery, k)
        for bound in ("low", "high"):
            interval[bound] = float(np.minimum(interval[bound], of_recovery[bound]))
        return interval

    def rows(self, draws: np.ndarray, **keys: Any) -> Iterator[Row]:
        """``keys``, k, value, low and high of draws at every k, (1 + R, K)."""
        for k in self.ks:
            yield {**keys, "k": k, **self.at_k(draws, k)}

    def recovery_rows(
        self, selectors: Iterable[str], ks: Iterable[int], members: np.ndarray | float = 1.0, **keys: Any
    ) -> Iterator[Row]:
        """``keys``, selector, far_context, k, value, low and high; `NET` as by `net_at_k`."""
        for selector in selectors:
            recoveries = self.recoveries(selector, members)
            for k in ks:
                for context, draws in recoveries.items():
                    interval = self.at_k(draws, k)
                    if context == NET:
                        interval = self.net_at_k(draws, recoveries[TRUE], k)
                    yield {**keys, "selector": selector, "far_context": context, "k": k, **interval}


def over_tau_column(result: Measurement) -> np.ndarray:
    """1 for every target over tau, finished or not, else 0, (n,)."""
    return result.targets["over_tau"].to_numpy(np.float64)


def selecting_gain_nats(result: Measurement) -> np.ndarray:
    """L_short - L_long of the model that selects, (n,)."""
    return np.asarray(result.targets.get("selecting_gain_nats", result.gain_nats))


def default_selector(names: Iterable[str]) -> str:
    """The selector that others are compared with: `DEFAULT_SELECTOR`, else its signed form, else the first that is no
    control."""
    names = list(names)
    no_controls = [name for name in names if name not in CONTROLS]
    for name in (DEFAULT_SELECTOR, SIGNED_SELECTOR, *no_controls):
        if name in names:
            return name
    return names[0]


def choose_k(ks: Sequence[int], requested: int | None = None) -> int:
    """The k of what is shown at one k only: ``requested``, else `DEFAULT_K`, else the closest (the smallest of two)."""
    if requested is None:
        return min(ks, key=lambda k: (abs(k - DEFAULT_K), k))
    if requested not in ks:
        raise UserError(f"k = {requested} was not measured; choose one of {', '.join(map(str, ks))}")
    return int(requested)  # of a frame with empty cells it is a float


def refuse_without_gain(result: Measurement) -> None:
    """Raise `UserError` where no recovery is defined: no target over tau, or gains that sum to nothing."""
    reason = why_no_recovery(result)
    if reason:
        raise UserError(reason)


def why_no_recovery(result: Measurement) -> str:
    """Why no recovery is defined, and the remedy, in one line; empty where it is defined."""
    if not result.selectors:
        return "no tokens were chosen, as the result was measured without selectors; measure again with some"
    over = result.over
    if len(over) == 0:
        return f"no target is over tau: {none_over_tau(result)}; measure with a lower tau, or more targets"
    if result.choices.empty:
        return f"no tokens were chosen yet for the {len(over):,} targets over tau; go on measuring"
    total = result.gain_nats[over].sum()
    if total <= 0:
        return (
            f"recovery is undefined: the gains of the {len(over):,} targets over tau sum to {total:.3g} nats under the "
            "evaluating model; measure with more targets, or tau >= 0"
        )
    return ""


def none_over_tau(result: Measurement) -> str:
    """Of a Result without a target over tau: that none gains so much, and how much the largest gain is."""
    so_far = ""
    if not result.settings.complete:
        so_far = " measured so far"
    tau = nats(result.settings.choices.tau_nats)
    largest = largest_gain(result)
    return f"none of {len(result.targets):,} targets{so_far} gains more than {tau} from the long context{largest}"


def largest_gain(result: Measurement) -> str:
    """``; the largest gain is 0.8 nats``, of the model that decides which targets are over tau; empty without any."""
    if len(result.targets) == 0:
        return ""
    by = ""
    if "selecting_gain_nats" in result.targets:
        by = " of the model that selects"
    largest = float(selecting_gain_nats(result).max())
    return f"; the largest gain{by} is {nats(round(largest, 3))}"


def nats(value: float) -> str:
    """``1 nat``, ``0.5 nats``."""
    if value == 1:
        return "1 nat"
    return f"{value:g} nats"
