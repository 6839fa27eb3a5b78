"""Policies in blocks, behind prefixes and on models of all kinds, against plain passes and arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis import eviction, measure
from analysis.kept import KeptAs
from analysis.model import far_cache, layer_states
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.losses import Scorer
from analysis.policies import POLICIES, Policy, find_policy
from analysis.policies.attention import AdaSnapKV
from analysis.policies.seen import Seen
from analysis.selectors import BLIND, SELECTORS, SelectorInput, find_selector
from analysis.selectors.registry import Registered
from tests.support import small_measurement
from tests.support.families import FAMILIES, WINDOWED, random_model, tiny_adapter
from tests.support.plain import encode, random_blocks, single_target
from tests.support.refusals import refused

N, M, B = 24, 6, 3
FAR = N - M
READING_LAYERS = ("knorm", "keydiff", "expected-attention")
BLIND_OR_NOT = [name for name in POLICIES if "blind" in POLICIES[name].__dataclass_fields__]


def seen_by(policy, adapter, contexts, targets=None):
    return Seen.of(Scorer(adapter), contexts, targets, blind=policy.blind, encode=encode)


def llama():
    return TransformersAdapter(random_model("llama")).requires_grad_(False)


def plain_keys(inner, tokens):
    """Keys of all layers, (G, L, D), as the cache of transformers has them."""
    with torch.no_grad():
        cache = inner(torch.tensor([tokens]), use_cache=True).past_key_values
    return torch.cat([layer.keys[0] for layer in cache.layers]).double().numpy()


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_policies_of_keys_look_at_those_of_the_cache(prefix):
    inner, contexts = random_model("llama"), random_blocks(N, M, B)
    adapter = with_prefix(TransformersAdapter(inner).requires_grad_(False), prefix)
    targets = contexts.all_targets
    scores = {}
    for name in ("knorm", "keydiff", "keydiff:blind=1"):
        policy = find_policy(name)
        scores[name] = policy.scores(seen_by(policy, adapter, contexts, targets))
    for row, (block, place) in enumerate(targets):
        tokens = [*prefix, *contexts.tokens[block, : N + place]]
        keys = plain_keys(inner, tokens)[:, len(prefix) :]
        far = keys[:, :FAR]
        np.testing.assert_allclose(scores["knorm"][row], -np.linalg.norm(far, axis=-1), atol=1e-5)
        for name, among in (("keydiff", keys), ("keydiff:blind=1", far)):
            unit = among / np.linalg.norm(among, axis=-1, keepdims=True)
            mean = unit.mean(axis=1, keepdims=True)
            likeness = (unit * mean).sum(axis=-1) / np.linalg.norm(mean, axis=-1)
            np.testing.assert_allclose(scores[name][row], -likeness[:, :FAR], atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_a_choice_in_a_block_is_that_of_the_target_by_itself(name, prefix):
    assert_a_choice_in_a_block_is_that_of_the_target_by_itself(
        find_policy(name), with_prefix(llama(), prefix)
    )


def assert_a_choice_in_a_block_is_that_of_the_target_by_itself(policy, adapter):
    contexts = random_blocks(N, M, B)
    heads = sum(Scorer(adapter).key_heads(contexts))
    together = policy.scores(seen_by(policy, adapter, contexts, contexts.all_targets))
    assert together.shape == (len(contexts.all_targets), heads, FAR)
    for row, (block, place) in enumerate(contexts.all_targets):
        by_itself = single_target(contexts, block, place)
        np.testing.assert_allclose(
            policy.scores(seen_by(policy, adapter, by_itself))[0], together[row], atol=2e-5
        )


@pytest.mark.parametrize("name", BLIND_OR_NOT)
def test_near_tokens_change_what_is_aware_and_nothing_that_is_blind(name):
    adapter, contexts = llama(), random_blocks(N, M, B)
    near = contexts.tokens.copy()
    near[:, FAR:N] = near[:, FAR:N] % 40 + 5
    others = replace(contexts, tokens=near)
    for text, is_blind in ((name, False), (f"{name}:blind=1", True)):
        policy = find_policy(text)
        assert policy.blind == is_blind
        first, second = (policy.scores(seen_by(policy, adapter, one)) for one in (contexts, others))
        assert first.shape == (len(contexts), 4, FAR)
        assert np.allclose(first, second, atol=1e-6) == is_blind


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_sees_the_target_or_what_is_behind_it(name):
    adapter, contexts = llama(), random_blocks(N, M, B)
    later = contexts.tokens.copy()
    later[:, N:] = later[:, N:] % 40 + 5
    others = replace(contexts, tokens=later, targets=contexts.targets % 40 + 5)
    policy = find_policy(name)
    first, second = (policy.scores(seen_by(policy, adapter, one)) for one in (contexts, others))
    np.testing.assert_allclose(first, second, atol=1e-6)


@pytest.mark.parametrize("name", ["h2o", "ada-snapkv", "kvzip"])
def test_a_screened_policy_keeps_in_no_head_what_was_not_proposed(name):
    contexts, adapter = random_blocks(N, M, B), llama()
    adapter.shares_far_keys = True
    scorer, targets = Scorer(adapter), contexts.all_targets
    inputs = SelectorInput(scorer, contexts, 0, 4, encode=encode)
    choice = find_selector(f"{name}@random:4")(inputs)
    losses = KeptAs("cache").losses(
        scorer, contexts, targets, choice, np.zeros((len(targets), FAR), dtype=int), [4]
    )
    proposed = far_cache.subset_masks(find_selector("random")(inputs).columns, FAR)
    expected = far_cache.measures(scorer, contexts, proposed[:, None], ("loss",), targets)[..., 0]
    np.testing.assert_allclose(losses, expected, atol=2e-5)


@pytest.mark.parametrize("blind", [False, True])
def test_both_commands_give_a_policy_no_target_and_nothing_behind_its_last_choice(monkeypatch, blind):
    inputs = []

    class Recorder(type(find_policy("knorm"))):
        def scores(self, seen: Seen):
            inputs.append((seen.contexts, seen.targets))
            return np.zeros((len(seen.targets), sum(seen.key_heads), seen.n_far))

    Recorder.blind = blind
    monkeypatch.setitem(POLICIES, "recorder", Recorder())
    monkeypatch.setitem(SELECTORS, "recorder", Registered(Recorder(), BLIND, "recorder"))
    shape = {"n_long": N, "n_short": M, "targets_per_block": 8, "device": "cpu", "progress": False}
    measured = measure(
        small_measurement.model(), small_measurement.TEXTS, **shape, targets=24, tau_nats=2.0, ks=(1,),
        selectors=("recorder",), keep_as=("cache",),
    )  # fmt: skip
    of_measure = inputs.copy()
    inputs.clear()
    eviction(
        small_measurement.model(), small_measurement.TEXTS, **shape, blocks=3, budgets=(0.5,),
        policies=("recorder",), references=(),
    )  # fmt: skip
    assert of_measure and inputs
    texts = small_measurement.small_tokens()
    targets = measured.targets.set_index("target_id")
    is_cut = False
    for contexts, choices in of_measure + inputs:
        assert (contexts.targets == -1).all()
        if blind:
            assert contexts.tokens.shape[1] == FAR
            continue
        for block, first in enumerate(contexts.target_id[:, 0]):
            text, position = targets.loc[first, ["text", "position"]]
            seen = M + choices[choices[:, 0] == block, 1].max()
            near = contexts.tokens[block, FAR:]  # the far ones may be those of the placebo
            assert near[:seen].tolist() == texts[text][position - M :][:seen].tolist()
            assert (near[seen:] == near[seen - 1]).all()
            is_cut |= len(near) > seen
    assert is_cut != blind


def test_blind_observers_are_kept_first_and_the_last_of_them_before_the_others():
    contexts = random_blocks(N, M, B)
    for name, observers in (("snapkv:window=4", 4), ("snapkv", FAR), ("ada-snapkv:window=4", 4), ("tova", 1)):
        policy = find_policy(f"{name}:blind=1")
        seen = seen_by(policy, llama(), contexts)
        for count in range(1, observers + 1):
            [kept] = policy.kept(seen, [count])
            last = np.arange(FAR) >= FAR - count
            assert kept.tolist() == np.broadcast_to(last, kept.shape).tolist()


def test_sinks_are_kept_first_and_counted_among_the_budget():
    contexts = random_blocks(N, M, B)
    for name in ("streaming-llm:sinks=3", "expected-attention:sinks=3", "kvzip:sinks=3"):
        policy = find_policy(name)
        for kept in policy.kept(seen_by(policy, llama(), contexts), [3, 5]):
            assert kept[..., :3].all()
    streaming = find_policy("streaming-llm:sinks=3")
    [kept] = streaming.kept(seen_by(streaming, llama(), contexts), [5])
    assert np.flatnonzero(kept[0, 0]).tolist() == [0, 1, 2, FAR - 2, FAR - 1]
    with refused("all that it sees are sinks; lower sinks"):
        policy = find_policy(f"expected-attention:sinks={N}")
        policy.scores(seen_by(policy, llama(), contexts))


def shared_out(scores, heads_by_layer, count, safe):
    """Ada-KV by a plain loop over the sorted scores of a layer."""
    kept = np.zeros(scores.shape, dtype=bool)
    start = 0
    for heads in heads_by_layer:
        layer = scores[start : start + heads]
        chosen = [set(np.argsort(-row, kind="stable")[:safe].tolist()) for row in layer]
        places = sorted(np.ndindex(layer.shape), key=lambda place: -layer[place])
        for head, column in places:
            if sum(map(len, chosen)) < heads * count:
                chosen[head].add(column)
        for head, columns in enumerate(chosen):
            kept[start + head, sorted(columns)] = True
        start += heads
    return kept


@pytest.mark.parametrize(("count", "safe"), [(1, 1), (5, 1), (10, 2), (FAR, 3)])
def test_heads_share_the_budget_of_their_layer_once_each_has_what_is_safe(count, safe):
    contexts = random_blocks(N, M, B)
    policy = AdaSnapKV(window=4)
    seen = seen_by(policy, llama(), contexts)
    scores = policy.scores(seen)
    [kept] = policy.kept(seen, [count])
    for row in range(len(contexts)):
        assert kept[row].tolist() == shared_out(scores[row], [2, 2], count, safe).tolist()
    if count == 5:
        assert len(set(kept.sum(axis=-1).ravel().tolist())) > 1


@pytest.mark.parametrize("name", ["ada-snapkv:window=4", "kvzip"])
def test_unequal_heads_are_measured_by_masks_beside_the_sinks(name):
    adapter, contexts = llama(), random_blocks(N, M, B)
    adapter.shares_far_keys = True
    scorer, targets = Scorer(adapter), contexts.all_targets
    choice = find_selector(name)(SelectorInput(scorer, contexts, 0, 6, encode=encode))
    words = np.zeros((len(targets), FAR), dtype=int)
    losses = KeptAs("cache", "token", 2).losses(scorer, contexts, targets, choice, words, (3, FAR - 2))
    masks = np.ones(choice.by_head.shape, dtype=bool)
    masks[..., 2:] = choice.keep(choice.by_head[..., 2:], 3)
    assert (masks.sum(axis=(1, 2)) == 4 * (2 + 3)).all()
    assert len(set(masks.sum(axis=-1).ravel().tolist())) > 1
    expected = far_cache.measures(scorer, contexts, masks[:, None], ("loss",), targets)[:, 0, 0]
    np.testing.assert_allclose(losses[:, 0], expected, atol=1e-6)
    whole = far_cache.measures(scorer, contexts, np.ones((1, FAR), dtype=bool), ("loss",), targets)
    np.testing.assert_allclose(losses[:, 1], whole[:, 0, 0], atol=1e-5)
    adapter.shares_far_keys = False
    with refused("leave out the policies whose heads keep unequal numbers"):
        KeptAs("cache").losses(scorer, contexts, targets, choice, words, (3,))


def plain_expectation(inner, tokens, future, sinks):
    """Expected attention with the queries of transformers' own projection, by sums over positions and queries."""
    queries_of = []

    def record(module, positional, named):
        hidden = named["hidden_states"]
        queries_of.append(module.q_proj(hidden).view(len(tokens), -1, 8).transpose(0, 1).double())

    hooks = [
        layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in inner.model.layers
    ]
    with torch.no_grad():
        cache = inner(torch.tensor([tokens]), use_cache=True).past_key_values
        ids = torch.arange(len(tokens), len(tokens) + future)[None]
        cosine, sine = (
            table[0].double() for table in inner.model.rotary_emb(torch.zeros(1, dtype=torch.float32), ids)
        )
    for hook in hooks:
        hook.remove()
    scores = []
    for queries, layer in zip(queries_of, cache.layers, strict=True):
        ahead = torch.zeros(*queries.shape, dtype=torch.double)
        for cos, sin in zip(cosine, sine, strict=True):
            first, second = queries.chunk(2, dim=-1)
            ahead += (queries * cos + torch.cat([-second, first], dim=-1) * sin) / future
        for group in range(2):
            shares = []
            keys = layer.keys[0, group, sinks:].double()
            for head in (2 * group, 2 * group + 1):
                products = ahead[head, sinks:] @ keys.T / 8**0.5
                expected = products.mean(dim=0) + products.var(dim=0, correction=0) / 2
                shares.append(expected.softmax(dim=-1))
            share = torch.stack(shares).mean(dim=0) * layer.values[0, group, sinks:].double().norm(dim=-1)
            scores.append(share.numpy())
    return np.stack(scores)


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_expected_attention_is_the_mean_and_half_the_variance_of_scores_of_the_next_positions(prefix):
    inner, contexts = random_model("llama"), random_blocks(N, M, B)
    adapter = with_prefix(TransformersAdapter(inner).requires_grad_(False), prefix)
    policy = find_policy("expected-attention:future=7:sinks=2")
    scores = policy.scores(seen_by(policy, adapter, contexts, contexts.all_targets))
    for row, (block, place) in enumerate(contexts.all_targets):
        tokens = [*prefix, *contexts.tokens[block, : N + place]]
        expected = plain_expectation(inner, tokens, 7, 2 + len(prefix))[:, : FAR - 2]
        np.testing.assert_allclose(scores[row, :, 2:], expected, atol=1e-5)


TURNED = [name for name in FAMILIES if name not in ("gpt2", "xglm")]


@pytest.mark.parametrize("name", [*TURNED, "rope", "grouped", "nope"])
def test_queries_are_turned_back_as_the_model_turned_them(name):
    """What they were says nothing of where they stand, in every layer, whatever it does to them before."""
    adapter, contexts = tiny_adapter(name), random_blocks(N, M, B)
    if name == "nope":
        with refused("other positions; leave expected-attention out"):
            find_policy("expected-attention").scores(seen_by(Policy, adapter, contexts))
        return
    policy = find_policy("expected-attention:future=4")
    scores = policy.scores(seen_by(policy, adapter, contexts))
    raw_layers = adapter.raw_layers
    adapter.raw_layers = lambda tokens, ids, read: raw_layers(tokens, ids + 17, read)
    of_later_ids = policy.scores(seen_by(policy, adapter, contexts))
    np.testing.assert_allclose(of_later_ids, scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["smollm3", "cohere", "glm"])
def test_layers_without_rotation_are_seen_and_other_rotations_refused(name):
    """SmolLM3 leaves every fourth layer unrotated; Cohere and GLM pair neighboring dimensions."""
    rotary = {**FAMILIES["llama"], "num_hidden_layers": 4}
    adapter = TransformersAdapter(random_model(name, **rotary)).requires_grad_(False)
    policy = find_policy("expected-attention:future=4")
    seen = seen_by(policy, adapter, random_blocks(N, M, B))
    if name == "smollm3":
        tables = seen.rotations(4).tables
        assert [table is None for table in tables] == [False, False, False, True]
        assert np.isfinite(policy.scores(seen)).all()
        return
    with refused("other positions; leave expected-attention out"):
        policy.scores(seen)


@pytest.mark.parametrize("per_slice", [1, 1000, None])
@pytest.mark.parametrize("family", WINDOWED)
def test_reading_layers_leaves_what_a_model_computes(family, per_slice, monkeypatch):
    """Windows, caps and sinks of scores are those of its own attention, in every layer, however few at once."""
    if per_slice is not None:
        monkeypatch.setitem(layer_states.WEIGHTS_PER_SLICE, "cpu", per_slice)
    inner = random_model(family, **WINDOWED[family])
    adapter, contexts = TransformersAdapter(inner).requires_grad_(False), random_blocks(N, M, B)
    tokens = torch.from_numpy(contexts.tokens)
    ids = torch.arange(tokens.shape[1]).expand(*tokens.shape)
    with torch.no_grad():
        cached = adapter.key_values(tokens, ids)
        read = adapter.layers(tokens, ids, lambda layer: layer.keys)
        weights = adapter.layers(tokens, ids, lambda layer: layer.attention())
        of_last = adapter.attention(tokens, ids, 3, lambda slices: torch.cat(list(slices), dim=2))
        inner.set_attn_implementation("eager")
        expected = inner(tokens, output_attentions=True).attentions
    for (keys, _), of_layer in zip(cached, read, strict=True):
        shared = min(keys.shape[2], of_layer.shape[2])
        torch.testing.assert_close(of_layer[:, :, -shared:], keys[:, :, -shared:], rtol=0, atol=2e-5)
    for of_layer, last, theirs in zip(weights, of_last, expected, strict=True):
        torch.testing.assert_close(of_layer, theirs, rtol=0, atol=2e-5)
        torch.testing.assert_close(last, theirs[:, :, -3:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["rope", "alibi", "grouped"])
def test_our_models_hand_over_the_keys_that_they_rotate(name):
    adapter, contexts = tiny_adapter(name), random_blocks(N, M, B)
    policy = find_policy("knorm")
    scores = policy.scores(seen_by(policy, adapter, contexts))
    tokens = torch.from_numpy(contexts.tokens[:, :FAR])
    with torch.no_grad():
        layers = adapter.key_values(tokens, torch.arange(FAR).expand(*tokens.shape))
    norms = np.concatenate([keys.norm(dim=-1).numpy() for keys, _ in layers], axis=1)
    np.testing.assert_allclose(scores, -norms, atol=1e-5)  # rotations leave norms as they are


@pytest.mark.parametrize("policy", READING_LAYERS)
@pytest.mark.parametrize("name", ["entmax", "ssmax", "fox", "xglm"])
def test_attentions_that_keep_their_keys_to_themselves_are_refused_by_name(name, policy):
    found = find_policy(policy)
    attention = name if name != "xglm" else "the attention of xglm"
    with refused(f"{attention} .*leave out all policies but h2o, snapkv, ada-snapkv, tova and kvzip"):
        found.scores(seen_by(found, tiny_adapter(name), random_blocks(N, M, B)))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in READING_LAYERS])
@pytest.mark.parametrize("name", ["entmax", "xglm"])
def test_policies_of_attention_and_place_choose_with_any_as_for_the_target_by_itself(name, policy):
    assert_a_choice_in_a_block_is_that_of_the_target_by_itself(find_policy(policy), tiny_adapter(name))


def test_kvzip_needs_a_tokenizer_and_room_for_the_context_twice():
    contexts = random_blocks(N, M, B)
    kvzip = find_policy("kvzip")
    with refused("kvzip reads a prompt, which needs the tokenizer"):
        kvzip.scores(Seen.of(Scorer(llama()), contexts, blind=True))
    adapter = TransformersAdapter(random_model("gpt2", n_positions=40)).requires_grad_(False)
    with refused("the far context is read twice, 42 tokens, which is beyond the 40 positions"):
        kvzip.scores(seen_by(kvzip, adapter, contexts))


def test_every_policy_is_a_target_blind_selector_of_its_name():
    assert {SELECTORS[name].family for name in POLICIES} == {BLIND}
    assert all(SELECTORS[name].item is policy for name, policy in POLICIES.items())
    with refused("unknown eviction policy 'snapvk'; choose from h2o, snapkv"):
        find_policy("snapvk")
