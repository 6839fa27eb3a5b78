"""Losses and selectors against straightforward computations, and a toy model whose far dependency is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.contexts import Contexts
from analysis.recovery import selected_losses
from analysis.scorer import Scorer, long_and_short_losses
from analysis.selectors import SELECTORS, Question, find_selector, most_influential
from olmo_sparsity.errors import UserError
from tests import tiny

N, M, VOCABULARY = 14, 4, 50
FAR = N - M
EXACT = ["leave-one-out", "leave-one-in"]


def make_contexts(count=3, seed=0):
    generator = np.random.default_rng(seed)
    return Contexts(
        tokens=generator.integers(1, VOCABULARY, (count, N)),
        targets=generator.integers(1, VOCABULARY, count),
        target_id=np.arange(count) * 10,
        n_short=M,
    )


@torch.no_grad()
def plain_loss(model, contexts, row, kept):
    """One subsequence at a time, all logits, log-softmax by hand."""
    tokens = torch.tensor([[int(contexts.tokens[row, j]) for j in kept]])
    logits = model(tokens, position_ids=torch.tensor([list(kept)])).logits[0, -1].double()
    return float(torch.log(torch.exp(logits).sum()) - logits[int(contexts.targets[row])])


@torch.no_grad()
def masked_loss(model, contexts, row, kept):
    """The whole context with the dropped tokens hidden by an attention mask."""
    mask = torch.zeros(1, N, dtype=torch.long)
    mask[0, list(kept)] = 1
    logits = model(torch.from_numpy(contexts.tokens[row])[None], attention_mask=mask).logits[0, -1].double()
    return float(-logits.log_softmax(-1)[int(contexts.targets[row])])


@pytest.fixture(scope="module")
def model():
    return tiny.model()


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 10_000])
def test_losses_equal_one_subsequence_at_a_time_and_masking(model, tokens_per_batch):
    contexts = make_contexts()
    keep = np.array([[0, 2, 5, 9, 10, 11, 12, 13], [1, 2, 3, 4, 10, 11, 12, 13]])
    losses = Scorer(model, tokens_per_batch=tokens_per_batch).losses(contexts, keep)
    for row in range(len(contexts)):
        for column, kept in enumerate(keep):
            assert losses[row, column] == pytest.approx(plain_loss(model, contexts, row, kept), abs=2e-5)
            assert losses[row, column] == pytest.approx(masked_loss(model, contexts, row, kept), abs=2e-5)


def test_long_and_short_losses_equal_a_plain_computation(model):
    contexts = make_contexts(5)
    long, short = long_and_short_losses(Scorer(model), contexts)
    for row in range(5):
        assert long[row] == pytest.approx(plain_loss(model, contexts, row, range(N)), abs=2e-5)
        assert short[row] == pytest.approx(plain_loss(model, contexts, row, range(FAR, N)), abs=2e-5)


def test_leave_one_out_is_the_loss_without_the_token_minus_the_long_loss(model):
    contexts = make_contexts()
    influence = find_selector("leave-one-out")(Question(Scorer(model), contexts, seed=0))
    for row in range(len(contexts)):
        long = plain_loss(model, contexts, row, range(N))
        for i in range(FAR):
            without = plain_loss(model, contexts, row, [j for j in range(N) if j != i])
            assert influence[row, i] == pytest.approx(without - long, abs=5e-5)


def test_leave_one_in_is_the_short_loss_minus_the_loss_with_the_token(model):
    contexts = make_contexts()
    influence = find_selector("leave-one-in")(Question(Scorer(model), contexts, seed=0))
    for row in range(len(contexts)):
        short = plain_loss(model, contexts, row, range(FAR, N))
        for i in range(FAR):
            with_it = plain_loss(model, contexts, row, [i, *range(FAR, N)])
            assert influence[row, i] == pytest.approx(short - with_it, abs=5e-5)


def test_loss_of_k_tokens_keeps_the_short_context_and_the_first_k_selected(model):
    contexts = make_contexts(2)
    selected = np.array([[7, 0, 3], [1, 9, 2]])
    losses = selected_losses(Scorer(model), contexts, selected, ks=(1, 3))
    for row, order in enumerate(selected):
        for column, k in enumerate((1, 3)):
            kept = sorted(order[:k]) + list(range(FAR, N))
            assert losses[row, column] == pytest.approx(plain_loss(model, contexts, row, kept), abs=2e-5)


def test_all_far_tokens_recover_the_long_loss(model):
    contexts = make_contexts()
    long, _ = long_and_short_losses(Scorer(model), contexts)
    everything = np.tile(np.arange(FAR), (len(contexts), 1))
    np.testing.assert_allclose(
        selected_losses(Scorer(model), contexts, everything, (FAR,))[:, 0], long, atol=2e-5
    )


class Planted:
    """Predicts the target only by the tokens at two known columns: each raises its logit, both together the more."""

    def __init__(self, columns, target, conjunction):
        self.columns, self.target, self.conjunction = columns, target, conjunction

    def __call__(self, input_ids, position_ids, *, last_logits_only):
        present = [(position_ids == column).any(dim=1).float() for column in self.columns]
        evidence = 6 * present[0] * present[1] if self.conjunction else 3 * present[0] + 3 * present[1]
        logits = torch.zeros(len(input_ids), 1, VOCABULARY)
        logits[:, 0, self.target] = evidence
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("columns", [(2, 7), (0, 9)])
@pytest.mark.parametrize(
    ("name", "conjunction"), [("leave-one-out", False), ("leave-one-out", True), ("leave-one-in", False)]
)
def test_exactly_the_two_planted_tokens_are_found(name, conjunction, columns):
    contexts = make_contexts(1)
    scorer = Scorer(Planted(columns, int(contexts.targets[0]), conjunction))
    influence = find_selector(name)(Question(scorer, contexts, seed=0))
    assert set(np.flatnonzero(influence[0] > 1e-6)) == set(columns)
    selected = most_influential(influence, 2)
    assert set(selected[0]) == set(columns)
    long, short = long_and_short_losses(scorer, contexts)
    losses = selected_losses(scorer, contexts, selected, (1, 2))
    assert losses[0, 1] == pytest.approx(long[0])  # two tokens recover everything
    assert long[0] < losses[0, 0] <= short[0]  # one of them does not


def test_no_single_token_shows_a_conjunction_to_leave_one_in():
    """METHOD 2.3: a model that needs two far tokens at once is invisible to leave-one-in."""
    contexts = make_contexts(1)
    scorer = Scorer(Planted((2, 7), int(contexts.targets[0]), conjunction=True))
    influence = find_selector("leave-one-in")(Question(scorer, contexts, seed=0))
    np.testing.assert_allclose(influence, 0, atol=1e-6)


def test_random_is_a_function_of_seed_and_target_alone(model):
    contexts = make_contexts(4)
    question = Question(Scorer(model), contexts, seed=5)
    whole = find_selector("random")(question)
    part = find_selector("random")(Question(Scorer(model), contexts.take(slice(2, 3)), seed=5))
    assert np.array_equal(whole[2:3], part)
    assert not np.array_equal(whole, find_selector("random")(Question(Scorer(model), contexts, seed=6)))
    first = np.array(
        [
            most_influential(find_selector("random")(Question(Scorer(model), contexts, s)), 1)[:, 0]
            for s in range(300)
        ]
    )
    assert np.bincount(first.ravel(), minlength=FAR).min() > 60  # 120 expected of each


def test_nearest_takes_the_far_tokens_next_to_the_short_context(model):
    influence = find_selector("nearest")(Question(Scorer(model), make_contexts(2), seed=0))
    assert most_influential(influence, 3).tolist() == [[FAR - 1, FAR - 2, FAR - 3]] * 2


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_choices_do_not_depend_on_how_targets_are_batched(model, name):
    contexts = make_contexts(5)
    together = find_selector(name)(Question(Scorer(model), contexts, seed=1))
    alone = [
        find_selector(name)(
            Question(Scorer(model, tokens_per_batch=16), contexts.take(slice(i, i + 1)), seed=1)
        )
        for i in range(5)
    ]
    np.testing.assert_allclose(together, np.concatenate(alone), atol=2e-5)


def test_unknown_selector_lists_the_choices():
    with pytest.raises(UserError, match=r"choose among leave-one-out.*did you mean leave-one-out"):
        find_selector("leave_one_out")
