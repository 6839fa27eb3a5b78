"""Numbers that compare: selectors, far contexts, ways of keeping, thresholds, and two results with each other.

They are functions of results that give tidy frames with 95 % intervals, as those of `analysis.stats.numbers`, and rest
on the same resamples. The scripts of studies in `results/` print them. Differences are paired: both numbers are
computed in every resample, and subtracted there.

    overlaps                   how many of a selector's tokens another one chooses, too, beside chance
    within                     how many targets come close to L_long, from k tokens or from k at most
    smallest_k                 for how many targets k tokens give half, nine tenths or all but 0.1 nats of the gain
    held_by_few                the share of the gain of all targets that those hold whose gain k tokens recover
    elsewhere                  what the same document gives elsewhere, net of another document's
    distances_beside_uniform   how many times as frequent chosen tokens are at a distance as under uniform choice
    adjusted_differences       of selectors, in several results, with p adjusted for how many differences there are
    kept_as_differences        kept in one way, less in another: words and tokens, with sinks and without
    specificity_differences    a target's own tokens, less what they are compared with in the ladder of specificity
    by_tau                     any frame at several thresholds
    by_bins                    any frame in bins of the gain or of p_long
    with_equal_groups          shares and gains in which no group weighs more than another
    result_overlaps            how many tokens two models choose both, of the targets that are over tau under both
    persistence_between        what is left under another run of the gain that targets were chosen for
    result_differences         one result less another, of the same targets or of others
    smallest_k_differences     likewise, for how many targets k tokens are enough

Shapes: n sampled targets, m of them over tau with finished choices, K values of k, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pandas as pd

from analysis.contexts import PLACEBO, SAME_GROUP, TRUE
from analysis.measurement import Measurement
from analysis.stats.bootstrap import CONFIDENCE, ClusterBootstrap, holm
from analysis.stats.numbers import (
    ENOUGH_NATS,
    NUMBERS,
    OWN,
    SHARE_NEEDED,
    Frame,
    bins_by,
    distances,
    frame_of_all_ways,
    overlap,
    rows_with,
    specificity_draws,
    target_bins,
)
from analysis.stats.recovery import (
    KEPT_AS_COLUMNS,
    NET,
    Measured,
    Row,
    choose_k,
    default_selector,
    over_tau_column,
    refuse_without_gain,
    selecting_gain_nats,
    ways_kept,
    why_no_recovery,
    with_over_tau,
)
from analysis.stats.tables import INTERVAL, OF_RUNS, interval_frame
from olmo_sparsity.util.errors import UserError

ENOUGH = {"half": 0.5, "nine_tenths": SHARE_NEEDED}
"""Shares of a target's gain that count as enough."""


def overlaps(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """The share of the default selector's first k tokens that are among the first k of every other selector.

    Columns: level, unit, sinks, first, second, k, chance (k / F: what two random choices share), value, low, high.
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        first = default_selector(measured.selectors)
        chosen = measured.of_choices("selected", first, TRUE)
        for second, k in product(measured.selectors, measured.ks):
            if second == first:
                continue
            others = measured.of_choices("selected", second, TRUE)
            shared = overlap(chosen[:, :k], others[:, :k]) * k
            keys = {"first": first, "second": second, "k": k, "chance": k / measured.result.n_far}
            yield keys | measured.ratio(np.rint(shared), k)

    return frame_of_all_ways(result, rows_of, ("first", "second", "k", "chance"), resamples, seed)


def within(
    result: Measurement, nats: float = ENOUGH_NATS, *, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """The share of the targets over tau whose loss given k tokens is at most ``nats`` above L_long.

    Columns: level, unit, sinks, name, selector, far_context ("true" and "placebo"), k, value, low, high. Names: at_k;
    k_or_fewer (from k tokens, or a smaller measured k: the targets whose smallest sufficient k is at most k).
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        most = measured.long_nats[:, None] + nats
        for selector, context in product(measured.selectors, measured.far_contexts):
            enough = measured.losses[selector, context] <= most
            ways = {"at_k": enough, "k_or_fewer": np.logical_or.accumulate(enough, axis=1)}
            for name, of_targets in ways.items():
                for k, at_k in zip(measured.ks, of_targets.T, strict=True):
                    keys = {"name": name, "selector": selector, "far_context": context, "k": k}
                    yield keys | measured.ratio(at_k)

    return frame_of_all_ways(result, rows_of, ("name", "selector", "far_context", "k"), resamples, seed)


def smallest_k(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """The share of the targets over tau that have enough of their gain from k tokens, or a smaller measured k.

    Columns: level, unit, sinks, name, selector, far_context ("true" and "placebo"), median (the smallest measured k
    that is enough for half of the targets; NaN: none is), k, value, low, high. Names: `ENOUGH`, and
    all_but_a_tenth_of_a_nat.
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        for selector, context in product(measured.selectors, measured.far_contexts):
            for name, reached in _reached(measured, selector, context).items():
                by_half = [
                    k for k, share in zip(measured.ks, reached.mean(axis=0), strict=True) if share >= 0.5
                ]
                median = by_half[0] if by_half else np.nan
                keys = {"name": name, "selector": selector, "far_context": context, "median": median}
                for k, at_k in zip(measured.ks, reached.T, strict=True):
                    yield keys | {"k": k} | measured.ratio(at_k)

    names = ("name", "selector", "far_context", "median", "k")
    return frame_of_all_ways(result, rows_of, names, resamples, seed)


def _reached(measured: Measured, selector: str, context: str) -> dict[str, np.ndarray]:
    """Which targets have enough of their gain from k tokens, or a smaller measured k, (m, K) bool, by name."""
    gains = measured.gain_nats[:, None]
    losses = measured.losses[selector, context]
    saved = measured.short_nats[:, None] - losses
    criteria = {name: saved >= share * gains for name, share in ENOUGH.items()}
    criteria["all_but_a_tenth_of_a_nat"] = losses <= measured.long_nats[:, None] + ENOUGH_NATS
    return {name: np.logical_or.accumulate(enough, axis=1) for name, enough in criteria.items()}


def held_by_few(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Σ gain over the targets that have `SHARE_NEEDED` of it from k tokens or fewer / Σ gain over all targets.

    Of the default selector; losses of other targets count, so it may exceed 1. Columns: level, unit, sinks, selector,
    far_context ("true" and "placebo"), k, value, low, high.
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        selector = default_selector(measured.selectors)
        gains = measured.gain_nats
        for context in measured.far_contexts:
            reached = _reached(measured, selector, context)["nine_tenths"]
            for k, at_k in zip(measured.ks, reached.T, strict=True):
                of_few = measured.column(np.where(at_k, gains, 0.0))
                draws = measured.bootstrap.ratio(of_few, measured.result.gain_nats)
                yield {"selector": selector, "far_context": context, "k": k, **measured.interval(draws)}

    return frame_of_all_ways(result, rows_of, ("selector", "far_context", "k"), resamples, seed)


def elsewhere(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """What tokens of another place of the same group recover, of the targets that have one; no rows without any.

    Columns: level, unit, sinks, name, selector, k, value, low, high. Names:

        net               recovery there less that in the placebo where it is positive: what a group repeats
        true_less_there   recovery in the true far context less that there: what the group does not repeat
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        if not {SAME_GROUP, PLACEBO} <= set(measured.result.far_contexts):
            return
        for selector in measured.selectors:
            members = np.isfinite(measured.losses[selector, SAME_GROUP]).all(axis=1)
            draws = measured.recoveries(selector, members, (TRUE, PLACEBO, SAME_GROUP))
            there = draws[SAME_GROUP]
            net = there - np.maximum(draws[PLACEBO], 0.0)
            for k in measured.ks if members.any() else ():
                yield {"name": "net", "selector": selector, "k": k, **measured.net_at_k(net, there, k)}
                difference = measured.at_k(draws[TRUE] - there, k)
                yield {"name": "true_less_there", "selector": selector, "k": k, **difference}

    return frame_of_all_ways(result, rows_of, ("name", "selector", "k"), resamples, seed)


def distances_beside_uniform(result: Measurement, **options: Any) -> pd.DataFrame:
    """`numbers.distances` divided by its column uniform: 1 where chosen tokens are as frequent as random ones.

    Columns and ``options``: those of `numbers.distances`, without uniform.
    """
    frame = distances(result, **options)
    for column in frame.columns.intersection([*INTERVAL, *OF_RUNS]):
        frame[column] /= frame["uniform"]
    return frame.drop(columns="uniform")


def adjusted_differences(
    results: Mapping[str, Measurement],
    ks: Iterable[int],
    selectors: Iterable[str] | None = None,
    *,
    num_tests: int | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Net recovery of the default selector less that of others, paired, in several results that ask one question.

    Args:
        results: by name.
        ks: those that were measured in all of them.
        selectors: the others; all without.
        num_tests: as for `holm`; by default the rows of the frame.

    Columns: result, level, unit, sinks, first, second, k, p (two-sided, `ClusterBootstrap.p_value`), p_holm (adjusted
    for all tests), value, low, high (not adjusted).
    """
    rows: list[Row] = []
    for name, result in results.items():
        for measured in Measured.of_all_ways(result, None, resamples=resamples, seed=seed):
            first = default_selector(measured.names)
            of_first = measured.recoveries(first)[NET]
            for second in measured.selectors:
                if second == first or (selectors is not None and second not in selectors):
                    continue
                draws = of_first - measured.recoveries(second)[NET]
                for k in ks:
                    p = measured.bootstrap.p_value(draws[:, measured.ks.index(k)])
                    keys = {"result": name, **measured.way, "first": first, "second": second, "k": k, "p": p}
                    rows.append(keys | measured.at_k(draws, k))
    names = ["result", *KEPT_AS_COLUMNS, "first", "second", "k", "p"]
    frame = interval_frame(rows, names)
    frame.insert(len(names), "p_holm", holm(frame["p"].to_numpy(), num_tests))
    return frame


def kept_as_differences(
    result: Measurement,
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Recovery of tokens kept in one way less that in another, of the selectors that have both, paired.

    Args:
        first, second: level, unit and sinks, see `analysis.kept`, such as {"level": "cache", "unit": "token", "sinks":
            4}.

    Columns: selector, far_context ("true", "placebo" and "net"), k, value, low, high. Raises `UserError` for a way
    that was not measured.
    """
    there = ways_kept(result)
    for way in (first, second):
        if dict(way) not in there:
            raise UserError(f"{dict(way)} was not measured; choose among {', '.join(map(str, there))}")
    bootstrap = {"resamples": resamples, "seed": seed}
    of_first, of_second = (Measured(result, way=way, **bootstrap) for way in (first, second))
    rows: list[Row] = []
    for selector in of_first.selectors:
        if selector in of_second.selectors:
            minuend, subtrahend = (measured.recoveries(selector) for measured in (of_first, of_second))
            for context, draws in minuend.items():
                difference = draws - subtrahend[context]
                rows += of_first.rows(difference, selector=selector, far_context=context)
    return interval_frame(rows, ["selector", "far_context", "k"])


def specificity_differences(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Recovery of a target's own tokens less that of every other rung of `numbers.specificity`, paired.

    Columns: level, unit, sinks, less (the rung), selector, k, n_targets, value, low, high.
    """

    def rows_of(measured: Measured) -> Iterator[Row]:
        for selector in measured.selectors:
            rungs, members = specificity_draws(measured, selector)
            for name, draws in rungs.items():
                if name != OWN:
                    keys = {"less": name, "selector": selector, "n_targets": int(members.sum())}
                    yield from measured.rows(rungs[OWN] - draws, **keys)

    return frame_of_all_ways(result, rows_of, ("less", "selector", "k", "n_targets"), resamples, seed)


def by_tau(frame: Frame, result: Measurement, taus_nats: Iterable[float], **options: Any) -> pd.DataFrame:
    """A frame of `analysis.stats.numbers`, such as `recovery`, at several thresholds, with a column tau_nats.

    Raises `UserError` for a tau below that of the result: of recoveries, as no tokens were chosen for the further
    targets, and of all numbers where the result keeps mean losses of them.
    """
    taus_nats = list(taus_nats)
    measured_nats = result.settings.choices.tau_nats
    if NUMBERS[frame.__name__].of_choices and min(taus_nats) < measured_nats:
        raise UserError(
            f"{frame.__name__} at tau {min(taus_nats):g}: tokens were chosen for targets over {measured_nats:g} nats; "
            "give a higher tau"
        )
    frames = [frame(at_tau(result, tau), **options).assign(tau_nats=float(tau)) for tau in taus_nats]
    return pd.concat(frames, ignore_index=True)


def by_bins(
    frame: Frame,
    result: Measurement,
    by: str,
    *,
    selector: str | Sequence[str] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """A frame of numbers of the targets over tau in each bin of "gain_nats" or "p_long" (`numbers.bins_by`).

    Columns: by, above, up_to (inclusive), and those of the frame. All bins have the same resamples. Bins in which no
    recovery is defined are left out. Raises `UserError` for another ``by``, for a frame with such bins, and where no
    recovery is defined at all.
    """
    refuse_without_gain(result)
    if frame is target_bins:
        raise UserError("target_bins has bins of targets already; give another frame")
    frames = []
    for one in bins_by(by, result):
        of_bin = with_over_tau(result, one.has)
        if why_no_recovery(of_bin):
            continue
        rows = frame(of_bin, **options)
        for place, (name, value) in enumerate(asdict(one).items()):
            rows.insert(place, name, value)
        frames.append(rows)
    filled = [rows for rows in frames if len(rows)] or frames[:1]
    # picked here, as a bin may lack what others have
    return rows_with(pd.concat(filled, ignore_index=True), selector=selector)


def at_tau(result: Measurement, tau_nats: float) -> Measurement:
    """The result with another threshold: its targets over it, under the model that selects, and their choices."""
    if tau_nats < result.settings.choices.tau_nats and result.settings.losses_not_over_tau is not None:
        raise UserError(
            f"tau {tau_nats:g} is below that of the result, {result.settings.choices.tau_nats:g}, which keeps mean "
            "losses of targets not over tau; give a higher tau"
        )
    of_targets = with_over_tau(result, lambda one: selecting_gain_nats(one) > tau_nats)
    return _with_tau(of_targets, tau_nats)


def _with_tau(result: Measurement, tau_nats: float) -> Measurement:
    """The result, and its runs, whose settings say this tau."""
    runs = tuple(_with_tau(run, tau_nats) for run in result.runs)
    return replace(result, settings=result.settings.but(tau_nats=tau_nats), runs=runs)


def with_equal_groups(result: Measurement, *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Means over targets in which every group has the same weight, in every run.

    Columns: name (share_over_tau, gain_nats), value, low, high. Raises `UserError` where texts have no groups.
    """
    if "group" not in result.targets:
        raise UserError("the texts of this result have no groups; give texts with a field for the group")
    bootstrap = ClusterBootstrap.of(result.targets, resamples=resamples, seed=seed)
    weight = group_weights(result.targets)
    numbers = {"share_over_tau": over_tau_column(result), "gain_nats": result.gain_nats}
    rows = [
        {"name": name, **asdict(bootstrap.ratio_interval(weight * values, weight))}
        for name, values in numbers.items()
    ]
    return interval_frame(rows, ["name"])


def group_weights(targets: pd.DataFrame) -> np.ndarray:
    """1 / the number of targets of the same group (and run), (n,)."""
    keys = [name for name in ("run", "group") if name in targets]
    return 1 / targets.groupby(keys)["text"].transform("size").to_numpy(np.float64)


def result_overlaps(
    first: Measurement, second: Measurement, *, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """The share of the first k tokens that one model chooses that another chooses, too, kept as by `of_one_way`.

    Of the targets over tau under both, n_targets. Columns: selector, far_context ("true" and "placebo"), n_targets, k,
    chance (k / F), value, low, high. Raises `UserError` where the two were measured on different targets.
    """
    refuse_other_targets(first, second)
    of_first, of_second = (Measured(one, resamples=resamples, seed=seed) for one in (first, second))
    over, *rows_of_both = np.intersect1d(of_first.over, of_second.over, return_indices=True)
    one = np.zeros(len(first.targets))
    one[over] = 1.0
    rows: list[Row] = []
    selectors = [name for name in of_first.selectors if name in of_second.selectors]
    for selector, context in product(selectors, of_first.far_contexts):
        chosen = [
            measured.of_choices("selected", selector, context)[of_both]
            for measured, of_both in zip((of_first, of_second), rows_of_both, strict=True)
        ]
        for k in sorted({*of_first.ks} & {*of_second.ks}):
            shared = np.zeros(len(first.targets))
            shared[over] = np.rint(overlap(chosen[0][:, :k], chosen[1][:, :k]) * k)
            keys = {"selector": selector, "far_context": context, "n_targets": len(over), "k": k}
            rows.append(keys | {"chance": k / first.n_far} | of_first.ratio_of_all(shared, k * one))
    return interval_frame(rows, ["selector", "far_context", "n_targets", "k", "chance"])


def are_of_same_texts(first: Measurement, second: Measurement) -> bool:
    """Whether a number of a text means the same one in both: of one corpus, or the same files, and of one split."""
    identities = [result.settings.texts for result in (first, second)]
    return len({(texts.sha256, texts.split) for texts in identities}) == 1


def refuse_other_targets(first: Measurement, second: Measurement) -> None:
    """Raise `UserError` where two results were not measured on the same targets."""
    identity = ["text", "position"]
    if "token" in first.targets and "token" in second.targets:  # some records name none
        identity.append("token")
    if not first.targets[identity].equals(second.targets[identity]):
        raise UserError("the results were measured on different targets; measure one of them again")


def persistence_between(runs: Sequence[Measurement], *, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """What another run leaves of the gain of targets over tau under one; means over all ordered pairs.

    Columns: name, value, low, high, by group for the runs at hand. Names: share_still_over_tau; where no losses
    are means, selecting_gain_nats and gain_nats (mean gain under the one that selects and under the other). Raises
    `UserError` where the runs were measured on different targets.
    """
    for run in runs[1:]:
        refuse_other_targets(runs[0], run)
    bootstrap = ClusterBootstrap.of(runs[0].targets, resamples=resamples, seed=seed)
    pairs = list(permutations(runs, 2))
    sums = {
        "share_still_over_tau": sum(over_tau_column(one) * over_tau_column(other) for one, other in pairs)
    }
    if all(run.settings.losses_not_over_tau is None for run in runs):
        sums["selecting_gain_nats"] = sum(over_tau_column(one) * one.gain_nats for one, _ in pairs)
        sums["gain_nats"] = sum(over_tau_column(one) * other.gain_nats for one, other in pairs)
    over = np.sum([over_tau_column(one) for one, _ in pairs], axis=0)
    rows = [
        {"name": name, **asdict(bootstrap.interval(bootstrap.ratio(above, over)))}
        for name, above in sums.items()
    ]
    return interval_frame(rows, ["name"])


def result_differences(
    first: Measurement,
    second: Measurement,
    *,
    selectors: tuple[str, str] | None = None,
    k: int | Sequence[int] | None = None,
    confidence: float = CONFIDENCE,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Numbers of the first result less those of the second, of the runs at hand.

    Groups (without groups: texts) that both were measured on are left out, or drawn, of both at once: on the same
    targets the difference is paired, on other texts the two are independent.

    Args:
        selectors: that of the first and that of the second result; by default the default one of both.
        k: of recovery; by default every k that both have.
        confidence: of the intervals; Bonferroni's for several tests is 1 - 0.05 / tests.

    Columns: name, far_context, k (of recovery), value, low, high. Names: loss_short_nats, loss_long_nats, gain_nats,
    share_over_tau (of all targets); share_over_tau_equal_groups (see `with_equal_groups`; where both have groups);
    recovery (far_context "true", and with a placebo "placebo" and "net").
    """
    results = (first, second)
    if selectors is None:
        selectors = (default_selector(first.selectors), default_selector(second.selectors))
    if k is None:
        k = sorted({*first.ks} & {*second.ks})
    ks = [int(one) for one in np.atleast_1d(k)]
    grouped = all("group" in result.targets for result in results)
    bootstrap = _bootstrap_of_both(results, grouped, confidence=confidence, resamples=resamples, seed=seed)
    sums = [_sums(result, selector, ks, grouped) for result, selector in zip(results, selectors, strict=True)]
    of_results = _draws_of_both(bootstrap, results, sums)
    for draws in of_results:
        for one in ks:
            if ("recovery", PLACEBO, one) in draws:
                placebo = np.maximum(draws["recovery", PLACEBO, one], 0.0)
                draws["recovery", NET, one] = draws["recovery", TRUE, one] - placebo
    rows = [
        dict(zip(("name", "far_context", "k"), key, strict=True))
        | asdict(bootstrap.interval(draws - of_results[1][key]))
        for key, draws in of_results[0].items()
        if key in of_results[1]
    ]
    return interval_frame(rows, ["name", "far_context", "k"])


def smallest_k_differences(
    first: Measurement, second: Measurement, *, resamples: int = 2000, seed: int = 0
) -> pd.DataFrame:
    """`smallest_k` of the first result less that of the second: of their default selectors, with the true far context.

    Groups are left out of both results at once, as in `result_differences`. Columns: name, k (those that both have),
    value, low, high.
    """
    results = (first, second)
    grouped = all("group" in result.targets for result in results)
    bootstrap = _bootstrap_of_both(results, grouped, resamples=resamples, seed=seed)
    sums = []
    for result in results:
        measured = Measured(result)
        over = over_tau_column(result)
        reached = _reached(measured, default_selector(measured.selectors), TRUE)
        sums.append(
            {
                (name, k): (measured.column(at_k), over)
                for name, by_k in reached.items()
                for k, at_k in zip(measured.ks, by_k.T, strict=True)
            }
        )
    minuends, subtrahends = _draws_of_both(bootstrap, results, sums)
    rows = []
    for (name, k), draws in minuends.items():
        if (name, k) in subtrahends:
            interval = bootstrap.interval(draws - subtrahends[name, k])
            rows.append({"name": name, "k": k, **asdict(interval)})
    return interval_frame(rows, ["name", "k"])


Key = tuple[str, str | None, int | None]
"""Name, far context and k of a number."""
Sums = tuple[np.ndarray, np.ndarray]
"""Numerator and denominator of a number, of every target, (n,) both."""


def _sums(result: Measurement, selector: str, ks: Sequence[int], grouped: bool) -> dict[Key, Sums]:
    """Every number of one result."""
    targets = result.targets
    one = np.ones(len(targets))
    over = over_tau_column(result)
    sums: dict[Key, Sums] = {
        ("loss_short_nats", None, None): (targets["loss_short_nats"].to_numpy(np.float64), one),
        ("loss_long_nats", None, None): (targets["loss_long_nats"].to_numpy(np.float64), one),
        ("gain_nats", None, None): (result.gain_nats, one),
        ("share_over_tau", None, None): (over, one),
    }
    if grouped:
        weight = group_weights(targets)
        sums["share_over_tau_equal_groups", None, None] = (weight * over, weight)
    measured = Measured(result)
    gain = measured.column(measured.gain_nats)
    for context, k in product(measured.far_contexts, ks):
        losses = measured.losses[selector, context][:, measured.ks.index(choose_k(measured.ks, k))]
        saved = np.nan_to_num(measured.short_nats - losses)
        sums["recovery", context, k] = (measured.column(saved), gain)
    return sums


def _draws_of_both(
    bootstrap: ClusterBootstrap, results: tuple[Measurement, Measurement], sums: Sequence[Mapping[Any, Sums]]
) -> list[dict[Any, np.ndarray]]:
    """Draws of the ratios of the sums of two results, whose targets stand one after the other in the bootstrap."""
    first, second = (len(result.targets) for result in results)
    of_results = []
    for of_result, ends in zip(sums, ((0, second), (first, 0)), strict=True):
        draws = {}
        for key, (above, below) in of_result.items():
            draws[key] = bootstrap.ratio(np.pad(above, ends), np.pad(below, ends))
        of_results.append(draws)
    return of_results


def _bootstrap_of_both(
    results: tuple[Measurement, Measurement], grouped: bool, **options: Any
) -> ClusterBootstrap:
    """That of the targets of two results, one after the other; see `are_of_same_texts`."""
    texts = [result.targets["text"].to_numpy() for result in results]
    if not are_of_same_texts(*results):
        texts[1] = texts[1] + texts[0].max() + 1
    groups = None
    if grouped:
        groups = np.concatenate([result.targets["group"].to_numpy() for result in results])
    return ClusterBootstrap(np.concatenate(texts), groups=groups, **options)
