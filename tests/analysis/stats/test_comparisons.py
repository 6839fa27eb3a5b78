"""Every comparison against plain loops over targets, and its interval against a jackknife written out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from analysis.api import Result
from analysis.stats import comparisons, numbers
from analysis.stats.numbers import ENOUGH_NATS, SHARE_NEEDED
from analysis.stats.tables import INTERVAL
from olmo_sparsity.util.errors import UserError
from tests.support.results import made_result

KS = (1, 2, 4, 8)
PLACES = ("true", "placebo", "same-group")
SINKS = {"level": "cache", "unit": "token", "sinks": 4}
TEXT = {"level": "text", "unit": "token", "sinks": 0}

Statistic = Callable[[Sequence[int]], float]
"""A number of the targets with these rows."""


@pytest.fixture(scope="module")
def result() -> Result:
    return made_result(texts=30, groups=7, far_contexts=PLACES)


def row_of(frame: pd.DataFrame, **where: Any) -> dict[str, Any]:
    """The single row with these values."""
    for name, value in where.items():
        frame = frame[frame[name].isna() if value is None else frame[name] == value]
    [row] = frame.to_dict("records")
    return row


def jackknife(statistic: Statistic, units: Sequence[Any]) -> tuple[float, float, float]:
    """A statistic of all targets, its standard error from it without each unit in turn, and degrees of freedom."""
    everything = range(len(units))
    value = statistic(everything)
    changes = [
        statistic([target for target in everything if units[target] != unit]) - value
        for unit in sorted(set(units))
    ]
    number = len(changes)
    squares = [change**2 for change in changes]
    if sum(squares) < 1e-20:
        return value, 0.0, 1.0
    variance = (number - 1) / number * sum(squares)
    effective = sum(squares) ** 2 / sum(square**2 for square in squares)
    freedom = min(max(effective, min(2, (number - 1) / 3)), number - 1)
    return value, variance**0.5, freedom


def assert_jackknife(
    row: dict[str, Any], statistic: Statistic, units: Sequence[Any], confidence: float = 0.95
) -> None:
    """That a row has a statistic of all targets, and its interval of Student's t, by the jackknife."""
    value, error, freedom = jackknife(statistic, units)
    assert row["value"] == pytest.approx(value)
    if error == 0:
        return
    half = student.ppf((1 + confidence) / 2, freedom) * error
    low, high = value - half, value + half
    if row.get("is_share"):
        low, high = max(0, low), min(1, high)
    assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))


def plain_recovery(result: Result, selector: str, far_context: str, k: int, **way: Any) -> Statistic:
    """Σ (L_short - L_k) / Σ (L_short - L_long) over the targets over tau among some."""
    short = result.targets["loss_short_nats"].tolist()
    long = result.targets["loss_long_nats"].tolist()
    losses = result.loss_nats(selector, far_context, **way)[:, result.ks.index(k)].tolist()
    loss_of = dict(zip(result.over.tolist(), losses, strict=True))

    def statistic(targets: Sequence[int]) -> float:
        over = [target for target in targets if target in loss_of and loss_of[target] == loss_of[target]]
        saved = sum(short[target] - loss_of[target] for target in over)
        return saved / sum(short[target] - long[target] for target in over)

    return statistic


def plain_net(result: Result, selector: str, k: int, far_context: str = "true", **way: Any) -> Statistic:
    """Recovery less that of the placebo, where this is positive."""
    recovery = plain_recovery(result, selector, far_context, k, **way)
    placebo = plain_recovery(result, selector, "placebo", k, **way)
    return lambda targets: recovery(targets) - max(0.0, placebo(targets))


def share_of_over(result: Result, hits: Sequence[float]) -> Statistic:
    """The mean of the values of the targets over tau, which are in the order of `Result.over`."""
    value_of = dict(zip(result.over.tolist(), hits, strict=True))

    def statistic(targets: Sequence[int]) -> float:
        return float(np.mean([value_of[target] for target in targets if target in value_of]))

    return statistic


def test_overlaps_are_the_sizes_of_intersections(result: Result) -> None:
    frame = comparisons.overlaps(result)
    assert list(frame["second"].unique()) == ["greedy", "random"]
    groups = result.targets["group"].tolist()
    for second in ("greedy", "random"):
        for k in KS:
            pairs = zip(result.selected("leave-one-out"), result.selected(second), strict=True)
            hits = [len({*one[:k].tolist()} & {*other[:k].tolist()}) / k for one, other in pairs]
            row = row_of(frame, first="leave-one-out", second=second, k=k)
            assert row["chance"] == k / 112
            assert_jackknife(row | {"is_share": True}, share_of_over(result, hits), groups)


def test_within_counts_targets_close_to_the_loss_of_the_long_context(result: Result) -> None:
    frame = comparisons.within(result)
    long = result.targets["loss_long_nats"][result.over].tolist()
    groups = result.targets["group"].tolist()
    for far_context in ("true", "placebo"):
        losses = result.loss_nats("greedy", far_context).tolist()
        for column, k in enumerate(KS):
            at_k = [row[column] <= most + ENOUGH_NATS for row, most in zip(losses, long, strict=True)]
            or_fewer = [
                min(row[: column + 1]) <= most + ENOUGH_NATS for row, most in zip(losses, long, strict=True)
            ]
            for name, hits in (("at_k", at_k), ("k_or_fewer", or_fewer)):
                row = row_of(frame, name=name, selector="greedy", far_context=far_context, k=k)
                if 0 < row["value"] < 1:
                    assert_jackknife(row | {"is_share": True}, share_of_over(result, hits), groups)
                else:
                    assert row["value"] == np.mean(hits)
    everything = comparisons.within(result, nats=1000.0)
    assert (everything["value"] == 1).all()


def test_the_smallest_k_is_counted_target_by_target(result: Result) -> None:
    frame = comparisons.smallest_k(result)
    over = result.targets.iloc[result.over]
    for selector in result.selectors:
        losses = result.loss_nats(selector)
        smallest: dict[str, list[float]] = {"half": [], "nine_tenths": [], "all_but_a_tenth_of_a_nat": []}
        for target, of_target in zip(over.itertuples(), losses, strict=True):
            gain = target.loss_short_nats - target.loss_long_nats
            most = {
                "half": target.loss_short_nats - 0.5 * gain,
                "nine_tenths": target.loss_short_nats - 0.9 * gain,
                "all_but_a_tenth_of_a_nat": target.loss_long_nats + ENOUGH_NATS,
            }
            for name, highest in most.items():
                enough = [k for k, loss in zip(KS, of_target, strict=True) if loss <= highest]
                smallest[name].append(enough[0] if enough else np.inf)
        for name, of_targets in smallest.items():
            median = sorted(of_targets)[(len(of_targets) + 1) // 2 - 1]
            for k in KS:
                row = row_of(frame, name=name, selector=selector, far_context="true", k=k)
                hits = [needed <= k for needed in of_targets]
                assert row["median"] == median or (np.isnan(row["median"]) and median == np.inf)
                statistic = share_of_over(result, hits)
                assert row["value"] == pytest.approx(statistic(range(len(result.targets))))


def test_held_by_few_sums_the_gain_of_targets_that_have_it_from_few(result: Result) -> None:
    frame = comparisons.held_by_few(result)
    assert set(frame["selector"]) == {"leave-one-out"}
    gains = result.gain_nats.tolist()
    over = result.over.tolist()
    short = result.targets["loss_short_nats"][over].tolist()
    for far_context in ("true", "placebo"):
        losses = result.loss_nats("leave-one-out", far_context).tolist()
        for column, k in enumerate(KS):
            few = {
                target
                for target, before, after in zip(over, short, losses, strict=True)
                if before - min(after[: column + 1]) >= SHARE_NEEDED * gains[target]
            }

            def held(targets: Sequence[int], few: set[int] = few) -> float:
                return sum(gains[one] for one in targets if one in few) / sum(gains[one] for one in targets)

            row = row_of(frame, far_context=far_context, k=k)
            assert_jackknife(row, held, result.targets["group"].tolist())


@pytest.mark.parametrize("without", [0, 25])
def test_elsewhere_is_net_of_the_placebo_and_paired(result: Result, without: int) -> None:
    """Also where some targets have no other place of their group."""
    lack = result.targets["target_id"][result.over[:without]]
    is_there = (result.choices["far_context"] == "same-group") & result.choices["target_id"].isin(lack)
    some = replace(result, choices=result.choices[~is_there].reset_index(drop=True))
    frame = comparisons.elsewhere(some)
    rest = replace(some, choices=some.choices[~some.choices["target_id"].isin(lack)].reset_index(drop=True))
    groups = result.targets["group"].tolist()
    for selector in ("leave-one-out", "random"):
        for k in KS:
            there = plain_recovery(rest, selector, "same-group", k)
            net = plain_net(rest, selector, k, "same-group")
            row = row_of(frame, name="net", selector=selector, k=k)
            of_there = row_of(
                numbers.placebos(some), name="recovery", selector=selector, far_context="same-group", k=k
            )
            assert row["value"] == pytest.approx(net(range(400)))
            assert row["low"] <= of_there["low"] and row["high"] <= of_there["high"]
            true = plain_recovery(rest, selector, "true", k)
            row = row_of(frame, name="true_less_there", selector=selector, k=k)
            assert_jackknife(
                row, lambda targets, true=true, there=there: true(targets) - there(targets), groups
            )


def test_the_interval_of_elsewhere_is_that_of_the_difference() -> None:
    """Where the placebo recovers nothing, net is the recovery there."""
    result = made_result(texts=30, groups=7, far_contexts=PLACES)
    is_placebo = result.choices["far_context"] == "placebo"
    short = result.targets.set_index("target_id")["loss_short_nats"]
    nothing = [np.full(4, short[target] + 1.0) for target in result.choices["target_id"][is_placebo]]
    losses = result.choices["loss_nats"].copy()
    losses[is_placebo] = pd.Series(nothing, index=losses.index[is_placebo])
    same = replace(result, choices=result.choices.assign(loss_nats=losses))
    row = row_of(comparisons.elsewhere(same), name="net", selector="greedy", k=4)
    groups = result.targets["group"].tolist()
    assert_jackknife(row, plain_recovery(same, "greedy", "same-group", 4), groups)


def test_there_is_nothing_elsewhere_without_another_place() -> None:
    assert comparisons.elsewhere(made_result()).empty


def test_distances_are_1_where_chosen_tokens_are_as_frequent_as_random_ones(result: Result) -> None:
    frame = comparisons.distances_beside_uniform(result, selector="greedy", far_context="true", k=4)
    back = 128 - result.selected("greedy")[:, :4]
    for row in frame.to_dict("records"):
        inside = ((back >= row["from_tokens"]) & (back < row["to_tokens"])).mean()
        assert row["value"] == pytest.approx(inside / ((row["to_tokens"] - row["from_tokens"]) / 112))
        assert row["low"] < row["value"] < row["high"]


def test_kept_as_differences_are_paired(result: Result) -> None:
    rng = np.random.default_rng(1)
    as_cache = result.choices.assign(**SINKS)
    as_cache["loss_nats"] = [row - rng.gamma(1.0, 0.2, len(row)) for row in as_cache["loss_nats"]]
    as_cache = as_cache[as_cache["selector"] != "random"]
    both = replace(result, choices=pd.concat([result.choices, as_cache], ignore_index=True))
    frame = comparisons.kept_as_differences(both, SINKS, TEXT)
    assert list(frame["selector"].unique()) == ["leave-one-out", "greedy"]
    groups = result.targets["group"].tolist()
    for k in KS:
        parts = [plain_recovery(both, "greedy", "placebo", k, **way) for way in (SINKS, TEXT)]
        row = row_of(frame, selector="greedy", far_context="placebo", k=k)
        assert_jackknife(row, lambda targets, parts=parts: parts[0](targets) - parts[1](targets), groups)
        parts = [plain_net(both, "greedy", k, **way) for way in (SINKS, TEXT)]
        row = row_of(frame, selector="greedy", far_context="net", k=k)
        assert_jackknife(row, lambda targets, parts=parts: parts[0](targets) - parts[1](targets), groups)
    with pytest.raises(UserError, match="'sinks': 0} was not measured; choose among .*'sinks': 4}"):
        comparisons.kept_as_differences(both, SINKS, TEXT | {"level": "cache"})


def test_adjusted_differences_are_those_of_all_results_together(result: Result) -> None:
    """p of Student's t, and Holm's: p times the number of tests that are left, in ascending order."""
    other = replace(
        result, targets=result.targets.assign(group=result.targets["group"].iloc[::-1].to_numpy())
    )
    results = {"one": result, "another": other}
    frame = comparisons.adjusted_differences(results, ks=(1, 4), selectors=["greedy", "random"])
    keys = list(frame[["result", "second", "k"]].itertuples(index=False, name=None))
    assert keys == list(product(results, ["greedy", "random"], [1, 4]))
    for row in frame.to_dict("records"):
        of_row = results[row["result"]]
        first, second = row["first"], row["second"]
        differences = numbers.differences(of_row, k=row["k"], far_context="net")
        interval = row_of(differences, first=first, second=second)
        assert [row[name] for name in INTERVAL] == [interval[name] for name in INTERVAL]

        def difference(targets: np.ndarray, of_row=of_row, first=first, second=second, k=row["k"]) -> float:
            return plain_net(of_row, first, k)(targets) - plain_net(of_row, second, k)(targets)

        value, error, freedom = jackknife(difference, of_row.targets["group"].tolist())
        assert row["p"] == pytest.approx(2 * student.sf(abs(value) / error, freedom), abs=1e-8)
    ascending = frame.sort_values("p", kind="stable")
    adjusted = 0.0
    for tests_left, row in zip(range(len(ascending), 0, -1), ascending.to_dict("records"), strict=True):
        adjusted = max(adjusted, min(1.0, tests_left * row["p"]))
        assert row["p_holm"] == pytest.approx(adjusted)
    of_nine = comparisons.adjusted_differences(results, (1, 4), ["greedy", "random"], num_tests=9)
    assert of_nine["p_holm"].min() == pytest.approx(9 * frame["p"].min())


def test_by_tau_is_what_a_higher_tau_would_have_measured(result: Result) -> None:
    shares = comparisons.by_tau(numbers.shares, result, (0.5, 1, 2))
    gains = result.gain_nats
    for tau in (0.5, 1, 2):
        over = gains > tau
        assert row_of(shares, name="share_over_tau", tau_nats=tau)["value"] == pytest.approx(over.mean())
        expected = gains[over].sum() / gains.sum()
        assert row_of(shares, name="share_of_gain", tau_nats=tau)["value"] == pytest.approx(expected)
        mirror = row_of(shares, name="share_below_minus_tau", tau_nats=tau)["value"]
        assert mirror == pytest.approx((gains < -tau).mean())
    recovery = comparisons.by_tau(numbers.recovery, result, (1, 2), selector="greedy")
    short = result.targets["loss_short_nats"].to_numpy()[result.over]
    loss = result.loss_nats("greedy")[:, 2]
    high = gains[result.over] > 2
    expected = (short - loss)[high].sum() / gains[result.over][high].sum()
    assert row_of(recovery, far_context="true", k=4, tau_nats=2)["value"] == pytest.approx(expected)
    with pytest.raises(UserError, match="tokens were chosen for targets over 1 nats; give a higher tau"):
        comparisons.by_tau(numbers.recovery, result, (0.5, 1))


def test_a_lower_tau_needs_the_losses_of_its_targets(result: Result) -> None:
    smaller = replace(result, settings=result.settings.but(losses_not_over_tau="means by text"))
    with pytest.raises(UserError, match=r"tau 0\.5 is below that of the result, 1"):
        comparisons.by_tau(numbers.shares, smaller, (0.5,))
    assert len(comparisons.by_tau(numbers.shares, smaller, (1, 2))) == 18


def test_runs_keep_their_own_choices_at_a_higher_tau() -> None:
    runs = [made_result(run=number) for number in range(3)]
    joined = comparisons.at_tau(Result.join(runs), 2)
    apart = Result.join([comparisons.at_tau(run, 2) for run in runs])
    pd.testing.assert_frame_equal(numbers.recovery(joined), numbers.recovery(apart))
    assert [len(run.over) for run in joined.runs] == [len(run.over) for run in apart.runs]


def test_every_group_has_the_same_weight(result: Result) -> None:
    targets = result.targets.assign(gain=result.gain_nats)
    frame = comparisons.with_equal_groups(result)

    def mean_of_means(column: str) -> Statistic:
        return lambda rows: targets.iloc[list(rows)].groupby("group")[column].mean().mean()

    groups = targets["group"].tolist()
    share = row_of(frame, name="share_over_tau") | {"is_share": True}
    assert_jackknife(share, mean_of_means("over_tau"), groups)
    assert_jackknife(row_of(frame, name="gain_nats"), mean_of_means("gain"), groups)
    with pytest.raises(UserError, match="no groups"):
        comparisons.with_equal_groups(made_result())


def test_persistence_is_the_mean_of_all_ordered_pairs() -> None:
    runs = [made_result(texts=30, groups=7, run=number) for number in range(3)]
    gains = [run.gain_nats for run in runs]
    pairs = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]

    def mean_over(value: Callable[[float, float], float]) -> Statistic:
        def statistic(rows: Sequence[int]) -> float:
            values = [
                value(gains[one][row], gains[other][row])
                for one, other in pairs
                for row in rows
                if gains[one][row] > 1
            ]
            return sum(values) / len(values)

        return statistic

    frame = comparisons.persistence_between(runs)
    groups = runs[0].targets["group"].tolist()
    expected = {
        "share_still_over_tau": mean_over(lambda _, other: float(other > 1)),
        "selecting_gain_nats": mean_over(lambda one, _: one),
        "gain_nats": mean_over(lambda _, other: other),
    }
    assert list(frame["name"]) == list(expected)
    for name, statistic in expected.items():
        assert_jackknife(row_of(frame, name=name), statistic, groups)
    with pytest.raises(UserError, match="different targets"):
        comparisons.persistence_between([runs[0], made_result(n=300)])


def test_persistence_without_all_losses_is_the_share_alone() -> None:
    smaller = [
        replace(run, settings=run.settings.but(losses_not_over_tau="means by text"))
        for run in (made_result(), made_result(run=1))
    ]
    assert list(comparisons.persistence_between(smaller)["name"]) == ["share_still_over_tau"]


def test_result_overlaps_are_of_the_targets_over_tau_under_both() -> None:
    first, second = (made_result(texts=30, groups=7, run=number) for number in (0, 1))
    of_first, of_second = (
        dict(zip(one.over.tolist(), one.selected("greedy"), strict=True)) for one in (first, second)
    )
    both = sorted(set(of_first) & set(of_second))
    assert 0 < len(both) < min(len(of_first), len(of_second))
    frame = comparisons.result_overlaps(first, second)
    assert set(frame["n_targets"]) == {len(both)}
    for k in KS:
        hits = {row: len({*of_first[row][:k].tolist()} & {*of_second[row][:k].tolist()}) / k for row in both}

        def mean(rows: Sequence[int], hits: dict[int, float] = hits) -> float:
            return float(np.mean([hits[row] for row in rows if row in hits]))

        row = row_of(frame, selector="greedy", far_context="true", k=k) | {"is_share": True}
        if row["value"] > 0:
            assert_jackknife(row, mean, first.targets["group"].tolist())
        else:
            assert mean(range(400)) == 0
    assert (comparisons.result_overlaps(first, first)["value"] == 1).all()
    with pytest.raises(UserError, match="different targets"):
        comparisons.result_overlaps(first, made_result(n=300))


def test_results_on_the_same_targets_are_paired() -> None:
    first, second = (made_result(texts=30, groups=7, run=number) for number in (0, 1))
    frame = comparisons.result_differences(first, second, k=[2, 4], confidence=0.99)
    groups = first.targets["group"].tolist()
    for name, values in {
        "gain_nats": first.gain_nats - second.gain_nats,
        "share_over_tau": first.targets["over_tau"].astype(int) - second.targets["over_tau"].astype(int),
        "loss_long_nats": first.targets["loss_long_nats"] - second.targets["loss_long_nats"],
    }.items():
        of_targets = np.asarray(values, dtype=float)
        row = row_of(frame, name=name)
        assert_jackknife(row, lambda rows, v=of_targets: float(v[list(rows)].mean()), groups, 0.99)
    for k in (2, 4):
        nets = [plain_net(result, "leave-one-out", k) for result in (first, second)]
        row = row_of(frame, name="recovery", far_context="net", k=k)
        assert_jackknife(row, lambda rows, nets=nets: nets[0](rows) - nets[1](rows), groups, 0.99)
    same = comparisons.result_differences(first, first)
    assert same["value"].abs().max() < 1e-12 and same[["low", "high"]].isna().all(axis=None)
    assert sorted(same["k"].dropna().unique()) == list(KS)


def test_results_on_other_targets_share_the_groups_that_have_one_name() -> None:
    """Of one group with a name in both texts the targets of both are left out at once; all others are independent."""
    first = made_result(n=300, texts=20, groups=5)
    second = made_result(n=200, texts=18, groups=6, run=1, texts_sha256="d" * 64)
    named = second.targets.assign(group=second.targets["group"].str.replace("book", "tome"))
    named.loc[named["group"] == "tome 1", "group"] = "book 1"
    second = replace(second, targets=named)
    selectors = ("greedy", "leave-one-out")
    frame = comparisons.result_differences(first, second, selectors=selectors, k=4)
    groups = [*first.targets["group"], *second.targets["group"]]
    assert len(set(groups)) == 10

    def difference(of_first: Statistic, of_second: Statistic) -> Statistic:
        def statistic(rows: Sequence[int]) -> float:
            mine = [row for row in rows if row < 300]
            rows_of_second = [row - 300 for row in rows if row >= 300]
            return of_first(mine) - of_second(rows_of_second)

        return statistic

    nets = [plain_net(first, selectors[0], 4), plain_net(second, selectors[1], 4)]
    assert_jackknife(row_of(frame, far_context="net"), difference(*nets), groups)
    means = []
    for targets in (first.targets, second.targets):
        means.append(
            lambda rows, targets=targets: targets.iloc[list(rows)].groupby("group")["over_tau"].mean().mean()
        )
    assert_jackknife(row_of(frame, name="share_over_tau_equal_groups"), difference(*means), groups)


def test_the_smallest_k_of_two_results_shares_their_groups() -> None:
    """Target by target; of a group that both have the targets of both are left out at once."""
    first = made_result(n=300, texts=20, groups=5)
    second = made_result(n=200, texts=18, groups=6, run=1, texts_sha256="d" * 64)
    frame = comparisons.smallest_k_differences(first, second)
    assert frame[["name", "k"]].values.tolist() == [
        [name, k] for name in (*comparisons.ENOUGH, "all_but_a_tenth_of_a_nat") for k in KS
    ]

    def share(result: Result) -> Statistic:
        enough = {}
        losses = result.loss_nats("leave-one-out")[:, : KS.index(4) + 1]
        for row, of_target in zip(result.over, losses, strict=True):
            target = result.targets.iloc[row]
            gain = target["loss_short_nats"] - target["loss_long_nats"]
            enough[row] = bool(min(of_target) <= target["loss_short_nats"] - 0.9 * gain)
        return lambda rows: float(np.mean([enough[row] for row in rows if row in enough]))

    shares = [share(first), share(second)]

    def difference(rows: Sequence[int]) -> float:
        mine = [row for row in rows if row < 300]
        rows_of_second = [row - 300 for row in rows if row >= 300]
        return shares[0](mine) - shares[1](rows_of_second)

    groups = [*first.targets["group"], *second.targets["group"]]
    assert_jackknife(row_of(frame, name="nine_tenths", k=4), difference, groups)


@pytest.mark.parametrize("change", [{"texts_sha256": "d" * 64}, {"split": "train"}])
def test_texts_of_other_files_or_another_split_are_other_texts(change: dict[str, str]) -> None:
    """Without groups, text 3 of one and text 3 of another are drawn each by itself."""
    first, second = made_result(texts=20), made_result(texts=20, run=1)
    of_one_file = comparisons.result_differences(first, second)
    other = replace(second, settings=second.settings.but(**change))
    with pytest.raises(UserError, match="different targets"):
        comparisons.refuse_other_targets(first, other)
    of_two = comparisons.result_differences(first, other)
    np.testing.assert_allclose(of_one_file["value"], of_two["value"])
    row = row_of(of_two, name="gain_nats")
    texts = [*first.targets["text"], *(20 + first.targets["text"])]
    gains = [first.gain_nats, second.gain_nats]

    def difference(rows: Sequence[int]) -> float:
        mine = [row for row in rows if row < 400]
        rows_of_second = [row - 400 for row in rows if row >= 400]
        return float(gains[0][mine].mean() - gains[1][rows_of_second].mean())

    assert_jackknife(row, difference, texts)
    paired = row_of(of_one_file, name="gain_nats")
    assert paired["high"] - paired["low"] < row["high"] - row["low"]
