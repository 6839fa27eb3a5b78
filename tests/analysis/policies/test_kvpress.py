"""Presses as policies, with stand-ins that have the interface of kvpress."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from analysis.cache_eviction.settings import BUDGETS, keys_of
from analysis.model import far_cache
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.losses import Scorer
from analysis.policies import find_policy, from_kvpress
from analysis.policies.policy import first_of_each_head
from analysis.policies.seen import Seen
from analysis.selectors import BLIND, SELECTORS, SelectorInput, find_selector, register
from analysis.selectors.by_policy import ByPolicy
from tests.support.families import random_model, tiny_adapter
from tests.support.plain import random_blocks
from tests.support.presses import BudgetPress, PyramidKVPress, PyramidPress, ScorerPress
from tests.support.refusals import refused

N, M, B = 24, 6, 3
FAR = N - M


@dataclass
class LastAttentionPress(ScorerPress):
    """TOVA's scores, by everything that a press may read."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        length = keys.shape[2]
        cosine, sine = kwargs["position_embeddings"]
        assert hidden_states.shape[1] == values.shape[2] == attentions.shape[-1] == cosine.shape[1] == length
        queries = module.q_proj(hidden_states).view(len(keys), length, -1, 8).transpose(1, 2)
        first, second = queries.chunk(2, dim=-1)
        queries = queries * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
        weights = queries @ keys.repeat_interleave(2, dim=1).transpose(-1, -2) / 8**0.5
        weights = weights.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(weights, attentions, rtol=0, atol=1e-5)
        return weights[:, :, -1].mean(dim=1, keepdim=True).expand(keys.shape[:3])


class BlockPress:
    press = LastAttentionPress()


class FinchPress(LastAttentionPress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError("it is never called")


class DownloadedPress(LastAttentionPress):
    def post_init_from_model(self, model):
        raise OSError("no statistics of this model\nand a long story")


class ShortPress(ScorerPress):
    def score(self, *arguments):
        raise AssertionError("Query length 18 should be greater than the window size 64")


def adapter_behind(prefix=()):
    return with_prefix(TransformersAdapter(random_model("llama")).requires_grad_(False), prefix)


@pytest.mark.parametrize("blind", [True, False])
def test_a_press_scores_what_its_policy_scores(blind):
    contexts = random_blocks(N, M, B)
    targets = contexts.all_targets
    press = LastAttentionPress()
    policy, ours = from_kvpress(press, blind=blind), find_policy(f"tova:blind={int(blind)}")
    seen = Seen.of(Scorer(adapter_behind((3, 1))), contexts, targets, blind=blind)
    others = slice(0, FAR - blind)  # of ours the last far token is kept first
    np.testing.assert_allclose(policy.scores(seen)[..., others], ours.scores(seen)[..., others], atol=1e-5)
    assert press.compression_ratio == 0.0
    assert not any(hasattr(part, "rotary_emb") for part in seen.scorer.model.model.model.layers)


def test_a_press_is_a_selector_like_any_policy(monkeypatch):
    policy = from_kvpress(LastAttentionPress())
    register("last-attention", BLIND)(policy)
    try:
        assert find_selector("last-attention") == ByPolicy(policy)
        given = SelectorInput(Scorer(adapter_behind()), random_blocks(N, M, B), 0, 4)
        assert find_selector("last-attention")(given).by_head.shape == (2 * B, 4, FAR)
        with refused("'window=2' is no parameter of last-attention; it has none"):
            find_selector("last-attention:window=2")
    finally:
        del SELECTORS["last-attention"]


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_a_press_scores_anew_at_each_budget(prefix):
    seen = Seen.of(Scorer(adapter_behind(prefix)), random_blocks(N, M, B), blind=True)
    policy = from_kvpress(BudgetPress())
    p = len(prefix)
    for count, kept in zip((4, 12), policy.kept(seen, (4, 12)), strict=True):
        assert (kept.sum(axis=-1) == count).all()
        assert kept[..., : max(0, (p + count) // 2 - p)].all()
    with refused("BudgetPress scores anew at each budget, or at random, so that it has no one ranking"):
        policy.scores(seen)


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_a_press_with_budgets_of_layers_shares_out_far_keys_alone(prefix):
    """Prefix and near tokens are outside of the budget, so that its total is that of any policy."""
    contexts = random_blocks(N, M, B)
    scorer = Scorer(adapter_behind(prefix))
    for blind, targets in ((True, None), (False, None), (False, contexts.all_targets)):
        seen = Seen.of(scorer, contexts, targets, blind=blind)
        policy = from_kvpress(PyramidPress(), blind=blind)
        for count, kept in zip((4, 12), policy.kept(seen, (4, 12)), strict=True):
            assert kept.sum(axis=-1).tolist() == [[count + 2, count + 2, count - 2, count - 2]] * len(kept)
        [few] = policy.kept(seen, (1,))
        assert few.sum(axis=-1).tolist() == [[3, 3, 0, 0]] * len(few)


@pytest.mark.parametrize("n_far", [224, 992])
def test_pyramid_kv_shares_out_no_budget_of_the_study_beside_four_sinks(n_far):
    """N 256 and 1,024: its window would not fit into the highest layer. Of all far keys it shares out a half."""
    seen = Seen.of(Scorer(adapter_behind()), random_blocks(N, M, B), blind=True)
    keep = from_kvpress(PyramidKVPress(num_layers=2)).keeping(seen)
    scores = np.random.default_rng(0).random((1, sum(seen.key_heads), n_far))
    of_snapkv = first_of_each_head
    for keys in keys_of(BUDGETS, n_far, 4):
        beside_sinks = scores[..., 4:]
        expected = of_snapkv(beside_sinks, keys - 4)
        np.testing.assert_array_equal(keep(beside_sinks, keys - 4), expected)
        shared_out = (keep(scores, keys) != of_snapkv(scores, keys)).any()
        assert shared_out == (keys == n_far // 2)


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (BlockPress(), "BlockPress has no score.*; give its press, LastAttentionPress"),
        (object(), "object has no score"),
        (FinchPress(), "FinchPress compresses in a way of its own"),
    ],
)
def test_other_presses_are_refused_by_name(press, message):
    with refused(message):
        from_kvpress(press)


def test_what_a_press_or_a_model_does_not_do_is_one_line():
    contexts = random_blocks(N, M, B)
    with refused("ShortPress: Query length 18 should be greater"):
        from_kvpress(ShortPress()).scores(Seen.of(Scorer(adapter_behind()), contexts, blind=True))
    with refused(
        "DownloadedPress is not to be had for this model .no statistics of this model.; give another"
    ):
        from_kvpress(DownloadedPress()).scores(Seen.of(Scorer(adapter_behind()), contexts, blind=True))
    with refused("a press reads a model of transformers; convert this one"):
        from_kvpress(BudgetPress()).scores(Seen.of(Scorer(tiny_adapter("rope")), contexts, blind=True))


def test_kvpress_may_be_imported_behind_a_measurement(monkeypatch):
    """It wraps every attention function that there is, ours of the measurement before among them."""

    def wrapped(function):
        def wrapper(module, query, key, value, attention_mask, dropout, **named):
            return function(module, query, key, value, attention_mask, dropout, **named)

        return wrapper

    contexts = random_blocks(N, M, B)
    adapter = adapter_behind()
    adapter.shares_far_keys = True
    scorer = Scorer(adapter)

    def measured():
        scores = find_policy("knorm").scores(Seen.of(scorer, contexts))
        masks = np.random.default_rng(0).random((3, FAR)) < 0.5
        return scores, far_cache.measures(scorer, contexts, masks, ("loss",), contexts.all_targets)

    expected = measured()
    around = {name: wrapped(function) for name, function in ALL_ATTENTION_FUNCTIONS.items()}
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", around)
    for values, before in zip(measured(), expected, strict=True):
        np.testing.assert_array_equal(values, before)
