"""Every number of a comparison of eviction policies, as tidy frames with 95 % intervals (docs/eviction.md [ours]).

Intervals are by group and text (`analysis.stats.bootstrap`); all numbers of a record rest on the same resamples, so
that differences are paired. Frames of policies have the columns `KEYS`, value, low and high:

    far_context         "true" or "placebo"
    policy, sees        its name, and what it has seen when it chooses
    near                "kept" or "reread": what becomes of the near tokens
    budget, keys        the share of the far keys that are kept, and K, their number a head in the mean, sinks included
    keys_beyond_sinks   K without them

Shapes: n targets, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any, Self

import numpy as np
import pandas as pd

from analysis.cache_eviction.record import AWARE, BLIND, FULL, NONE, SINKS, EvictionRecord
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.contexts import TRUE
from analysis.faithfulness import row_spearman
from analysis.stats.bootstrap import DEFAULT_RESAMPLES, ClusterBootstrap, holm
from analysis.stats.tables import INTERVAL, interval_frame
from analysis.token_kinds import KINDS
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.rng import Stream

LOSS, KL, SHARE, TOP = "loss_over_full_nats", "kl_nats", "share_of_gain", "loss_over_full_top_tenth_nats"
SPEARMAN, OVERLAP = "spearman", "overlap"
KEYS = ["far_context", "policy", "sees", "near", "budget", "keys", "keys_beyond_sinks"]
SNAPKV = "snapkv"
"""The policy that others are compared with."""
_TOP = 10
"""One of so many targets is among those that gain most."""
GAIN_EDGES_NATS = (-math.inf, 0.0, 1.0, 2.0, 4.0, math.inf)
"""Between the bins of `by_gain`: a target stands in the one whose lower edge it is above."""
_LEAST_POLICIES = 4
"""Of fewer policies a rank correlation says nothing."""
_FIRST_BIN = 4
"""Targets in the first bin of `by_distance`; later bins are as long as all before them."""
Column = tuple[str, str, float]
"""Policy, near and budget."""
Bins = Iterator[tuple[dict[str, Any], np.ndarray]]
"""What a bin is, and which targets are in it, (n,) bool."""


class Measured:
    """The losses of a record in one far context, a column a policy, and the bootstrap that its numbers rest on."""

    def __init__(self, record: EvictionRecord, far_context: str = TRUE, *, resamples: int, seed: int):
        self.record = record
        self.far_context = far_context
        self._policies = record.policies
        targets = record.targets
        self.bootstrap = ClusterBootstrap.of(targets, resamples=resamples, seed=seed)
        losses = _wide(record.losses, far_context, "target_id", ["loss_nats", "kl_nats"])
        losses = losses.loc[targets["target_id"]]
        self._losses = losses["loss_nats"]
        self._kl = losses["kl_nats"]
        blocks = targets.drop_duplicates("block")
        self._blocks = pd.Index(blocks["block"])
        self._by_block = ClusterBootstrap.of(blocks, resamples=resamples, seed=seed)
        self._agreement = _wide(record.choices, far_context, "block", [SPEARMAN, OVERLAP]).loc[
            blocks["block"]
        ]

    @classmethod
    def of_far_contexts(cls, record: EvictionRecord, *, resamples: int, seed: int) -> Iterator[Self]:
        """Of every far context of a record."""
        for far_context in record.far_contexts:
            yield cls(record, far_context, resamples=resamples, seed=seed)

    def columns(self, near: str | None = None) -> list[Column]:
        """Of everything that was judged, in its order; of one way of the near tokens, or of all."""
        columns = []
        for policy, _, of_policy in self._policies.itertuples(index=False):
            for budget in self.record.settings.budgets:
                column = (policy, of_policy, budget)
                if near in (None, of_policy) and column in self._losses.columns:
                    columns.append(column)
        return columns

    def keys(self, column: Column) -> dict[str, Any]:
        """`KEYS` of a column."""
        policy, near, budget = column
        settings = self.record.settings
        sees = self._policies.loc[self._policies["policy"] == policy, "sees"].iloc[0]
        count = settings.keys[settings.budgets.index(budget)]
        return {
            "far_context": self.far_context,
            "policy": policy,
            "sees": sees,
            "near": near,
            "budget": budget,
            "keys": count,
            "keys_beyond_sinks": count - settings.sinks,
        }

    def full(self, near: str) -> np.ndarray:
        """Loss with the full cache, by the passes of one way of the near tokens, (n,) nats."""
        return self._losses[FULL, near, 1.0].to_numpy()

    def gains(self, near: str) -> np.ndarray:
        """L_short less the loss with the full cache, (n,) nats."""
        return self._losses[NONE, NEAR_REREAD, 0.0].to_numpy() - self.full(near)

    def over_full(self, column: Column) -> np.ndarray:
        """Loss over that with the full cache, (n,) nats."""
        return self._losses[column].to_numpy() - self.full(column[1])

    def kl(self, column: Column) -> np.ndarray:
        """KL to the full cache, (n,) nats."""
        return self._kl[column].to_numpy()

    def draws(self, values: np.ndarray, of: np.ndarray | None = None) -> np.ndarray:
        """Draws of the mean of some values (n,) over all targets, or over those in ``of``, (n,) bool: (1 + R,)."""
        counted = np.ones(len(values)) if of is None else of.astype(float)
        return self.bootstrap.ratio(values * counted, counted)

    def interval(self, draws: np.ndarray) -> dict[str, Any]:
        """Value, low and high of draws."""
        return asdict(self.bootstrap.interval(draws))

    def difference(self, first: Column, second: Column) -> dict[str, Any]:
        """Loss over full of the first less that of the second, paired by target: value, low, high and p."""
        draws = self.draws(self.over_full(first) - self.over_full(second))
        return {**self.interval(draws), "p": self.bootstrap.p_value(draws)}

    def of_blocks(self, blocks: Sequence[int] | pd.Index, values: np.ndarray) -> dict[str, Any]:
        """Value, low and high of the mean of some values over some of the blocks, both (b,)."""
        of_each = np.zeros(len(self._blocks))
        is_there = np.zeros(len(self._blocks))
        rows = self._blocks.get_indexer(blocks)
        of_each[rows] = values
        is_there[rows] = 1.0
        return asdict(self._by_block.interval(self._by_block.ratio(of_each, is_there)))

    def agreement_draws(self, column: Column, name: str) -> np.ndarray:
        """Draws of the mean over blocks of `SPEARMAN` or `OVERLAP` of a column, (1 + R,); NaN where no block has it."""
        values = self._agreement[(name, *column)].to_numpy()
        there = np.isfinite(values)
        return self._by_block.ratio(np.where(there, values, 0.0), there.astype(float))

    def agreement(self, column: Column, name: str) -> dict[str, Any] | None:
        """Mean over blocks of `SPEARMAN` or `OVERLAP` of a column; None where no block has it."""
        draws = self.agreement_draws(column, name)
        if np.isnan(draws[0]):
            return None
        return asdict(self._by_block.interval(draws))


def _wide(frame: pd.DataFrame, far_context: str, index: str, values: list[str]) -> pd.DataFrame:
    """The rows of one far context with a column for every value, policy, near and budget."""
    rows = frame[frame["far_context"] == far_context]
    wide = rows.pivot(index=index, columns=["policy", "near", "budget"], values=values)
    return wide.astype(np.float64)


def gain(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean losses of all targets: far_context, name, value, low, high.

    Names: loss_full_nats (with the full cache), loss_short_nats (without far keys), gain_nats (their difference).
    """
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        full = measured.full(NEAR_REREAD)
        gains = measured.gains(NEAR_REREAD)
        values = {"loss_full_nats": full, "loss_short_nats": full + gains, "gain_nats": gains}
        for name, of_targets in values.items():
            interval = measured.interval(measured.draws(of_targets))
            rows.append({"far_context": measured.far_context, "name": name, **interval})
    return interval_frame(rows, ["far_context", "name"])


def caches(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean loss over that with the full cache where nothing is chosen: what there is to lose.

    Columns: far_context, policy (`SINKS`: the sinks alone are kept, or `NONE`: no far key), near, value, low, high.
    """
    settings = record.settings
    shares = {NONE: 0.0}
    if settings.sinks:
        shares = {SINKS: settings.sinks / settings.contexts.n_far, NONE: 0.0}
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        for near in record.nears:
            for name, share in shares.items():
                interval = measured.interval(measured.draws(measured.over_full((name, near, share))))
                rows.append({"far_context": measured.far_context, "policy": name, "near": near, **interval})
    return interval_frame(rows, ["far_context", "policy", "near"])


def summary(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """The numbers of every policy, reference, way of the near tokens and budget: `KEYS`, name, value, low, high.

    Names:

        loss_over_full_nats            mean loss of all targets less that with the full cache: the headline
        kl_nats                        mean KL from the prediction with the full cache
        share_of_gain                  what is left of the gain of the far context, where its interval is above 0
        loss_over_full_top_tenth_nats  the first, of the tenth of the targets that gain most from the far context
        spearman, overlap              see `EvictionRecord`, means over blocks

    In the placebo far context there are no gains to share.
    """
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        for near in record.nears:
            gains = measured.gains(near)
            is_gain = measured.interval(measured.draws(gains))["low"] > 0
            for column in measured.columns(near):
                keys = measured.keys(column)
                for name, interval in _means(measured, column):
                    rows.append({**keys, "name": name, **interval})
                if measured.far_context == TRUE:
                    for name, interval in _of_gains(measured, column, gains, is_gain):
                        rows.append({**keys, "name": name, **interval})
    return interval_frame(rows, [*KEYS, "name"])


def _means(measured: Measured, column: Column) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and interval of what is a mean over all targets, or over blocks."""
    yield LOSS, measured.interval(measured.draws(measured.over_full(column)))
    yield KL, measured.interval(measured.draws(measured.kl(column)))
    for name in (SPEARMAN, OVERLAP):
        interval = measured.agreement(column, name)
        if interval is not None:
            yield name, interval


def _of_gains(
    measured: Measured, column: Column, gains: np.ndarray, is_gain: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and interval of what rests on the gains of the targets, (n,); ``is_gain``: their mean is above 0."""
    over = measured.over_full(column)
    if is_gain:
        yield SHARE, measured.interval(measured.bootstrap.ratio(gains - over, gains))
    top = np.zeros(len(gains), dtype=bool)
    top[np.argsort(-gains, kind="stable")[: max(1, len(gains) // _TOP)]] = True
    yield TOP, measured.interval(measured.draws(over, top))


def differences(
    record: EvictionRecord,
    reference: str = SNAPKV,
    near: str = NEAR_KEPT,
    policies: Sequence[str] | None = None,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean loss with every policy less that with one of them, paired by target: `KEYS`, value, low, high, p, p_holm.

    ``policies``: those that are compared, of policies, controls and references; None: all. ``p`` is two-sided;
    ``p_holm`` is adjusted for their number at all budgets, without references, which have none. Both are NaN where
    there is no interval, as where both keep the same keys. Budgets at which that one was not judged are left out.
    Raises `UserError` where one was not judged with the near tokens treated so.
    """
    _check_near(record, near)
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        columns = measured.columns(near)
        judged = list(dict.fromkeys(policy for policy, *_ in columns))
        for name in (reference, *(policies or ())):
            if name not in judged:
                raise UserError(
                    f"{name!r} was not judged with near tokens {near!r}; choose from {', '.join(judged) or 'none'}"
                )
        for column in columns:
            policy, _, budget = column
            of_reference = (reference, near, budget)
            if policy == reference or of_reference not in columns:
                continue
            if policies is not None and policy not in policies:
                continue
            rows.append({**measured.keys(column), **measured.difference(column, of_reference)})
    return _with_p(rows, KEYS, untested=record.settings.references)


def aware_less_blind(
    record: EvictionRecord,
    near: str = NEAR_REREAD,
    *,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean loss with every policy that has seen the near tokens less that with the same policy blind, paired by target.

    Near tokens are read again behind a blind policy. ``near``: what becomes of them behind the aware one. "reread": the
    same, so that nothing differs but what was seen at the choice. "kept", as published: the difference also has what is
    gained as the near tokens keep keys that were read with the full cache; both losses are over the full cache of their
    own passes, which are equal but for rounding.

    Columns: `KEYS` of the aware policy, blind (the other's name), value, low, high, p, p_holm, adjusted for the number
    of policies at all budgets. Empty where no policy was judged in both ways. Raises `UserError` for another ``near``.
    """
    _check_near(record, near)
    pairs = _aware_and_blind(record)
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        columns = set(measured.columns())
        for aware, blind in pairs:
            for budget in record.settings.budgets:
                first = (aware, near, budget)
                second = (blind, NEAR_REREAD, budget)
                if first in columns and second in columns:
                    difference = measured.difference(first, second)
                    rows.append({**measured.keys(first), "blind": blind, **difference})
    return _with_p(rows, [*KEYS, "blind"])


def _aware_and_blind(record: EvictionRecord) -> list[tuple[str, str]]:
    """The names of every policy that was judged aware and blind, with the same parameters beside."""
    blind_ones = {}
    aware_ones = {}
    for policy, sees, _ in record.policies.itertuples(index=False):
        name, *parts = policy.split(":")
        others = tuple(sorted(part for part in parts if not part.startswith("blind=")))
        if sees == BLIND:
            blind_ones[name, others] = policy
        elif sees == AWARE:
            aware_ones[policy] = (name, others)
    return [(policy, blind_ones[key]) for policy, key in aware_ones.items() if key in blind_ones]


def _check_near(record: EvictionRecord, near: str) -> None:
    """Raise `UserError` for a way of the near tokens that was not measured."""
    if near not in record.nears:
        raise UserError(f"near tokens were not treated as {near!r}; choose from {', '.join(record.nears)}")


def _with_p(
    rows: Sequence[dict[str, Any]], keys: Sequence[str], untested: Sequence[str] = ()
) -> pd.DataFrame:
    """Rows with an interval and p as a frame, and p_holm, adjusted by far context but for policies that are no test."""
    frame = interval_frame(rows, [*keys, "p"])
    tested = frame["p"].mask(frame["policy"].isin(untested))
    frame["p_holm"] = tested.groupby(frame["far_context"]).transform(holm)
    return frame[[*keys, *INTERVAL, "p", "p_holm"]]


def best_found(
    record: EvictionRecord,
    *,
    policies: Sequence[str] | None = None,
    resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """What is best by KL on one half of the groups, measured on the other half, and the other way round.

    ``policies``: those, controls and references that are chosen from; None: all.

    Blocks are halved where there are no two groups. Never the best of a block by its own loss. ``seed``: of the halves
    and of the bootstrap, whose intervals take the choices as given. Columns: far_context, near, budget, keys, first,
    second (what the first and the second half choose), name (loss_over_full_nats, kl_nats), value, low, high: means
    over the targets of both halves. Raises `UserError` where there is only one block.
    """
    if record.counts["blocks"] < 2:
        raise UserError(
            "the best policy is chosen on half of the blocks, and there is one block; measure more"
        )
    halved = "group" if record.counts.get("groups", 0) > 1 else "block"
    order = np.random.default_rng([Stream.HALVES, seed]).permutation(record.targets[halved].unique())
    in_first = record.targets[halved].isin(order[: len(order) // 2]).to_numpy()
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        for near in record.nears:
            columns = measured.columns(near)
            for budget, count in zip(record.settings.budgets, record.settings.keys, strict=True):
                judged = [column for column in columns if column[2] == budget]
                if policies is not None:
                    judged = [column for column in judged if column[0] in policies]
                if not judged:
                    continue
                by_first = min(judged, key=lambda column: measured.kl(column)[in_first].mean())
                by_second = min(judged, key=lambda column: measured.kl(column)[~in_first].mean())
                keys = {
                    "far_context": measured.far_context,
                    "near": near,
                    "budget": budget,
                    "keys": count,
                    "first": by_first[0],
                    "second": by_second[0],
                }
                for name, values in ((LOSS, measured.over_full), (KL, measured.kl)):
                    crossed = np.where(in_first, values(by_second), values(by_first))
                    rows.append({**keys, "name": name, **measured.interval(measured.draws(crossed))})
    return interval_frame(rows, ["far_context", "near", "budget", "keys", "first", "second", "name"])


def by_distance(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean loss over that with the full cache, by how far a target stands behind the choice.

    Columns: `KEYS`, from_tokens, to_tokens (not included; the first target behind the choice is at 1), value, low,
    high.
    """
    distance = 1 + record.targets["place"].to_numpy()
    edges = distance_edges(record.settings.contexts.targets_per_block)

    def bins_of(measured: Measured, column: Column) -> Bins:
        for start, end in pairwise(edges):
            yield {"from_tokens": start, "to_tokens": end}, (start <= distance) & (distance < end)

    return _in_bins(record, bins_of, ["from_tokens", "to_tokens"], resamples, seed)


def by_gain(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean loss over that with the full cache, by what a target gains from the far context.

    The gain is L_short less the loss with the full cache, so that a bin of large gains holds targets whose loss with
    the full cache is low by luck, too: what differs between policies within a bin is free of that. Columns: `KEYS`,
    above_nats, up_to_nats (`GAIN_EDGES_NATS`), n_targets, value, low, high.
    """

    def bins_of(measured: Measured, column: Column) -> Bins:
        gains = measured.gains(column[1])
        for above, up_to in pairwise(GAIN_EDGES_NATS):
            yield {"above_nats": above, "up_to_nats": up_to}, (above < gains) & (gains <= up_to)

    return _in_bins(record, bins_of, ["above_nats", "up_to_nats", "n_targets"], resamples, seed)


def by_kind(record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Mean loss over that with the full cache, by the kind of dependency (docs/method.md, 2.6).

    Columns: `KEYS`, kind, n_targets, value, low, high.
    """
    of_targets = record.targets["kind"].to_numpy()

    def bins_of(measured: Measured, column: Column) -> Bins:
        for kind in KINDS:
            yield {"kind": kind}, of_targets == kind

    return _in_bins(record, bins_of, ["kind", "n_targets"], resamples, seed)


def _in_bins(
    record: EvictionRecord,
    bins_of: Callable[[Measured, Column], Bins],
    names: Sequence[str],
    resamples: int,
    seed: int,
) -> pd.DataFrame:
    """Mean loss over that with the full cache in each bin that has targets: `KEYS`, ``names``, value, low, high."""
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        for column in measured.columns():
            over = measured.over_full(column)
            for bin_keys, inside in bins_of(measured, column):
                if inside.any():
                    keys = {**measured.keys(column), **bin_keys, "n_targets": int(inside.sum())}
                    rows.append({**keys, **measured.interval(measured.draws(over, inside))})
    return interval_frame(rows, [*KEYS, *names])


def keeps(
    record: EvictionRecord, tokens: pd.DataFrame, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """The share of layers and heads that keep given far tokens: `KEYS`, name, value, low, high, means over blocks.

    ``tokens``: a row a token, with block, name and column (in the far context, from 0); of those of one name in a block
    the mean counts. Of two names there is also "FIRST less SECOND", paired by block, of the blocks that have both.
    Raises `UserError` where the record has no kept sets, or ``tokens`` lacks a column.
    """
    if "kept_share" not in record.choices:
        raise UserError("no kept sets were saved; measure with kept_sets=True")
    if missing := {"block", "name", "column"}.difference(tokens):
        raise UserError(
            f"tokens lack {', '.join(sorted(missing))}; give a row a token, with block, name and column"
        )
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        choices = record.choices[record.choices["far_context"] == measured.far_context]
        kept = choices.set_index(["policy", "near", "budget", "block"])["kept_share"].sort_index()
        for column in measured.columns():
            of_column = kept.loc[column]
            shares = {}
            for name, named in tokens.groupby("name", sort=False):
                by_block = named.groupby("block")["column"]
                shares[name] = pd.Series(
                    {block: float(of_column[block][places].mean()) for block, places in by_block}
                )
            if len(shares) == 2:
                first, second = shares
                shares[f"{first} less {second}"] = (shares[first] - shares[second]).dropna()
            for name, of_blocks in shares.items():
                interval = measured.of_blocks(of_blocks.index, of_blocks.to_numpy())
                rows.append({**measured.keys(column), "name": name, **interval})
    return interval_frame(rows, [*KEYS, "name"])


def agreement_tells(
    record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """Does agreement with the exact effects tell which policy costs least? Spearman's correlation over policies.

    Of the mean overlap, or rank correlation with the exact effects, with the mean loss over full: -1 says that the
    policies that agree more lose less. Controls count, references do not; policies that keep the same keys count once.
    Columns: far_context, near, budget, keys, n_policies, name (`SPEARMAN`, `OVERLAP`), value, low, high, cut at -1
    and 1.
    """
    rows = []
    for measured in Measured.of_far_contexts(record, resamples=resamples, seed=seed):
        for near in record.nears:
            for budget, count in zip(record.settings.budgets, record.settings.keys, strict=True):
                columns: list[Column] = []
                for column in measured.columns(near):
                    if column[2] != budget or column[0] in record.settings.references:
                        continue
                    of_column = measured.over_full(column)
                    if not any(np.array_equal(measured.over_full(other), of_column) for other in columns):
                        columns.append(column)
                if len(columns) < _LEAST_POLICIES:
                    continue
                losses = [measured.draws(measured.over_full(column)) for column in columns]
                for name in (SPEARMAN, OVERLAP):
                    agreements = [measured.agreement_draws(column, name) for column in columns]
                    draws = row_spearman(np.stack(agreements, axis=1), np.stack(losses, axis=1))
                    if np.isnan(draws[0]):
                        continue
                    keys = {
                        "far_context": measured.far_context,
                        "near": near,
                        "budget": budget,
                        "keys": count,
                        "n_policies": len(columns),
                        "name": name,
                    }
                    interval = measured.interval(draws)
                    for bound in ("low", "high"):  # NaN stays
                        interval[bound] = float(np.clip(interval[bound], -1, 1))
                    rows.append({**keys, **interval})
    return interval_frame(rows, ["far_context", "near", "budget", "keys", "n_policies", "name"])


def distance_edges(targets_per_block: int) -> list[int]:
    """Edges of the bins of `by_distance`, ascending, from 1 to B + 1."""
    edges = [1]
    length = _FIRST_BIN
    while length < targets_per_block:
        edges.append(1 + length)
        length *= 2
    return [*edges, 1 + targets_per_block]


def every_number(
    record: EvictionRecord, *, resamples: int = DEFAULT_RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """All frames of a record, one below the other; the column ``frame`` says which. What a frame lacks is empty."""
    bootstrap: dict[str, Any] = {"resamples": resamples, "seed": seed}
    frames = {
        "gain": gain(record, **bootstrap),
        "caches": caches(record, **bootstrap),
        "summary": summary(record, **bootstrap),
    }
    judged = record.policies
    for near in record.nears:
        if (judged["near"] == near)[judged["policy"] == SNAPKV].any():
            frames[f"differences to {SNAPKV}, near {near}"] = differences(record, SNAPKV, near, **bootstrap)
    if _aware_and_blind(record):
        for near in record.nears:
            frames[f"aware, near {near}, less blind"] = aware_less_blind(record, near, **bootstrap)
    if record.counts["blocks"] > 1:
        frames["best_found"] = best_found(record, **bootstrap)
    frames["by_distance"] = by_distance(record, **bootstrap)
    frames["agreement_tells"] = agreement_tells(record, **bootstrap)
    frames["by_gain"] = by_gain(record, **bootstrap)
    frames["by_kind"] = by_kind(record, **bootstrap)
    named = [frame.assign(frame=name) for name, frame in frames.items() if len(frame)]
    stacked = pd.concat(named, ignore_index=True)
    others = [name for name in stacked if name not in ("frame", *INTERVAL)]
    return stacked[["frame", *others, *INTERVAL]]
