"""Exact selectors find every token that a hand-built model depends on (docs/method.md 2.6), and recall is right."""

import itertools

import numpy as np
import pytest

from analysis.model.losses import Scorer, long_and_short_losses
from analysis.selectors import SelectorInput, find_selector
from analysis.synthetic.planted import (
    PlantedModel,
    chance_recall,
    found_at,
    planted_context,
    recall_of_hand_built,
)

N, M = 40, 8
COLUMNS = [3, 4, 11, 17, 20, 26, 30, 31]


def select(name, planted, rule, k):
    scorer = Scorer(PlantedModel(planted, N, rule=rule))
    return find_selector(name)(SelectorInput(scorer, planted_context(N, M), 0, k)).columns


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("leave-one-out", "sum"),
        ("leave-one-out", "all"),
        ("leave-one-in", "sum"),
        ("greedy", "sum"),
        ("gradient", "sum"),
        ("gradient", "all"),
        ("leave-one-out@gradient:12", "all"),
        ("leave-one-out-kl", "all"),
        ("leave-one-out-tv", "sum"),
        ("leave-one-in-kl", "sum"),
        ("greedy-kl", "sum"),
        ("saliency", "all"),
        ("integrated-gradients", "sum"),
    ],
)
def test_the_planted_set_comes_first(name, rule, count):
    planted = COLUMNS[:count]
    selected = select(name, planted, rule, 16)
    ks = (1, 2, 4, 8, 16)
    recall = found_at(selected, np.array([planted]), ks).mean(axis=2)[0]
    assert recall.tolist() == [min(k, count) / count for k in ks]  # the most that k tokens can hold


@pytest.mark.parametrize("name", ["leave-one-in", "greedy"])
def test_adding_single_tokens_cannot_see_a_conjunction(name):
    """What needs all of its tokens at once is invisible to selectors that add one at a time (docs/method.md 4)."""
    assert set(select(name, COLUMNS[:4], "all", 4)[0]) != set(COLUMNS[:4])


def test_the_model_is_what_it_says():
    contexts, noise_free = planted_context(N, M), {"noise_nats": 0.0, "strength_nats": 3.0}
    for rule, of_half in (("sum", 1.5), ("all", 0.0)):
        scorer = Scorer(PlantedModel([2, 5], N, rule=rule, **noise_free))
        long, short = long_and_short_losses(scorer, contexts)
        assert long[0] == pytest.approx(np.log1p(np.exp(-3)))
        assert short[0] == pytest.approx(np.log(2))
        half = scorer.losses(contexts, np.array([[2]]))[0, 0]
        assert half == pytest.approx(np.log1p(np.exp(-of_half)))


def test_recall_by_hand():
    selected, planted = np.array([[5, 1, 2], [0, 9, 8]]), np.array([[1, 2], [7, 9]])
    assert found_at(selected, planted, (1, 2, 3)).mean(axis=2).tolist() == [[0, 0.5, 1], [0, 0.5, 0.5]]


def test_a_place_is_found_by_any_of_its_tokens():
    found = found_at(
        np.array([[5, 1, 2], [0, 9, 8]]), np.array([[3, 4], [7, 9]]), (1, 2, 3), tokens_per_place=2
    )
    assert found.tolist() == [[[0, 1], [0, 1], [1, 1]], [[0, 0], [0, 1], [0, 1]]]


@pytest.mark.parametrize("unit", [1, 2])
def test_chance_is_the_mean_over_all_choices(unit):
    for k in (1, 2, 5, 6):
        choices = np.array(list(itertools.combinations(range(6), k)))
        planted = np.broadcast_to([1, 5], (len(choices), 2))
        recall = found_at(choices, planted, (k,), unit).mean()
        assert chance_recall(k, 6, unit) == pytest.approx(recall)


def test_leave_one_out_finds_what_models_by_hand_depend_on():
    recalls = recall_of_hand_built(["leave-one-out", "random"], n_long=N, n_short=M, models=2)
    assert len(recalls) == 2 * 4 * 2 * 5
    exact = recalls[recalls["selector"] == "leave-one-out"]
    assert [*exact["value"]] == [min(k, p) / p for k, p in zip(exact["k"], exact["planted"], strict=True)]
