"""Selectors that choose with other near tokens: what they choose, and that it is measured with the true ones."""

import numpy as np
import pytest

from analysis.contexts import Contexts
from analysis.model.losses import Scorer
from analysis.open_model import adapter_of
from analysis.selectors import SelectorInput, find_selector
from tests.support.plain import plain_divergence, plain_log_p, plain_loss, whole_pass
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.small_measurement import F, M, model, small, small_tokens, window

FAR_CONTEXTS = ("true", "placebo", "same-group", "shuffled")
SIGNED, KL, IN_CACHE = (
    "leave-one-out/other-near",
    "leave-one-out-kl/other-near",
    "leave-one-out-kl/cache:2/other-near",
)
SETTINGS = {
    "targets_per_block": 3,
    "tau_nats": 1.0,
    "ks": (1, 3),
    "targets": 30,
    "scores": True,
    "placebos": FAR_CONTEXTS[1:],
    "keep_as": ("text", "cache:2"),
}
SELECTORS = (SIGNED, "leave-one-out", IN_CACHE, KL, "attention/other-near")


@pytest.fixture(scope="module")
def result():
    return small(**SETTINGS, selectors=SELECTORS)


def for_the_choice(target, tokens, text):
    """The text with its tokens F and F + 1, two of the M = 5 near ones, replaced by the last two of the placebo."""
    assert M == 5
    end = target.placebo_start + F
    changed = text.copy()
    changed[F : F + 2] = tokens[target.placebo_text][end - 2 : end]
    return changed


def influences(name, target, text):
    """Of every far token in one text, by one plain pass each; NaN of sinks."""
    inner = model()[0]
    adapter = adapter_of(inner, "the model")
    everything = range(len(text))
    expected = np.full(F, np.nan)
    for left_out in range(2 if name == IN_CACHE else 0, F):
        without = [column for column in everything if column != left_out]
        if name == SIGNED:
            expected[left_out] = plain_loss(inner, text, without, target.token)
            expected[left_out] -= plain_loss(inner, text, everything, target.token)
        elif name == KL:
            long, some = (plain_log_p(inner, text, kept) for kept in (everything, without))
            expected[left_out] = plain_divergence("kl", long, some)
        else:
            long = whole_pass(adapter, text, F, range(F))[-1]
            some = whole_pass(adapter, text, F, without[: F - 1])[-1]
            expected[left_out] = plain_divergence("kl", long, some)
    return expected


@pytest.mark.parametrize("name", [SIGNED, KL, IN_CACHE])
@pytest.mark.parametrize("far_context", slow_but(FAR_CONTEXTS, "true", "placebo"))
def test_tokens_are_chosen_with_the_placebos_end_and_measured_with_the_true_near_ones(
    result, name, far_context
):
    inner, tokens = model()[0], small_tokens()
    there = "selector == @name and far_context == @far_context and level == 'text'"
    rows = result.choices.query(there).set_index("target_id")
    scores = result.scores.query("selector == @name and far_context == @far_context").set_index("target_id")
    over = result.targets.iloc[result.over]
    over = over[over["target_id"].isin(rows.index)]
    assert len(set(over["target_id"] % 3)) == 3, "targets at every place of a block"
    differing = 0
    for target in over.iloc[:: max(1, len(over) // 5)].itertuples():
        text = window(result, target, tokens, far_context)
        expected = influences(name, target, for_the_choice(target, tokens, text))
        np.testing.assert_allclose(scores.influence[target.target_id], expected, atol=1e-4)
        ranked = np.argsort(-np.nan_to_num(expected, nan=-np.inf), kind="stable")[:3]
        row = rows.loc[target.target_id]
        assert row.selected.tolist() == ranked.tolist()
        kept = [[*sorted(row.selected[:k]), *range(F, len(text))] for k in (1, 3)]
        losses = [plain_loss(inner, text, columns, target.token) for columns in kept]
        np.testing.assert_allclose(row.loss_nats, losses, atol=1e-4)
        differing += not np.allclose(influences(name, target, text), expected, atol=1e-3, equal_nan=True)
    assert differing, "the near tokens have a part in the choice"


@pytest.mark.slow
def test_other_selectors_and_the_targets_are_as_without_them(result):
    alone = small(**SETTINGS, selectors=("leave-one-out",))
    assert alone.targets.equals(result.targets)
    for far_context in FAR_CONTEXTS:
        for name in ("selected", "loss_nats"):
            one, other = (getattr(of, name)("leave-one-out", far_context) for of in (alone, result))
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", slow_but(["leave-one-out-kl@attention:9", "snapkv"], "snapkv"))
def test_any_selector_that_looks_at_near_tokens_can_choose_so(name):
    """What it chooses of a target by itself, whose near tokens were replaced by hand."""
    by_other_near = f"{name}/other-near"
    measured = small(**{**SETTINGS, "placebos": ("placebo",)}, selectors=(by_other_near, name))
    adapter = adapter_of(model()[0], "the model")
    tokens = small_tokens()
    chosen = measured.selected(by_other_near)
    assert (chosen != measured.selected(name)).any()
    for target, of_target in list(
        zip(measured.targets.iloc[measured.over].itertuples(), chosen, strict=True)
    )[:6]:
        text = for_the_choice(target, tokens, window(measured, target, tokens, "true"))
        alone = Contexts(text[None], np.array([[target.token]]), np.array([[0]]), len(text) - F)
        selection = find_selector(name)(SelectorInput(Scorer(adapter), alone, 0, 3))
        assert of_target.tolist() == selection.columns[0].tolist()


def test_what_cannot_choose_so_is_refused():
    with refused("nearest does not look at the near tokens"):
        small(selectors=("nearest/other-near",))
    with refused("give an n_short of 2 or more"):
        small(selectors=(SIGNED,), n_short=1)
    with refused("n_long at least one and a half times as large"):
        small(selectors=(SIGNED,), n_long=30, n_short=21, ks=(1,))
    for misplaced in ("leave-one-out/other-near/cache:4", "leave-one-out/other-near@attention:9"):
        with refused("/other-near ends a name"):
            small(selectors=(misplaced,))
    with refused("ends a name once"):
        find_selector("attention/other-near/other-near")
    with refused("unknown selector 'leave-one-outt'"):
        small(selectors=("leave-one-outt/other-near",))
