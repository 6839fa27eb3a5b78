"""Our GPT-NeoX against transformers' own, and attention across ids that jump or repeat."""

import copy

import pytest
import torch
from olmo.config import ActivationCheckpointingStrategy

from olmo_sparsity.model.neox import PositionedNeoX
from tests.support import tiny
from tests.support.tiny import tokens


def large_weights() -> PositionedNeoX:
    """A random model whose weights are large enough for positions and tokens to matter."""
    model = tiny.neox(n_heads=2, rope_theta=500).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return model


def transformers_own(positioned: PositionedNeoX):
    """GPT-NeoX as a user of transformers would configure it, with the same weights."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        attn_implementation="eager",
    )
    model = GPTNeoXForCausalLM(config).eval()
    model.load_state_dict(positioned.model.state_dict())
    return model


def jumping_and_repeating(ids):
    """Ids as PoSE and position coupling make them: 0 … 9, then a jump ahead, then 3 … again."""
    length = ids.shape[1]
    row = torch.cat([torch.arange(10), torch.arange(400, 405), torch.arange(3, 3 + length - 15)])
    return row.expand(ids.shape)


def test_logits_are_those_of_transformers_across_ids_that_jump_or_repeat_too():
    """Against plain attention under a causal mask that is spelled out, which nothing can reinterpret."""
    positioned, ids = large_weights(), tokens()
    jumping, contiguous = jumping_and_repeating(ids), torch.arange(20).expand(3, -1)
    causal = torch.full((20, 20), torch.finfo(torch.float32).min).triu(diagonal=1).expand(3, 1, 20, 20)
    spelled_out = transformers_own(positioned)
    for passed_ids, position_ids in ((jumping, jumping), (contiguous, contiguous), (None, contiguous)):
        expected = spelled_out(ids, position_ids=position_ids, attention_mask=causal).logits
        result = positioned(ids, passed_ids).logits
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)
    result, changed = positioned(ids, jumping).logits, ids.clone()
    changed[:, 0] += 1 - 2 * (changed[:, 0] == 49).long()
    assert ((positioned(changed, jumping).logits - result)[:, -1].abs().amax(dim=-1) > 1e-3).all()


def test_a_cache_of_keys_gives_the_same_logits():
    model, ids = large_weights(), tokens()
    position_ids = jumping_and_repeating(ids)
    whole = model(ids, position_ids).logits
    # with the ids of cached tokens, as OLMo wants them, or without
    for passed_ids in (position_ids, position_ids[:, 12:]):
        start = model(ids[:, :12], position_ids[:, :12], use_cache=True)
        rest = model(ids[:, 12:], passed_ids, past_key_values=start.attn_key_values).logits
        torch.testing.assert_close(rest, whole[:, 12:], atol=2e-5, rtol=1e-4)
    start = model(ids[:, :12], use_cache=True)
    rest = model(ids[:, 12:], past_key_values=start.attn_key_values).logits
    torch.testing.assert_close(rest, model(ids).logits[:, 12:], atol=2e-5, rtol=1e-4)


def test_a_masked_token_is_a_dropped_token():
    tiny.assert_dropped_is_masked(large_weights(), jumping_and_repeating(torch.empty(1, 24))[0])


@pytest.mark.parametrize(("strategy", "runs"), [(None, 2), ("one_in_two", 3), ("whole_layer", 4)])
@pytest.mark.parametrize("compiles", [False, True])
def test_layers_are_run_again_for_their_gradients(strategy, runs, compiles):
    """With the same gradients, compiled or not."""
    plain, ids, calls = large_weights().train(), tokens(), []
    model = copy.deepcopy(plain)
    if strategy:
        model.set_activation_checkpointing(ActivationCheckpointingStrategy(strategy))
    torch._dynamo.reset()
    for layer in model.blocks():
        if compiles:
            layer.compile(fullgraph=True, backend="aot_eager")
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
    for network in (plain, model):
        network(ids, jumping_and_repeating(ids)).logits.logsumexp(-1).sum().backward()
    assert len(calls) == runs or compiles  # a graph calls no hook
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
