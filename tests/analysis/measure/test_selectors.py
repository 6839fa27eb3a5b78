"""Losses and selectors against straightforward computations, and a toy model whose far dependency is known."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.measure.influence import selected_losses
from analysis.measure.selectors import (
    SELECTORS,
    Question,
    check_selector,
    find_selector,
    gradient,
    leave_one_in,
    leave_one_out,
)
from analysis.model.adapters import OlmoForAnalysis
from analysis.model.scorer import Scorer, long_and_short_losses
from analysis.text.contexts import Contexts
from olmo_sparsity.util.errors import UserError
from tests.support import tiny

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
    tokens = torch.from_numpy(contexts.tokens[row])[None]
    logits = model(tokens, torch.arange(N)[None], attention_mask=mask).logits[0, -1].double()
    return float(-logits.log_softmax(-1)[int(contexts.targets[row])])


@pytest.fixture(scope="module")
def model():
    return OlmoForAnalysis(tiny.model()).requires_grad_(False)


def ask(scorer, contexts, k=FAR, seed=0):
    return Question(scorer, contexts, seed, k)


def choose(name, scorer, contexts, k, seed=0):
    return find_selector(name)(ask(scorer, contexts, k, seed))


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
    influence = leave_one_out(ask(Scorer(model), contexts))
    for row in range(len(contexts)):
        long = plain_loss(model, contexts, row, range(N))
        for i in range(FAR):
            without = plain_loss(model, contexts, row, [j for j in range(N) if j != i])
            assert influence[row, i] == pytest.approx(without - long, abs=5e-5)


def test_leave_one_in_is_the_short_loss_minus_the_loss_with_the_token(model):
    contexts = make_contexts()
    influence = leave_one_in(ask(Scorer(model), contexts))
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
    ("name", "conjunction"),
    [("leave-one-out", False), ("leave-one-out", True), ("leave-one-in", False), ("greedy", False)],
)
def test_exactly_the_two_planted_tokens_are_found(name, conjunction, columns):
    contexts = make_contexts(1)
    scorer = Scorer(Planted(columns, int(contexts.targets[0]), conjunction))
    selection = choose(name, scorer, contexts, k=FAR)
    assert set(selection.columns[0, :2]) == set(columns)
    assert (selection.influence[0, :2] > 1e-6).all()
    np.testing.assert_allclose(selection.influence[0, 2:], 0, atol=1e-6)
    long, short = long_and_short_losses(scorer, contexts)
    losses = selected_losses(scorer, contexts, selection.columns, (1, 2))
    assert losses[0, 1] == pytest.approx(long[0])  # two tokens recover everything
    assert long[0] < losses[0, 0] <= short[0]  # one of them does not


def test_no_single_token_shows_a_conjunction_to_leave_one_in():
    """A model that needs two far tokens at once is invisible to leave-one-in (docs/method.md 4)."""
    contexts = make_contexts(1)
    scorer = Scorer(Planted((2, 7), int(contexts.targets[0]), conjunction=True))
    np.testing.assert_allclose(leave_one_in(ask(scorer, contexts)), 0, atol=1e-6)


def test_greedy_adds_the_token_that_lowers_the_loss_most(model):
    contexts = make_contexts()
    selection = choose("greedy", Scorer(model), contexts, k=3)
    short = list(range(FAR, N))
    for row in range(len(contexts)):
        chosen, loss = [], plain_loss(model, contexts, row, short)
        for round_ in range(3):
            losses = {
                i: plain_loss(model, contexts, row, sorted([*chosen, i]) + short)
                for i in range(FAR)
                if i not in chosen
            }
            best = min(losses, key=losses.get)
            assert selection.columns[row, round_] == best
            assert selection.influence[row, round_] == pytest.approx(loss - losses[best], abs=5e-5)
            chosen, loss = [*chosen, best], losses[best]


def test_gradient_is_the_slope_of_the_loss_as_a_token_fades(model):
    """Against finite differences of an attention bias, and that bias at its end against dropping the token."""
    contexts = make_contexts()
    slopes = gradient(ask(Scorer(model), contexts))
    tokens, ids = torch.from_numpy(contexts.tokens), torch.arange(N).expand(len(contexts), -1)

    @torch.no_grad()
    def loss_at(column, presence):
        bias = torch.zeros(len(contexts), N, N)
        bias[:, :, column] = np.log(presence)
        bias[:, column, column] = 0
        logits = model.biased_logits(tokens, ids, bias).double()
        return -logits.log_softmax(-1)[range(len(contexts)), contexts.targets].numpy()

    for column in range(FAR):
        slope = (loss_at(column, 1.01) - loss_at(column, 0.99)) / 0.02
        np.testing.assert_allclose(slopes[:, column], -slope, atol=2e-4)
        for row in range(len(contexts)):
            without = plain_loss(model, contexts, row, [j for j in range(N) if j != column])
            assert loss_at(column, 1e-30)[row] == pytest.approx(without, abs=2e-5)


def test_screened_decides_exactly_among_what_was_proposed(model):
    contexts = make_contexts()
    proposed = choose("gradient", Scorer(model), contexts, k=5).columns
    screened = choose("leave-one-out@gradient:5", Scorer(model), contexts, k=2)
    influence = leave_one_out(ask(Scorer(model), contexts))
    for row in range(len(contexts)):
        best = sorted(proposed[row], key=lambda i, row=row: -influence[row, i])[:2]
        assert screened.columns[row].tolist() == best
        np.testing.assert_allclose(screened.influence[row], influence[row, best], atol=5e-5)
    everything = choose(f"leave-one-out@random:{FAR}", Scorer(model), contexts, k=4)
    assert np.array_equal(everything.columns, choose("leave-one-out", Scorer(model), contexts, k=4).columns)


@pytest.mark.parametrize("name", ["greedy@gradient:6", "greedy@leave-one-in:6", "attention@nearest:6"])
def test_screened_forms_choose_different_tokens_among_the_proposed(model, name):
    contexts = make_contexts()
    proposed = choose(name.partition("@")[2].partition(":")[0], Scorer(model), contexts, k=6).columns
    chosen = choose(name, Scorer(model), contexts, k=4).columns
    for row in range(len(contexts)):
        assert set(chosen[row]) < set(proposed[row])
        assert len(set(chosen[row])) == 4


def test_random_is_a_function_of_seed_and_target_alone(model):
    contexts = make_contexts(4)
    whole = choose("random", Scorer(model), contexts, k=4, seed=5).columns
    part = choose("random", Scorer(model), contexts.take(slice(2, 3)), k=4, seed=5).columns
    assert np.array_equal(whole[2:3], part)
    assert not np.array_equal(whole, choose("random", Scorer(model), contexts, k=4, seed=6).columns)
    first = np.array([choose("random", Scorer(model), contexts, 1, s).columns[:, 0] for s in range(300)])
    assert np.bincount(first.ravel(), minlength=FAR).min() > 60  # 120 expected of each


def test_nearest_takes_the_far_tokens_next_to_the_short_context(model):
    columns = choose("nearest", Scorer(model), make_contexts(2), k=3).columns
    assert columns.tolist() == [[FAR - 1, FAR - 2, FAR - 3]] * 2


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_choices_do_not_depend_on_how_targets_are_batched(model, name):
    contexts = make_contexts(5)
    together = choose(name, Scorer(model), contexts, k=4, seed=1)
    alone = [
        choose(name, Scorer(model, tokens_per_batch=16), contexts.take(slice(i, i + 1)), k=4, seed=1)
        for i in range(5)
    ]
    assert np.array_equal(together.columns, np.concatenate([each.columns for each in alone]))
    np.testing.assert_allclose(
        together.influence, np.concatenate([each.influence for each in alone]), atol=2e-5
    )


def test_unknown_selectors_list_the_choices():
    with pytest.raises(UserError, match=r"choose among leave-one-out.*did you mean leave-one-out"):
        find_selector("leave_one_out")
    with pytest.raises(UserError, match=r"unknown selector 'gradeint'.*did you mean gradient"):
        find_selector("leave-one-out@gradeint:4")
    with pytest.raises(UserError, match="write EXACT@PROPOSER:m"):
        find_selector("leave-one-out@gradient")
    for count in (3, 11):
        with pytest.raises(
            UserError, match=f"m = {count} must be at least k = 4 and at most the 10 far tokens"
        ):
            check_selector(f"leave-one-out@gradient:{count}", k_max=4, n_far=10)


def test_a_model_that_only_predicts_has_no_gradient():
    contexts = make_contexts(1)
    scorer = Scorer(Planted((2, 7), int(contexts.targets[0]), conjunction=False))
    with pytest.raises(UserError, match="does not offer what the selector gradient needs"):
        choose("gradient", scorer, contexts, k=1)
