"""Selectors against straightforward computations: of single targets, and of blocks."""

from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest

from analysis.model.adapter import TransformersAdapter
from analysis.model.losses import Scorer, long_and_short_losses
from analysis.policies.attention import AdaSnapKV, SnapKV
from analysis.selectors import (
    ABSOLUTE,
    BLIND,
    FAMILIES,
    SELECTORS,
    SIGNED,
    SelectorInput,
    SelectorName,
    find_selector,
    list_selectors,
    register_influence,
    subsets,
)
from analysis.selectors.by_policy import ByPolicy
from analysis.selectors.subsets import leave_one_out
from tests.support import plain, small_measurement
from tests.support.families import random_model
from tests.support.plain import (
    encode,
    plain_spans,
    random_blocks,
    random_contexts,
    selected_losses,
    single_target,
)
from tests.support.refusals import refused

N, M, B, VOCABULARY = 14, 4, 6, 50
FAR = N - M


make_contexts = partial(random_contexts, N, M)


def build(family="llama", **changes):
    return TransformersAdapter(random_model(family, **changes)).requires_grad_(False)


def plain_loss(model, contexts, row, kept):
    return plain.plain_loss(model, contexts.tokens[row], kept, contexts.targets[row, 0])


def plain_measure(kind, model, contexts, row, kept):
    """The target's loss, or how far the prediction is from that of the long context."""
    if kind not in ("kl", "tv"):
        return plain_loss(model, contexts, row, kept)
    long, some = (plain.plain_log_p(model, contexts.tokens[row], columns) for columns in (range(N), kept))
    return plain.plain_divergence(kind, long, some)


@pytest.fixture(scope="module")
def model():
    return build()


SUBSETS_THAT_ARE_NONE = {"descending": [3, 2], "twice": [3, 3], "near": [3, FAR], "below": [-1, 3]}


@pytest.mark.parametrize("name", SUBSETS_THAT_ARE_NONE)
def test_subsets_that_are_none_are_refused(model, name):
    """Their losses were those of no text, and looked plausible: a new selector would rank by them."""
    inputs = SelectorInput(Scorer(model), make_contexts(), 0, 2)
    one = SUBSETS_THAT_ARE_NONE[name]
    for far in (np.array([[2, 3], one]), np.array([one])):
        for read in (inputs.losses, partial(inputs.evaluate, "kl")):
            with pytest.raises(ValueError, match="must ascend, each once|is not in 0 … "):
                read(far)
    assert np.isfinite(inputs.losses(np.array([[2, 3]]))).all()


def given(scorer, contexts, k=FAR, seed=0):
    return SelectorInput(scorer, contexts, seed, k, encode=encode)


def choose(name, scorer, contexts, k, seed=0):
    return find_selector(name)(given(scorer, contexts, k, seed))


@pytest.mark.parametrize(("split", "shortest", "width"), [(2, 2, 4), (4, 1, 4), (4, 4, 4)])
def test_spans_equal_a_plain_search_from_coarse_to_fine(model, monkeypatch, split, shortest, width):
    """10 far tokens: the last span overlaps the one before where the width does not divide them."""
    monkeypatch.setattr(subsets, "_SPLIT", split)
    monkeypatch.setattr(subsets, "_SHORTEST", shortest)
    contexts, k = make_contexts(), 2
    chosen = choose("spans", Scorer(model), contexts, k)
    for row in range(len(contexts)):

        def value(kept, row=row):
            return plain_loss(model, contexts, row, [*sorted(kept), *range(FAR, N)])

        tokens = plain_spans(value, range(FAR), (), k, width=width, split=split, shortest=shortest)
        expected = sorted(tokens.values(), reverse=True)[:k]
        np.testing.assert_allclose(chosen.influence[row], expected, atol=2e-5)
        of_chosen = [tokens[i] for i in chosen.columns[row].tolist()]
        np.testing.assert_allclose(of_chosen, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("kind", ["", "absolute", "kl", "tv"])
def test_single_tokens_equal_a_plain_computation(family, kind):
    """What a measure loses without a token, and what it gains by one: with its sign, or without."""
    model, contexts, short = build(family), make_contexts(), list(range(FAR, N))
    ending = f"-{kind}" if kind else ""
    out, into = (choose(f"leave-one-{way}{ending}", Scorer(model), contexts, FAR) for way in ("out", "in"))
    for row in range(len(contexts)):
        long, without_far = (plain_measure(kind, model, contexts, row, kept) for kept in (range(N), short))
        plain_out, plain_in = np.empty(FAR), np.empty(FAR)
        for i in range(FAR):
            others = [j for j in range(N) if j != i]
            plain_out[i] = plain_measure(kind, model, contexts, row, others) - long
            plain_in[i] = without_far - plain_measure(kind, model, contexts, row, [i, *short])
        for chosen, expected in ((out, plain_out), (into, plain_in)):
            expected = abs(expected) if kind == "absolute" else expected
            np.testing.assert_allclose(chosen.influence[row], sorted(expected, reverse=True), atol=5e-5)
            np.testing.assert_allclose(expected[chosen.columns[row]], chosen.influence[row], atol=5e-5)


def of_family(*families):
    """Names of selectors, without parameters."""
    return [name for name, registered in SELECTORS.items() if registered.family in families]


@pytest.mark.parametrize("name", [*of_family(BLIND), "leave-one-out-kl@attention:6"])
def test_target_blind_selectors_never_look_at_the_target(model, name):
    contexts = make_contexts()
    others = replace(contexts, targets=contexts.targets % (VOCABULARY - 1) + 1)
    assert (others.targets != contexts.targets).all()
    first, second = (choose(name, Scorer(model), batch, k=4) for batch in (contexts, others))
    assert np.array_equal(first.columns, second.columns)
    assert np.array_equal(first.influence, second.influence)


def test_every_selector_has_one_family(model):
    """Those that are neither blind nor controls do look at the target."""
    assert {*of_family(*FAMILIES)} == {*SELECTORS}
    by_family = [list_selectors(family) for family in FAMILIES]
    assert sorted(chain(*by_family)) == sorted(list_selectors())
    contexts = make_contexts()
    others = replace(contexts, targets=contexts.targets % (VOCABULARY - 1) + 1)
    for name in of_family(SIGNED, ABSOLUTE):
        first, second = (choose(name, Scorer(model), batch, k=4).influence for batch in (contexts, others))
        assert abs(first - second).max() > 1e-3, name
        assert "absolute" not in name or (first >= 0).all()


@pytest.mark.parametrize("name", SELECTORS)
def test_what_is_registered_of_a_selector_is_what_it_does(model, name, monkeypatch):
    calls = set()
    for method in ("measures", "input_gradients", "integrated_gradients", "presence_gradient"):
        original = getattr(Scorer, method)

        def spied(self, *arguments, method=method, original=original, **options):
            calls.add(method)
            return original(self, *arguments, **options)

        monkeypatch.setattr(Scorer, method, spied)
    selection = choose(name, Scorer(model), make_contexts(1), k=2)
    registered = SELECTORS[name]
    assert registered.by_subsets == ("measures" in calls)
    assert registered.changes_embeddings == bool(calls & {"input_gradients", "integrated_gradients"})
    assert registered.hides_tokens == ("presence_gradient" in calls)
    assert registered.chooses_by_head == (selection.by_head is not None)
    assert registered.scores_only_k == (selection.scores is None)
    assert registered.scores_only_k or not registered.ranks_only_k
    assert registered.method in SELECTORS


@pytest.mark.parametrize(("name", "kind"), [("greedy", ""), ("greedy-kl", "kl")])
def test_greedy_adds_the_token_that_lowers_the_measure_most(model, name, kind):
    contexts = make_contexts()
    selection = choose(name, Scorer(model), contexts, k=3)
    short = list(range(FAR, N))
    for row in range(len(contexts)):
        chosen, before = [], plain_measure(kind, model, contexts, row, short)
        for round_ in range(3):
            after = {
                i: plain_measure(kind, model, contexts, row, sorted([*chosen, i]) + short)
                for i in range(FAR)
                if i not in chosen
            }
            best = min(after, key=after.get)
            assert selection.columns[row, round_] == best
            assert selection.influence[row, round_] == pytest.approx(before - after[best], abs=5e-5)
            chosen, before = [*chosen, best], after[best]


def test_screened_decides_exactly_among_what_was_proposed(model):
    contexts = make_contexts()
    proposed = choose("gradient", Scorer(model), contexts, k=5).columns
    screened = choose("leave-one-out@gradient:5", Scorer(model), contexts, k=2)
    influence = leave_one_out(given(Scorer(model), contexts))
    for row in range(len(contexts)):
        best = sorted(proposed[row], key=lambda i, row=row: -influence[row, i])[:2]
        assert screened.columns[row].tolist() == best
        np.testing.assert_allclose(screened.influence[row], influence[row, best], atol=5e-5)
    everything = choose(f"leave-one-out@random:{FAR}", Scorer(model), contexts, k=4)
    assert np.array_equal(everything.columns, choose("leave-one-out", Scorer(model), contexts, k=4).columns)


def test_a_smaller_model_proposes_and_the_model_decides(model):
    contexts = make_contexts()
    small = Scorer(build(num_hidden_layers=1))
    alone = replace(
        given(Scorer(model), contexts, k=2), names=(SelectorName.parse("leave-one-out@leave-one-out:4"),)
    )
    influence, passes = leave_one_out(alone), choose("leave-one-out", small, contexts, k=4).columns
    screened = find_selector("leave-one-out@leave-one-out:4")(replace(alone, proposing=small))
    for row in range(len(contexts)):
        best = sorted(passes[row], key=lambda i, row=row: -influence[row, i])[:2]
        assert screened.columns[row].tolist() == best
    assert not np.array_equal(
        np.sort(passes), np.sort(choose("leave-one-out", Scorer(model), contexts, k=4).columns)
    )


@pytest.mark.parametrize("name", ["greedy@gradient:6", "greedy-kl@saliency:6", "attention@leave-one-in-tv:6"])
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


def test_forms_of_one_selector_together_choose_what_they_choose_alone(model):
    names = ("leave-one-out", "leave-one-out-absolute", "leave-one-out-kl", "leave-one-in-tv", "leave-one-in",
             "leave-one-out-kl@gradient:4", "leave-one-out@gradient:4", "leave-one-out-tv@gradient:6",
             "leave-one-out@leave-one-in-kl:5", "random")  # fmt: skip
    scorer = Scorer(model)
    for contexts in (make_contexts(3), make_contexts(2, seed=7)):
        parsed = tuple(SelectorName.parse(name) for name in names)
        given = SelectorInput(scorer, contexts, seed=0, k=4, names=parsed)
        shared = {name: find_selector(name)(given) for name in names}
        for name, together in shared.items():
            alone = choose(name, scorer, contexts, k=4)
            np.testing.assert_array_equal(together.columns, alone.columns)
            np.testing.assert_allclose(together.influence, alone.influence, atol=1e-6)


@pytest.mark.parametrize("level", ["", "/cache:1"])
@pytest.mark.parametrize("screened_first", [False, True])
def test_a_screened_form_reads_nothing_that_the_whole_one_reads(model, level, screened_first):
    """Only L_long again, and whichever of the two runs first; by another measure, too, off the same passes."""
    contexts, targets = random_blocks(N, M, B), np.array([[0, 0], [0, 3], [1, 2]])
    names = (f"leave-one-out-kl{level}", f"leave-one-out{level}@random:6")
    read = []
    scorer = Scorer(model)
    scorer.on_read = read.append

    def chosen(*run):
        read.clear()
        inputs = SelectorInput(scorer, contexts, 0, 4, targets, names=tuple(map(SelectorName.parse, run)))
        selections = {name: find_selector(name)(inputs) for name in run}
        return selections, sum(read)

    whole, tokens = chosen(names[0])
    alone, tokens_alone = chosen(names[1])
    together, tokens_together = chosen(*(names[::-1] if screened_first else names))
    for name, expected in (whole | alone).items():
        np.testing.assert_array_equal(together[name].columns, expected.columns)
        np.testing.assert_allclose(together[name].influence, expected.influence, atol=1e-6)
    assert tokens < tokens_together < tokens + 0.5 * tokens_alone


def test_a_screened_form_makes_its_own_passes_where_others_measured_the_whole_one(model):
    """As `--effects` do, of KL and loss: for total variation all F subsets would be read again, for few of them."""
    contexts = random_blocks(N, M, B)
    read = []
    scorer = Scorer(model)
    scorer.on_read = read.append
    names = tuple(map(SelectorName.parse, ("leave-one-out-kl", "leave-one-out-tv@random:4")))
    inputs = SelectorInput(scorer, contexts, 0, 3, np.array([[0, 0]]), names=names)
    inputs.shared[SelectorName("leave-one-out"), "kl"] = np.zeros((1, FAR))
    together = find_selector("leave-one-out-tv@random:4")(inputs)
    tokens = sum(read)
    read.clear()
    alone = find_selector("leave-one-out-tv@random:4")(replace(inputs, names=(), shared={}, proposals={}))
    np.testing.assert_array_equal(together.columns, alone.columns)
    assert tokens == sum(read)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leave_one_out", "choose from leave-one-out"),
        ("leave-one-out@gradient:3", "m = 3 must be at least k = 4 and at most the 10 far tokens"),
        ("leave-one-out@gradient:11", "m = 11 must be at least k = 4 and at most the 10 far tokens"),
    ],
)
def test_unknown_selectors_list_the_choices(name, message):
    with refused(message):
        SelectorName.parse(name).check_candidates(k_max=4, n_far=10)


@pytest.mark.parametrize("name", [*SELECTORS, "leave-one-out@gradient:8", "greedy-kl@leave-one-out-tv:8"])
def test_a_selector_chooses_in_a_block_what_it_chooses_for_each_target_alone(model, name):
    scorer, contexts = Scorer(model), random_blocks(N, M, B)
    targets = np.array([[0, 0], [0, 3], [1, 2], [1, 5]])
    together = find_selector(name)(SelectorInput(scorer, contexts, 7, 3, targets, encode=encode))
    losses = selected_losses(scorer, contexts, targets, together.columns, (1, 3))
    long, short = long_and_short_losses(scorer, contexts, targets)
    for row, (block, place) in enumerate(targets):
        by_itself, first = single_target(contexts, block, place), np.array([[0, 0]])
        # of passes over other rows, too
        small = Scorer(model, tokens_per_batch=16)
        selection = find_selector(name)(SelectorInput(small, by_itself, 7, 3, encode=encode))
        assert together.columns[row].tolist() == selection.columns[0].tolist()
        np.testing.assert_allclose(together.influence[row], selection.influence[0], atol=5e-5)
        expected = selected_losses(scorer, by_itself, first, selection.columns, (1, 3))
        np.testing.assert_allclose(losses[row], expected[0], atol=5e-5)
        alone = [float(losses[0]) for losses in long_and_short_losses(scorer, by_itself)]
        assert (long[row], short[row]) == pytest.approx(alone, abs=5e-5)


@pytest.mark.parametrize("name", ["leave-one-out", "leave-one-out@gradient:8", "spans"])
def test_scores_are_the_influence_of_every_token_that_has_one(model, name):
    selection = choose(name, Scorer(model), random_contexts(44, 4, 2), k=8)
    assert selection.scores.shape == (2, 40)
    for row in range(2):
        best = np.argsort(-np.nan_to_num(selection.scores[row], nan=-np.inf), kind="stable")[:8]
        assert best.tolist() == selection.columns[row].tolist()
        assert selection.scores[row, best].tolist() == selection.influence[row].tolist()
    if name != "spans":
        assert np.isfinite(selection.scores).sum(axis=1).tolist() == [8 if "@" in name else 40] * 2


def test_parameters_are_fields_of_a_selector_and_the_last_number_is_that_of_a_screen():
    snapkv = "snapkv:window=32:pool=5:blind=0"
    assert {"nearest", snapkv, "integrated-gradients:steps=50"} <= {*list_selectors()}
    assert find_selector("snapkv:pool=7") == ByPolicy(SnapKV(pool=7))
    assert find_selector("snapkv") == find_selector(snapkv) == ByPolicy(SnapKV(window=32, pool=5))
    assert find_selector("snapkv:blind=1") == ByPolicy(SnapKV(blind=True))
    assert find_selector("ada-snapkv:safe=0.5") == ByPolicy(AdaSnapKV(safe=0.5))
    assert find_selector("expected-attention:sinks=0").policy.sinks == 0
    SelectorName.parse("leave-one-out@snapkv:window=4:pool=3:8").check_candidates(k_max=4, n_far=FAR)
    with refused("m = 8 must be at least k = 9"):
        SelectorName.parse("leave-one-out@snapkv:window=4:8").check_candidates(k_max=9, n_far=FAR)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "snapkv:windows=4",
            "'windows=4' is no parameter of snapkv; write NAME=NUMBER, by default window=32, pool=5",
        ),
        ("snapkv:window=x", "window of snapkv is a whole number of at least 1, not 'x'"),
        ("snapkv:window=0", "window of snapkv is a whole number of at least 1, not '0'"),
        ("snapkv:pool=4", "give an odd number"),
        ("snapkv:window=2.5", "window of snapkv is a whole number of at least 1, not '2.5'"),
        ("snapkv:window=²", "window of snapkv is a whole number of at least 1, not '²'"),
        ("snapkv:blind=2", "blind of snapkv is 0 or 1, not '2'"),
        ("ada-snapkv:safe=1.5", "it is a share; give a number of at most 1"),
        ("ada-snapkv:safe=-1", "safe of ada-snapkv is a number of at least 0, without an exponent, not '-1'"),
        ("nearest:far=2", "'far=2' is no parameter of nearest; it has none"),
        ("nearst", "unknown selector 'nearst'; choose from leave-one-out, .*, or EXACT@PROPOSER:m"),
    ],
)
def test_other_parameters_and_names_are_refused_with_the_choices(name, message):
    with refused(message):
        find_selector(name)


def test_a_changed_selector_does_not_go_on_where_another_was_measured(tmp_path):
    """Of one's own definition the code counts, also of what screens with it."""

    def by_loss(sign):
        return lambda inputs: sign * inputs.losses(inputs.candidates[:, :, None])

    options = {"selectors": ("mine", "leave-one-out@mine:8"), "targets": 20, "tau_nats": 0.5}
    try:
        register_influence("mine", SIGNED)(by_loss(-1))
        first = small_measurement.small(**options, out=tmp_path / "out")
        register_influence("mine", SIGNED)(by_loss(-1))
        again = small_measurement.small(**options, out=tmp_path / "out")
        small_measurement.assert_same(first, again)
        register_influence("mine", SIGNED)(by_loss(1))
        with refused("definitions .*mine"):
            small_measurement.small(**options, out=tmp_path / "out")
        assert not small_measurement.small(**options).choices.equals(first.choices)
    finally:
        del SELECTORS["mine"]
