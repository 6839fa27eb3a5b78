"""One block judged, against whole passes in which every head hides keys of its own, and by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal

from analysis.cache_eviction.contenders import Contender, Contest, every_policy
from analysis.cache_eviction.judge import BlockJudge, with_total
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.model import far_cache
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.losses import Scorer
from analysis.policies import POLICIES, find_policy
from analysis.policies.policy import first_of_each_head
from analysis.policies.seen import Seen
from analysis.settings import ContextSettings
from olmo_sparsity.util.rng import Stream
from tests.support.families import WINDOWED, random_model, tiny_adapter
from tests.support.plain import block_pass_by_head, encode, plain_divergence, random_blocks, whole_pass
from tests.support.refusals import refused

N, M, B, SINKS = 24, 6, 4, 2
FAR = N - M
BUDGETS, KEYS = (0.2, 0.5), (4, 9)


def contest(policies=("all",), references=(), budgets=BUDGETS, sinks=SINKS, seed=0):
    contexts = ContextSettings(N, M, seed, B)
    return Contest.of(contexts, budgets=budgets, sinks=sinks, policies=policies, references=references)


def judge_of(name="llama", prefix=(), **named):
    if name in WINDOWED:
        adapter = TransformersAdapter(random_model(name, **WINDOWED[name])).requires_grad_(False)
    else:
        adapter = tiny_adapter(name)
    adapter = with_prefix(adapter, prefix)
    if name != "rope":
        adapter.shares_far_keys = True
    return BlockJudge(Scorer(adapter), contest(**named), encode)


def block():
    return random_blocks(N, M, B, count=1)


def choices_of(judge, contexts):
    """The choice of every policy and control, by name."""
    return {choice.contender.name: choice for choice in judge._chosen(contexts)}


@torch.no_grad()
def pass_of_ours(adapter, contexts, place, kept, first_query):
    """`block_pass_by_head` of a model of ours of four heads a layer, whose attention is written out."""
    length = contexts.tokens.shape[1]
    blocks = adapter.model.blocks()
    for block, of_heads in zip(blocks, np.split(kept, len(blocks)), strict=True):
        mask = torch.full((4, length, length), -torch.inf).triu(1)
        hidden = torch.from_numpy(~of_heads)[:, None]
        mask[:, first_query:, :FAR] = mask[:, first_query:, :FAR].masked_fill(hidden, -torch.inf)

        def attend(q, k, v, *_, mask=mask, **__):
            return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v

        block._scaled_dot_product_attention = attend
    logits = adapter(torch.from_numpy(contexts.tokens), torch.arange(length)[None]).logits
    for block in blocks:
        del block._scaled_dot_product_attention
    return logits[0, N - 1 + place].double().log_softmax(-1).numpy()


OF_HEADS = ("ada-snapkv", "h2o:blind=1")


@pytest.mark.parametrize(
    ("name", "prefix", "policies"),
    [
        *((name, (), (*OF_HEADS, "snapkv", "kvzip", "random")) for name in ("llama", "rope")),
        *((name, prefix, OF_HEADS) for name in ("gemma2", "gemma3_text") for prefix in ((), (3, 1))),
    ],
)
def test_losses_are_those_of_whole_passes_in_which_heads_hide_their_own_keys(name, prefix, policies):
    """Also behind a prefix, and within windows."""
    judge = judge_of(name, prefix, policies=policies)
    contexts = block()
    choices = choices_of(judge, contexts)
    assert choices["ada-snapkv"].kept[0].ndim == 2
    losses = judge.judge(contexts).losses
    losses = losses[losses["policy"].isin(policies)]
    assert set(losses["policy"]) == set(policies)
    heads = sum(judge.scorer.key_heads(contexts))
    whole = pass_of_ours if name == "rope" else block_pass_by_head
    every_key = np.ones((heads, FAR), dtype=bool)
    for (policy, near, keys, place), rows in losses.groupby(["policy", "near", "keys", "place"]):
        kept = np.broadcast_to(choices[policy].kept[KEYS.index(keys)], (heads, FAR))
        first_query = N - 1 if near == NEAR_KEPT else FAR
        log_p = whole(judge.scorer.model, contexts, place, kept, first_query)
        long = whole(judge.scorer.model, contexts, place, every_key, first_query)
        expected = [-log_p[contexts.targets[0, place]], plain_divergence("kl", long, log_p)]
        assert rows[["loss_nats", "kl_nats"]].to_numpy().tolist() == [pytest.approx(expected, abs=5e-5)]


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_block_that_policies_were_tried_on_is_not_chosen_from_again(is_tried, monkeypatch):
    """What is judged is the same, on that block and on another one."""
    judge = judge_of(policies=("snapkv", "h2o:blind=1", "random"))
    blocks = random_blocks(N, M, B, count=2)
    tried, other = blocks.take(slice(0, 1)), blocks.take(slice(1, 2))
    expected = [judge.judge(contexts) for contexts in (tried, other)]
    judge = judge.of_those_that_can(tried if is_tried else other, leave_out=True)
    chosen = []
    choose = BlockJudge._choose
    monkeypatch.setattr(
        BlockJudge, "_choose", lambda self, *given: chosen.append(given) or choose(self, *given)
    )
    assert_frame_equal(judge.judge(tried).losses, expected[0].losses)
    assert len(chosen) == (0 if is_tried else 3)
    assert_frame_equal(judge.judge(other).choices, expected[1].choices)
    assert len(chosen) == 3


def test_policies_that_look_at_what_near_tokens_see_share_one_reading_of_the_far_context(monkeypatch):
    """Each would compute attention of all pairs of tokens, which takes memory that grows as N squared."""
    judge = judge_of(policies=("snapkv", "ada-snapkv", "tova"))
    contexts = block()
    read = []
    far_key_values = type(judge.scorer.model).far_key_values

    def counted(self, tokens):
        read.append(tokens.numel())
        return far_key_values(self, tokens)

    monkeypatch.setattr(type(judge.scorer.model), "far_key_values", counted)
    monkeypatch.setattr(type(judge.scorer.model), "attention", lambda *_: pytest.fail("of all pairs"))
    judge.judge(contexts)
    assert read == [
        FAR,
        N - 1,
        FAR,
    ]  # for all choices, with the near tokens that are kept, and where these are reread


@pytest.mark.parametrize("near", [NEAR_KEPT, NEAR_REREAD])
def test_caches_beside_those_of_policies_have_all_keys_the_sinks_and_none(near):
    judge = judge_of(policies=("random",))
    contexts = block()
    judged = judge.judge(contexts)
    losses = judged.losses[judged.losses["near"] == near]
    sees_all = N - 1 if near == NEAR_KEPT else FAR
    for policy, count in (("full", FAR), ("sinks", SINKS), ("none", 0)):
        rows = losses[losses["policy"] == policy]
        assert rows["keys"].unique().tolist() == [count]
        left = [*range(count), *range(FAR, sees_all)]
        log_p = whole_pass(judge.scorer.model, contexts.tokens[0], sees_all, left)[N - 1 - sees_all :]
        expected = -log_p[np.arange(B), contexts.targets[0]]
        np.testing.assert_allclose(rows["loss_nats"], expected, atol=5e-5)
        if near == NEAR_REREAD:
            np.testing.assert_array_equal(judged.loss_nats(policy), rows["loss_nats"])


def test_policies_that_keep_the_same_keys_lose_the_same_to_the_last_bit(monkeypatch):
    """Rows of a pass differ by rounding, of which a test between such policies would be one."""
    original = far_cache.block_measures

    def with_rounding(scorer, contexts, visible, names):
        measured = original(scorer, contexts, visible, names)
        return measured + 1e-6 * np.arange(measured.shape[1])[:, None]

    monkeypatch.setattr(far_cache, "block_measures", with_rounding)
    policies = ("nearest", "random", f"streaming-llm:sinks={SINKS}", "snapkv:blind=1", "ada-snapkv:blind=1")
    losses = judge_of(policies=policies).judge(block()).losses
    of_policy = losses[losses["near"] == NEAR_REREAD].groupby("policy")["loss_nats"].apply(list)
    for name in policies[2:]:
        assert of_policy[name] == of_policy["nearest"]
    assert of_policy["random"] != of_policy["nearest"]


def test_every_policy_keeps_the_sinks_and_as_many_keys_in_all():
    judge = judge_of()
    heads = 4
    choices = choices_of(judge, block())
    assert list(choices) == every_policy()
    for name, choice in choices.items():
        for keys, kept in zip(KEYS, choice.kept, strict=True):
            assert kept[..., :SINKS].all(), name
            assert np.broadcast_to(kept, (heads, FAR)).sum() == keys * heads, name
    unequal = choices["ada-snapkv"].kept[0].sum(axis=-1)
    assert len(set(unequal.tolist())) > 1


def test_without_sinks_none_are_forced():
    judge = judge_of(policies=("nearest", "kvzip", "snapkv"), sinks=0)
    nearest, *others = choices_of(judge, block()).values()
    assert np.flatnonzero(nearest.kept[0]).tolist() == [14, 15, 16, 17]
    for choice in others:
        assert np.broadcast_to(choice.kept[1], (4, FAR)).sum() == 9 * 4


def test_controls_by_hand():
    contexts = replace(block(), target_id=B * 3 + np.arange(B)[None])
    choices = choices_of(judge_of(policies=("random", "random-by-head", "nearest"), seed=5), contexts)
    order = np.random.default_rng([Stream.RANDOM_EVICTION, 5, 12]).permutation(FAR)
    drawn = np.argsort(-order[SINKS:])[:7] + SINKS
    assert np.flatnonzero(choices["random"].kept[1]).tolist() == sorted([0, 1, *drawn])
    assert np.flatnonzero(choices["nearest"].kept[0]).tolist() == [0, 1, 16, 17]
    in_heads = np.random.default_rng([Stream.RANDOM_EVICTION_BY_HEAD, 5, 12]).random((4, FAR))
    for head, values in enumerate(in_heads):
        drawn = np.argsort(-values[SINKS:])[:7] + SINKS
        assert np.flatnonzero(choices["random-by-head"].kept[1][head]).tolist() == sorted([0, 1, *drawn])


def test_nothing_behind_the_choice_changes_it():
    judge = judge_of()
    contexts = block()
    tokens = contexts.tokens.copy()
    tokens[:, N:] = tokens[:, N:] % 40 + 5
    others = replace(contexts, tokens=tokens, targets=contexts.targets % 40 + 5)
    first, second = (choices_of(judge, one) for one in (contexts, others))
    for name in first:
        for one, other in zip(first[name].scores, second[name].scores, strict=True):
            np.testing.assert_array_equal(one, other)
        for one, other in zip(first[name].kept, second[name].kept, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("blind", [False, True])
def test_a_policy_that_reads_targets_reads_nothing(monkeypatch, blind):
    read = []

    class Cheat(type(find_policy("knorm"))):
        def scores(self, seen: Seen):
            read.append((seen.contexts.targets.tolist(), seen.contexts.tokens.tolist()))
            return np.zeros((1, 4, FAR))

    Cheat.blind = blind
    monkeypatch.setitem(POLICIES, "cheat", Cheat())
    contexts = block()
    judge_of(policies=("cheat",)).judge(contexts)
    assert read == [([[-1]], contexts.tokens[:, : FAR if blind else N].tolist())]


def policy_of(scores, keep=first_of_each_head):
    """A policy of these scores."""

    class OfScores(type(find_policy("knorm"))):
        def scores(self, seen: Seen):
            return scores

        def keeping(self, seen: Seen):
            return keep

    return OfScores()


@pytest.mark.parametrize("scores", [np.arange(18.0), np.zeros((1, 4, N)), np.zeros((4, 1, 18)), [1, 2], None])
def test_a_policy_whose_scores_have_another_shape_is_refused(monkeypatch, scores):
    monkeypatch.setitem(POLICIES, "mine", policy_of(scores))
    with refused(r"mine: scores\(\) gives \(.*\), not \(1, 4, 18\), a score for every choice, head of keys"):
        judge_of(policies=("mine",)).judge(block())


def test_a_policy_whose_scores_are_no_numbers_is_refused(monkeypatch):
    scores = np.zeros((1, 4, FAR))
    scores[0, 2, 5] = np.nan
    monkeypatch.setitem(POLICIES, "mine", policy_of(scores))
    with refused(r"mine: scores\(\) gives NaN, which has no rank, for 1 of 72 keys"):
        judge_of(policies=("mine",)).judge(block())


@pytest.mark.parametrize("kind", [np.uint8, bool, torch.tensor, list])
def test_scores_of_any_kind_of_number_are_ranked_alike(monkeypatch, kind):
    numbers = np.roll(np.arange(FAR), 9)
    if kind is bool:
        numbers = numbers >= 9
    scores = np.broadcast_to(numbers, (1, 4, FAR)).copy()
    given = scores.astype(kind) if kind in (np.uint8, bool) else kind(scores.tolist())
    monkeypatch.setitem(POLICIES, "mine", policy_of(given))
    monkeypatch.setitem(POLICIES, "plain", policy_of(scores.astype(float)))
    mine, plain = choices_of(judge_of(policies=("mine", "plain")), block()).values()
    for one, other in zip(mine.kept, plain.kept, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_policy_that_keeps_keys_of_another_shape_is_refused(monkeypatch):
    def columns(scores, count):
        return np.argsort(-scores)[..., :count]

    monkeypatch.setitem(POLICIES, "mine", policy_of(np.zeros((1, 4, FAR)), columns))
    with refused(r"mine: keeping\(\) gives \(4, 2\), not which of \(4, 16\) keys are kept"):
        judge_of(policies=("mine",)).judge(block())


def test_blind_policies_have_near_tokens_read_again_and_aware_ones_both():
    judged = judge_of(policies=("snapkv", "snapkv:blind=1", "knorm")).judge(block())
    ways = judged.choices[["policy", "sees", "near"]].drop_duplicates().itertuples(index=False)
    assert sorted(tuple(way) for way in ways) == [
        ("knorm", "far", "reread"),
        ("snapkv", "far and near", "kept"),
        ("snapkv", "far and near", "reread"),
        ("snapkv:blind=1", "far", "reread"),
    ]
    only_blind = judge_of(policies=("knorm", "random")).judge(block())
    assert set(only_blind.losses["near"]) == {"reread"}


@dataclass(frozen=True)
class ByHand:
    """In the place of a reference: it counts what it is given, and ranks by the column."""

    most_keys: int | None = None
    first: int | None = None

    def scores(self, reading, sinks, places):
        assert (reading.n_far, sinks, places.tolist()) == (FAR, SINKS, [0, 2])
        return np.arange(FAR, dtype=float)


def test_policies_are_compared_with_the_first_reference_and_the_exact_effects():
    judge = judge_of(policies=("nearest", "streaming-llm:sinks=2", "knorm"))
    references = [
        Contender("leave-one-out-kl:first=3", "targets", reference=ByHand()),
        Contender("greedy-kl", "targets", reference=ByHand(most_keys=5)),
    ]
    judge = replace(judge, contest=replace(judge.contest, references=references))
    choices = judge.judge(block(), np.array([0, 2])).choices
    assert set(choices.loc[choices["policy"] == "greedy-kl", "keys"]) == {4}
    of_budget = choices[choices["keys"] == 9].set_index(["policy", "near"])
    for policy in ("nearest", "streaming-llm:sinks=2", "leave-one-out-kl:first=3"):
        assert of_budget.loc[(policy, "reread"), ["spearman", "overlap"]].tolist() == pytest.approx([1, 1])
    knorm = choices_of(judge, block())["knorm"].kept[1]
    expected = knorm[:, FAR - 7 :].sum() / (4 * 7)
    assert of_budget.loc[("knorm", "reread"), "overlap"] == pytest.approx(expected)


def test_a_press_that_shares_out_up_to_rounding_gets_the_same_total():
    scores = np.array([[5.0, 1, 4, 2], [3, 9, 8, 7]])
    kept = np.array([[True, False, True, False], [True, True, True, True]])
    assert with_total("it", kept, scores, 3) is kept
    fewer = with_total("it", kept, scores, 2)
    assert fewer.tolist() == [[True, False, True, False], [False, True, True, False]]
    few = np.array([[True, False, False, False], [False, True, True, False]])
    assert with_total("it", few, scores, 2).tolist() == [
        [True, False, True, False],
        [False, True, True, False],
    ]
    with refused("it keeps 3.0 keys a head where 1 are asked for"):
        with_total("it", kept, scores, 1)


def test_a_policy_whose_scores_look_at_the_budget_scores_at_each(monkeypatch):
    class AtEach(type(find_policy("knorm"))):
        def scores_at(self, seen: Seen, counts):
            return [np.eye(FAR)[count % FAR] + np.zeros((1, 4, 1)) for count in counts]

    monkeypatch.setitem(POLICIES, "at-each", AtEach())
    [choice] = choices_of(judge_of(policies=("at-each",)), block()).values()
    assert [np.flatnonzero(kept).tolist()[:3] for kept in choice.kept] == [[0, 1, 2], [0, 1, 2]]
    assert [kept[4] for kept in choice.kept] == [True, True]
    assert choice.kept[1][9] and not choice.kept[0][9]


def test_a_model_that_copies_far_keys_is_refused():
    with refused("reads copies of far keys"):
        BlockJudge(Scorer(tiny_adapter("xglm")), contest())


def test_a_reference_ranks_by_all_targets_where_its_first_ones_are_none():
    judge = judge_of(policies=("nearest",), references=("leave-one-out-kl:first=2", "leave-one-out-kl"))
    few, some = (judge.judge(block(), np.array(places)).losses for places in ([3], [1, 3]))

    def of(losses, policy):
        return losses.loc[losses["policy"] == policy, "loss_nats"].to_numpy()

    assert not np.array_equal(of(some, "leave-one-out-kl:first=2"), of(some, "leave-one-out-kl"))
    assert len(of(few, "leave-one-out-kl:first=2")) == len(of(some, "leave-one-out-kl:first=2"))
