"""Whole comparisons of eviction policies on a tiny model: all targets, plain losses, interruptions, what is refused."""

import json
import shutil
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import analysis
from analysis import saved
from analysis.cache_eviction import run
from analysis.cache_eviction.contenders import ALL, CONTROLS, Contest
from analysis.cache_eviction.judge import BlockJudge
from analysis.cache_eviction.record import FRAMES, FULL, NONE, SINKS
from analysis.cache_eviction.reference import REFERENCES, RankedBlock
from analysis.cache_eviction.result import EvictionResult
from analysis.contexts import Contexts
from analysis.model.adapter import TransformersAdapter
from analysis.model.losses import Scorer
from analysis.policies import POLICIES, Policy, find_policy, from_kvpress
from analysis.policies.policy import RESERVED
from analysis.policies.seen import Seen
from analysis.settings import ContextSettings
from analysis.work import Work
from tests.support import small_measurement, tiny
from tests.support.families import directory, random_model
from tests.support.plain import plain_loss
from tests.support.presses import BudgetPress, PyramidKVPress, PyramidPress
from tests.support.refusals import refused
from tests.support.small_measurement import TEXTS, small_tokens

ROOT = Path(__file__).parents[3]
N, M, B, F = 24, 6, 4, 18
SMALL = {
    "n_long": N,
    "n_short": M,
    "targets_per_block": B,
    "blocks": 5,
    "budgets": (0.2, 0.5),
    "policies": ("snapkv", "knorm", "random"),
    "sinks": 2,
    "references": ("leave-one-out-kl:first=2",),
    "device": "cpu",
    "progress": False,
}
pytestmark = pytest.mark.usefixtures("one_thread")


def small(model=None, texts=TEXTS, **changes):
    return analysis.eviction(model or small_measurement.model(), texts, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def whole():
    return small()


def assert_same(one, other):
    """To the last bit."""
    assert one.settings == other.settings
    for name in FRAMES:
        pd.testing.assert_frame_equal(getattr(one, name), getattr(other, name), check_exact=True)


def test_all_targets_of_the_blocks_are_judged(whole):
    assert whole.targets["target_id"].tolist() == list(range(5 * B))
    assert whole.targets["place"].tolist() == list(range(B)) * 5
    judged = whole.losses.groupby(["policy", "near", "budget"])["target_id"].apply(list)
    assert all(sorted(targets) == list(range(5 * B)) for targets in judged)
    assert judged.index.droplevel("budget").unique().tolist() == [
        *(("full", near) for near in ("kept", "reread")),
        ("knorm", "reread"),
        *(
            (policy, near)
            for policy in ("leave-one-out-kl:first=2", "none", "random", "sinks", "snapkv")
            for near in ("kept", "reread")
        ),
    ]
    assert whole.settings.keys == (4, 9)
    assert whole.losses["loss_nats"].dtype == np.float32


def test_the_full_and_the_short_loss_are_plain_ones(whole):
    inner, _ = small_measurement.model()
    tokens = small_tokens()
    for target in whole.targets.itertuples():
        window = tokens[target.text][target.position - N - target.place : target.position]
        assert tokens[target.text][target.position] == target.token
        for first, loss in ((0, target.loss_full_nats), (F, target.loss_short_nats)):
            expected = plain_loss(inner, window, range(first, len(window)), target.token)
            assert loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("seconds_between_parts", [0.0, 1e9])
def test_an_interrupted_comparison_goes_on_where_it_stopped(
    whole, tmp_path, monkeypatch, seconds_between_parts
):
    monkeypatch.setattr(saved, "SECONDS_BETWEEN_PARTS", seconds_between_parts)
    original = BlockJudge.judge
    judged = []

    def judge(self, contexts, places, effects_nats):
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(contexts.target_id[0, 0] // B)
        return original(self, contexts, places, effects_nats)

    monkeypatch.setattr(BlockJudge, "judge", judge)
    with pytest.raises(KeyboardInterrupt):
        small(out=tmp_path)
    assert judged == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["eviction-parts"]
    with refused("it is not finished: the same call that began it goes on"):
        EvictionResult.load(tmp_path)
    with refused(
        "was begun with other settings, and is not finished: sinks 2 -> 1, policies .*; give another folder"
    ):
        small(out=tmp_path, sinks=1, policies=("knorm",))
    if seconds_between_parts == 0.0:
        damaged = tmp_path / "eviction-parts" / "block-00000001"
        (damaged / "eviction-losses.parquet").write_bytes(b"nothing")
        with refused("block-00000001 is damaged; remove it, and the same call measures again"):
            small(out=tmp_path)
        shutil.rmtree(damaged)
    judged.clear()
    monkeypatch.setattr(BlockJudge, "judge", original)
    assert_same(small(out=tmp_path), whole)
    assert_same(EvictionResult.load(tmp_path), whole)
    assert not (tmp_path / "eviction-parts").exists()
    monkeypatch.setattr(BlockJudge, "judge", judge)
    assert_same(small(out=tmp_path), whole)
    assert judged == []
    with refused("was measured with other settings: budgets .*; give another folder"):
        small(out=tmp_path, budgets=(0.5,))


def test_the_placebo_is_the_same_in_a_far_context_of_another_text(whole):
    both = small(placebo=True)
    assert both.far_contexts == ["true", "placebo"]
    of_true = both.losses[both.losses["far_context"] == "true"].reset_index(drop=True)
    pd.testing.assert_frame_equal(of_true, whole.losses, check_exact=True)
    inner, _ = small_measurement.model()
    tokens = small_tokens()
    rows = both.losses[(both.losses["far_context"] == "placebo") & (both.losses["near"] == "reread")]
    rows = rows[rows["policy"] == "full"].set_index("target_id")["loss_nats"]
    for target in both.targets.iloc[:6].itertuples():
        near = tokens[target.text][target.position - M - target.place : target.position]
        far = tokens[target.placebo_text][target.placebo_start : target.placebo_start + F]
        window = [*far, *near]
        expected = plain_loss(inner, window, range(len(window)), target.token)
        assert rows[target.target_id] == pytest.approx(expected, abs=1e-4)


EFFECTS = {
    "n_long": N,
    "n_short": M,
    "targets_per_block": B,
    "targets": 5 * B,
    "selectors": ("leave-one-out-kl/cache:2",),
    "keep_as": ("cache:2",),
    "ks": (1,),
    "tau_nats": 1.0,
    "device": "cpu",
    "progress": False,
    "effects": True,
}


@pytest.fixture(scope="module")
def measured_in(tmp_path_factory):
    """A measurement with effects of the targets of the blocks, and its folder."""
    out = tmp_path_factory.mktemp("effects")
    return analysis.measure(small_measurement.model(), TEXTS, **EFFECTS, out=out), out


@pytest.fixture
def measured(measured_in):
    return measured_in[0]


def test_the_reference_is_read_from_effects_that_were_kept_where_near_tokens_are_read_again(
    measured_in, monkeypatch
):
    names = ("leave-one-out-kl", "leave-one-out-kl:first=2", "greedy-kl:keys=5")
    expected = small(references=names)
    rows = []
    original = RankedBlock.divergences

    def divergences(self, subsets):
        rows.append((self.reading.contexts.n_short, subsets.shape))
        return original(self, subsets)

    monkeypatch.setattr(RankedBlock, "divergences", divergences)
    for effects in measured_in:
        rows.clear()
        read = small(references=names, effects=effects)
        leaving_one = [near for near, shape in rows if shape == (F - 2, F - 3)]
        assert leaving_one == [1] * 3 * 5  # near tokens that are kept; none of those that are read again
        assert read.settings == expected.settings
        pd.testing.assert_frame_equal(read.losses, expected.losses, atol=2e-6)
        pd.testing.assert_frame_equal(read.choices, expected.choices, atol=2e-6)


def test_the_time_left_does_not_count_passes_that_known_effects_save(measured, monkeypatch):
    expected = []
    original = Work.begin_steps

    def begin_steps(self, tokens):
        expected.extend(tokens)
        original(self, tokens)

    monkeypatch.setattr(Work, "begin_steps", begin_steps)
    names = ("leave-one-out-kl:first=2", "halving-kl", "greedy-kl", "presence-gradient")
    for options in ({}, {"effects": measured}, {"placebo": True}, {"placebo": True, "effects": measured}):
        small(references=names, only_blocks=[0], **options)
    in_true, with_effects, in_both, in_both_with_effects = expected
    saved = 2 * F * (M + B - 1) + F * (M + 2 - 1)  # the first of the references reads up to the second target
    assert in_true - with_effects == in_both - in_both_with_effects == saved
    assert in_both == 2 * in_true


def test_effects_of_some_blocks_serve_these_and_those_of_others_are_refused(measured):
    is_first = measured.effects["target_id"] < 2 * B
    some = replace(measured, effects=measured.effects[is_first].reset_index(drop=True))
    whole_again = small(references=("leave-one-out-kl",), effects=some)
    pd.testing.assert_frame_equal(
        whole_again.losses, small(references=("leave-one-out-kl",)).losses, atol=2e-6
    )
    with refused("the effects are those of another measurement: n_long 26 -> 24.*; leave them out"):
        small(effects=replace(measured, settings=measured.settings.but(n_long=26)))
    with refused("the effects are those of another measurement: model_sha256 .*; leave them out"):
        small(small_measurement.model(seed=1), effects=measured)
    none = replace(measured, effects=measured.effects.iloc[:0])
    with refused(
        "the effects have none of the blocks that are judged; draw as many targets of the same seed"
    ):
        small(effects=none)
    with refused("the result has no effects; measure with effects=True, or leave it out"):
        small(effects=replace(measured, effects=None))
    with refused("effects takes a result of analysis.measure, or its folder, not a int"):
        small(effects=3)


def test_one_way_of_the_near_tokens_is_measured_as_beside_the_other(whole, tmp_path):
    kept = small(near="kept", policies=("snapkv", "random"), out=tmp_path)
    assert kept.nears == ["kept"]
    columns = ["policy", "near", "budget"]
    of_whole = whole.losses[
        (whole.losses["near"] == "kept") | (whole.losses["policy"].isin(["full", "none", "sinks"]))
    ]
    both = kept.losses.merge(of_whole, on=["target_id", *columns], suffixes=("", "_whole"))
    assert len(both) == len(kept.losses) == len(of_whole)
    pd.testing.assert_series_equal(both["loss_nats"], both["loss_nats_whole"], check_names=False, atol=2e-6)
    assert set(kept.summary()["near"]) == set(kept.best_found()["near"]) == {"kept"}
    assert {"gain", "summary", "by_gain"} <= set(kept.every_number()["frame"])
    kept.write(tmp_path)


def test_parts_of_some_blocks_are_joined_to_the_whole(whole, tmp_path):
    parts = [small(only_blocks=blocks) for blocks in ([3, 1], [0], [4, 2])]
    assert parts[0].targets["block"].unique().tolist() == [1, 3]
    assert_same(EvictionResult.of_parts(parts), whole)
    for wrong in ([5], [], [-1], [0, 9]):
        with refused("only_blocks takes numbers from 0 to 4, as blocks are drawn"):
            small(only_blocks=wrong)
    some = small(only_blocks=[3, 1], out=tmp_path)
    assert_same(some, parts[0])
    assert [path.name for path in tmp_path.iterdir()] == ["eviction-parts"]
    assert_same(small(only_blocks=[1], out=tmp_path), some)
    assert_same(small(out=tmp_path), whole)
    assert_same(EvictionResult.load(tmp_path), whole)


def test_a_result_of_some_blocks_is_not_taken_for_the_whole(tmp_path):
    some = small(only_blocks=[3, 1])
    some.save(tmp_path)
    with refused("holds a result of 2 of the 5 blocks; give another folder"):
        small(out=tmp_path)
    assert_same(small(only_blocks=[3], out=tmp_path), some)


def test_kept_sets_are_shares_of_all_heads(tmp_path):
    result = small(kept_sets=True, blocks=2, out=tmp_path)
    shares = np.stack(result.choices["kept_share"])
    assert shares.shape == (len(result.choices), F)
    np.testing.assert_allclose(shares.sum(axis=1), result.choices["keys"], rtol=1e-6)
    assert (shares[:, :2] == 1).all()
    again = EvictionResult.load(tmp_path)
    np.testing.assert_array_equal(np.stack(again.choices["kept_share"]), shares)
    assert "kept_share" not in small(blocks=2).choices


def test_kinds_are_those_that_measure_gives(whole, measured):
    assert whole.targets["kind"].tolist() == measured.targets["kind"].tolist()


def test_all_leaves_out_what_the_model_does_not_have(tmp_path, caplog):
    model = tiny.model(rope=False, nope=True), small_measurement.model()[1]
    result = small(model, blocks=1, policies="all", references=())
    assert "snapkv:blind=1" in result.settings.policies and "nearest" in result.settings.policies
    assert not [name for name in result.settings.policies if name.startswith("expected-attention")]
    assert "expected-attention is left out" in caplog.text
    with refused("expected-attention turns queries back"):
        small(model, blocks=1, policies=("expected-attention",), references=())


def test_targets_that_are_none_are_not_judged_and_rank_nothing(monkeypatch):
    inner, tokenizer = small_measurement.model()
    texts = {group: [text.replace("w7 ", "unknown ") for text in texts] for group, texts in TEXTS.items()}
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["unknown"])
    places = []
    original = BlockJudge.judge
    monkeypatch.setattr(
        BlockJudge,
        "judge",
        lambda self, contexts, of, known: places.append(len(of)) or original(self, contexts, of, known),
    )
    result = small((inner, tokenizer), texts, blocks=8)
    assert 0 not in result.targets["token"].tolist()
    assert sum(places) == len(result.targets) < B * result.counts["blocks"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": (0.0, 0.5)}, "budgets ascend, from more than 0 to at most 100 %"),
        ({"budgets": (0.5, 1.2)}, "budgets ascend, from more than 0 to at most 100 %"),
        ({"budgets": ()}, "budgets ascend"),
        ({"budgets": (0.05, 0.5)}, "a budget of 5 % of 18 far keys is 1, and there are 2 sinks"),
        ({"budgets": (0.2, 0.21)}, "keeps 4 of 18 far keys, as the one before does"),
        ({"budgets": None}, "budgets takes a finite number, not None"),
        ({"placebo": "no"}, "placebo takes True or False, not 'no'"),
        ({"sinks": 18}, "18 sinks leave none of the 18 far tokens"),
        ({"sinks": -1}, "sinks takes whole numbers from 0"),
        (
            {"policies": ("snapkv", "nothing")},
            "unknown eviction policy 'nothing'; choose from .*random, random-by-head, nearest, all",
        ),
        ({"policies": ("snapkv:windows=3",)}, "'windows=3' is no parameter of snapkv"),
        ({"policies": ("random:seed=3",)}, "unknown eviction policy 'random:seed=3'"),
        ({"policies": ("snapkv", "snapkv")}, "the policy snapkv is given twice"),
        ({"policies": ()}, "there is no policy to judge"),
        ({"references": ("oracle",)}, "unknown reference 'oracle'; choose from leave-one-out-kl"),
        ({"references": ("leave-one-out-kl:first=5",)}, "more than the 4 targets of a block"),
        (
            {"references": ("leave-one-out-kl:first=0",)},
            "first of leave-one-out-kl is a whole number of at least 1",
        ),
        ({"references": ("greedy-kl:keys=3",)}, "ranks for budgets of at most 3 keys, and the smallest is 4"),
        ({"near": "keep"}, "unknown way of the near tokens 'keep'; choose from kept, reread"),
        ({"near": ()}, "there is no way of the near tokens; choose from kept, reread"),
        ({"near": ("kept", "kept")}, "the way of the near tokens kept is given twice"),
        (
            {"near": "kept"},
            "knorm has not seen the near tokens, which are read again behind it; add reread to near",
        ),
        ({"targets_per_block": 1}, "a choice is judged by the targets that follow it; give 2 or more"),
        ({"blocks": 0}, "blocks takes whole numbers from 1"),
        ({"n_short": 24}, "N = 24 must be larger than M = 24"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_opened(monkeypatch, changes, message):
    monkeypatch.setattr(run, "open_model", lambda *_, **__: pytest.fail("a model was opened"))
    with refused(message):
        small(**changes)


def test_all_are_those_that_can_be_judged_in_the_ways_of_the_near_tokens():
    contexts = ContextSettings(n_long=N, n_short=M, targets_per_block=B, seed=0)
    options = {"budgets": (0.5,), "sinks": 2, "policies": ("all",), "references": ()}
    all_policies = Contest.of(contexts, **options).policies
    that_have_seen_the_near = Contest.of(contexts, **options, near=("kept",)).policies
    assert that_have_seen_the_near == [one for one in all_policies if one.sees != "far"]
    assert {one.sees for one in that_have_seen_the_near} == {"far and near", "nothing"}


def value_norms(power, base=Policy):
    """A policy by norms of values, as a user defines one."""

    @dataclass(frozen=True)
    class ValueNorm(base):
        kind: str = "large"

        def scores(self, seen):
            norms = seen.of_layers(lambda layer: layer.values.norm(p=power, dim=-1))
            return norms if self.kind == "large" else -norms

    return ValueNorm


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "register the policy by another name") for name in RESERVED),
        *((name, "no eviction policy can be named") for name in ("", "mine:2", "a,b", "a@b", "a/b", "a b")),
        ("snapkv", "the eviction policy 'snapkv' is there already; register yours by another name"),
    ],
)
def test_a_policy_of_a_name_that_has_another_meaning_is_refused(name, message):
    snapkv = POLICIES["snapkv"]
    with refused(message):
        POLICIES.register(name)(value_norms(2))
    assert POLICIES["snapkv"] is snapkv and (name == "snapkv" or name not in POLICIES)


def test_all_names_beside_those_of_policies_are_reserved():
    assert set(RESERVED) == {*CONTROLS, *REFERENCES, FULL, SINKS, NONE, ALL}


@dataclass(frozen=True)
class WithoutDefault(POLICIES["knorm"]):
    """A policy with a parameter that has no default."""

    power: int


class WithoutScores(Policy):
    """A policy that defines nothing."""


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (value_norms(2, base=object), "mine: an eviction policy is derived from analysis.policies.Policy"),
        (WithoutScores, r"mine: the policy has no scores\(\); define it"),
        (WithoutDefault, "mine: the parameter power has no default; give it one"),
    ],
)
def test_what_is_no_policy_is_refused_as_it_is_registered(item, message):
    with refused(message):
        POLICIES.register("mine")(item)
    assert "mine" not in POLICIES


def test_a_changed_policy_does_not_go_on_where_another_was_measured(other_policies, tmp_path):
    """It is told apart by its code; the same code, defined again, is the same policy."""
    out = tmp_path / "out"
    mine = {"policies": ("mine", "mine:kind=small"), "references": (), "blocks": 2}
    POLICIES.register("mine")(value_norms(2))
    first = small(**mine, out=out)
    POLICIES.register("mine")(value_norms(2))
    assert_same(small(**mine, out=out), first)

    @dataclass(frozen=True)
    class Changed(Policy):
        kind: str = "large"

        def scores(self, seen):
            norms = seen.of_layers(lambda layer: layer.values.norm(p=2, dim=-1))
            return -norms if self.kind == "large" else norms

    POLICIES.register("mine")(Changed)
    with refused("out was measured with other settings: definitions .*mine"):
        small(**mine, out=out)
    changed = small(**mine)
    swapped = changed.losses.replace({"mine": "mine:kind=small", "mine:kind=small": "mine"})
    rows = ["policy", "near", "budget", "target_id"]
    pd.testing.assert_frame_equal(
        swapped.sort_values(rows, ignore_index=True), first.losses.sort_values(rows, ignore_index=True)
    )


def test_a_changed_press_does_not_go_on_where_another_was_measured(other_policies, tmp_path):
    """Another class, or other parameters of the same one; the same press is the same policy."""
    mine = {"policies": ("mine",), "references": (), "blocks": 1, "out": tmp_path / "out"}
    POLICIES.register("mine")(from_kvpress(PyramidKVPress()))
    whole = small(**mine)
    POLICIES.register("mine")(from_kvpress(PyramidKVPress()))
    assert_same(small(**mine), whole)
    for press in (PyramidPress(), PyramidKVPress(beta=7)):
        POLICIES.register("mine")(from_kvpress(press))
        with refused("was measured with other settings: definitions .*mine"):
            small(**mine)


def test_complex_scores_are_refused(other_policies):
    @POLICIES.register("mine")
    @dataclass(frozen=True)
    class Complex(Policy):
        def scores(self, seen):
            return find_policy("knorm").scores(seen) * 1j

    with refused(r"mine: scores\(\) gives complex numbers, which have no order"):
        small(policies=("mine",))


def test_tokens_without_a_column_are_refused():
    with refused("tokens lack column, name; give a row a token"):
        small(blocks=1, kept_sets=True).keeps(pd.DataFrame({"block": [0]}))


def test_scores_of_a_layer_that_lack_an_axis_are_refused_with_their_shape(other_policies):
    @POLICIES.register("mine")
    @dataclass(frozen=True)
    class OfAllHeads(Policy):
        def scores(self, seen):
            return seen.of_layers(lambda layer: layer.values.norm(dim=-1).mean(dim=1))

    with refused(
        r"scores of a layer have the shape \(1, 24\), not \(1, 2, 24\): rows, heads of keys, tokens"
    ):
        small(policies=("mine",))


def test_an_error_in_a_policy_names_it(other_policies):
    @POLICIES.register("mine")
    @dataclass(frozen=True)
    class Raising(Policy):
        def scores(self, seen):
            return 1 / 0

    with pytest.raises(ZeroDivisionError) as raised:
        small(policies=("mine",))
    assert raised.value.__notes__ == ["in the eviction policy mine"]


def test_texts_of_one_group_are_enough_without_a_placebo():
    texts = {"one": [text for of_group in TEXTS.values() for text in of_group]}
    assert small(texts=texts, blocks=1).counts["groups"] == 1
    with refused("the placebo needs a second text"):
        small(texts=texts, blocks=1, placebo=True)


def test_a_model_that_cannot_share_far_keys_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(Seen, "accumulated_attention", lambda *_: pytest.fail("it was measured"))
    with refused("reads copies of far keys"):
        small((random_model("xglm"), small_measurement.model()[1]), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_budgets_of_no_more_than_the_sinks_keep_one_key_more():
    assert small(budgets=(0.11,), blocks=1).settings.keys == (3,)  # 2 of 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of transformers, and texts of its words, in a folder."""
    folder = directory(tmp_path_factory.mktemp("model"), "llama")
    small_measurement.model()[1].save(str(folder / "tokenizer.json"))
    for group, texts in TEXTS.items():
        (folder / f"{group}.txt").write_text(" ".join(texts))
    return folder


def test_the_command_measures_writes_and_prints_and_prints_again(folder, tmp_path, call_main):
    files = [folder / f"{group}.txt" for group in TEXTS]
    out = tmp_path / "out"
    options = ("--n-long", N, "--n-short", M, "--targets-per-block", B, "--blocks", 3, "--budgets", "20%,0.5")
    names = ("--policies", "snapkv,random", "--sinks", 2, "--references", "none", "--device", "cpu")
    code, printed = call_main("eviction", folder, "--text", *files, *options, *names, "--out", out)
    assert not code
    names = [
        "eviction.json",
        "eviction-targets.parquet",
        "eviction-losses.parquet",
        "eviction-choices.parquet",
    ]
    assert {path.name for path in out.iterdir()} == {*names, "numbers.csv", "eviction.png"}
    assert json.loads((out / "eviction.json").read_text())["settings"]["budgets"] == [0.2, 0.5]
    before = (out / "numbers.csv").read_bytes()
    (out / "numbers.csv").unlink()
    _, again = call_main("eviction", "--out", out)
    assert again.partition("\nwrote")[0] == printed.partition("\nwrote")[0]
    assert (out / "numbers.csv").read_bytes() == before


def test_the_command_judges_some_blocks_and_then_the_others(folder, tmp_path, call_main):
    out = tmp_path / "out"
    options = ("--n-long", N, "--n-short", M, "--targets-per-block", B, "--blocks", 4, "--budgets", "50%")
    names = ("--policies", "nearest", "--references", "none", "--device", "cpu", "--out", out)
    command = ("eviction", folder, "--text", *(folder / f"{group}.txt" for group in TEXTS), *options, *names)
    _, printed = call_main(*command, "--only-blocks", "0-1,3")
    assert "in 3 blocks" in printed and "the same command without --only-blocks judges the others" in printed
    assert [path.name for path in out.iterdir()] == ["eviction-parts"]
    _, printed = call_main(*command)
    assert "in 4 blocks" in printed and (out / "eviction.json").is_file()


@pytest.mark.parametrize("numbers", ["7-0", "-1", "a", "0,", "1-2-3"])
def test_the_command_refuses_blocks_that_are_no_numbers(call_main, capsys, numbers):
    with pytest.raises(SystemExit, match="2"):
        call_main("eviction", "MODEL", "--out", "out", f"--only-blocks={numbers}")
    assert "are no numbers of blocks; write them as 0-7 or 12" in capsys.readouterr().err


def test_the_command_says_that_a_model_is_missing(call_main, tmp_path):
    with refused("there is no MODEL; name it before --text, or leave --text out to print what is in"):
        call_main("eviction", "--out", tmp_path, "--text", "a.txt", "the-model")
    with refused("there is no MODEL; name it before --corpus, or leave --corpus out to print what is in"):
        call_main("eviction", "--out", tmp_path, "--corpus", "corpus")


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ("0%,5%", "'0%' is no share"),
        ("120%", "'120%' is no share"),
        ("3", "'3' is no share"),
        ("x%", "is no share"),
    ],
)
def test_the_command_refuses_shares_that_are_none(call_main, capsys, budgets, message):
    with pytest.raises(SystemExit, match="2"):
        call_main("eviction", "MODEL", "--out", "out", "--budgets", budgets)
    assert message in capsys.readouterr().err


def code_on_the_page():
    """The policy that docs/eviction.md defines, and the comparison of it, as they stand there."""
    page = (ROOT / "docs" / "eviction.md").read_text(encoding="utf8")
    _, begin, rest = page.partition("    from dataclasses import dataclass")
    lines = (begin + rest).splitlines()
    end = next(number for number, line in enumerate(lines) if line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[:end]))


@pytest.fixture
def other_policies():
    """Policies that a test registers are gone after it."""
    before = set(POLICIES)
    yield before
    for name in set(POLICIES) - before:
        del POLICIES[name]


def test_a_press_shares_out_the_budget_beside_the_sinks(other_policies):
    """Its budgets of layers and its scores are for far keys without sinks, which it keeps whatever it says."""
    POLICIES.register("pyramid")(from_kvpress(PyramidPress()))
    POLICIES.register("critical")(from_kvpress(BudgetPress()))
    inner, tokenizer = small_measurement.model()
    result = small((inner, tokenizer), policies=("pyramid", "critical"), references=(), kept_sets=True)
    tokens = small_tokens()
    scorer = Scorer(TransformersAdapter(inner))
    choices = result.choices.set_index(["policy", "budget", "block"])["kept_share"]
    for block, first in result.targets.groupby("block").first().iterrows():
        far = tokens[first["text"]][first["position"] - N :][None, :F]
        contexts = Contexts(far, np.array([[1]]), np.array([[0]]), n_short=0)
        [norms] = find_policy("knorm").scores(Seen.of(scorer, contexts))
        for budget, keys in zip(SMALL["budgets"], result.settings.keys, strict=True):
            half = norms.copy()
            half[:, : keys // 2] = 1
            of_layers = [keys - 2 + more for more in (2, 2, -2, -2)]
            for policy, scores, counts in (("pyramid", norms, of_layers), ("critical", half, [keys - 2] * 4)):
                kept = np.zeros((4, F))
                kept[:, :2] = 1
                for head, count in enumerate(counts):
                    kept[head, 2 + np.argsort(-scores[head, 2:], kind="stable")[:count]] = 1
                np.testing.assert_allclose(choices[policy, budget, block], kept.mean(axis=0))


def test_the_policy_on_the_page_is_judged_by_its_name(other_policies):
    definition, _, _ = code_on_the_page().partition("\nresult =")
    exec(definition, {"__name__": "page"})
    [added] = set(POLICIES) - other_policies
    result = small(policies=(added, f"{added}:power=1:blind=1"), blocks=1)
    assert result.settings.policies == (added, f"{added}:power=1:blind=1")


@pytest.mark.slow
def test_the_page_alone_is_enough_for_a_policy_of_ones_own(other_policies, monkeypatch, capsys):
    """Every line as it stands, with the weights of this repository."""
    monkeypatch.chdir(ROOT)
    exec(code_on_the_page(), {"__name__": "page"})
    printed = capsys.readouterr().out
    for name in ("value-norm", "value-norm:power=1:blind=1", "snapkv"):
        assert f"\n{name} " in printed
