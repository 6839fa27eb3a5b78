"""Adapters: dropping a token is hiding it, a prefix is the beginning of the text, and every family of transformers."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from analysis.contexts import NO_FAR
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.attention_to_far import last_attention
from analysis.model.check import check_long_context
from analysis.model.losses import Scorer
from analysis.model.token_losses import TokenLosses
from analysis.open_model import adapter_of
from analysis.project import OlmoAdapter
from olmo_sparsity.export import export_checkpoint
from olmo_sparsity.util.errors import UserError
from tests.support import tiny
from tests.support.families import FAMILIES, OURS, REACH, VOCABULARY, tiny_adapter, tiny_causal_lm
from tests.support.plain import plain_loss, random_blocks, random_contexts
from tests.support.slow import slow_but

N, M, PREFIX = 24, 6, (7, 3)
FAR, P = N - M, len(PREFIX)
KEPT = [0, 1, 2, 6, 7, 11, 15, 16, 17, 18, 19]


def random_tokens(rows=3, length=20, seed=0):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


# --- positions ---


@pytest.mark.parametrize("name", [*OURS, *FAMILIES])
@torch.no_grad()
def test_dropping_tokens_equals_hiding_them(name):
    model = tiny_adapter(name)
    tokens, ids = random_tokens(), torch.arange(20).expand(3, -1)
    mask = torch.zeros(3, 20, dtype=torch.long)
    mask[:, KEPT] = 1
    hidden = model(tokens, position_ids=ids, attention_mask=mask).logits[:, KEPT]
    dropped = model(tokens[:, KEPT], position_ids=ids[:, KEPT]).logits
    last = model(tokens[:, KEPT], position_ids=ids[:, KEPT], logits_to_keep=1).logits
    scale = float(hidden.abs().max())
    torch.testing.assert_close(dropped, hidden, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(last, hidden[:, -1:], rtol=0, atol=1e-5 * scale)
    if name != "nope":
        renumbered = model(tokens[:, KEPT], position_ids=torch.arange(len(KEPT)).expand(3, -1)).logits
        assert float((renumbered - hidden).abs().max()) > 1e-2 * scale


@torch.no_grad()
def test_the_trap_is_real_and_avoided():
    """Without a mask transformers cuts attention where the ids jump: text before the jump has no effect."""
    model = tiny_adapter("llama")
    tokens, ids = random_tokens(), torch.tensor(KEPT).expand(3, -1)
    other = tokens.clone()
    other[:, :6] = random_tokens(seed=1)[:, :6]
    bare = [
        model.model(text[:, KEPT], position_ids=ids, use_cache=False).logits[:, -1]
        for text in (tokens, other)
    ]
    assert torch.equal(*bare), "transformers no longer cuts attention at id jumps: say so in model/adapter.py"
    logits = [model(text[:, KEPT], position_ids=ids).logits[:, -1] for text in (tokens, other)]
    assert float((logits[0] - logits[1]).abs().max()) > 1e-2 * float(logits[0].abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_configuration_says_of_a_model(family):
    model = tiny_adapter(family)
    assert (model.vocabulary_size, model.max_positions, model.prefix) == (VOCABULARY, REACH, ())
    config = model.model.config.get_text_config()
    for ends, token in ((4, 4), ([3, 4], 3), (VOCABULARY + 1, 0), (None, 0)):
        config.eos_token_id = ends
        assert TransformersAdapter(model.model).baseline_token == token
    torch.testing.assert_close(
        model.embedded_logits(model.embed(random_tokens()), torch.arange(20).expand(3, -1), 2),
        model(random_tokens(), torch.arange(20).expand(3, -1), logits_to_keep=2).logits,
    )


def test_attention_and_gradients_of_an_exported_model_are_those_of_ours(tmp_path):
    source, model = tiny.checkpoint(tmp_path / "own")
    export_checkpoint(source.parent, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").requires_grad_(False)
    of_olmo = Scorer(OlmoAdapter(model.requires_grad_(False)))
    of_transformers, contexts = Scorer(TransformersAdapter(exported)), random_contexts(N, M)
    gradients = (Scorer.presence_gradient, 1e-5), (Scorer.input_gradients, 1e-5)
    for values_of, rounding in ((last_attention, 1e-6), *gradients):
        values = [values_of(scorer, contexts, contexts.all_targets) for scorer in (of_olmo, of_transformers)]
        np.testing.assert_allclose(*values, atol=rounding)


# --- the prefix ---


def with_prefix_in_the_text(contexts):
    first = np.broadcast_to(PREFIX, (len(contexts), P))
    return replace(contexts, tokens=np.concatenate([first, contexts.tokens], axis=1))


@pytest.mark.parametrize(
    "name", slow_but(["rope", "alibi", "learned", "grouped", *FAMILIES], "rope", "learned", "llama", "gpt2")
)
@pytest.mark.parametrize("targets_per_block", slow_but([1, 3], 3))
def test_every_number_is_that_of_a_text_that_begins_so(name, targets_per_block):
    contexts, model = random_blocks(N, M, targets_per_block, count=3), tiny_adapter(name)
    wide = with_prefix_in_the_text(contexts)
    prefixed, plain = Scorer(with_prefix(model, PREFIX), tokens_per_batch=100), Scorer(model)
    columns = np.arange(FAR - 1)
    without = columns + (columns >= np.arange(FAR)[:, None])
    for far in (without, contexts.all_far, np.arange(FAR)[:, None], NO_FAR):
        kept = np.concatenate([np.broadcast_to(np.arange(P), (len(far), P)), far + P], axis=1)
        for names in (("loss",), ("kl",)):
            expected = plain.measures(wide, kept, names)
            np.testing.assert_allclose(prefixed.measures(contexts, far, names), expected, atol=2e-5)
    targets = contexts.all_targets
    for values_of in (
        Scorer.presence_gradient,
        last_attention,
        Scorer.input_gradients,
        partial(Scorer.integrated_gradients, path=[(1.0, 1.0)]),
    ):
        expected = values_of(plain, wide, targets)[:, P:]
        np.testing.assert_allclose(values_of(prefixed, contexts, targets), expected, atol=2e-5, rtol=1e-5)


def test_losses_of_last_tokens_are_behind_the_prefix_too():
    model = tiny_adapter("llama")
    tokens = np.random.default_rng(0).integers(1, 40, (3, 12))
    wide = np.concatenate([np.broadcast_to(PREFIX, (3, P)), tokens], axis=1)
    losses = TokenLosses(with_prefix(model, PREFIX)).last_losses(tokens, 4)
    np.testing.assert_allclose(losses, TokenLosses(model).last_losses(wide, 4), atol=1e-5)


# --- every family ---


def eager_attention_of_last(model, contexts):
    """What transformers says that the last token of every context attends to, mean over heads and layers."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(torch.from_numpy(contexts.tokens), output_attentions=True).attentions
    model.set_attn_implementation(before)
    return np.mean(
        [layer[:, :, -1, :FAR].mean(dim=1).double().numpy() for layer in layers if layer is not None], axis=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_losses_are_those_of_plain_passes_and_a_full_bias_drops_a_token(name):
    """Every causal language model of transformers that a tiny configuration builds: measured right, or refused."""
    model = tiny_causal_lm(name)
    if model is None:
        pytest.skip("not built by a tiny configuration")
    try:
        adapter = adapter_of(model, f"the model ({name})")
        check_long_context(adapter, N, name=f"the model ({name})")
    except UserError as error:
        assert name in str(error) and "\n" not in str(error)
        return
    contexts, scorer = random_contexts(N, M, 2), Scorer(adapter, tokens_per_batch=400)
    columns = np.arange(FAR - 1)
    without = columns + (columns >= np.arange(FAR)[:, None])
    rows = zip(contexts.tokens, contexts.targets[:, 0], strict=True)
    subsets = [[*kept, *range(FAR, N)] for kept in without]
    expected = np.array(
        [[plain_loss(model, text, kept, target) for kept in subsets] for text, target in rows]
    )
    np.testing.assert_allclose(scorer.losses(contexts, without), expected, atol=1e-5, rtol=0)
    attention = last_attention(scorer, contexts, contexts.all_targets)
    if not name.endswith("_swa"):  # Granite says its weights without what sinks take of them
        np.testing.assert_allclose(attention, eager_attention_of_last(model, contexts), atol=2e-5)
    assert (attention >= 0).all() and (attention.sum(axis=1) <= 1 + 1e-5).all() and attention.max() > 0
    assert np.isfinite(scorer.input_gradients(contexts, contexts.all_targets)).all()
    try:
        assert np.isfinite(scorer.presence_gradient(contexts, contexts.all_targets)).all()
    except UserError as error:
        assert name in str(error)
        return
    tokens, ids = torch.from_numpy(contexts.tokens), torch.arange(N).expand(2, -1)
    for column in (0, 7):
        bias = torch.zeros(2, N, N)
        bias[:, :, column], bias[:, column, column] = -70.0, 0.0
        logits = adapter.biased_logits(tokens, ids, bias, 1)[:, 0].double()
        dropped = -logits.log_softmax(-1)[range(2), contexts.targets[:, 0]].numpy()
        np.testing.assert_allclose(dropped, expected[:, column], atol=1e-5, rtol=0)
