"""`EvictionResult`: which eviction policy keeps what the next predictions need; `analysis.eviction` gives one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from analysis.cache_eviction import numbers
from analysis.cache_eviction.record import EvictionRecord
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.contexts import TRUE
from analysis.saved import last_part
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, by_clusters, counted, enough_for_intervals
from analysis.stats.tables import INTERVAL, interval_text, show
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, user_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = "numbers.csv"
_HEADS = {numbers.LOSS: "over_full_nats", numbers.TOP: "top_tenth_nats"}
"""Shorter names for the printed table."""


@dataclass(frozen=True, repr=False)
class EvictionResult(EvictionRecord):
    """What a comparison of eviction policies measured, with its numbers and pictures (docs/eviction.md).

    ``print(result)`` shows the policies at the middle budget. Every number is a method that gives a tidy frame with
    95 % intervals, by group and text, in the columns value, low and high; all rest on the same resamples.
    ``resamples`` and ``seed`` are of the bootstrap.
    """

    def gain(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.gain`: losses with the full cache, and without far keys."""
        return numbers.gain(self, resamples=resamples, seed=seed)

    def caches(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.caches`: losses with the sinks alone, and without far keys."""
        return numbers.caches(self, resamples=resamples, seed=seed)

    def summary(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.summary`: a row for each policy, budget and number."""
        return numbers.summary(self, resamples=resamples, seed=seed)

    def differences(
        self,
        reference: str = numbers.SNAPKV,
        near: str = NEAR_KEPT,
        policies: Sequence[str] | None = None,
        *,
        resamples: int = DEFAULT_RESAMPLES,
        seed: int = 0,
    ) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.differences`: losses of policies less that of one, paired, with p."""
        return numbers.differences(self, reference, near, policies, resamples=resamples, seed=seed)

    def aware_less_blind(
        self, near: str = NEAR_REREAD, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
    ) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.aware_less_blind`: what a policy gains by seeing the near tokens."""
        return numbers.aware_less_blind(self, near, resamples=resamples, seed=seed)

    def best_found(
        self, *, policies: Sequence[str] | None = None, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
    ) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.best_found`: chosen on half of the groups, measured on the other."""
        return numbers.best_found(self, policies=policies, resamples=resamples, seed=seed)

    def by_distance(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.by_distance`: losses by how far targets stand behind the choice."""
        return numbers.by_distance(self, resamples=resamples, seed=seed)

    def agreement_tells(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.agreement_tells`: whether it tells which policy costs least."""
        return numbers.agreement_tells(self, resamples=resamples, seed=seed)

    def by_gain(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.by_gain`: losses by what targets gain from the far context."""
        return numbers.by_gain(self, resamples=resamples, seed=seed)

    def by_kind(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.by_kind`: losses by the kind of dependency."""
        return numbers.by_kind(self, resamples=resamples, seed=seed)

    def keeps(
        self, tokens: pd.DataFrame, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
    ) -> pd.DataFrame:
        """See `analysis.cache_eviction.numbers.keeps`: the share of heads that keep given far tokens."""
        return numbers.keeps(self, tokens, resamples=resamples, seed=seed)

    def every_number(self, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
        """All frames above one another, with a column ``frame``: what `numbers.csv` has."""
        return numbers.every_number(self, resamples=resamples, seed=seed)

    def figure(self) -> Figure:
        """Loss over that with the full cache against the budget, a line for every policy and reference."""
        # not above: numbers are read without matplotlib
        from analysis.cache_eviction.figure import drawn, eviction_figure

        best = None
        if self.counts["blocks"] > 1:
            of_panels = {near: self.best_found(policies=drawn(self.policies, near)) for near in self.nears}
            best = pd.concat([frame[frame["near"] == near] for near, frame in of_panels.items()])
        heading = self.heading(with_folders=False)
        return eviction_figure(self.summary(), best, self.settings.budgets, heading=heading)

    def write(self, folder: str | Path) -> list[Path]:
        """Write all numbers as `numbers.csv`, and the figure; returns the paths."""
        from analysis.figures.style import save_figure

        path = user_path(folder) / NUMBERS
        with atomic_path(path) as temporary:
            self.every_number().to_csv(temporary, index=False)
        return [path, *save_figure(self.figure(), folder, "eviction.png")]

    def heading(self, *, with_folders: bool = True) -> str:
        """What was measured, in one line; ``with_folders``: model and texts by their paths, not by the last part."""
        lengths = self.settings.contexts
        size = self.counts
        model = self.settings.model.name
        texts = self.settings.texts.name
        if not with_folders:
            model = last_part(model)
            texts = last_part(texts)
        return (
            f"{model} on {texts}: N {lengths.n_long:,}, M {lengths.n_short}, "
            f"{counted(size['targets'], 'target')} in {counted(size['blocks'], 'block')} of "
            f"{lengths.targets_per_block}, {counted(size['documents'], 'document')}"
        )

    def __str__(self) -> str:
        """The policies at the middle budget, the best first, and what to look at next."""
        size = self.counts
        losses = {row["name"]: row for row in self.gain().to_dict("records") if row["far_context"] == TRUE}
        gain = losses["gain_nats"]
        lines = [
            self.heading(),
            f"mean loss {interval_text(losses['loss_full_nats'])} nats with the full cache, "
            f"{interval_text(losses['loss_short_nats'])} without far keys: a gain of {interval_text(gain)}",
        ]
        if not gain["low"] > 0:
            lines.append("its interval is not above 0, so that no share of it is given")
        intervals = by_clusters(size)
        if enough_for_intervals(size):
            intervals = f"[95 % interval] {intervals}"
        lines += ["", self.table(), "", f"{intervals}; what the columns are: docs/eviction.md"]
        lines.append(
            f"next: .summary() has all budgets; .differences({numbers.SNAPKV!r}), .best_found(), .by_distance(), "
            ".figure(), .write(FOLDER)"
        )
        return "\n".join(lines)

    def table(self, budget: float | None = None) -> str:
        """The numbers of all policies at one budget, by default the middle one, as text, the lowest loss first.

        Raises `UserError` for a budget that was not measured.
        """
        settings = self.settings
        if budget is None:
            budget = settings.budgets[settings.middle]
        if budget not in settings.budgets:
            choices = ", ".join(map(str, settings.budgets))
            raise UserError(f"nothing was judged at a budget of {budget}; choose from {choices}")
        frame = self.summary()
        frame = frame[(frame["budget"] == budget) & (frame["far_context"] == TRUE)]
        headline = frame[frame["name"] == numbers.LOSS].sort_values("value", kind="stable")
        frame = headline[["policy", "near"]].merge(frame)
        # other intervals would make lines too long for a terminal
        frame.loc[frame["name"] != numbers.LOSS, ["low", "high"]] = np.nan
        frame["name"] = frame["name"].replace(_HEADS)
        shown = frame[["policy", "sees", "near", "name", *INTERVAL]]
        keys = settings.keys[settings.budgets.index(budget)]
        title = (
            f"{100 * budget:g} % of the far keys: {keys} of {settings.contexts.n_far:,} a head in the mean, "
            f"{settings.sinks} sinks included"
        )
        return show(shown, across="name", percent=False, digits=2, title=title)
