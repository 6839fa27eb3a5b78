"""Every number of a Result, as tidy frames with 95 % intervals: one row a number, in the columns value, low and high.

Shares and recoveries are fractions, losses nats per token. ``low`` and ``high`` are NaN where the data support no
interval. Of a Result joined of three runs or more the numbers are those of all together, and the intervals also say how
much runs differ. Two are pooled: the columns first_run and second_run have the value in either by itself. Every
function takes ``resamples`` (2,000) and ``seed`` (0) of the bootstrap; all intervals of a Result rest on the same
resamples. Recoveries are of the targets over tau.

    recovery(k)     Σ (L_short - L_k) / Σ (L_short - L_long)     (paper Eq. 20, docs/method.md 2.2)
    placebo         the same sums, L_k measured in the placebo far context, same denominator   [ours]
    net             recovery(k) - max(0, placebo(k))                                           [ours]

``selector`` may be ``best``: the lowest L_k of all selectors. ``far_context`` may be ``net``. A frame that is of one k
only is of ``k``, by default 4 or the closest that was measured. The columns level, unit and sinks say how chosen tokens
were kept: a result has rows of every way (`analysis.stats.recovery.of_one_way` picks one). All but `shares`
and `persistence` raise `UserError` where recovery is undefined: no target over tau, or gains that sum to nothing.
Further frames stand in `context_worth`, `attribution` and `comparisons`.
Shapes: n sampled targets, m of them over tau with finished choices, K values of k.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import pairwise, product
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import OTHER_TARGET, PLACEBO, SAME_GROUP, SHUFFLED, TRUE, placebo_column
from analysis.measurement import Measurement
from analysis.stats.bootstrap import ClusterBootstrap, count_clusters
from analysis.stats.recovery import (
    CONTROLS,
    KEPT_AS_COLUMNS,
    NET,
    Measured,
    Row,
    choose_k,
    default_selector,
    over_tau_column,
    selecting_gain_nats,
)
from analysis.stats.tables import INTERVAL, interval_frame
from analysis.token_kinds import KINDS
from olmo_sparsity.util.errors import UserError

GAIN_EDGES_NATS = (1.0, 2.0, 3.0, 5.0)
"""Inner edges of the bins of L_short - L_long; those not above tau are left out. [ours]"""
P_LONG_EDGES = (0.2, 0.5)
"""Inner edges of the bins of p_long, the probability of the target given the long context. [ours]"""
DISTANCE_BINS = 8
"""At most so many bins of the distance, equally wide on a logarithmic scale. [ours]"""
SHARE_NEEDED = 0.9
"""Of L_short - L_long: a target has what it needs when k tokens recover so much. [ours]"""
BLIND_FORMS = ("kl", "tv")
"""What the name of a selector's target-blind forms ends with."""
OWN, RANDOM, SINKS_ALONE = "own", CONTROLS[0], "sinks"
"""Rungs of the ladder of specificity beside the far contexts."""
LARGEST = "largest"
"""Name of the largest positive placebo, beside those that it is taken from."""
ENOUGH_NATS = 0.1
"""A context is enough where its loss is at most so much above L_long. [ours]"""
OF_CHOICE = ("selector", "far_context", "k")
OF_BIN = ("by", "above", "up_to")
"""A bin of targets: of which of `BINNED_BY`, and its edges, of which it includes the upper one."""
OF_KIND = ("n_targets", "n_targets_over_tau", "n_documents_over_tau", "n_groups_over_tau")


Frame = Callable[..., pd.DataFrame]
Rows = Callable[[Measured], Iterable[Row]]


@dataclass(frozen=True)
class Numbers:
    """One kind of numbers of a result, as it is registered."""

    frame: Frame
    """Makes the frame of a `Measurement`."""
    columns: tuple[str, ...]
    of_choices: bool = True
    """Whether it needs targets over tau, with what was chosen for them."""
    one_k: bool = False
    """Whether it is of one k only."""
    in_nats: bool = False
    """Whether its values are losses; else they are shares, but for those whose ``name`` ends with "_nats"."""
    printed: str = "all"
    """Of which selectors the printed summary shows it: "all", or the "default" one."""


NUMBERS: dict[str, Numbers] = {}
"""Every kind of numbers by its name, in the order in which they are printed. The methods of `analysis.Result`, the
printed summary and ``numbers.csv`` are made of it."""


def frame_of(*names: str, one_k: bool = False, **options: Any) -> Callable[[Rows], Frame]:
    """Register a function that yields the rows of one way of keeping as one that gives a result's frame, of all ways.

    Columns are those of the way, ``names`` and those of the interval; the docstring says so. ``options``: further
    fields of `Numbers`.
    """
    columns = (*KEPT_AS_COLUMNS, *names, *INTERVAL)

    def decorate(rows_of: Rows) -> Frame:
        @wraps(rows_of)
        def frame(
            result: Measurement,
            *,
            selector: str | Sequence[str] | None = None,
            far_context: str | Sequence[str] | None = None,
            k: int | Sequence[int] | None = None,
            resamples: int = 2000,
            seed: int = 0,
        ) -> pd.DataFrame:
            at_k = None
            if one_k:
                if not isinstance(k, Real | None):
                    raise UserError(f"{rows_of.__name__} is of one k, not of {k!r}")
                at_k = choose_k(result.ks, k)
            all_rows = frame_of_all_ways(result, rows_of, names, resamples, seed, at_k)
            if one_k:
                return rows_with(all_rows, selector=selector, far_context=far_context)
            return rows_with(all_rows, selector=selector, far_context=far_context, k=k)

        frame.__doc__ = f"{rows_of.__doc__}\n\nColumns: {', '.join(columns)}."
        NUMBERS[rows_of.__name__] = Numbers(frame, columns, one_k=one_k, **options)
        return frame

    return decorate


def frame_of_all_ways(
    result: Measurement,
    rows_of: Rows,
    names: Sequence[str],
    resamples: int,
    seed: int,
    k: int | None = None,
) -> pd.DataFrame:
    """The rows of every way of keeping in a result, as one frame; ``k``: as `Measured` takes it."""
    of_all_ways = Measured.of_all_ways(result, k, resamples=resamples, seed=seed)
    rows = [measured.way | row for measured in of_all_ways for row in rows_of(measured)]
    return interval_frame(rows, [*KEPT_AS_COLUMNS, *names])


def frame_of_targets(*names: str) -> Callable[[Frame], Frame]:
    """Register a function that gives a frame of all targets, whether or not one of them is over tau."""

    def decorate(frame: Frame) -> Frame:
        columns = (*names, *INTERVAL)
        frame.__doc__ = f"{frame.__doc__}\n\nColumns: {', '.join(columns)}."
        NUMBERS[frame.__name__] = Numbers(frame, columns, of_choices=False)
        return frame

    return decorate


def rows_with(frame: pd.DataFrame, **picked: Any) -> pd.DataFrame:
    """The rows of a frame that have no other value than those ``picked`` of a column; None wants all.

    Raises `UserError`, which lists the values that there are, for a value that there is not.
    """
    for column, values in picked.items():
        if values is None:
            continue
        if isinstance(values, str | Real):
            values = [values]
        values = list(values)
        measured = []
        if column in frame:
            measured = frame[column].dropna().unique().tolist()
        unknown = [value for value in values if value not in measured]
        if unknown and len(frame):
            choices = ", ".join(map(str, measured)) or "nothing: these numbers have none"
            raise UserError(f"{column} = {unknown[0]!r} was not measured; choose from {choices}")
        if measured:
            frame = frame[frame[column].isna() | frame[column].isin(values)]
    return frame.reset_index(drop=True)


def counts(result: Measurement) -> dict[str, int]:
    """How much was measured: targets (of all runs together), targets_over_tau, targets_measured (finished),
    documents, documents_over_tau, and where the texts have groups groups, groups_over_tau; runs.

    What captions say, and `analysis.stats.bootstrap.by_clusters` reads.
    """
    targets = result.targets
    finished = result.over[np.unique(result.over_of_choice)]
    sizes = {"targets": len(targets), "targets_over_tau": len(result.over), "targets_measured": len(finished)}
    sizes |= count_clusters(targets)
    sizes |= count_clusters(targets.iloc[finished], "_over_tau")
    sizes["runs"] = max(1, len(result.runs))
    return sizes


# --- of all targets ---


@frame_of_targets("name")
def shares(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """name, value, low, high; no target need be over tau. Names:

    loss_short_nats, loss_long_nats, gain_nats, absolute_gain_nats     means of all targets
    share_over_tau, share_below_minus_tau                              the tail, and its mirror (docs/method.md, 2.4)
    share_of_gain                                                      of all gains summed, held by those over tau
    loss_placebo_nats, net_gain_nats                                   where it was measured: the loss given the long
                                                                       context with the placebo in it, and that - L_long
    loss_short_over_tau_nats, loss_long_over_tau_nats                  means of the targets over tau
    """
    targets = result.targets
    gain = result.gain_nats
    over = over_tau_column(result)
    short = targets["loss_short_nats"].to_numpy(np.float64)
    long = targets["loss_long_nats"].to_numpy(np.float64)
    below_minus_tau = selecting_gain_nats(result) < -result.settings.choices.tau_nats
    one = np.ones(len(targets))
    finished = over
    if len(result.choices):
        finished = np.zeros(len(targets))
        finished[result.over[result.over_of_choice]] = 1.0
    ratios = [
        ("loss_short_nats", short, one),
        ("loss_long_nats", long, one),
        ("gain_nats", gain, one),
        ("absolute_gain_nats", np.abs(gain), one),
        ("share_over_tau", over, one),
        ("share_below_minus_tau", below_minus_tau, one),
        ("share_of_gain", gain * over, gain),
        ("loss_short_over_tau_nats", short * finished, finished),
        ("loss_long_over_tau_nats", long * finished, finished),
    ]
    if placebo_column(PLACEBO) in targets:
        placebo = targets[placebo_column(PLACEBO)].to_numpy(np.float64)
        ratios += [("loss_placebo_nats", placebo, one), ("net_gain_nats", placebo - long, one)]
    return ratios_of_targets(result, ratios, resamples, seed)


@frame_of_targets("name")
def persistence(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """What is left of the gain that targets were chosen for, where results are cross-fitted; no rows otherwise.

    name, value, low, high. Names: selecting_gain_nats, gain_nats (means over the targets over tau, under the model that
    selects and the one that evaluates), share_still_over_tau (under the one that evaluates).
    """
    ratios = []
    if result.crossfit:
        over = over_tau_column(result)
        gain = result.gain_nats
        still_over = gain > result.settings.choices.tau_nats
        ratios = [
            ("selecting_gain_nats", over * selecting_gain_nats(result), over),
            ("gain_nats", over * gain, over),
            ("share_still_over_tau", over * still_over, over),
        ]
    return ratios_of_targets(result, ratios, resamples, seed)


def ratios_of_targets(
    result: Measurement, ratios: Iterable[tuple[str, np.ndarray, np.ndarray]], resamples: int, seed: int
) -> pd.DataFrame:
    """name, value, low and high of sums over all targets divided by others, (n,) both."""
    of_all = ClusterBootstrap.of(result.targets, resamples=resamples, seed=seed)
    rows = []
    for name, above, below in ratios:
        interval = of_all.ratio_interval(above, below)
        rows.append({"name": name, **asdict(interval)})
    return interval_frame(rows, ["name"])


# --- of what k far tokens recover ---


@frame_of(*OF_CHOICE)
def recovery(measured: Measured) -> Iterator[Row]:
    """Recovery of every selector; far_context "true", "placebo" and "net"."""
    yield from measured.recovery_rows(measured.names, measured.ks)


@frame_of(*OF_CHOICE, in_nats=True)
def losses(measured: Measured) -> Iterator[Row]:
    """Mean L_k in nats over the targets over tau; far_context "true" and "placebo"."""
    for selector, context in product(measured.names, measured.far_contexts):
        draws = measured.draws(measured.losses[selector, context])
        yield from measured.rows(draws, selector=selector, far_context=context)


@frame_of("first", "second", "far_context", "k", one_k=True)
def differences(measured: Measured) -> Iterator[Row]:
    """Recovery of the default selector minus that of every other, paired; far_context "net" and "true"."""
    first = default_selector(measured.names)
    of_first = measured.recoveries(first)
    if NET not in of_first:
        return
    for second in measured.names:
        if second == first:
            continue
        of_second = measured.recoveries(second)
        keys = {"first": first, "second": second, "k": measured.k}
        for context in (NET, TRUE):
            draws = of_first[context] - of_second[context]
            yield {**keys, "far_context": context, **measured.at_k(draws, measured.k)}


@frame_of("name", *OF_CHOICE, "n_targets", printed="default")
def tokens_needed(measured: Measured) -> Iterator[Row]:
    """Share of the targets that have `SHARE_NEEDED` of their gain from k tokens, or a smaller measured k.

    Names: reached; never (not from the largest k; true far context only). Only targets that gain anything count: under
    cross-fitting a target may lose by the long context of the model that evaluates, and has then nothing to recover.
    """
    gains = measured.gain_nats > 0
    ks = measured.ks
    for selector, context in product(measured.names, measured.far_contexts):
        saved = measured.short_nats[:, None] - measured.losses[selector, context]
        enough = saved >= SHARE_NEEDED * measured.gain_nats[:, None]
        reached = np.logical_or.accumulate(enough, axis=1) & gains[:, None]
        keys = {"selector": selector, "far_context": context, "n_targets": int(gains.sum())}
        for k, reached_at_k in zip(ks, reached.T, strict=True):
            share = measured.ratio(reached_at_k, gains)
            yield {"name": "reached", "k": k, **keys, **share}
        if context == TRUE:
            share = measured.ratio(gains & ~reached[:, -1], gains)
            yield {"name": "never", "k": ks[-1], **keys, **share}


@frame_of("from_nats", "to_nats", "n_targets", "n_documents", *OF_CHOICE, one_k=True, printed="default")
def gain_bins(measured: Measured) -> Iterator[Row]:
    """Recovery by gain of the target, from_nats … to_nats (inclusive; inf).

    The selecting model's gain decides, as it does for tau. A bin of the evaluating model's gain would hold targets by
    chance of that model, which cross-fitting is to avoid.
    """
    for one in bins_by("gain_nats", measured.result):
        inside, size = _members_of(one, measured)
        keys: Row = {"from_nats": one.above, "to_nats": one.up_to, **size}
        yield from measured.recovery_rows(measured.names, [measured.k], inside, **keys)


def gain_edges(tau_nats: float) -> list[float]:
    """Edges of the bins of L_short - L_long in nats, from tau to infinity."""
    inner = [edge for edge in GAIN_EDGES_NATS if edge > tau_nats]
    return [tau_nats, *inner, float("inf")]


@dataclass(frozen=True)
class Bin:
    """Targets whose gain, or p_long, is above one edge, and not above the next."""

    by: str
    above: float
    up_to: float

    def has(self, result: Measurement) -> np.ndarray:
        """Which of the targets over tau of a result, or of one of its runs, are in it, (n,) bool."""
        values = BINNED_BY[self.by](result)
        edges = _edges(self.by, result)
        # the outer bins are open: a loss of 0 may be rounded to less
        index = np.searchsorted(edges[1:-1], values)
        return (index == edges.index(self.above)) & result.targets["over_tau"].to_numpy()


def p_long(result: Measurement) -> np.ndarray:
    """The probability of every target given the long context, of the model that evaluates, (n,)."""
    return np.exp(-result.targets["loss_long_nats"].to_numpy(np.float64))


BINNED_BY = {"gain_nats": selecting_gain_nats, "p_long": p_long}
"""What bins are of: the gain, of the model that selects, and the target's probability given the long context."""


def bins_by(by: str, result: Measurement) -> list[Bin]:
    """The bins of the targets over tau, ascending. Raises `UserError` for what is not in `BINNED_BY`."""
    if by not in BINNED_BY:
        raise UserError(f"{by!r} divides no targets; choose from {', '.join(BINNED_BY)}")
    return [Bin(by, above, up_to) for above, up_to in pairwise(_edges(by, result))]


def _edges(by: str, result: Measurement) -> list[float]:
    if by == "p_long":
        return [0.0, *P_LONG_EDGES, 1.0]
    return gain_edges(result.settings.choices.tau_nats)


@frame_of(*OF_BIN, "n_targets", "n_documents", *OF_CHOICE, printed="default")
def target_bins(measured: Measured) -> Iterator[Row]:
    """Recovery at every k by the gain of the target in nats, and by its probability given the long context.

    ``by``: gain_nats, as `gain_bins`, or p_long. Where p_long is high the KL divergence is nearly the target's own loss
    (docs/method.md, 2.4).
    """
    for by in BINNED_BY:
        for one in bins_by(by, measured.result):
            inside, size = _members_of(one, measured)
            yield from measured.recovery_rows(measured.names, measured.ks, inside, **asdict(one), **size)


def _members_of(one: Bin, measured: Measured) -> tuple[np.ndarray, dict[str, int]]:
    """Which of the targets over tau are in a bin, (m,) bool, and how many targets and documents these are."""
    inside = one.has(measured.result)[measured.over]
    documents = np.unique(measured.document[inside])
    return inside, {"n_targets": int(inside.sum()), "n_documents": len(documents)}


# --- which dependencies the far context carries [ours] (docs/method.md, 2.6) ---


@frame_of("kind", *OF_KIND, "name", *OF_CHOICE, one_k=True, printed="default")
def kinds(measured: Measured) -> Iterator[Row]:
    """Numbers of every kind of dependency that was sampled; n_groups_over_tau is NaN without groups.

    Names: share (of all targets), share_over_tau (of those over tau), gain_nats (mean of all of the kind), recovery
    (with selector, far_context and k).
    """
    targets = measured.result.targets
    over = over_tau_column(measured.result)
    kind_of_target = targets["kind"].to_numpy()
    there = set(kind_of_target)
    known = [kind for kind in KINDS if kind in there]
    others = sorted(there.difference(KINDS))
    for kind in [*known, *others]:
        of_kind = kind_of_target == kind
        members = of_kind.astype(np.float64)
        targets_over = targets[of_kind & targets["over_tau"]]
        groups_over: float = np.nan
        if "group" in targets:
            groups_over = targets_over["group"].nunique()
        keys = {
            "kind": kind,
            "n_targets": int(members.sum()),
            "n_targets_over_tau": len(targets_over),
            "n_documents_over_tau": targets_over["text"].nunique(),
            "n_groups_over_tau": groups_over,
        }
        share = measured.ratio_of_all(members)
        yield {**keys, "name": "share", **share}
        share_over = measured.ratio_of_all(members * over, over)
        yield {**keys, "name": "share_over_tau", **share_over}
        gain = measured.ratio_of_all(members * measured.result.gain_nats, members)
        yield {**keys, "name": "gain_nats", **gain}
        inside = members[measured.over]
        yield from measured.recovery_rows(measured.names, [measured.k], inside, name="recovery", **keys)


def distance_edges(n_long: int, n_short: int) -> list[int]:
    """Edges of the bins in tokens back from the target, ascending: M + 1 … N + 1; a bin excludes its upper edge.

    In a block (docs/method.md, 2.1) from its first target, so that uniform choice has the same share for all.
    """
    edges = np.geomspace(n_short + 1, n_long + 1, DISTANCE_BINS + 1)
    return np.unique(np.rint(edges).astype(int)).tolist()


@frame_of(*OF_CHOICE, "from_tokens", "to_tokens", "uniform", one_k=True, printed="default")
def distances(measured: Measured) -> Iterator[Row]:
    """How far back the first k chosen tokens stand, as a share of them per bin; position id c is N - c tokens back.

    A bin excludes to_tokens; uniform is its share of tokens drawn uniformly.
    """
    lengths = measured.result.settings.contexts
    k = measured.k
    edges = distance_edges(lengths.n_long, lengths.n_short)
    for selector, context in product(measured.selectors, measured.far_contexts):
        position = measured.of_choices("selected", selector, context)[:, :k]
        distance = lengths.n_long - position
        keys = {"selector": selector, "far_context": context, "k": k}
        for low, high in pairwise(edges):
            inside = (distance >= low) & (distance < high)
            uniform = (high - low) / measured.result.n_far
            of_bin = {"from_tokens": low, "to_tokens": high, "uniform": uniform}
            yield keys | of_bin | measured.ratio(inside.sum(axis=1), k)


@frame_of("name", *OF_CHOICE, "n_targets", one_k=True, printed="default")
def near_copies(measured: Measured) -> Iterator[Row]:
    """Targets in near copies of training text, and recovery without them; no rows where copies are unknown.

    Names: share (of all targets), share_over_tau, recovery.
    """
    targets = measured.result.targets
    if "near_copy" not in targets:
        return
    copies = targets["near_copy"].to_numpy(np.float64)
    share = measured.ratio_of_all(copies)
    yield {"name": "share", "n_targets": int(copies.sum()), **share}
    over = over_tau_column(measured.result)
    copies_over = copies * over
    share_over = measured.ratio_of_all(copies_over, over)
    yield {"name": "share_over_tau", "n_targets": int(copies_over.sum()), **share_over}
    others = 1 - copies[measured.over]
    keys = {"name": "recovery", "n_targets": int(others.sum())}
    yield from measured.recovery_rows(measured.selectors, [measured.k], others, **keys)


@frame_of(*OF_CHOICE, one_k=True, printed="default")
def special_tokens(measured: Measured) -> Iterator[Row]:
    """Share of the first k chosen tokens that are special; no rows where the texts have no special tokens."""
    if "selected_special" not in measured.result.choices:
        return
    for selector, context in product(measured.selectors, measured.far_contexts):
        is_special = measured.of_choices("selected_special", selector, context)[:, : measured.k]
        count = np.nan_to_num(is_special).sum(axis=1)
        keys = {"selector": selector, "far_context": context, "k": measured.k}
        yield keys | measured.ratio(count, measured.k)


# --- the parts of a recovery (docs/method.md, 2.3) ---


def blind_form(selector: str, form: str) -> str:
    """The name of a selector's target-blind form: of ``leave-one-out/cache:4``, ``leave-one-out-kl/cache:4``."""
    name = re.split("[/@]", selector, maxsplit=1)[0]
    return f"{name}-{form}{selector.removeprefix(name)}"


@frame_of("name", "selector", "blind", "far_context", "k", "n_targets")
def placebos(measured: Measured) -> Iterator[Row]:
    """Recovery in every far context, and its parts, of the targets that have every far context.

    No rows without a further placebo; other targets' tokens are none (see `specificity`). ``blind``: name of the
    selector's target-blind form, of parts only. Names:

        recovery          by selector and far_context
        selection_bias    what the signed selector has more than the blind one in the placebo (winner's curse)
        common_context    what the blind one has in each placebo, and `LARGEST`: the largest of these that is positive
        specific          what the blind one has in its own text beyond the largest
    """
    contexts = [context for context in measured.result.far_contexts if context != OTHER_TARGET]
    selectors = measured.selectors
    losses = [measured.losses[selectors[0], context] for context in contexts]  # every selector has all
    comparable = np.isfinite(losses).all(axis=(0, 2))
    if set(contexts) <= {TRUE, PLACEBO} or not comparable.any():
        return

    recoveries = {name: measured.recoveries(name, comparable, contexts) for name in measured.names}
    parts: dict[tuple[str, str, str | None, str], np.ndarray] = {}
    for selector, context in product(recoveries, contexts):
        parts["recovery", selector, None, context] = recoveries[selector][context]
    for signed, form in product(selectors, BLIND_FORMS):
        blind = blind_form(signed, form)
        if blind in recoveries:
            common = {context: recoveries[blind][context] for context in contexts if context != TRUE}
            if PLACEBO in common:
                bias = recoveries[signed][PLACEBO] - common[PLACEBO]
                parts["selection_bias", signed, blind, PLACEBO] = bias
            largest = np.max(list(common.values()), axis=0)
            common[LARGEST] = np.maximum(largest, 0.0)
            for context, draws in common.items():
                parts["common_context", signed, blind, context] = draws
            parts["specific", signed, blind, TRUE] = recoveries[blind][TRUE] - common[LARGEST]
    n_targets = int(comparable.sum())
    for (name, selector, form_of, context), draws in parts.items():
        keys = {"name": name, "selector": selector, "blind": form_of, "far_context": context}
        yield from measured.rows(draws, **keys, n_targets=n_targets)


@frame_of("name", "selector", "k", "n_targets", printed="default")
def specificity(measured: Measured) -> Iterator[Row]:
    """The ladder of specificity: recovery of the tokens chosen for a target, and of what they are compared with.

    Of the targets that have every rung, so that rungs are paired; what no target has is left out. Names:

        own                               the tokens that the selector chose for the target
        other-target                      those that it chose for another target of the block
        same-group, shuffled, placebo     those that it chose in this far context
        random                            random tokens of the target's far context; not of ``random`` itself
        sinks                             no token but the sinks, the same at every k; of ways with sinks
    """
    for selector in measured.selectors:
        rungs, members = specificity_draws(measured, selector)
        for name, draws in rungs.items():
            yield from measured.rows(draws, name=name, selector=selector, n_targets=int(members.sum()))


def specificity_draws(measured: Measured, selector: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draws of the recovery of every rung that a selector has, (1 + R, K), and the targets that have all, (m,) bool."""
    rungs = {OWN: measured.losses[selector, TRUE]}
    for context in (OTHER_TARGET, SAME_GROUP, SHUFFLED, PLACEBO):
        if context in measured.result.far_contexts:
            rungs[context] = measured.losses[selector, context]
    if RANDOM in measured.selectors and selector != RANDOM:
        rungs[RANDOM] = measured.losses[RANDOM, TRUE]
    if measured.way["sinks"] and "loss_base_nats" in measured.result.choices:
        base = measured.of_choices("loss_base_nats", selector, TRUE)
        rungs[SINKS_ALONE] = np.repeat(base[:, None], len(measured.ks), axis=1)
    rungs = {name: losses for name, losses in rungs.items() if np.isfinite(losses).any()}
    members = np.isfinite(list(rungs.values())).all(axis=(0, 2))
    if not members.any():
        return {}, members
    draws = {}
    for name, losses in rungs.items():
        saved = np.nan_to_num(measured.short_nats[:, None] - losses)
        draws[name] = measured.draws(saved * members[:, None], measured.gain_nats * members)
    return draws, members


def overlap(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Share of the k tokens of one choice that are in the other, (m,); both (m, k). By chance it is k / F."""
    in_both = (first[:, :, None] == second[:, None, :]).any(axis=2)
    return in_both.mean(axis=1)
