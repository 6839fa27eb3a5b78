"""The check of a model before it is measured: what its configuration ends, and a trial on random tokens."""

import numpy as np
import pytest
import torch

from analysis.kept import KeptAs
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.check import check_long_context
from analysis.model.losses import Scorer, long_and_short_losses
from analysis.open_model import adapter_of
from analysis.project import OlmoAdapter
from analysis.selectors import SelectorInput, find_selector
from tests.support import tiny
from tests.support.families import (
    FAMILIES,
    REACH,
    ROTARY,
    VOCABULARY,
    WINDOWED,
    layers_of_other_heads,
    random_model,
)
from tests.support.plain import random_blocks, whole_pass_by_head
from tests.support.refusals import refused

LONGROPE = {
    **FAMILIES["llama"],
    "original_max_position_embeddings": 20,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0]},
}
"""RoPE of other frequencies in texts of more than 20 tokens: what comes first is read otherwise there."""
WINDOW = {"text_config": {**FAMILIES["gemma3"]["text_config"], "sliding_window": 31}}
CHUNKED = {**ROTARY, "attention_chunk_size": 31, "num_local_experts": 2, "intermediate_size_mlp": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def check(model, n_long, targets_per_block=1, **options):
    check_long_context(model, n_long, targets_per_block, name="the model", **options)


def adapter(family="llama", **changes):
    return TransformersAdapter(random_model(family, **changes)).requires_grad_(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_measured_as_far_as_their_positions_reach(family):
    check(adapter(family), REACH)


@pytest.mark.parametrize(
    ("family", "changes", "longest", "message"),
    [
        ("gpt2", {}, 64, "beyond the 64 positions of the model"),
        ("mistral", {"sliding_window": 31}, 31, "beyond the 31 tokens of a sliding window of"),
        ("phi3", {**ROTARY, "sliding_window": 31}, 31, "beyond the 31 tokens of a sliding window"),
        ("gemma3", WINDOW, 31, "beyond the 31 tokens of a sliding window"),
        ("llama4_text", CHUNKED, 31, "beyond the 31 tokens of a chunked window"),
        ("llama", {"rope_parameters": DYNAMIC}, 64, "the 64 tokens after which dynamic changes all"),
        ("phi3", LONGROPE, 20, "the 20 tokens after which longrope changes all"),
    ],
    ids=["positions", "mistral", "phi3", "composite", "chunks", "dynamic", "longrope"],
)
def test_contexts_that_are_too_long_are_refused(family, changes, longest, message):
    model = adapter(family, **changes)
    check(model, longest)
    model.bfloat16()  # in which a trial would not see one token
    with refused(message):
        check(model, longest + 1)
    with refused("with 4 more tokens of block and prefix is beyond"):
        check(model, longest - 3, targets_per_block=5)


def test_the_prefix_counts_among_the_positions_of_a_model():
    behind = with_prefix(adapter("gpt2"), (1,))  # 64 learned positions
    check(behind, 63)
    with refused("N = 64 with 1 more tokens .* beyond the 64 positions"):
        check(behind, 64)


def test_learned_positions_of_this_project_end():
    ours = OlmoAdapter(tiny.model(**tiny.ENCODINGS["learned"]))
    check(ours, 32)
    with refused("N = 33 .* beyond the 32 positions"):
        check(ours, 33)
    check(OlmoAdapter(tiny.model()), 500)


def test_contexts_that_leave_what_was_trained_are_said(caplog):
    """The last target of a block has B - 1 tokens more; a prefix and a gap count, too."""
    ours = OlmoAdapter(tiny.model())
    check(ours, 29, targets_per_block=4, reach=32)
    check(with_prefix(ours, (1,)), 20, targets_per_block=4, gap=8, reach=32)
    check(ours, 500)
    assert not caplog.text
    check(ours, 30, targets_per_block=4, reach=32)
    assert "has 33 position ids before it, and the model is made for 32" in caplog.text
    for model in (adapter(), with_prefix(ours, (1,))):
        caplog.clear()
        check(model, 20, targets_per_block=4, gap=10, reach=32)
        assert caplog.text.count("lower N or B where that is not meant") == 1


def test_the_trial_sees_a_window_that_leaves_out_one_token():
    """Of a kind that no setting of ours names."""
    local = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_heads": 4,
        "max_position_embeddings": REACH,
        "num_layers": 2,
        "attention_types": [[["local"], 2]],
        "window_size": 31,
        "initializer_range": 0.3,
    }
    model = adapter("gpt_neo", **local)
    check(model, 31)
    with refused("tokens dropped from N = 32 than with them hidden"):
        check(model, 32)


def test_rounding_of_bf16_is_no_reason_to_refuse_a_model():
    """In Gemma 3 it is a third of the logits' spread; the trial is in fp32 and leaves weights as they were."""
    model = random_model()
    model.lm_head.weight.data += 200 * torch.randn(32)  # logits far from 0, near each other
    model.bfloat16()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    check(TransformersAdapter(model), 40)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("bert", "looks ahead, as BERT does"),
        ("openai-gpt", "caches no keys"),
        ("minimax", "cannot read random tokens behind a prefix"),
    ],
)
def test_models_whose_prefixes_cannot_be_shared_are_refused(family, message):
    with refused(f"the model .*{message}"):
        check(adapter(family, **ROTARY, num_experts_per_tok=1), 20)


def test_models_that_do_not_read_their_position_ids_are_refused():
    falcon = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    with refused("the model does not read its position ids"):
        check(adapter("falcon", **falcon, alibi=True), 20)


def test_a_trial_that_memory_does_not_allow_is_left_out(monkeypatch, caplog):
    model = adapter()
    model.model.forward = lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    check(model, 20)
    assert "no memory to try the model in fp32" in caplog.text


def test_a_model_that_looks_tokens_up_in_layers_has_no_gradients_of_embeddings():
    model = adapter_of(layers_of_other_heads(), "it")
    check_long_context(model, 24, name="it", drops_tokens=False, in_cache=True)
    with refused("it looks tokens up in layers, too"):
        check_long_context(model, 24, name="it", drops_tokens=False, changes_embeddings=True)
    check(adapter(), 24, changes_embeddings=True)


WINDOW_OF_ITS_OWN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_heads": 4,
    "max_position_embeddings": REACH,
    "num_layers": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 9,
    "initializer_range": 0.3,
}
SHARED_LAYERS = {
    **ROTARY,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": REACH,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}


def test_heads_keep_no_tokens_of_their_own_where_copied_keys_would_move_a_window():
    """GPT-Neo counts the keys that are left, and has no interface through which rows could share the others."""
    neo = adapter("gpt_neo", **WINDOW_OF_ITS_OWN)
    check(neo, 24, drops_tokens=False, in_cache=True)
    assert not neo.shares_far_keys
    with refused(
        "the model counts the keys that are left in its cache .*lower N, or leave tova, keydiff out$"
    ):
        check(neo, 24, drops_tokens=False, in_cache=True, by_head=["tova", "keydiff"])
    check(neo, 9, in_cache=True, by_head=["h2o"])
    gemma = adapter("gemma3_text", **WINDOWED["gemma3_text"])
    check(gemma, 24, drops_tokens=False, in_cache=True, by_head=["h2o"])
    assert gemma.shares_far_keys


def test_layers_that_share_keys_have_no_policies_by_head():
    model = adapter("gemma4_text", **SHARED_LAYERS)
    check(model, 24, in_cache=True)
    with refused("the model has keys of 2 layers and attention of 4, .*leave expected-attention out$"):
        check(model, 24, by_head=["expected-attention"])
    with refused("attention of 4, .*; give another model$"):  # where every policy would have to be left out
        check(model, 24, by_head=())


def test_chunks_end_in_the_cache_too():
    """Of chunks transformers counts the first columns that are hidden as padding: they would begin elsewhere."""
    with refused("beyond the 9 tokens of a chunked window of the model; lower N or B$"):
        check(
            adapter("llama4_text", **{**CHUNKED, "attention_chunk_size": 9}),
            24,
            drops_tokens=False,
            in_cache=True,
        )


def test_layers_may_differ_in_their_heads_of_keys():
    model = adapter_of(layers_of_other_heads(), "it")
    check_long_context(model, 24, name="it", drops_tokens=False, in_cache=True)
    contexts = random_blocks(24, 6, 2)
    long, _ = long_and_short_losses(Scorer(model), contexts)
    for name in ("h2o", "snapkv"):
        choice = find_selector(name)(SelectorInput(Scorer(model), contexts, 0, 18))
        assert choice.by_head.shape == (4, 5 * 2 + 1, 18)
        words = np.zeros((4, 18), dtype=int)
        losses = KeptAs("cache").losses(Scorer(model), contexts, contexts.all_targets, choice, words, (6, 18))
        np.testing.assert_allclose(losses[:, 1], long, atol=1e-5)
        kept = np.argsort(-choice.by_head, axis=-1, kind="stable")[..., :6]
        for row, (block, place) in enumerate(contexts.all_targets):
            log_p = whole_pass_by_head(model.model, contexts.tokens[block, : 24 + place], 18, kept[row])
            assert losses[row, 0] == pytest.approx(-log_p[contexts.targets[block, place]], abs=2e-5)
        assert (np.abs(losses[:, 0] - long) > 1e-3).any()
