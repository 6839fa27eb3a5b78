"""Agreement of rankings and of kept sets, by hand-made cases and SciPy."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from analysis.cache_eviction.agreement import kept_overlap, rank_correlation


def of_columns(*columns, count=8):
    kept = np.zeros(count, dtype=bool)
    kept[list(columns)] = True
    return kept


@pytest.mark.parametrize("sinks", [0, 3])
def test_ranks_correlate_as_scipy_has_it(sinks):
    """Heads are averaged before they are ranked, and ties share their mean rank."""
    generator = np.random.default_rng(0)
    scores = generator.random((6, 20))
    effects = np.round(generator.random(20), 1)
    expected = spearmanr(scores.mean(axis=0)[sinks:], effects[sinks:]).statistic
    assert rank_correlation(scores, effects, sinks) == pytest.approx(expected)
    assert rank_correlation(scores.mean(axis=0), effects, sinks) == pytest.approx(expected)
    assert rank_correlation(effects, scores, sinks) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], 1.0),
        ([4.0, 3.0, 2.0, 1.0], -1.0),
        ([2.0, 2.0, 2.0, 2.0], np.nan),
        ([1.0, np.nan, 3.0, 4.0], np.nan),
        ([np.inf, 2.0, 3.0, 4.0], np.nan),
    ],
)
def test_correlation_is_undefined_of_equal_scores_and_of_none(scores, expected):
    effects = np.array([0.1, 0.2, 0.3, 0.9])
    np.testing.assert_equal(rank_correlation(np.array(scores), effects), expected)
    np.testing.assert_equal(rank_correlation(effects, np.array(scores)), expected)


def test_sinks_do_not_count_whatever_they_score():
    scores = np.array([[np.inf, np.nan, 1.0, 2.0, 3.0]])
    effects = np.array([9.0, -9.0, 1.0, 2.0, 3.0])
    assert rank_correlation(scores, effects, sinks=2) == 1.0


@pytest.mark.parametrize(
    ("first", "second", "sinks", "expected"),
    [
        (of_columns(0, 1, 2, 3), of_columns(2, 3, 4, 5), 0, 0.5),
        (of_columns(0, 1, 2, 3), of_columns(0, 1, 4, 5), 0, 0.5),
        (of_columns(0, 1, 2, 3), of_columns(0, 1, 4, 5), 2, 0.0),
        (of_columns(1, 2), of_columns(1, 2), 0, 1.0),
        (of_columns(), of_columns(), 0, np.nan),
        (of_columns(0), of_columns(0), 1, np.nan),
    ],
)
def test_kept_sets_overlap_by_the_share_of_both(first, second, sinks, expected):
    np.testing.assert_equal(kept_overlap(first, second, sinks), expected)


def test_heads_are_averaged_and_a_set_of_all_heads_is_that_of_each():
    by_head = np.stack([of_columns(0, 1), of_columns(1, 2)])
    assert kept_overlap(by_head, of_columns(0, 1)) == 0.75
    assert kept_overlap(of_columns(0, 1), by_head) == 0.75
    unequal = np.stack([of_columns(0, 1, 2), of_columns(1)])  # K = 2 in the mean
    assert kept_overlap(unequal, by_head) == 3 / 4
