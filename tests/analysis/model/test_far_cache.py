"""Far keys and values that are left out of the cache, against one whole masked pass a subset."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from analysis.model import far_cache
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.attention_to_far import accumulated_attention, last_attention
from analysis.model.check import check_long_context
from analysis.model.far_attention import FarKeys, Scores, attend
from analysis.model.losses import Scorer, long_and_short_losses
from analysis.open_model import adapter_of
from analysis.selectors import SelectorInput, SelectorName, find_selector, subsets
from olmo_sparsity.util.errors import UserError
from tests.support.families import (
    FAMILIES,
    OURS,
    REACH,
    VOCABULARY,
    WINDOWED,
    random_model,
    tiny_adapter,
    tiny_causal_lm,
)
from tests.support.plain import (
    plain_divergence,
    plain_greedy,
    plain_halving,
    plain_spans,
    random_blocks,
    whole_pass,
)
from tests.support.refusals import refused
from tests.support.slow import slow_but

N, M, B = 24, 6, 3
FAR = N - M
BYPASSING = ("xglm",)
"""Families whose attention is not called through the interface of transformers."""
SHARING = [name for name in FAMILIES if name not in BYPASSING]


def adapter_named(name, *, shares):
    """The model of a name; it reads far keys that rows share, or copies of a row each.

    Of transformers' models with windows it is such as "windowed gemma2", or "windowed gemma2 of 3" with other ones.
    """
    family, _, window = name.removeprefix("windowed ").partition(" of ")
    if name.startswith("windowed ") and family in WINDOWED:
        changes = {"sliding_window": int(window)} if window else {}
        model = random_model(family, **{**WINDOWED[family], **changes})
        adapter = TransformersAdapter(model).requires_grad_(False)
        adapter.shares_far_keys = shares
        return adapter
    adapter = tiny_adapter(name)
    if isinstance(adapter, TransformersAdapter):
        adapter.shares_far_keys = shares
    return adapter


def random_masks(count, seed=0):
    """Subsets of the far tokens, (count, F) bool: all, none, all but one, and drawn ones."""
    masks = np.random.default_rng(seed).random((count, FAR)) < 0.5
    masks[0] = True
    masks[1] = False
    masks[2] = True
    masks[2, 5] = False
    return masks


def whole_losses(adapter, contexts, masks, targets):
    """Loss of every target with every subset, (m, C): a pass each."""
    losses = np.empty((len(targets), len(masks)))
    for row, (block, place) in enumerate(targets):
        for subset, mask in enumerate(masks):
            tokens = contexts.tokens[block, : N + place]
            log_p = whole_pass(adapter, tokens, FAR, np.flatnonzero(mask))[-1]
            losses[row, subset] = -log_p[contexts.targets[block, place]]
    return losses


CASES = [(name, True) for name in (*OURS, *SHARING)]
CASES += [(name, False) for name in FAMILIES]
CASES += [(f"windowed {family}", shares) for family in WINDOWED for shares in (True, False)]
SHORT_WINDOWS = ("windowed gemma2 of 3", "windowed gpt_oss of 4", "windowed phi3 of 4")
"""Shorter than the near part of M + B - 1 tokens, whose last ones see no far key in such a layer."""
CASES += [(name, shares) for name in SHORT_WINDOWS for shares in (True, False)]
SOFTMAX = ("rope", "nope", "alibi", "learned", "hybrid", "windowed hybrid", "grouped")
"""Those of our models whose attention is a softmax: rows share far keys."""
QUICK = [(name, True) for name in (*OURS, "llama", "windowed gemma2", "windowed gpt_oss")]
QUICK += [("xglm", False)]


@pytest.mark.parametrize(("name", "shares"), CASES)
@pytest.mark.parametrize("prefix", [pytest.param((), marks=pytest.mark.slow), (3, 1)])
def test_losses_are_those_of_a_whole_masked_pass(name, shares, prefix):
    contexts = random_blocks(N, M, B)
    adapter = with_prefix(adapter_named(name, shares=shares), prefix)
    targets = np.array([[0, 0], [0, 2], [1, 1]])
    masks = random_masks(7)
    scorer = Scorer(adapter, tokens_per_batch=30)  # few rows a pass
    losses = far_cache.measures(scorer, contexts, masks, ("loss",), targets)[..., 0]
    np.testing.assert_allclose(losses, whole_losses(adapter, contexts, masks, targets), atol=3e-5)
    of_its_own = np.broadcast_to(masks, (len(targets), *masks.shape))
    again = far_cache.measures(scorer, contexts, of_its_own, ("loss",), targets)[..., 0]
    np.testing.assert_allclose(again, losses, atol=3e-5)


@pytest.mark.parametrize(("name", "shares"), slow_but(CASES, *QUICK))
def test_all_far_tokens_are_the_long_context_and_none_is_the_short_one(name, shares):
    contexts = random_blocks(N, M, B)
    scorer = Scorer(adapter_named(name, shares=shares))
    targets = contexts.all_targets
    both = np.array([[True] * FAR, [False] * FAR])
    losses = far_cache.measures(scorer, contexts, both, ("loss",), targets)[..., 0]
    expected = long_and_short_losses(scorer, contexts, targets)
    np.testing.assert_allclose(losses, np.stack(expected, axis=1), atol=2e-5)


def test_a_far_context_is_read_once_where_it_is_kept_and_the_next_one_anew():
    contexts = random_blocks(N, M, B)
    scorer = Scorer(tiny_adapter("llama"))
    targets = np.array([[0, 0], [1, 1]])

    def losses_of(block):
        return far_cache.measures(scorer, contexts, random_masks(4), ("loss",), targets[[block]])

    read_anew = [losses_of(block) for block in (0, 0, 1, 0)]
    reads = []
    scorer.on_read = reads.append
    with scorer.keeping_far():
        kept = [losses_of(block) for block in (0, 0, 1, 0)]
    assert reads.count(FAR) == 3
    np.testing.assert_array_equal(kept, read_anew)
    losses_of(0)
    assert reads.count(FAR) == 4


@pytest.mark.parametrize(("most", "passes"), [(1, 7), (2 * 3 * VOCABULARY, 4), (1 << 27, 1)])
@pytest.mark.parametrize("shares", [True, False])
def test_a_pass_has_no_more_logits_than_it_may_or_one_row(monkeypatch, shares, most, passes):
    """Of the 7 rows of a block, each with the logits before three targets."""
    monkeypatch.setitem(far_cache.LOGITS_PER_BATCH, "cpu", most)
    contexts = random_blocks(N, M, B, count=1)
    adapter = adapter_named("llama", shares=shares)
    scorer = Scorer(adapter)
    reads = []
    scorer.on_read = reads.append
    masks = random_masks(7)
    losses = far_cache.measures(scorer, contexts, masks, ("loss",), contexts.all_targets)[..., 0]
    expected = whole_losses(adapter, contexts, masks, contexts.all_targets)
    np.testing.assert_allclose(losses, expected, atol=3e-5)
    assert reads[0] == FAR and len(reads) == 1 + passes
    assert sum(reads[1:]) == 7 * (M + B - 1)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "windowed gemma2", "rope"])
def test_measures_are_those_of_whole_passes(name):
    contexts = random_blocks(N, M, B)
    adapter = adapter_named(name, shares=True)
    targets = np.array([[0, 1], [1, 2]])
    masks = random_masks(5)
    names = ("loss", "correct", "kl", "tv")
    measured = far_cache.measures(Scorer(adapter), contexts, masks, names, targets)
    for row, (block, place) in enumerate(targets):
        tokens = contexts.tokens[block, : N + place]
        log_long = whole_pass(adapter, tokens, FAR, range(FAR))[-1]
        for subset, mask in enumerate(masks):
            log_p = whole_pass(adapter, tokens, FAR, np.flatnonzero(mask))[-1]
            token = contexts.targets[block, place]
            expected = [-log_p[token], float(log_p.argmax() == token)]
            expected += [plain_divergence(kind, log_long, log_p) for kind in ("kl", "tv")]
            assert measured[row, subset] == pytest.approx(expected, abs=3e-5)


def scoring(family, scores):
    """A model of one layer that gives the keys of some tokens these scores, {token: score}, and others about 0.

    Each of these tokens has a dimension of the embeddings to itself. Its key has it in the pair of dimensions that RoPE
    turns least, by 0.001 a position, and the queries of all tokens are 1 there.
    """
    changes = {"sliding_window": REACH, "num_hidden_layers": 1, "attention_bias": True}
    model = random_model(family, **{**WINDOWED.get(family, {}), **changes}).requires_grad_(False)
    embedding, attention = model.get_input_embeddings().weight, model.model.layers[0].self_attn
    slowest = torch.arange(32) % 4 == 3  # heads have 8 dimensions, pairs are 4 apart
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[slowest[: len(projection.weight)]] = 0
    attention.q_proj.weight *= 0.2
    attention.q_proj.bias[3::8] = 1
    for dimension, (token, score) in enumerate(scores.items()):
        embedding[:, dimension] = 0
        embedding[token] = 0
        embedding[token, dimension] = 1  # sqrt(32) behind the norm
        attention.k_proj.weight[3::8, dimension] = score * 8**0.5 / 32**0.5
    return TransformersAdapter(model)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_column_that_holds_all_attention_may_be_hidden(family, shares):
    """Its weight is 1 in float32: subtracted from a finished softmax it leaves rounding. GPT-OSS has sink logits."""
    heavy, column = 49, 5
    contexts = random_blocks(N, M, B, vocabulary=heavy)
    contexts.tokens[:, column] = heavy
    adapter = scoring(family, {heavy: 200.0})
    adapter.shares_far_keys = shares
    tokens = torch.from_numpy(contexts.tokens)
    [attention] = adapter.attention(tokens, torch.arange(tokens.shape[1]).expand(2, -1), M + B - 1)
    assert (attention[:, :, column] == 1).all()
    targets, masks = contexts.all_targets, random_masks(7)
    assert masks[:3, column].tolist() == [True, False, False] and masks[2].sum() == FAR - 1
    losses = far_cache.measures(Scorer(adapter), contexts, masks, ("loss",), targets)[..., 0]
    np.testing.assert_allclose(losses, whole_losses(adapter, contexts, masks, targets), atol=1e-5)
    assert (abs(losses[:, 2] - losses[:, 0]) > 0.1).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_is_measured_right_or_refused_by_name(name):
    """Of transformers, as far as a tiny configuration builds it; windows end within the far context."""
    windows = (
        {} if name == "moshi" else {"sliding_window": 9, "attention_chunk_size": 9}
    )  # its masks have none
    model = tiny_causal_lm(name, **windows)
    if model is None:
        pytest.skip("not built by a tiny configuration")
    try:
        adapter = adapter_of(model, f"the model ({name})")
        check_long_context(adapter, N, name=f"the model ({name})", drops_tokens=False, in_cache=True)
    except UserError as error:
        assert name in str(error) and "\n" not in str(error)
        return
    contexts = random_blocks(N, M, 1)
    targets, masks = contexts.all_targets, random_masks(5)
    losses = far_cache.measures(Scorer(adapter), contexts, masks, ("loss",), targets)[..., 0]
    np.testing.assert_allclose(losses, whole_losses(adapter, contexts, masks, targets), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", OURS)
def test_rows_of_our_models_share_far_keys_where_the_attention_is_a_softmax(name):
    """Other attentions compute weights of their own from all keys, so that each row reads a copy."""
    assert tiny_adapter(name).shares_far_keys == (name in SOFTMAX)


@pytest.mark.parametrize(("name", "shares"), [("llama", True), ("gpt2", True), ("xglm", False)])
def test_the_trial_says_whether_rows_may_share_far_keys(name, shares):
    adapter = tiny_adapter(name)
    check_long_context(adapter, N, name="the model", in_cache=True)
    assert adapter.shares_far_keys == shares


def test_a_model_that_caches_a_state_is_refused():
    with refused("the model"):
        check_long_context(
            TransformersAdapter(tiny_causal_lm("mamba")),
            N,
            name="the model",
            drops_tokens=False,
            in_cache=True,
        )


def test_a_window_is_refused_for_text_and_not_for_the_cache():
    adapter = adapter_named("windowed gemma3_text", shares=False)
    with refused("9 tokens of a sliding window of the model; lower N or B, or rank and keep in the cache"):
        check_long_context(adapter, N, name="the model", in_cache=True, may_keep_in_cache=True)
    with refused("9 tokens of a sliding window of the model; lower N or B$"):
        check_long_context(adapter, N, name="the model", in_cache=True)
    check_long_context(adapter, N, name="the model", drops_tokens=False, in_cache=True)
    assert adapter.shares_far_keys


def test_near_tokens_see_no_later_ones():
    """Of an attention that transformers makes no mask for they would, without an error."""
    adapter = adapter_named("llama", shares=True)
    tokens = torch.randint(1, 50, (2, N), generator=torch.Generator().manual_seed(0))
    tokens[1] = tokens[0]
    tokens[1, -1] = (tokens[0, -1] + 7) % 50
    visible = torch.ones(2, FAR, dtype=torch.bool)
    with torch.no_grad():
        far = adapter.far_key_values(tokens[:1, :FAR])
        logits = adapter.near_logits(far, visible, tokens[:, FAR:], M)
    assert torch.equal(logits[0, :-1], logits[1, :-1])
    assert not torch.allclose(logits[0, -1], logits[1, -1])


def test_parts_of_a_composite_model_keep_the_attention_that_the_user_gave_them():
    adapter = adapter_named("gemma3", shares=True)
    adapter.model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    contexts = random_blocks(N, M, 1)
    far_cache.measures(Scorer(adapter), contexts, random_masks(3), ("loss",), contexts.all_targets)
    last_attention(Scorer(adapter), contexts, contexts.all_targets)
    config = adapter.model.config
    parts = config, config.text_config, config.vision_config
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


SHARED = [name for name, shares in CASES if shares and (name in SOFTMAX or name not in OURS)]


@pytest.mark.parametrize("name", slow_but(SHARED, "rope", "alibi", "llama", *SHORT_WINDOWS[:2]))
@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_attention_of_near_tokens_behind_a_kept_far_context_is_that_of_a_pass_over_all(name, prefix):
    """And the far context is read once for all; windows of observers may be longer than the short context.

    A window of transformers' models counts tokens, so that they are refused with a gap between ids.
    """
    adapter = with_prefix(adapter_named(name, shares=True), prefix)
    contexts = random_blocks(N, M, B).with_gap(0 if "windowed" in name else 4)
    blocks = [contexts.take(slice(block, block + 1)) for block in range(len(contexts.tokens))]

    def attention_by(scorer, one):
        targets = one.all_targets
        return [
            last_attention(scorer, one, targets),
            *(accumulated_attention(scorer, one, targets, window) for window in (1, 4, M, 100)),
        ]

    for one in blocks:
        whole, behind = Scorer(adapter), Scorer(adapter)
        read = {whole: [], behind: []}
        for scorer, tokens in read.items():
            scorer.on_read = tokens.append
        expected = attention_by(whole, one)
        with behind.keeping_far():
            for values, right in zip(attention_by(behind, one), expected, strict=True):
                np.testing.assert_allclose(values, right, atol=3e-6)  # of sums of up to 8 weights
        assert (read[whole], read[behind]) == ([], [FAR])  # passes for attention are not counted


@pytest.mark.parametrize("same", [False, True], ids=["two models", "one model"])
def test_threads_read_far_keys_of_their_own(same):
    contexts = random_blocks(N, M, B)
    masks = random_masks(9)
    first = adapter_named("llama", shares=True)
    second = first if same else adapter_named("qwen3", shares=True)

    def losses(adapter):
        scorer = Scorer(adapter, tokens_per_batch=30)
        return far_cache.measures(scorer, contexts, masks, ("loss",), contexts.all_targets)

    alone = [losses(first), losses(second)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(losses, [first, second] * 4))
    for number, measured in enumerate(together):
        np.testing.assert_allclose(measured, alone[number % 2], atol=3e-5)


def test_sums_over_many_far_keys_do_not_overflow_in_fp16():
    """With weights alike, 4,096 values of 20 sum to more than fp16 holds before they are divided."""
    count = 4096
    far = FarKeys.of(
        [(torch.zeros(1, 1, count, 8).half(), torch.full((1, 1, count, 8), 20.0).half())],
        torch.ones(1, count, dtype=torch.bool),
        count + torch.arange(2),
    )
    near = torch.zeros(1, 1, 2, 8).half()
    output = attend(near, near, near + 20, None, far, 0, Scores(1.0))
    torch.testing.assert_close(output, torch.full_like(output, 20.0), atol=0.05, rtol=0)


# --- selectors that rank in the cache ---


class Plain:
    """Measures of a target with some far tokens in the cache, by whole passes, each once."""

    def __init__(self, adapter, contexts, block, place, measure):
        self.adapter = adapter
        self.tokens = contexts.tokens[block, : N + place]
        self.token = contexts.targets[block, place]
        self.measure = measure
        self.log_long = self.log_p(range(FAR))

    def log_p(self, kept):
        return whole_pass(self.adapter, self.tokens, FAR, sorted(kept))[-1]

    def __call__(self, kept):
        log_p = self.log_p(kept)
        if self.measure == "loss":
            return -log_p[self.token]
        return plain_divergence(self.measure, self.log_long, log_p)


def plain_leave_one_out(value, candidates):
    whole = value(range(FAR))
    return {i: value(set(range(FAR)) - {i}) - whole for i in candidates}


def plain_leave_one_in(value, candidates, sinks):
    base = value(sinks)
    return {i: base - value({*sinks, i}) for i in candidates}


def by_influence(influence):
    """Tokens and their influence, the largest first."""
    return sorted(influence.items(), key=lambda of_token: -of_token[1])


FORMS = {"": "loss", "-absolute": "loss", "-kl": "kl", "-tv": "tv"}
"""Measures by the forms of leaving one out and in."""
WHERE = [("cache", ()), ("cache:3", ()), ("cache:3", (3, 1))]
"""With and without sinks, and behind a prefix."""


@pytest.mark.parametrize(("ranked_in", "prefix"), WHERE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("base", ["leave-one-out", "leave-one-in"])
def test_single_tokens_are_ranked_as_by_whole_passes(base, form, ranked_in, prefix):
    contexts = random_blocks(N, M, B)
    adapter = with_prefix(adapter_named("windowed gemma2", shares=True), prefix)
    targets = np.array([[0, 2], [1, 0]])
    name = f"{base}{form}/{ranked_in}"
    selection = find_selector(name)(SelectorInput(Scorer(adapter), contexts, 0, 4, targets))
    sinks = range(3 if ranked_in == "cache:3" else 0)
    candidates = range(len(sinks), FAR)
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, FORMS[form])
        if base == "leave-one-out":
            expected = plain_leave_one_out(value, candidates)
        else:
            expected = plain_leave_one_in(value, candidates, sinks)
        if form == "-absolute":
            expected = {i: abs(influence) for i, influence in expected.items()}
        np.testing.assert_allclose(
            selection.scores[row, len(sinks) :], [expected[i] for i in candidates], atol=5e-5
        )
        assert np.isnan(selection.scores[row, : len(sinks)]).all()
        assert selection.columns[row].tolist() == [i for i, _ in by_influence(expected)][:4]


@pytest.mark.parametrize(("sinks", "prefix"), [(0, ()), (2, (3, 1))])
def test_spans_are_left_out_from_coarse_to_fine(monkeypatch, sinks, prefix):
    """Of 8, 4 and 2 tokens; the last span overlaps the one before where the width does not divide the candidates."""
    monkeypatch.setattr(subsets, "_SPLIT", 2)
    monkeypatch.setattr(subsets, "_SHORTEST", 2)
    contexts = random_blocks(N, M, B)
    adapter = with_prefix(adapter_named("windowed gemma2", shares=True), prefix)
    targets = np.array([[0, 2], [1, 0]])
    given = SelectorInput(Scorer(adapter), contexts, 0, 2, targets)
    selection = find_selector(f"spans/cache:{sinks}")(given)
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, "loss")
        of_tokens = plain_spans(value, range(sinks, FAR), range(sinks), 2, width=8, split=2, shortest=2)
        expected = sorted(of_tokens.values(), reverse=True)[:2]
        np.testing.assert_allclose(selection.influence[row], expected, atol=5e-5)
        of_chosen = [of_tokens[i] for i in selection.columns[row].tolist()]
        np.testing.assert_allclose(of_chosen, expected, atol=5e-5)


@pytest.mark.parametrize(("name", "measure"), [("greedy", "loss"), ("greedy-kl", "kl")])
def test_greedy_adds_to_the_sinks_what_helps_most(name, measure):
    contexts = random_blocks(N, M, B)
    adapter = adapter_named("llama", shares=True)
    targets = np.array([[0, 0], [1, 2]])
    selection = find_selector(f"{name}/cache:2")(SelectorInput(Scorer(adapter), contexts, 0, 3, targets))
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, measure)
        chosen, gains = plain_greedy(value, range(2, FAR), range(2), 3)
        assert selection.columns[row].tolist() == chosen
        np.testing.assert_allclose(selection.influence[row], gains, atol=5e-5)


@pytest.mark.parametrize(("name", "measure"), [("halving", "loss"), ("halving-kl", "kl")])
@pytest.mark.parametrize("sinks", [0, 2])
def test_halving_drops_the_half_of_least_influence_again_and_again(name, measure, sinks):
    contexts = random_blocks(N, M, B)
    adapter = adapter_named("llama", shares=True)
    targets = np.array([[0, 0], [1, 2]])
    given = SelectorInput(Scorer(adapter), contexts, 0, FAR - sinks, targets)
    selection = find_selector(f"{name}/cache:{sinks}")(given)
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, measure)
        expected = plain_halving(value, range(sinks, FAR), range(sinks))
        assert selection.columns[row].tolist() == [i for i, _ in expected]
        np.testing.assert_allclose(selection.influence[row], [gain for _, gain in expected], atol=5e-5)


def test_what_stands_in_for_one_another_is_seen_by_halving_and_missed_by_leaving_one_out():
    """Columns 3 and 9 are one token, to which all attend most; to that in column 12 they attend 0.6 times as much."""
    twice, once = 48, 49
    contexts = random_blocks(N, M, B, vocabulary=twice)
    contexts.tokens[:, [3, 9]] = twice
    contexts.tokens[:, 12] = once
    adapter = scoring("llama", {twice: 6.0, once: 5.5})
    adapter.shares_far_keys = True
    targets = np.array([[0, 0], [1, 0]])
    given = SelectorInput(Scorer(adapter), contexts, 0, 3, targets)
    by_leaving_one_out = find_selector("leave-one-out-kl/cache")(given).columns
    by_halving = find_selector("halving-kl/cache")(given).columns
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, "kl")
        influence = plain_leave_one_out(value, range(FAR))
        assert by_leaving_one_out[row].tolist() == [i for i, _ in by_influence(influence)][:3]
        assert by_halving[row].tolist() == [i for i, _ in plain_halving(value, range(FAR), ())][:3]
        best, *others = by_leaving_one_out[row]
        assert best == 12 and sorted(others) == [3, 9]
        first, second, _ = by_halving[row]
        assert first in (3, 9) and second == 12
        assert value([first]) < value([best])


@pytest.mark.parametrize("name", ["leave-one-out-kl", "leave-one-in", "greedy-kl", "halving"])
@pytest.mark.parametrize("proposer", ["attention", "leave-one-in-tv/cache:2"])
def test_a_screened_form_decides_by_whole_passes_among_the_proposed_that_are_no_sinks(name, proposer):
    """In the first round of halving all far tokens are there, in the others the sinks and what is left."""
    contexts = random_blocks(N, M, B)
    adapter = adapter_named("llama", shares=True)
    targets = np.array([[0, 1], [1, 2]])
    inputs = SelectorInput(Scorer(adapter), contexts, 0, FAR - 2, targets)
    proposed = find_selector(proposer)(inputs).columns
    selection = find_selector(f"{name}/cache:4@{proposer}:6")(replace(inputs, k=3))
    for row, (block, place) in enumerate(targets):
        value = Plain(adapter, contexts, block, place, "kl" if name.endswith("-kl") else "loss")
        candidates = sorted([i for i in proposed[row].tolist() if i >= 4][:6])
        if name == "leave-one-out-kl":
            expected = by_influence(plain_leave_one_out(value, candidates))
        elif name == "leave-one-in":
            expected = by_influence(plain_leave_one_in(value, candidates, range(4)))
        elif name == "greedy-kl":
            expected = list(zip(*plain_greedy(value, candidates, range(4), 3), strict=True))
        else:
            others = sorted({*range(4, FAR)} - {*candidates})
            expected = plain_halving(value, candidates, range(4), others)
        expected = expected[:3]
        assert selection.columns[row].tolist() == [i for i, _ in expected]
        np.testing.assert_allclose(selection.influence[row], [gain for _, gain in expected], atol=5e-5)


def test_forms_share_their_passes_only_where_they_rank_in_the_same_place():
    contexts = random_blocks(N, M, B)
    scorer = Scorer(adapter_named("llama", shares=True))
    names = ("leave-one-out", "leave-one-out-kl", "leave-one-out/cache", "leave-one-out-kl/cache:2")
    parsed = tuple(SelectorName.parse(name) for name in names)
    given = SelectorInput(scorer, contexts, 0, 3, names=parsed)
    together = {name: find_selector(name)(given) for name in names}
    for name, parsed_name in zip(names, parsed, strict=True):
        alone = find_selector(name)(SelectorInput(scorer, contexts, 0, 3, names=(parsed_name,)))
        np.testing.assert_array_equal(together[name].columns, alone.columns)
        np.testing.assert_allclose(together[name].influence, alone.influence, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("attention/cache:4", "attention reads no subsets to rank by"),
        ("leave-one-out/key", "subsets are ranked in text or cache"),
        ("leave-one-out/cache:12", "12 of the 14 far tokens are sinks"),
        ("leave-one-out/cache:4@attention:12", "m = 12 must be at least k = 4 and at most the 10 far tokens"),
    ],
)
def test_a_name_that_ranks_nowhere_is_refused(name, message):
    with refused(message):
        SelectorName.parse(name).check_candidates(k_max=4, n_far=14)
