"""A measurement whose tokens are ranked in the cache, from texts to recovery, against whole passes."""

from dataclasses import replace

import numpy as np
import pytest

from analysis.api import load
from analysis.engine import Engine
from analysis.model.adapter import TransformersAdapter
from analysis.open_model import adapter_of
from analysis.selectors import find_selector
from analysis.work import tokens_to_choose
from tests.support.families import WINDOWED, random_model
from tests.support.plain import plain_divergence, plain_greedy, plain_halving, whole_pass
from tests.support.refusals import refused
from tests.support.small_measurement import F, M, model, read, small, small_tokens, window

KL = "leave-one-out-kl/cache:2"
CACHE = {"selectors": (KL, "leave-one-in/cache:2", "nearest"), "keep_as": ("cache:2",)}


@pytest.fixture(scope="module")
def result():
    return small(
        **CACHE, targets_per_block=3, tau_nats=1.0, ks=(1, 3), scores=True, targets=24, placebos=("placebo",)
    )


@pytest.fixture(scope="module")
def adapter():
    return adapter_of(model()[0], "the model")


@pytest.mark.parametrize("far_context", ["true", "placebo"])
def test_tokens_are_ranked_and_kept_as_by_whole_passes(result, adapter, far_context):
    tokens = small_tokens()
    over = result.targets.iloc[result.over][:6]
    rows = result.choices.query("selector == @KL and far_context == @far_context").set_index("target_id")
    scores = result.scores.query("selector == @KL and far_context == @far_context").set_index("target_id")
    for target in over.itertuples():
        text = window(result, target, tokens, far_context)
        log_long = whole_pass(adapter, text, F, range(F))[-1]
        expected = np.full(F, np.nan)
        for left_out in range(2, F):
            without = whole_pass(adapter, text, F, sorted({*range(F)} - {left_out}))[-1]
            expected[left_out] = plain_divergence("kl", log_long, without)
        np.testing.assert_allclose(scores.influence[target.target_id], expected, atol=5e-5)
        row = rows.loc[target.target_id]
        best = 2 + np.argsort(-expected[2:], kind="stable")[:3]
        assert row.selected.tolist() == best.tolist()
        for k, loss in zip((1, 3), row.loss_nats, strict=True):
            log_p = whole_pass(adapter, text, F, sorted({0, 1, *row.selected[:k]}))[-1]
            assert loss == pytest.approx(-log_p[target.token], abs=5e-5)
        assert read(result, target) == len(text)


def test_windows_are_measured_in_the_cache_and_refused_as_text():
    windowed = random_model("gemma3_text", **{**WINDOWED["gemma3_text"], "initializer_range": 0.4})
    of_model = windowed, model()[1]
    with refused("9 tokens of a sliding window"):
        small(of_model, selectors=("leave-one-out-kl",), keep_as=("cache:2",))
    with refused("9 tokens of a sliding window"):
        small(of_model, selectors=(KL,))
    with refused("9 tokens of a sliding window"):
        small(of_model, selectors=("gradient",), keep_as=("cache:2",))
    result = small(of_model, selectors=(KL, "attention"), keep_as=("cache:2",), tau_nats=0.05, targets=18)
    adapter = adapter_of(windowed, "the model")
    tokens = small_tokens()
    assert len(result.over) > 3
    for target in result.targets.iloc[result.over][:4].itertuples():
        text = window(result, target, tokens, "true")
        log_p = whole_pass(adapter, text, F, range(F))[-1]
        assert target.loss_long_nats == pytest.approx(-log_p[target.token], abs=5e-5)
        for row in result.choices.query(
            "target_id == @target.target_id and far_context == 'true'"
        ).itertuples():
            for k, loss in zip(result.ks, row.loss_nats, strict=True):
                log_p = whole_pass(adapter, text, F, sorted({0, 1, *row.selected[:k]}))[-1]
                assert loss == pytest.approx(-log_p[target.token], abs=5e-5)


def test_a_name_says_where_it_ranks():
    assert find_selector(KL) is not find_selector("leave-one-out-kl")
    with refused("k = 4 cannot be chosen"):
        small(selectors=(f"leave-one-out/cache:{F - 3}",))


def test_effects_are_of_all_targets_and_choices_rest_on_them(result, adapter):
    settings = {**CACHE, "targets_per_block": 3, "tau_nats": 1.0, "ks": (1, 3), "scores": True, "targets": 24}
    measured = small(**settings, placebos=("placebo",), effects=True)
    np.testing.assert_array_equal(measured.targets["target_id"], measured.effects["target_id"])
    tokens = small_tokens()
    rows = [0, 1, *measured.over[:2]]
    for target, effect in zip(
        measured.targets.iloc[rows].itertuples(), measured.effects.iloc[rows].itertuples(), strict=True
    ):
        text = window(measured, target, tokens, "true")
        log_long = whole_pass(adapter, text, F, range(F))[-1]
        for left_out in (0, 1, 7, F - 1):
            log_p = whole_pass(adapter, text, F, sorted({*range(F)} - {left_out}))[-1]
            kl = plain_divergence("kl", log_long, log_p)
            change = log_long[target.token] - log_p[target.token]
            assert effect.kl_nats[left_out] == pytest.approx(kl, abs=5e-5)
            assert effect.loss_change_nats[left_out] == pytest.approx(change, abs=5e-5)
    assert measured.choices["selected"].map(list).tolist() == result.choices["selected"].map(list).tolist()
    losses = (np.stack(frame["loss_nats"]) for frame in (measured.choices, result.choices))
    np.testing.assert_allclose(*losses, atol=2e-6)


def test_effects_are_kept_and_read_again(tmp_path):
    settings = {**CACHE, "targets_per_block": 3, "targets": 30, "effects": True, "tau_nats": 100.0}
    measured = small(**settings, out=tmp_path)
    assert not len(measured.over) and len(measured.effects) == len(measured.targets)
    again = load(tmp_path)
    np.testing.assert_array_equal(np.stack(again.effects["kl_nats"]), np.stack(measured.effects["kl_nats"]))
    assert again.settings.choices.effects


def test_the_trial_is_made_for_who_proposes_in_the_cache_too(monkeypatch):
    shares = []
    near_logits = TransformersAdapter.near_logits

    def spied(self, *arguments):
        shares.append(self.shares_far_keys)
        return near_logits(self, *arguments)

    monkeypatch.setattr(TransformersAdapter, "near_logits", spied)
    small(selectors=("leave-one-out-kl@leave-one-out/cache:2:9",), targets=2, tau_nats=-9.0)
    assert shares[-1], "rows share far keys, as a trial has allowed"


class Counted:
    """A value of subsets that says nothing, and of how many it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, kept):
        self.asked += 1
        return 0.0


@pytest.fixture
def read_in_rounds(monkeypatch):
    """What is read of the cache in every round of the engine: far contexts, rows of near tokens, and their tokens."""
    rounds = []
    choose, far, near = Engine.choose, TransformersAdapter.far_key_values, TransformersAdapter.near_logits

    def counted_choose(self, targets):
        rounds.append({"far": 0, "rows": 0, "tokens": 0})
        return choose(self, targets)

    def counted_far(self, tokens):
        if rounds:  # the trial comes before
            rounds[-1]["far"] += len(tokens)
        return far(self, tokens)

    def counted_near(self, far, visible, tokens, *further):
        if rounds:
            rounds[-1]["rows"] += len(tokens)
            rounds[-1]["tokens"] += tokens.numel()
        return near(self, far, visible, tokens, *further)

    monkeypatch.setattr(Engine, "choose", counted_choose)
    monkeypatch.setattr(TransformersAdapter, "far_key_values", counted_far)
    monkeypatch.setattr(TransformersAdapter, "near_logits", counted_near)
    return rounds


@pytest.mark.parametrize("name", ["leave-one-out", "leave-one-in", "halving", "greedy"])
def test_as_many_rows_are_read_as_the_method_says(read_in_rounds, name):
    """F a block and far context; of halving F more a target, of greedy at most k F a target.

    A plain loop says of how many subsets. The first round of those that go in rounds is one of the block.
    """
    size, k = 3, 4
    result = small(selectors=(f"{name}/cache",), targets_per_block=size, tau_nats=1.0, targets=18, ks=(k,))
    choices = result.targets.groupby(result.targets["target_id"] // size)["over_tau"].sum().tolist()
    assert {*choices} == {0, 1, 2}

    plain = Counted()
    more = 0
    claimed = [F * (count > 0) for count in choices]
    if name == "halving":
        plain_halving(plain, range(F), ())
        more = plain.asked - (F + 1)
        claimed = [F * (count + 1) * (count > 0) for count in choices]
    elif name == "greedy":
        plain_greedy(plain, range(F), (), k)
        more = plain.asked - (F + 1) - (k - 1)  # what all before gave is known
        claimed = [k * F * count for count in choices]
    rows = np.array([(F + 1 + more * count) * (count > 0) for count in choices])
    far_contexts = 2
    assert [read["rows"] for read in read_in_rounds] == (far_contexts * rows).tolist()
    assert [read["far"] for read in read_in_rounds] == [far_contexts * (count > 0) for count in choices]
    assert (rows <= 1.1 * np.array(claimed)).all()

    tokens = sum(read["tokens"] for read in read_in_rounds)
    assert tokens <= far_contexts * rows.sum() * (M + size - 1)
    no_search = replace(result.settings.choices, selectors=("nearest",))
    expected, of_losses = (
        tokens_to_choose(settings, sum(choices), np.count_nonzero(choices))
        for settings in (result.settings, replace(result.settings, choices=no_search))
    )
    assert tokens / 2 < expected - of_losses < 2 * tokens, "what the time left is estimated from"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"selectors": (KL,), "keep_as": ("text/ranked:3",), "ks": (1, 16)},
            f"the {F - 2} that .* keep 2 sinks",
        ),
        ({"selectors": (KL,), "keep_as": ("text:1/ranked:3",), "ks": (1, 16)}, "does not rank its 2 sinks"),
        (
            {"selectors": (f"leave-one-out/cache:2@leave-one-out/cache:4:{F - 3}",), "keep_as": ("cache:2",)},
            f"m = {F - 3} must be at least k = 4 and at most the {F - 4} far tokens",
        ),
    ],
)
def test_what_sinks_leave_too_few_tokens_for_is_refused_before_a_model_is_opened(changes, message):
    with refused(message):
        small(("no model", None), **changes)
