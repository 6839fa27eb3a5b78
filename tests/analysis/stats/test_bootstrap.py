"""The cluster bootstrap against plain loops over documents, and against simulated truth."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy.stats import sem, t

from analysis.stats import bootstrap as statistics
from analysis.stats.bootstrap import ClusterBootstrap, Interval, by_clusters, interval_caption
from analysis.stats.tables import runs_differ
from tests.support.jackknife import assert_jackknife, jackknife


@pytest.fixture
def many(monkeypatch):
    """A bootstrap of few units, too, so that a plain loop over them is short."""
    monkeypatch.setattr(statistics, "MOST_UNITS_OF_T", 1)


def interval_of(columns: np.ndarray, clusters: np.ndarray, **options: Any) -> Interval:
    """The interval of Σ first column / Σ last column."""
    bootstrap = ClusterBootstrap(clusters, **options)
    return bootstrap.interval(bootstrap.ratio(columns[:, 0], columns[:, -1]))


def clustered(seed: int, documents: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Targets of documents of unequal size, mixed: columns (saved, saved by placebo, gain) and documents."""
    rng = np.random.default_rng(seed)
    clusters = rng.permutation(np.repeat(np.arange(documents) * 7 + 3, rng.integers(1, 9, documents)))
    gain = rng.exponential(2.0, len(clusters)) + 1
    saved = gain * rng.normal(0.7, 0.2, len(clusters))
    return np.stack([saved, gain * rng.normal(0.2, 0.1, len(clusters)), gain], axis=1), clusters


def slow_resamples(clusters: np.ndarray, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of every resample: documents drawn one by one, all rows of each copied out."""
    rng = np.random.default_rng(seed)
    documents = np.unique(clusters)
    for _ in range(resamples):
        drawn = [documents[rng.integers(len(documents))] for _ in documents]
        yield np.concatenate([np.flatnonzero(clusters == document) for document in drawn])


def test_equals_a_plain_loop(many):
    columns, clusters = clustered(1)
    sums = np.array([columns[rows].sum(axis=0) for rows in slow_resamples(clusters, 200, seed=5)])
    slow = (sums[:, 0] - sums[:, 1]) / sums[:, 2]
    bootstrap = ClusterBootstrap(clusters, resamples=200, seed=5)
    saved, placebo = (bootstrap.ratio(column, columns[:, 2]) for column in columns.T[:2])
    together = bootstrap.ratio(columns[:, :2], columns[:, 2])
    np.testing.assert_allclose(together, np.stack([saved, placebo], axis=1), rtol=1e-12)
    np.testing.assert_allclose((saved - placebo)[1:], slow, rtol=1e-12)
    interval = bootstrap.interval(saved - placebo)
    assert interval.value == pytest.approx((columns[:, 0] - columns[:, 1]).sum() / columns[:, 2].sum())
    low, high = np.sort(slow)[[4, 195]]  # 2.5 % of 199 = 4.975
    assert (interval.low, interval.high) == pytest.approx((low, high))


def test_chunks_change_nothing(many, monkeypatch):
    columns, clusters = clustered(3)
    whole = ClusterBootstrap(clusters, resamples=100, seed=1).sums(columns)
    monkeypatch.setattr(statistics, "_CHUNK_ELEMENTS", 40)  # three resamples at once
    np.testing.assert_allclose(ClusterBootstrap(clusters, resamples=100, seed=1).sums(columns), whole)


def test_groups_and_their_documents_equal_a_plain_loop(many):
    """Groups one by one, then how often each of their documents comes; a group of one document comes whole."""
    columns, clusters = clustered(1, documents=9)
    documents, place = np.unique(clusters, return_inverse=True)
    group_of = np.array(list("abbbcddea"))
    rng = np.random.default_rng(5)
    turns = [[int(rng.integers(5)) for _ in range(5)] for _ in range(100)]
    counts = np.zeros((100, 9))
    for number, group in enumerate("abcde"):
        members = np.flatnonzero(group_of == group)
        for resample in range(100):
            times = turns[resample].count(number)
            drawn = [times]
            if len(members) > 1:
                drawn = rng.multinomial(times * len(members), [1 / len(members)] * len(members))
            counts[resample, members] = drawn
    of_documents = [columns[clusters == document].sum(axis=0) for document in documents]
    bootstrap = ClusterBootstrap(clusters, groups=group_of[place], resamples=100, seed=5)
    np.testing.assert_allclose(bootstrap.sums(columns)[1:], counts @ of_documents, rtol=1e-12)
    assert bootstrap.units == 5


@pytest.mark.parametrize("units", [1, 3, 4])
@pytest.mark.parametrize("runs", [1, 5])
@pytest.mark.parametrize("grouped", [False, True])
def test_fewer_than_four_units_have_no_interval(units, runs, grouped):
    """Many documents of few groups, or many runs, do not help: mean, share and a share of none or all."""
    target = np.arange(12 * runs)
    of_run = {"runs": target // 12} if runs > 1 else {}
    bootstrap = ClusterBootstrap(target % units, **of_run)
    if grouped:
        bootstrap = ClusterBootstrap(target % 12, groups=target % units, **of_run)
    rng, ones = np.random.default_rng(units), np.ones(len(target))
    for values in (rng.normal(size=len(target)), rng.integers(2, size=len(target)), 0 * ones, ones):
        interval = bootstrap.ratio_interval(values, ones)
        assert interval.value == pytest.approx(values.mean())
        assert np.isfinite([interval.low, interval.high]).tolist() == [units == 4] * 2


@pytest.mark.parametrize("units", [5, 140])
@pytest.mark.parametrize("bearing", [1, 3, 4])
def test_nor_has_a_value_of_targets_in_fewer_than_four_units(units, bearing):
    """Such as recovery, where most documents have no target over tau: a resample may hold none of them."""
    unit = np.arange(10 * units) % units
    inside = (unit < bearing) & (np.arange(10 * units) % 3 == 0)
    above = inside * np.random.default_rng(0).random(10 * units)
    bootstrap = ClusterBootstrap(unit)
    interval = bootstrap.ratio_interval(above, inside)
    assert interval.value == pytest.approx(above[inside].mean())
    if bearing < 4:
        assert np.isnan([interval.low, interval.high]).all()
    elif units == 5:
        assert interval.low < interval.value < interval.high
    below = np.stack([inside, np.ones(len(unit))], axis=1)
    columns = bootstrap.ratio(np.stack([above, above], axis=1), below)
    assert np.isnan(columns[1:, 0]).all() == (bearing < 4) and np.isfinite(columns[:, 1]).all()


@pytest.mark.parametrize(
    ("counts", "by"),
    [
        ({"documents": 40}, "by document"),
        ({"documents": 4}, "by document (only 4 documents: rough)"),
        ({"documents": 3}, "3 documents: too few for an interval"),
        ({"documents": 1, "runs": 5}, "1 document: too few for an interval"),
        ({"documents": 400, "groups": 2}, "2 groups: too few for an interval"),
        ({"documents": 40, "runs": 1}, "by document"),
        ({"documents": 40, "runs": 2}, "by document; two runs pooled"),
        ({"documents": 40, "runs": 3}, "by run and document"),
        ({"documents": 400, "groups": 9}, "by group, then document (only 9 groups: rough)"),
        ({"documents": 400, "groups": 10}, "by group, then document"),
        ({"documents": 20, "groups": 20}, "by group, then document (only 20 documents: rough)"),
    ],
)
def test_few_groups_or_documents_are_named(counts, by):
    assert by_clusters(counts) == by
    renamed = {name if name == "runs" else f"{name}_over_tau": count for name, count in counts.items()}
    assert by_clusters(renamed, "_over_tau") == by


@pytest.mark.parametrize(
    ("documents", "over", "caption"),
    [
        (40, 30, "bars: 95 %, by document"),
        (40, 0, "bars: 95 %, by document"),
        (40, 2, "bars: 95 %, by document; over tau only 2 documents: too few for an interval"),
        (3, 2, "3 documents: too few for an interval"),
    ],
)
def test_captions_say_95_per_cent_of_intervals_that_are_there(documents, over, caption):
    counts = {"documents": documents, "documents_over_tau": over}
    assert interval_caption("bars: 95 %,", counts) == caption


def test_empty_denominator_has_no_value():
    for below in (np.zeros(50), -np.ones(50)):
        interval = interval_of(np.stack([np.ones(50), below], axis=1), np.arange(50))
        assert np.isnan([interval.value, interval.low, interval.high]).all()


def test_refuses_what_would_spread_unseen():
    with pytest.raises(ValueError, match="not finite"):
        ClusterBootstrap(np.arange(2)).sums(np.array([1.0, np.nan]))


def test_few_groups_have_students_t_of_the_means_of_groups():
    """Groups of one size: the jackknife of a mean is its standard error, and the effective number bounds the t."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(7), 4)
    columns = np.stack([rng.normal(size=28) + rng.normal(size=7)[groups], np.ones(28)], axis=1)
    means = columns[:, 0].reshape(7, 4).mean(axis=1)
    squares = (means - means.mean()) ** 2
    freedom = squares.sum() ** 2 / (squares**2).sum()
    low, high = t.interval(0.95, freedom, means.mean(), sem(means))
    interval = interval_of(columns, np.arange(28), groups=groups)
    assert 1 < freedom < 6 and (interval.low, interval.high) == pytest.approx((low, high))


@pytest.mark.parametrize(("units", "freedom"), [(4, 1), (5, 4 / 3), (7, 2), (13, 2)])
def test_one_group_that_dominates_leaves_two_degrees_of_freedom(units, freedom):
    values = np.zeros(units)
    values[0] = 1000.0
    interval = interval_of(np.stack([values, np.where(values, 1e6, 1.0)], axis=1), np.arange(units))
    without = np.array([0, *[1000 / (1e6 + units - 2)] * (units - 1)]) - interval.value
    deviation = math.sqrt((units - 1) / units * (without**2).sum())
    assert (interval.high - interval.value) / deviation == pytest.approx(t.ppf(0.975, freedom), rel=1e-6)


@pytest.mark.parametrize("groups", [40, 140])
def test_two_runs_are_pooled_and_stand_beside_both(groups):
    """As rows and as seeds of one model: an interval by group alone, t's or percentiles, of the mean of both.

    Of a ratio the value of a run is that of its own sums, of a net value its own too.
    """
    rng = np.random.default_rng(groups)
    above, below = rng.normal(3, 1, (2, 2, groups)), rng.uniform(1, 2, groups)
    clusters, runs = np.tile(np.arange(groups), 2), np.repeat([7, 9], groups)
    of_rows = ClusterBootstrap(clusters, runs=runs)
    ratios = [of_rows.ratio(values.ravel(), np.tile(below, 2)) for values in above]
    net = of_rows.interval(ratios[0] - np.maximum(0, ratios[1] - 2))
    own = above.sum(axis=2) / below.sum()
    assert (net.first_run, net.second_run) == pytest.approx(own[0] - np.maximum(0, own[1] - 2))

    rows = of_rows.interval(ratios[0])
    pooled = interval_of(np.stack([above[0].mean(axis=0), below], axis=1), np.arange(groups))
    assert pooled.first_run is pooled.second_run is None
    assert (rows.value, rows.low, rows.high) == pytest.approx((pooled.value, pooled.low, pooled.high))
    columns = ClusterBootstrap(np.arange(groups), labels=["one", "two", "two"])
    of_seeds = [columns.ratio(values, below) for values in above[0]]
    two = columns.interval(columns.over_seeds(1, of_seeds))
    assert vars(two) == pytest.approx(vars(rows))
    one = columns.interval(columns.over_seeds(0, of_seeds[:1]))
    assert (one.first_run, one.second_run) == pytest.approx((one.value, one.value))
    alone = interval_of(np.stack([above[0, 0], below], axis=1), np.arange(groups))
    assert (alone.low, alone.high) == pytest.approx((one.low, one.high))


@pytest.mark.parametrize("units", [13, 140])
@pytest.mark.parametrize("value", [0.1, 0.5, 0.9, -2.0])
def test_no_interval_where_all_resamples_are_alike(units, value):
    """Two runs whose units are all alike, as needles that one finds and the other does not; t's and percentiles."""
    values = np.concatenate([np.full(units, value + 0.1), np.full(units, value - 0.1)])
    clusters, runs = np.tile(np.arange(units), 2), np.repeat([0, 1], units)
    bootstrap = ClusterBootstrap(clusters, runs=runs)
    interval = bootstrap.ratio_interval(values, np.ones(2 * units))
    assert interval.value == pytest.approx(value) and np.isnan([interval.low, interval.high]).all()
    assert (interval.first_run, interval.second_run) == pytest.approx((value + 0.1, value - 0.1))
    values[0] += 0.01
    other = bootstrap.ratio_interval(values, np.ones(2 * units))
    assert other.low < other.value < other.high


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differ", "marked", "covered"),
    [(0.0, 0.0, 0.97), (1.0, 0.0, 0.94), (3.0, 0.25, 0.70), (10.0, 0.73, 0.27)],
)
def test_how_often_two_runs_are_marked_and_how_often_pooled_intervals_hold(differ, marked, covered):
    """Means of runs vary by so many standard errors of the mean of 13 groups that both share; the truth is 0."""
    rng, differing, inside = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        values = rng.normal(0, 13**0.5, 13) + rng.normal(0, differ, (2, 1)) + rng.normal(0, 1, (2, 13))
        columns = np.stack([values.ravel(), np.ones(26)], axis=1)
        interval = interval_of(columns, np.tile(np.arange(13), 2), runs=np.repeat([0, 1], 13))
        differing += runs_differ(vars(interval))
        inside += interval.low <= 0 <= interval.high
    shares = (differing / 1000, inside / 1000)
    assert shares == (pytest.approx(marked, abs=0.04), pytest.approx(covered, abs=0.04))


@pytest.mark.parametrize("units", [40, 140])
def test_confidence_is_an_argument(units):
    """Bonferroni's confidence of ten tests: t's quantile, the percentiles, and Wilson's."""
    values, ones = np.random.default_rng(units).normal(size=units), np.ones(units)
    usual, corrected = (
        ClusterBootstrap(np.arange(units), confidence=confidence).ratio_interval(values, ones)
        for confidence in (0.95, 0.995)
    )
    assert corrected.low < usual.low < usual.high < corrected.high
    if units == 40:
        assert_jackknife(
            vars(corrected), lambda rows: values[rows].mean(), np.arange(units), confidence=0.995
        )
    none = ClusterBootstrap(np.arange(60), confidence=0.995).ratio_interval(np.zeros(60), np.ones(60))
    assert none == statistics.wilson(0, 60, 0.995)
    assert none.high > statistics.wilson(0, 60).high


@pytest.mark.parametrize("runs", [3, 4])
def test_runs_are_units_too(runs):
    """Run by run as rows, and as columns of one model: the t of their means beside that of groups."""
    rng = np.random.default_rng(runs)
    values = rng.normal(size=40) + rng.normal(0, 3, (runs, 1)) + rng.normal(0, 0.1, (runs, 40))
    clusters, number = np.tile(np.arange(40), runs), np.repeat(np.arange(runs), 40)
    rows = interval_of(np.stack([values.ravel(), np.ones(values.size)], axis=1), clusters, runs=number)
    columns = ClusterBootstrap(np.arange(40), labels=["one"] * runs)
    of_seeds = [columns.ratio(of_seed, np.ones(40)) for of_seed in values]
    as_columns = columns.interval(columns.over_seeds(0, of_seeds))
    assert (rows.low, rows.high) == pytest.approx((as_columns.low, as_columns.high))
    _, of_groups, freedom = jackknife(lambda rows: values.ravel()[rows].mean(), clusters)
    errors, freedoms = np.array([sem(values.mean(axis=1)), of_groups]), [runs - 1, freedom]
    half = (errors**2 * t.ppf(0.975, freedoms)).sum() / (errors**2).sum() ** 0.5
    assert rows.high - rows.value == pytest.approx(half)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_share_of_none_or_all_has_the_interval_of_its_targets(value):
    for documents in (5, 60):
        bootstrap = ClusterBootstrap(np.arange(60) % documents, resamples=1000)
        interval = bootstrap.ratio_interval(np.full(60, value), np.ones(60))
        assert interval == statistics.wilson(round(60 * value), 60)


def test_a_share_stays_between_0_and_1():
    interval = ClusterBootstrap(np.arange(4)).ratio_interval(np.array([0.0, 0, 0, 1]), np.ones(4))
    assert interval == Interval(0.25, 0.0, 1.0)


def test_a_mean_of_values_between_0_and_1_is_no_share() -> None:
    """Its jackknife of five units is Student's t of the mean, whatever its ends are."""
    gains = np.array([0.02, 0.9, 0.01, 0.03, 0.05])
    interval = ClusterBootstrap(np.arange(5)).ratio_interval(gains, np.ones(5))
    changes = (gains.mean() - gains) / 4
    freedom = max(4 / 3, (changes**2).sum() ** 2 / (changes**4).sum())
    half = t.ppf(0.975, freedom) * np.sqrt(4 / 5 * (changes**2).sum())
    assert (interval.low, interval.high) == pytest.approx((gains.mean() - half, gains.mean() + half))
    assert interval.low < 0 and interval.high > 1


@pytest.mark.slow
@pytest.mark.parametrize("differ", [0.3, 3.0])
@pytest.mark.parametrize("sizes", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("units", [4, 5, 13, 29, 60, 100])
def test_few_groups_cover_the_truth(units, sizes, differ):
    """Groups whose means differ by ``differ`` of what targets do, and whose sizes by e to a normal of ``sizes``."""
    rng, covered = np.random.default_rng(units), 0
    for _ in range(2000):
        targets = np.exp(rng.normal(2.5, sizes, units)).clip(1).round()
        sums = targets * (rng.normal(0, differ, units) + rng.normal(size=units) / np.sqrt(targets))
        interval = interval_of(np.stack([sums, targets], axis=1), np.arange(units))
        covered += interval.low <= 0 <= interval.high
    assert covered / 2000 >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("differ", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("groups", [4, 13, 60])
@pytest.mark.parametrize("runs", [3, 5])
def test_few_runs_cover_the_truth(runs, groups, differ):
    """Of the variance of groups, 1, a tenth is not common to the runs, whose means differ by ``differ``."""
    rng, covered = np.random.default_rng(groups), 0
    rows = {"runs": np.repeat(np.arange(runs), groups)}
    for _ in range(2000):
        values = rng.normal(size=groups) + rng.normal(0, differ, (runs, 1))
        values = values + rng.normal(0, 0.3, (runs, groups))
        columns = np.stack([values.ravel(), np.ones(values.size)], axis=1)
        interval = interval_of(columns, np.tile(np.arange(groups), runs), **rows)
        covered += interval.low <= 0 <= interval.high
    assert covered / 2000 >= 0.93


@pytest.mark.parametrize("units", [40, 140])
@pytest.mark.parametrize("errors", [0.1, 1.0, -2.0])
def test_at_p_the_interval_ends_at_0(units, errors):
    """Of a mean so many standard errors from 0."""
    values = np.random.default_rng(1).normal(size=units)
    values += errors * values.std() / units**0.5 - values.mean()
    bootstrap = ClusterBootstrap(np.arange(units))
    p = bootstrap.p_value(bootstrap.ratio(values, np.ones(units)))
    for confidence, holds_0 in ((1 - 0.9 * p, True), (1 - min(0.999, 1.1 * p), False)):
        at = ClusterBootstrap(np.arange(units), confidence=confidence)
        interval = at.ratio_interval(values, np.ones(units))
        assert (interval.low <= 0 <= interval.high) == holds_0 or p > 0.9
    assert abs(p - 2 * t.sf(abs(errors), units)) < 0.04


def test_p_of_nothing_that_varies_is_undefined():
    bootstrap = ClusterBootstrap(np.arange(9))
    assert np.isnan(bootstrap.p_value(bootstrap.ratio(np.zeros(9), np.ones(9))))
    few = ClusterBootstrap(np.arange(3))
    assert np.isnan(few.p_value(few.ratio(np.arange(3.0), np.ones(3))))
    far = bootstrap.p_value(bootstrap.ratio(1e9 + np.arange(9.0), np.ones(9)))
    assert 0 < far < 1e-11


def test_holm_is_that_of_the_paper():
    """Holm (1979): the smallest of m times m, the next times m - 1, and none smaller than the one before."""
    adjusted = statistics.holm(np.array([0.04, np.nan, 0.01, 0.03, 0.6]))
    assert adjusted == pytest.approx([0.09, np.nan, 0.04, 0.09, 0.6], nan_ok=True)
    assert statistics.holm(np.array([0.5, 0.9])).tolist() == [1.0, 1.0]
    assert statistics.holm(np.array([])).tolist() == []
    not_yet = statistics.holm(np.array([0.01, 0.03, 1.0, 1.0]))[:2]
    assert statistics.holm(np.array([0.01, 0.03]), num_tests=4).tolist() == not_yet.tolist()


# --- least squares ---


def planted(
    rng: np.random.Generator, slope: float, sizes: np.ndarray, *, differ: float = 0.3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcome, predictors (n, 2) and groups; the first predictor has this slope, and a different one in each group."""
    groups = np.repeat(np.arange(len(sizes)), sizes)
    predictors = rng.normal(size=(len(groups), 2))
    predictors[:, 1] += 0.5 * predictors[:, 0] + rng.normal(size=len(sizes))[groups]
    of_group = slope + differ * rng.normal(size=len(sizes))
    outcome = 3 + of_group[groups] * predictors[:, 0] - 2 * predictors[:, 1]
    return outcome + rng.normal(size=len(groups)), predictors, groups


def slow_slopes(outcome: np.ndarray, predictors: np.ndarray) -> np.ndarray:
    """Coefficients of a fit with an intercept."""
    design = np.column_stack([np.ones(len(outcome)), predictors])
    return np.linalg.lstsq(design, outcome, rcond=None)[0][1:]


def test_slopes_equal_a_plain_loop_that_leaves_a_group_out():
    """Predictors that are far from 0 and of other units lose no digits."""
    rng = np.random.default_rng(0)
    outcome, predictors, groups = planted(rng, 0.4, rng.integers(2, 40, 9))
    predictors = 1e4 + predictors * [1.0, 1e-3]
    bootstrap = ClusterBootstrap(np.arange(len(groups)), groups=groups)
    draws = bootstrap.slopes(outcome, predictors)
    without = [groups != group for group in range(9)]
    slow = [slow_slopes(outcome[rows], predictors[rows]) for rows in [groups >= 0, *without]]
    np.testing.assert_allclose(draws, slow, rtol=1e-6)


def test_slopes_of_resamples_equal_fits_of_their_rows(many):
    rng = np.random.default_rng(3)
    outcome, predictors, groups = planted(rng, 0.4, rng.integers(2, 12, 12))
    bootstrap = ClusterBootstrap(groups, resamples=50, seed=5)
    slow = [slow_slopes(outcome[rows], predictors[rows]) for rows in slow_resamples(groups, 50, seed=5)]
    np.testing.assert_allclose(bootstrap.slopes(outcome, predictors)[1:], slow, rtol=1e-9)


def test_slopes_that_a_sample_does_not_determine_are_undefined():
    """A predictor that is constant, or the sum of others; one that only one group varies has no interval."""
    rng = np.random.default_rng(1)
    outcome, predictors, groups = planted(rng, 0.4, np.full(6, 10))
    bootstrap = ClusterBootstrap(groups)
    for further in (np.ones(60), predictors.sum(axis=1)):
        assert np.isnan(bootstrap.slopes(outcome, np.column_stack([predictors, further]))).all()
    of_one = bootstrap.slopes(outcome, np.column_stack([predictors, (groups == 2) * rng.normal(size=60)]))
    assert np.isfinite(of_one[0]).all()
    assert np.isnan(bootstrap.interval(of_one[:, 2]).low) and np.isnan(bootstrap.p_value(of_one[:, 2]))
    few = groups < 3
    assert np.isnan(ClusterBootstrap(groups[few]).slopes(outcome[few], predictors[few])[1:]).all()


@pytest.mark.parametrize("sizes", [np.full(21, 20), np.array([200, 90, 70, *[15] * 10, *[3] * 8])])
def test_intervals_of_slopes_cover_the_truth_and_p_is_uniform(sizes):
    """With packages of equal size and of sizes as unequal as those of the docstrings, where one dominates."""
    rng = np.random.default_rng(7)
    values = []
    holds = []
    p_values = []
    for _ in range(300):
        slope = 0.25
        outcome, predictors, groups = planted(rng, slope, sizes)
        bootstrap = ClusterBootstrap(groups)
        interval = bootstrap.interval(bootstrap.slopes(outcome, predictors)[:, 0])
        values.append(interval.value)
        holds.append(interval.low <= slope <= interval.high)
        nothing = outcome - slope * predictors[:, 0]
        p_values.append(bootstrap.p_value(bootstrap.slopes(nothing, predictors)[:, 0]))
    assert np.mean(values) == pytest.approx(0.25, abs=4 * sem(values))
    assert 0.92 <= np.mean(holds) <= 0.99
    shares = [(np.array(p_values) < level).mean() for level in (0.05, 0.2, 0.5)]
    assert np.abs(np.array(shares) - [0.05, 0.2, 0.5]).max() < 0.09 and shares[0] <= 0.08


def test_what_is_detectable_is_told_from_0_in_four_of_five_samples():
    """Of a mean of 20 units: the difference that a two-sided test finds with a power of 0.8."""
    rng = np.random.default_rng(2)
    bootstrap = ClusterBootstrap(np.arange(20))
    ones = np.ones(20)
    drawn = [rng.normal(size=20) for _ in range(300)]
    detectable = np.mean([bootstrap.detectable(bootstrap.ratio(values, ones)) for values in drawn])
    p_values = [bootstrap.p_value(bootstrap.ratio(values + detectable, ones)) for values in drawn]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.8, abs=0.07)
    assert np.isnan(ClusterBootstrap(np.arange(3)).detectable(np.arange(4.0)))


def test_what_is_detectable_by_percentiles_is_that_by_t(monkeypatch):
    values = np.random.default_rng(4).normal(size=150)
    of_percentiles = ClusterBootstrap(np.arange(150), resamples=4000)
    by_percentiles = of_percentiles.detectable(of_percentiles.ratio(values, np.ones(150)))
    monkeypatch.setattr(statistics, "MOST_UNITS_OF_T", 1000)
    of_t = ClusterBootstrap(np.arange(150))
    assert by_percentiles == pytest.approx(of_t.detectable(of_t.ratio(values, np.ones(150))), rel=0.08)
