"""Rankings that see the targets, against plain loops over whole passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.cache_eviction.reading import BlockReading
from analysis.cache_eviction.reference import REFERENCES, find_reference
from analysis.cache_eviction.settings import NEAR_KEPT, NEAR_REREAD
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.losses import Scorer
from tests.support.families import WINDOWED, random_model, tiny_adapter
from tests.support.plain import plain_divergence, plain_greedy, plain_halving, random_blocks, whole_pass
from tests.support.refusals import refused

N, M, B = 24, 6, 4
FAR = N - M
NEARS = (NEAR_KEPT, NEAR_REREAD)
SHARING = ("llama", "rope", "windowed gemma2")


def adapter_named(name):
    """The model of a name, whose rows share far keys if they can."""
    if name.startswith("windowed "):
        family = name.removeprefix("windowed ")
        adapter = TransformersAdapter(random_model(family, **WINDOWED[family])).requires_grad_(False)
    else:
        adapter = tiny_adapter(name)
    if isinstance(adapter, TransformersAdapter):
        adapter.shares_far_keys = name != "xglm"
    return adapter


def one_block():
    return random_blocks(N, M, B, count=1)


class Plain:
    """KL to the full cache of some targets of one block, summed, by one whole pass a subset."""

    def __init__(self, adapter, contexts, near, places):
        self.adapter = adapter
        self.tokens = contexts.tokens[0]
        self.places = list(places)
        self.sees_all_far = N - 1 if near == NEAR_KEPT else FAR
        self.with_all = self.log_p(range(FAR))

    def log_p(self, kept):
        left = [*sorted(kept), *range(FAR, self.sees_all_far)]
        of_places = whole_pass(self.adapter, self.tokens, self.sees_all_far, left)[-B:]
        return of_places[self.places]

    def __call__(self, kept):
        pairs = zip(self.with_all, self.log_p(kept), strict=True)
        return sum(plain_divergence("kl", with_all, log_p) for with_all, log_p in pairs)


def by_score(scores):
    return np.argsort(-scores, kind="stable").tolist()


# --- exact effects ---


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("name", [*SHARING, "xglm"])
def test_leaving_one_out_is_the_kl_to_the_full_cache_summed_over_targets(name, near):
    contexts = one_block()
    adapter = adapter_named(name)
    plain = Plain(adapter, contexts, near, range(B))
    reading = BlockReading.of(Scorer(adapter), contexts, near)
    expected = [plain(set(range(FAR)) - {column}) for column in range(FAR)]
    np.testing.assert_allclose(find_reference("leave-one-out-kl").scores(reading), expected, atol=1e-4)


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize(
    ("text", "places", "count"),
    [("leave-one-out-kl:first=2", None, [0, 1]), ("leave-one-out-kl:first=3", [3, 2, 0], [0, 2])],
)
def test_only_the_first_targets_and_those_that_are_some_count(text, places, count, near):
    contexts = one_block()
    adapter = adapter_named("llama")
    plain = Plain(adapter, contexts, near, count)
    read = []
    scorer = Scorer(adapter)
    scorer.on_read = read.append
    scores = find_reference(text).scores(BlockReading.of(scorer, contexts, near), places=places)
    expected = [plain(set(range(FAR)) - {column}) for column in range(FAR)]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    far = N - 1 if near == NEAR_KEPT else FAR
    assert sum(read) == far + (1 + FAR) * (N - far + count[-1])


@pytest.mark.parametrize("name", list(REFERENCES))
@pytest.mark.parametrize("near", NEARS)
def test_sinks_score_above_all_others(name, near):
    adapter = adapter_named("llama")
    reading = BlockReading.of(Scorer(adapter), one_block(), near)
    scores = find_reference(name).scores(reading, sinks=3)
    assert scores.shape[-1] == FAR
    assert scores.dtype == np.float64
    assert (scores[..., :3] > scores[..., 3:].max(axis=-1, keepdims=True)).all()
    if name in ("leave-one-out-kl", "presence-gradient"):
        without = find_reference(name).scores(reading)
        np.testing.assert_allclose(scores[..., 3:], without[..., 3:], atol=1e-5)


# --- step by step ---


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize(("name", "sinks"), [("llama", 0), ("rope", 2), ("windowed gemma2", 3)])
def test_halving_drops_the_half_of_least_effect_again_and_again(name, sinks, near):
    contexts = one_block()
    adapter = adapter_named(name)
    scorer = Scorer(adapter)
    read = []
    scorer.on_read = read.append
    scores = find_reference("halving-kl").scores(BlockReading.of(scorer, contexts, near), sinks=sinks)
    plain = Plain(adapter, contexts, near, range(B))
    ranked = plain_halving(plain, range(sinks, FAR), range(sinks))
    assert by_score(scores)[sinks:] == [column for column, _ in ranked]
    far = N - 1 if near == NEAR_KEPT else FAR
    row = N - far + B - 1
    rounds = int(np.log2(FAR - sinks)) + 1
    assert read[0] == far
    assert sum(read[1:]) <= (2 * (FAR - sinks) + rounds) * row


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize(("name", "sinks"), [("llama", 0), ("rope", 2)])
def test_greedy_adds_what_brings_the_block_nearest_to_the_full_cache(name, sinks, near):
    contexts = one_block()
    adapter = adapter_named(name)
    reading = BlockReading.of(Scorer(adapter), contexts, near)
    scores = find_reference("greedy-kl:keys=5").scores(reading, sinks=sinks)
    plain = Plain(adapter, contexts, near, range(B))
    chosen, _ = plain_greedy(plain, range(sinks, FAR), range(sinks), 5 - sinks)
    effects = find_reference("leave-one-out-kl").scores(reading)
    rest = [column for column in by_score(effects) if column >= sinks and column not in chosen]
    assert by_score(scores)[sinks:] == [*chosen, *rest]


def test_greedy_chooses_all_keys_where_there_are_no_more():
    reading = BlockReading.of(Scorer(adapter_named("llama")), one_block(), NEAR_KEPT)
    scores = find_reference("greedy-kl:keys=99").scores(reading, sinks=12)
    assert sorted(scores[12:]) == [1, 2, 3, 4, 5, 6]


# --- the gradient by presence ---


class PlainByPresence:
    """The summed loss of one block by one whole pass in float64, where every far key of each head has a presence."""

    def __init__(self, name, contexts, near):
        family = name.removeprefix("windowed ")
        changes = WINDOWED[family] if name.startswith("windowed ") else {}
        self.model = random_model(family, **changes).double()
        self.model.set_experts_implementation("eager")
        self.contexts = contexts
        self.begin = N - 1 if near == NEAR_KEPT else FAR
        """The first query that meets the presence."""
        self.presence = None

    def attention(self, module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **_):
        """As transformers calls it."""
        of_group = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(of_group, dim=1) for states in (key, value))
        scores = query @ key.transpose(-1, -2) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        scores = scores + mask
        log_presence = self.presence[module.layer_idx].log().repeat_interleave(of_group, dim=0)
        scores[:, :, self.begin :, :FAR] += log_presence[:, None]
        weights = scores.exp()
        total = weights.sum(dim=-1, keepdim=True)
        if s_aux is not None:
            total = total + s_aux.exp()[:, None, None]
        return (weights / total @ value).transpose(1, 2), None

    @torch.no_grad()
    def __call__(self, presence):
        """``presence``: (layers, G, F)."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register("plain_presence", self.attention)
        AttentionMaskInterface.register("plain_presence", eager_mask)
        self.model.set_attn_implementation("plain_presence")
        self.presence = presence
        logits = self.model(torch.from_numpy(self.contexts.tokens), logits_to_keep=B).logits[0]
        log_p = logits.double().log_softmax(-1)
        return -log_p[range(B), self.contexts.targets[0]].sum().item()

    def slope(self, layers, heads, column):
        """Of minus the loss by the presence of a key in some layers and heads.

        By finite differences, extrapolated to no step: norms are in float32 in any model, which forbids tiny ones.
        """

        def over(step):
            losses = []
            for change in (step, -step):
                presence = torch.ones(len(self.model.model.layers), 2, FAR, dtype=torch.float64)
                presence[layers, heads, column] += change
                losses.append(self(presence))
            return (losses[1] - losses[0]) / (2 * step)

        return (4 * over(0.02) - over(0.04)) / 3


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("name", ["llama", "windowed gemma2", "windowed gpt_oss"])
def test_the_gradient_is_a_finite_difference_in_every_layer_and_head(name, near):
    contexts = one_block()
    plain = PlainByPresence(name, contexts, near)
    slopes = find_reference("presence-gradient").scores(
        BlockReading.of(Scorer(adapter_named(name)), contexts, near)
    )
    assert slopes.shape == (4, FAR)
    for column in range(0, FAR, 2):
        of_all = plain.slope(slice(None), slice(None), column)
        assert slopes[:, column].sum() == pytest.approx(of_all, abs=2e-4)
        for layer in range(2):
            for head in range(2):
                expected = plain.slope(layer, head, column)
                assert slopes[2 * layer + head, column] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("name", ["rope", "grouped", "alibi"])
def test_the_gradient_of_our_models_is_that_by_a_bias_in_a_whole_pass(name, near):
    """Summed over layers, which share the bias."""
    contexts = one_block()
    adapter = adapter_named(name)
    slopes = find_reference("presence-gradient").scores(BlockReading.of(Scorer(adapter), contexts, near))
    tokens = torch.from_numpy(contexts.tokens)
    length = tokens.shape[1]
    begin = N - 1 if near == NEAR_KEPT else FAR
    log_presence = torch.zeros(FAR, requires_grad=True)
    bias = torch.zeros(1, length, length)
    bias[:, begin:, :FAR] = log_presence
    ids = torch.arange(length)[None]
    log_p = adapter.biased_logits(tokens, ids, bias, B)[0].log_softmax(-1)
    (expected,) = torch.autograd.grad(log_p[range(B), contexts.targets[0]].sum(), log_presence)
    np.testing.assert_allclose(slopes.sum(axis=0), expected, atol=2e-5)


@pytest.mark.parametrize("near", NEARS)
@pytest.mark.parametrize("name", SHARING)
def test_the_gradient_counts_the_targets_that_count_in_any_batch(name, near):
    """In parts of one target, behind a prefix, after the far keys were read without gradients."""
    contexts = one_block()
    reading = BlockReading.of(Scorer(with_prefix(adapter_named(name), (3, 1))), contexts, near)
    gradient = find_reference("presence-gradient")
    with reading.scorer.keeping_far():
        find_reference("leave-one-out-kl").scores(reading)
        together = gradient.scores(reading)
    parts = [gradient.scores(reading, places=[place]) for place in range(B)]
    np.testing.assert_allclose(sum(parts), together, atol=1e-5)
    small_batches = replace(reading, scorer=Scorer(reading.scorer.model, tokens_per_batch=4 * (M + 2)))
    np.testing.assert_allclose(gradient.scores(small_batches), together, atol=1e-5)


def test_a_gradient_that_does_not_fit_goes_on_with_fewer_targets(monkeypatch):
    contexts = one_block()
    adapter = adapter_named("llama")
    expected = find_reference("presence-gradient").scores(
        BlockReading.of(Scorer(adapter), contexts, NEAR_REREAD)
    )
    near_logits = adapter.near_logits

    def small_near_logits(far, visible, tokens, queries, first_id):
        if queries > 2:
            raise torch.OutOfMemoryError("no")
        return near_logits(far, visible, tokens, queries, first_id)

    adapter.near_logits = small_near_logits
    reading = BlockReading.of(Scorer(adapter, tokens_per_batch=4 * (M + B)), contexts, NEAR_REREAD)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    np.testing.assert_allclose(find_reference("presence-gradient").scores(reading), expected, atol=1e-5)


@pytest.mark.parametrize("name", [*SHARING, "alibi", "windowed gpt_oss"])
def test_no_presence_is_a_key_that_is_left_out(name):
    contexts = one_block()
    adapter = adapter_named(name)
    scorer = Scorer(adapter)
    tokens = torch.from_numpy(contexts.tokens)
    with torch.no_grad():
        far = adapter.far_key_values(tokens[:, :FAR])
        heads = sum(scorer.key_heads(contexts))
        visible = torch.rand(1, heads, FAR, generator=torch.Generator().manual_seed(0)) < 0.5
        by_layer = list(visible.split([keys.shape[1] for keys, _ in far], dim=1))
        of_masks = adapter.near_logits(far, by_layer, tokens[:, FAR:], B)
        of_presence = adapter.near_logits(far, [mask.float() for mask in by_layer], tokens[:, FAR:], B)
    torch.testing.assert_close(of_presence, of_masks, atol=2e-5, rtol=0)


# --- refusals ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leave-one-in", "unknown reference 'leave-one-in'; choose from leave-one-out-kl, halving-kl"),
        ("halving-kl:keys=3", "'keys=3' is no parameter of halving-kl"),
        ("greedy-kl:keys=0", "keys of greedy-kl is a whole number of at least 1, not '0'"),
        ("leave-one-out-kl:first=0", "first of leave-one-out-kl is a whole number of at least 1, not '0'"),
    ],
)
def test_other_references_are_refused_by_name(text, message):
    with refused(message):
        find_reference(text)
