"""What faithfulness adds to a result, against one plain forward pass for each subset, for B = 1 and B > 1."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from analysis.contexts import Contexts
from analysis.faithfulness import SUBSETS, Faithfulness, far_subsets, score_agreement, subset_influence
from analysis.selectors import Selection
from tests.support.plain import plain_loss, selected_losses
from tests.support.small_measurement import KS, F, model, read, small, small_tokens, window

SELECTORS = ("leave-one-out", "greedy", "leave-one-in", "attention", "leave-one-out@gradient:6", "random")


@pytest.fixture(scope="module", params=[1, 6])
def measured(request):
    return small(faithfulness=True, targets_per_block=request.param, selectors=SELECTORS, targets=18)


def subsets_of(measured, target):
    block = int(target.target_id) // measured.settings.contexts.targets_per_block
    return far_subsets(F, SUBSETS, seed=0, block=block)


def test_losses_equal_plain_passes(measured):
    """Subsets and what is left without S_k, of both far contexts; L_short with ids from 0; the last 32 tokens."""
    inner, tokens = model()[0], small_tokens()
    for row in range(3):
        target = measured.targets.iloc[measured.over[row]]
        length, token = read(measured, target), target.token
        true, short = window(measured, target, tokens, "true"), list(range(F, length))
        alone = plain_loss(inner, true[F:], range(length - F), token)
        assert target.loss_short_from_0_nats == pytest.approx(alone, abs=1e-4)
        last = plain_loss(
            inner, true, range(40 - 32, length), token
        )  # in a block 32 and those before the target
        assert target.loss_of_32_nats == pytest.approx(last, abs=1e-4)
        for far_context in ("true", "placebo"):
            text = window(measured, target, tokens, far_context)
            long = plain_loss(inner, text, range(length), token)
            expected = [
                plain_loss(inner, text, [*subset, *short], token) for subset in subsets_of(measured, target)
            ]
            for name in SELECTORS:
                columns = {
                    column: measured.of_choices(column, name, far_context)[row]
                    for column in ("subset_loss_nats", "comprehensiveness_nats")
                }
                np.testing.assert_allclose(columns["subset_loss_nats"], expected, atol=1e-4)
                chosen = measured.selected(name, far_context)[row].tolist()
                drops = [
                    plain_loss(inner, text, [j for j in range(length) if j not in chosen[:k]], token) - long
                    for k in KS
                ]
                np.testing.assert_allclose(columns["comprehensiveness_nats"], drops, atol=2e-4)
    assert "loss_of_96_nats" not in measured.targets


def test_leave_one_outs_sums_are_those_of_plain_influences(measured):
    inner = model()[0]
    target = measured.targets.iloc[measured.over[0]]
    text = window(measured, target, small_tokens(), "placebo")
    long = plain_loss(inner, text, range(len(text)), target.token)
    influence = [
        plain_loss(inner, text, [j for j in range(len(text)) if j != i], target.token) - long
        for i in range(F)
    ]
    expected = [sum(influence[i] for i in subset) for subset in subsets_of(measured, target)]
    sums = measured.of_choices("subset_influence", "leave-one-out", "placebo")[0]
    np.testing.assert_allclose(sums, expected, atol=1e-3)
    assert np.isnan(measured.of_choices("subset_influence", "greedy")).all()
    agreement = {name: measured.of_choices("leave_one_out_spearman", name) for name in SELECTORS}
    assert np.isnan(agreement["leave-one-out"]).all() and np.isnan(agreement["greedy"]).all()
    assert np.isfinite(agreement["random"]).all()


def test_subsets_are_distinct_halves_and_belong_to_the_block():
    subsets = far_subsets(15, 200, seed=3, block=7)
    assert subsets.shape == (200, 8) and (np.diff(subsets, axis=1) > 0).all()
    kept = np.bincount(subsets.ravel(), minlength=15) / 200
    assert np.abs(kept - 8 / 15).max() < 0.12
    assert np.array_equal(subsets[:50], far_subsets(15, 200, seed=3, block=7)[:50])
    for other in (far_subsets(15, 200, seed=3, block=8), far_subsets(15, 200, seed=4, block=7)):
        assert not np.array_equal(subsets, other)


def test_tokens_without_a_score_count_as_nothing():
    scores = np.array([[1.0, np.nan, 3.0, -0.5], [0.5, 0.25, np.nan, np.nan]])
    subsets = np.array([[[0, 1], [2, 3]], [[1, 2], [0, 3]]])
    assert subset_influence(scores, subsets).tolist() == [[1.0, 2.5], [0.25, 0.5]]
    columns, influence = np.zeros((2, 1), dtype=int), np.zeros((2, 1))
    chosen = {
        "leave-one-out": Selection(columns, influence, np.array([[4.0, 3, 2, 1], [1.0, 2, 3, 4]])),
        "screened": Selection(columns, influence, scores),
        "greedy": Selection(columns, influence),
    }
    agreement = score_agreement(chosen)
    expected = [
        spearmanr([4, 3, 2, 1], [1, 0, 3, -0.5]).statistic,
        spearmanr([1, 2, 3, 4], [0.5, 0.25, 0, 0]).statistic,
    ]
    assert list(agreement) == ["screened"] and agreement["screened"].tolist() == pytest.approx(expected)
    assert score_agreement({"greedy": chosen["greedy"], "screened": chosen["screened"]}) == {}


class Lookup:
    """A scorer whose p of the target is a function of the far tokens that are read, worked out by hand."""

    def __init__(self, probability):
        self.probability = probability

    def losses(self, contexts, far, targets):
        far = np.broadcast_to(far, (len(targets), *far.shape[-2:]))
        return -np.log([[self.probability(frozenset(kept.tolist())) for kept in row] for row in far])


def test_definitions_of_eraser_and_contextcite_by_hand():
    """Of four far tokens, 1 or 2 is enough (redundant), 3 helps a little: p 0.1, times 6 and 1.5; ranked 1, 3, 2, 0.

    ERASER (4.2), m a probability of the label: sufficiency m(x) - m(r), comprehensiveness m(x) - m(x without r).
    ContextCite (3.2): top-k drop log p(x) - log p(x without r). Ours: both, with m = log p.
    """

    def p(kept):
        return 0.1 * (6 if kept & {1, 2} else 1) * (1.5 if 3 in kept else 1)

    scorer, everything, ranked, ks = Lookup(p), frozenset(range(4)), [1, 3, 2, 0], (1, 2, 3)
    contexts = Contexts(
        np.zeros((1, 6), dtype=int), np.zeros((1, 1), dtype=int), np.zeros((1, 1), dtype=int), 2
    )
    targets, columns = np.array([[0, 0]]), np.array([ranked])
    chosen = {"leave-one-out": Selection(columns, columns * 1.0, np.array([[0.0, 0.0, 0.0, 0.4]]))}
    judged = Faithfulness(scorer, ks, seed=0).of_choices(contexts, targets, chosen)["leave-one-out"]
    drops = [np.log(p(everything)) - np.log(p(everything - {*ranked[:k]})) for k in ks]
    assert drops == pytest.approx([0.0, np.log(1.5), np.log(9)])  # the first is not missed: 2 says the same
    assert judged["comprehensiveness_nats"][0].tolist() == pytest.approx(drops)
    lacks = [np.log(p(everything)) - np.log(p(frozenset(ranked[:k]))) for k in ks]
    assert lacks == pytest.approx([np.log(1.5), 0.0, 0.0])
    losses = selected_losses(scorer, contexts, targets, columns, ks)
    assert (losses - scorer.losses(contexts, np.arange(4)[None], targets))[0].tolist() == pytest.approx(lacks)
    kept = [frozenset(subset) for subset in far_subsets(4, SUBSETS, seed=0, block=0).tolist()]
    assert judged["subset_loss_nats"][0].tolist() == pytest.approx([-np.log(p(subset)) for subset in kept])
    assert judged["subset_influence"][0].tolist() == pytest.approx([0.4 * (3 in subset) for subset in kept])


def test_selectors_that_rank_more_tokens_than_others_are_judged_by_as_many():
    """Where sinks are kept, a selector that has none among its candidates ranks fewer."""
    names = ("leave-one-out/cache:2", "attention")
    settings = {"targets": 12, "tau_nats": 0.5, "keep_as": ("text", "cache:2")}
    together = small(**settings, selectors=names, faithfulness=True)
    alone = small(**settings, selectors=names[1:], faithfulness=True)
    for name in ("comprehensiveness_nats", "subset_influence"):
        first, second = (result.of_choices(name, "attention", "true") for result in (together, alone))
        np.testing.assert_allclose(first, second, atol=1e-5)
