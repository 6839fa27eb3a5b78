"""Every comparison against sums over targets, and its interval against a jackknife written out."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from analysis.api import Result
from analysis.stats import comparisons, numbers
from analysis.stats.bootstrap import holm
from analysis.stats.numbers import ENOUGH_NATS, SHARE_NEEDED
from analysis.stats.tables import INTERVAL
from olmo_sparsity.util.errors import UserError
from tests.support.frames import row_of
from tests.support.jackknife import assert_jackknife, jackknife
from tests.support.refusals import refused
from tests.support.results import made_result

KS = (1, 2, 4, 8)
PLACES = ("true", "placebo", "same-group")
SINKS = {"level": "cache", "unit": "token", "sinks": 4}
TEXT = {"level": "text", "unit": "token", "sinks": 0}


@pytest.fixture(scope="module")
def result():
    """Losses that do not fall with k, so that k tokens or fewer are not k."""
    made = made_result(texts=30, groups=7, far_contexts=PLACES)
    rng = np.random.default_rng(0)
    losses = [rng.permutation(of_choice) for of_choice in made.choices["loss_nats"]]
    return replace(made, choices=made.choices.assign(loss_nats=losses))


@pytest.fixture(scope="module")
def groups(result):
    return result.targets["group"]


def shared(first, second, k):
    """The share of its first k tokens that each of some targets has in another choice, too."""
    return [len({*one[:k]} & {*other[:k]}) / k for one, other in zip(first, second, strict=True)]


# --- statistics: numbers of the targets with some rows ---


def ratio(above, below):
    """Σ above / Σ below, (n,) both."""
    return lambda rows: above[rows].sum() / below[rows].sum()


def minus(first, second):
    return lambda rows: first(rows) - second(rows)


def minus_other(first, second, count):
    """Of two results whose targets stand one after the other, ``count`` of the first."""
    return lambda rows: first(rows[rows < count]) - second(rows[rows >= count] - count)


def of_all(result, values):
    """Values of the targets over tau, in the order of `Result.over`, as those of all targets."""
    column = np.zeros(len(result.targets))
    column[result.over] = values
    return column


def share_of_over(result, hits):
    return ratio(of_all(result, hits), of_all(result, 1.0))


def recovery_of(result, selector, far_context, k, **way):
    """Σ (L_short - L_k) / Σ (L_short - L_long) over the targets over tau that have the far context."""
    losses = result.loss_nats(selector, far_context, **way)[:, result.ks.index(k)]
    over = result.targets.iloc[result.over]
    saved = np.nan_to_num(over["loss_short_nats"] - losses)
    gains = (over["loss_short_nats"] - over["loss_long_nats"]) * np.isfinite(losses)
    return ratio(of_all(result, saved), of_all(result, gains))


def net_of(result, selector, k, far_context="true", **way):
    """Recovery less that of the placebo, where this is positive."""
    recovery = recovery_of(result, selector, far_context, k, **way)
    placebo = recovery_of(result, selector, "placebo", k, **way)
    return lambda rows: recovery(rows) - max(0.0, placebo(rows))


def mean_of_groups(targets, column):
    return lambda rows: targets.iloc[rows].groupby("group")[column].mean().mean()


# --- one result ---


def test_overlaps_are_the_sizes_of_intersections(result, groups):
    frame = comparisons.overlaps(result)
    assert list(frame["second"].unique()) == ["greedy", "random"]
    for second, k in product(("greedy", "random"), KS):
        hits = shared(result.selected("leave-one-out"), result.selected(second), k)
        row = row_of(frame, first="leave-one-out", second=second, k=k)
        assert row["chance"] == k / 112
        assert_jackknife(row, share_of_over(result, hits), groups, is_share=True)


def test_within_counts_targets_close_to_the_loss_of_the_long_context(result, groups):
    frame = comparisons.within(result)
    most = result.targets["loss_long_nats"].to_numpy()[result.over, None] + ENOUGH_NATS
    for far_context in ("true", "placebo"):
        enough = result.loss_nats("greedy", far_context) <= most
        for column, k in enumerate(KS):
            or_fewer = enough[:, : column + 1].any(axis=1)
            for name, hits in (("at_k", enough[:, column]), ("k_or_fewer", or_fewer)):
                row = row_of(frame, name=name, selector="greedy", far_context=far_context, k=k)
                assert_jackknife(row, share_of_over(result, hits), groups, is_share=True)
    assert (comparisons.within(result, nats=1000.0)["value"] == 1).all()


def test_the_smallest_k_is_counted_target_by_target(result):
    frame = comparisons.smallest_k(result)
    over = result.targets.iloc[result.over]
    gain = over["loss_short_nats"] - over["loss_long_nats"]
    most = {
        "half": over["loss_short_nats"] - 0.5 * gain,
        "nine_tenths": over["loss_short_nats"] - 0.9 * gain,
        "all_but_a_tenth_of_a_nat": over["loss_long_nats"] + ENOUGH_NATS,
    }
    for selector, name in product(result.selectors, most):
        needed = [
            next((k for k, loss in zip(KS, losses, strict=True) if loss <= highest), np.inf)
            for losses, highest in zip(result.loss_nats(selector), most[name], strict=True)
        ]
        median = sorted(needed)[(len(needed) - 1) // 2]
        for k in KS:
            row = row_of(frame, name=name, selector=selector, far_context="true", k=k)
            assert row["median"] == median or (np.isnan(row["median"]) and median == np.inf)
            assert row["value"] == pytest.approx(np.mean([number <= k for number in needed]))


def test_held_by_few_sums_the_gain_of_targets_that_have_it_from_few(result, groups):
    frame = comparisons.held_by_few(result)
    assert set(frame["selector"]) == {"leave-one-out"}
    gains = result.gain_nats
    short = result.targets["loss_short_nats"].to_numpy()[result.over]
    for far_context, (column, k) in product(("true", "placebo"), enumerate(KS)):
        lowest = result.loss_nats("leave-one-out", far_context)[:, : column + 1].min(axis=1)
        of_few = gains[result.over] * (short - lowest >= SHARE_NEEDED * gains[result.over])
        row = row_of(frame, far_context=far_context, k=k)
        assert_jackknife(row, ratio(of_all(result, of_few), gains), groups)


@pytest.mark.parametrize("without", [0, 25])
def test_elsewhere_is_net_of_the_placebo_and_paired(result, groups, without):
    """Also where some targets have no other place of their group."""
    lack = result.choices["target_id"].isin(result.targets["target_id"][result.over[:without]])
    is_there = result.choices["far_context"] == "same-group"
    some, rest = (
        replace(result, choices=result.choices[~left_out].reset_index(drop=True))
        for left_out in (lack & is_there, lack)
    )
    frame = comparisons.elsewhere(some)
    recoveries = numbers.placebos(some)
    for selector, k in product(("leave-one-out", "random"), KS):
        net = row_of(frame, name="net", selector=selector, k=k)
        assert net["value"] == pytest.approx(net_of(rest, selector, k, "same-group")(np.arange(400)))
        there = row_of(recoveries, name="recovery", selector=selector, far_context="same-group", k=k)
        assert net["low"] <= there["low"] and net["high"] <= there["high"]
        true, there = (recovery_of(rest, selector, place, k) for place in ("true", "same-group"))
        row = row_of(frame, name="true_less_there", selector=selector, k=k)
        assert_jackknife(row, minus(true, there), groups)


def harmed_by_placebo(result):
    """The result in which the placebo recovers less than nothing."""
    short = result.targets["loss_short_nats"][result.choices["target_id"]]
    choices = result.choices.copy()
    is_placebo = choices["far_context"] == "placebo"
    losses = [np.full(4, nats + 1.0) for nats in short]
    choices["loss_nats"] = choices["loss_nats"].mask(is_placebo, pd.Series(losses, choices.index))
    return replace(result, choices=choices)


def test_the_interval_of_elsewhere_is_that_of_the_difference(result, groups):
    """Where the placebo recovers nothing, net is the recovery there."""
    same = harmed_by_placebo(result)
    row = row_of(comparisons.elsewhere(same), name="net", selector="greedy", k=4)
    assert_jackknife(row, recovery_of(same, "greedy", "same-group", 4), groups)


def test_there_is_nothing_elsewhere_without_another_place():
    assert comparisons.elsewhere(made_result()).empty


def test_distances_are_1_where_chosen_tokens_are_as_frequent_as_random_ones(result):
    frame = comparisons.distances_beside_uniform(result, selector="greedy", far_context="true", k=4)
    back = 128 - result.selected("greedy")[:, :4]
    for row in frame.to_dict("records"):
        inside = ((back >= row["from_tokens"]) & (back < row["to_tokens"])).mean()
        assert row["value"] == pytest.approx(inside / ((row["to_tokens"] - row["from_tokens"]) / 112))
        assert row["low"] < row["value"] < row["high"]


def test_kept_as_differences_are_paired(result, groups):
    rng = np.random.default_rng(1)
    as_cache = result.choices[result.choices["selector"] != "random"].assign(**SINKS)
    as_cache["loss_nats"] = [losses - rng.gamma(1.0, 0.2, len(losses)) for losses in as_cache["loss_nats"]]
    both = replace(result, choices=pd.concat([result.choices, as_cache], ignore_index=True))
    frame = comparisons.kept_as_differences(both, SINKS, TEXT)
    assert list(frame["selector"].unique()) == ["leave-one-out", "greedy"]
    for k in KS:
        placebos = [recovery_of(both, "greedy", "placebo", k, **way) for way in (SINKS, TEXT)]
        row = row_of(frame, selector="greedy", far_context="placebo", k=k)
        assert_jackknife(row, minus(*placebos), groups)
        nets = [net_of(both, "greedy", k, **way) for way in (SINKS, TEXT)]
        assert_jackknife(row_of(frame, selector="greedy", far_context="net", k=k), minus(*nets), groups)
    with pytest.raises(UserError, match="'sinks': 0} was not measured; choose among .*'sinks': 4}"):
        comparisons.kept_as_differences(both, SINKS, TEXT | {"level": "cache"})


def test_adjusted_differences_are_those_of_all_results_together(result):
    """p of Student's t, and Holm's over both results, selectors and k."""
    reversed_groups = result.targets["group"].to_numpy()[::-1]
    other = replace(result, targets=result.targets.assign(group=reversed_groups))
    results = {"one": result, "another": other}
    frame = comparisons.adjusted_differences(results, ks=(1, 4), selectors=["greedy", "random"])
    keys = list(frame[["result", "second", "k"]].itertuples(index=False, name=None))
    assert keys == list(product(results, ["greedy", "random"], [1, 4]))
    for row in frame.to_dict("records"):
        first, second, k = row["first"], row["second"], row["k"]
        one = results[row["result"]]
        interval = row_of(numbers.differences(one, k=k, far_context="net"), first=first, second=second)
        assert [row[name] for name in INTERVAL] == [interval[name] for name in INTERVAL]
        difference = minus(net_of(one, first, k), net_of(one, second, k))
        value, error, freedom = jackknife(difference, one.targets["group"])
        assert row["p"] == pytest.approx(2 * student.sf(abs(value) / error, freedom), abs=1e-8)
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"]))
    of_nine = comparisons.adjusted_differences(results, (1, 4), ["greedy", "random"], num_tests=9)
    assert of_nine["p_holm"].min() == pytest.approx(9 * frame["p"].min())


def test_by_tau_is_what_a_higher_tau_would_have_measured(result):
    shares = comparisons.by_tau(numbers.shares, result, (0.5, 1, 2))
    gains = result.gain_nats
    for tau in (0.5, 1, 2):
        values = shares[shares["tau_nats"] == tau].set_index("name")["value"]
        over = gains > tau
        assert values["share_over_tau"] == pytest.approx(over.mean())
        assert values["share_of_gain"] == pytest.approx(gains[over].sum() / gains.sum())
        assert values["share_below_minus_tau"] == pytest.approx((gains < -tau).mean())
    recovery = comparisons.by_tau(numbers.recovery, result, (1, 2), selector="greedy")
    short = result.targets["loss_short_nats"].to_numpy()[result.over]
    high = gains[result.over] > 2
    saved = (short - result.loss_nats("greedy")[:, 2])[high]
    expected = saved.sum() / gains[result.over][high].sum()
    assert row_of(recovery, far_context="true", k=4, tau_nats=2)["value"] == pytest.approx(expected)
    with pytest.raises(UserError, match="tokens were chosen for targets over 1 nats; give a higher tau"):
        comparisons.by_tau(numbers.recovery, result, (0.5, 1))


def test_a_lower_tau_needs_the_losses_of_its_targets(result):
    smaller = replace(result, settings=result.settings.but(losses_not_over_tau="means by text"))
    with pytest.raises(UserError, match=r"tau 0\.5 is below that of the result, 1"):
        comparisons.by_tau(numbers.shares, smaller, (0.5,))
    assert len(comparisons.by_tau(numbers.shares, smaller, (1, 2))) == 18


def test_every_group_has_the_same_weight(result, groups):
    targets = result.targets.assign(gain=result.gain_nats)
    frame = comparisons.with_equal_groups(result)
    share = row_of(frame, name="share_over_tau")
    assert_jackknife(share, mean_of_groups(targets, "over_tau"), groups, is_share=True)
    assert_jackknife(row_of(frame, name="gain_nats"), mean_of_groups(targets, "gain"), groups)
    with pytest.raises(UserError, match="no groups"):
        comparisons.with_equal_groups(made_result())


# --- several runs ---


@pytest.fixture(scope="module")
def runs():
    """Of the same targets."""
    return [made_result(texts=30, groups=7, run=number) for number in range(3)]


def test_runs_keep_their_own_choices_at_a_higher_tau(runs):
    joined = comparisons.at_tau(Result.join(runs), 2)
    apart = Result.join([comparisons.at_tau(run, 2) for run in runs])
    pd.testing.assert_frame_equal(numbers.recovery(joined), numbers.recovery(apart))
    assert [len(run.over) for run in joined.runs] == [len(run.over) for run in apart.runs]


def test_persistence_is_the_mean_of_all_ordered_pairs(runs, groups):
    frame = comparisons.persistence_between(runs)
    of_pairs = [
        pd.DataFrame({"row": range(400), "gain": one.gain_nats, "again": other.gain_nats})
        for one, other in permutations(runs, 2)
    ]
    pairs = pd.concat(of_pairs, ignore_index=True)
    pairs = pairs[pairs["gain"] > 1].assign(still=pairs["again"] > 1)
    columns = {"share_still_over_tau": "still", "selecting_gain_nats": "gain", "gain_nats": "again"}
    assert list(frame["name"]) == list(columns)
    for name, column in columns.items():

        def mean(rows, column=column):
            return pairs[column][pairs["row"].isin(rows)].mean()

        assert_jackknife(row_of(frame, name=name), mean, groups)
    with pytest.raises(UserError, match="different targets"):
        comparisons.persistence_between([runs[0], made_result(n=300)])


def test_persistence_without_all_losses_is_the_share_alone(runs):
    smaller = [replace(run, settings=run.settings.but(losses_not_over_tau="means by text")) for run in runs]
    assert list(comparisons.persistence_between(smaller)["name"]) == ["share_still_over_tau"]


def test_result_overlaps_are_of_the_targets_over_tau_under_both(runs, groups):
    first, second, _ = runs
    over = [one.targets["over_tau"].to_numpy() for one in (first, second)]
    is_both = over[0] & over[1]
    assert 0 < is_both.sum() < min(len(first.over), len(second.over))
    frame = comparisons.result_overlaps(first, second)
    assert set(frame["n_targets"]) == {is_both.sum()}
    chosen = [one.selected("greedy")[is_both[one.over]] for one in (first, second)]
    for k in KS:
        hits = np.zeros(400)
        hits[is_both] = shared(*chosen, k)
        row = row_of(frame, selector="greedy", far_context="true", k=k)
        assert_jackknife(row, ratio(hits, is_both), groups, is_share=True)
    assert (comparisons.result_overlaps(first, first)["value"] == 1).all()
    with pytest.raises(UserError, match="different targets"):
        comparisons.result_overlaps(first, made_result(n=300))


def test_results_on_the_same_targets_are_paired(runs, groups):
    first, second = runs[0], harmed_by_placebo(runs[1])
    frame = comparisons.result_differences(first, second, k=[2, 4], confidence=0.99)
    one = np.ones(400)
    for name in ("gain_nats", "over_tau", "loss_long_nats"):
        of_first, of_second = (
            run.targets.assign(gain_nats=run.gain_nats)[name].to_numpy(float) for run in (first, second)
        )
        row = row_of(frame, name=name.replace("over_tau", "share_over_tau"))
        assert_jackknife(row, ratio(of_first - of_second, one), groups, confidence=0.99)
    for k in (2, 4):
        nets = [net_of(run, "leave-one-out", k) for run in (first, second)]
        row = row_of(frame, name="recovery", far_context="net", k=k)
        assert_jackknife(row, minus(*nets), groups, confidence=0.99)
    same = comparisons.result_differences(first, first)
    assert same["value"].abs().max() < 1e-12 and same[["low", "high"]].isna().all(axis=None)
    assert sorted(same["k"].dropna().unique()) == list(KS)


# --- results of other texts ---


@pytest.fixture(scope="module")
def of_two_texts():
    """300 targets of five groups, and 200 of six others, one of which has the name of one of the five."""
    first = made_result(n=300, texts=20, groups=5)
    second = made_result(n=200, texts=18, groups=6, run=1, texts_sha256="d" * 64)
    named = second.targets["group"].str.replace("book", "tome").replace("tome 1", "book 1")
    second = replace(second, targets=second.targets.assign(group=named))
    groups = pd.concat([first.targets["group"], named])
    assert groups.nunique() == 10
    return first, second, groups


def test_results_on_other_targets_share_the_groups_that_have_one_name(of_two_texts):
    """Of one group with a name in both texts the targets of both are left out at once; all others are independent."""
    first, second, groups = of_two_texts
    frame = comparisons.result_differences(
        first, second, selectors=("greedy", "leave-one-out"), k=np.float64(4)
    )
    nets = net_of(first, "greedy", 4), net_of(second, "leave-one-out", 4)
    assert_jackknife(row_of(frame, far_context="net"), minus_other(*nets, 300), groups)
    means = [mean_of_groups(one.targets, "over_tau") for one in (first, second)]
    row = row_of(frame, name="share_over_tau_equal_groups")
    assert_jackknife(row, minus_other(*means, 300), groups)


def test_the_smallest_k_of_two_results_shares_their_groups(of_two_texts):
    first, second, groups = of_two_texts
    frame = comparisons.smallest_k_differences(first, second)
    names = (*comparisons.ENOUGH, "all_but_a_tenth_of_a_nat")
    assert frame[["name", "k"]].values.tolist() == [[name, k] for name in names for k in KS]
    shares = []
    for one in (first, second):
        over = one.targets.iloc[one.over]
        most = over["loss_short_nats"] - 0.9 * (over["loss_short_nats"] - over["loss_long_nats"])
        lowest = one.loss_nats("leave-one-out")[:, : KS.index(4) + 1].min(axis=1)
        shares.append(share_of_over(one, lowest <= most))
    assert_jackknife(row_of(frame, name="nine_tenths", k=4), minus_other(*shares, 300), groups)


@pytest.mark.parametrize("column", ["text", "position", "token"])
def test_other_targets_are_refused(column):
    """At the same places of another text there are other tokens."""
    first, second = made_result(texts=20), made_result(texts=20, run=1)
    comparisons.refuse_other_targets(first, second)
    other = second.targets.assign(**{column: second.targets[column] + (second.targets.index == 7)})
    with refused("different targets"):
        comparisons.refuse_other_targets(first, replace(second, targets=other))


@pytest.mark.parametrize("change", [{"texts_sha256": "d" * 64}, {"split": "train"}])
def test_texts_of_other_files_or_another_split_are_other_texts(change):
    """Without groups, text 3 of one and text 3 of another are drawn each by itself."""
    first, second = made_result(texts=20), made_result(texts=20, run=1)
    of_one_file = comparisons.result_differences(first, second)
    other = replace(second, settings=second.settings.but(**change))
    of_two = comparisons.result_differences(first, other)
    np.testing.assert_allclose(of_one_file["value"], of_two["value"])
    row = row_of(of_two, name="gain_nats")
    means = [ratio(one.gain_nats, np.ones(400)) for one in (first, second)]
    texts = pd.concat([first.targets["text"], 20 + second.targets["text"]])
    assert_jackknife(row, minus_other(*means, 400), texts)
    paired = row_of(of_one_file, name="gain_nats")
    assert paired["high"] - paired["low"] < row["high"] - row["low"]
