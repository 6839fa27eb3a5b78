"""Our model against unmodified OLMo, and dropping tokens against masking them."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from olmo.config import ActivationCheckpointingStrategy
from olmo.config import ModelConfig as OLMoModelConfig
from olmo.model import OLMo

from tests.support import tiny
from tests.support.tiny import tokens

SHAPES = {
    "plain": {},
    "groups": {"block_group_size": 2},
    "llama": {"block_type": "llama"},
    "grouped heads": {"n_kv_heads": 2},
    "half precision rotation": {"rope_full_precision": False},
}


def unmodified(positioned):
    """OLMo itself with the same weights."""
    values = {field.name: getattr(positioned.config, field.name) for field in fields(OLMoModelConfig)}
    olmo = OLMo(OLMoModelConfig(**values)).eval()
    olmo.load_state_dict(positioned.state_dict())
    return olmo


def contiguous(ids):
    return torch.arange(ids.shape[1]).expand(ids.shape)


@pytest.mark.parametrize("encoding", ["rope", "alibi", "learned"])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_contiguous_ids_give_the_logits_of_olmo(encoding, shape):
    positioned = tiny.model(**tiny.ENCODINGS[encoding], **SHAPES[shape])
    ids = tokens()
    expected = unmodified(positioned)(ids).logits
    torch.testing.assert_close(
        positioned(ids, position_ids=contiguous(ids)).logits, expected, atol=2e-5, rtol=1e-5
    )
    torch.testing.assert_close(positioned(ids).logits, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("strategy", list(ActivationCheckpointingStrategy))
@pytest.mark.parametrize("group_size", [1, 2])
def test_activation_checkpointing_gives_the_gradients_of_olmo(strategy, group_size):
    positioned = tiny.model(block_group_size=group_size)
    olmo = unmodified(positioned)
    positioned.set_activation_checkpointing(strategy)
    ids = tokens()
    for model, options in ((positioned.train(), {"position_ids": contiguous(ids)}), (olmo.train(), {})):
        F.cross_entropy(model(ids, **options).logits.flatten(0, 1), ids.flatten()).backward()
    expected = dict(olmo.named_parameters())
    for name, parameter in positioned.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["whole_layer", "fine_grained"])
def test_recomputed_layers_see_the_ids_of_their_own_forward_pass(strategy):
    """Two forward passes with different ids, then one backward pass through both."""

    def gradients(checkpointing):
        model = tiny.model().train()
        if checkpointing:
            model.set_activation_checkpointing(ActivationCheckpointingStrategy(strategy))
        ids = tokens()
        first = model(ids, position_ids=contiguous(ids) * 3).logits.logsumexp(-1).sum()
        second = model(ids, position_ids=contiguous(ids) + 100).logits.logsumexp(-1).sum()
        (first + 2 * second).backward()
        return [parameter.grad for parameter in model.parameters()]

    for gradient, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("places", "seen_by"),
    [
        (range(0, 64, 2), [10, 11, 12]),  # three tokens are within six ids
        # coupled: its id comes before those around it
        ([*range(20, 30), 36, *range(30, 51)], [10, *range(12, 23)]),
    ],
)
def test_a_window_hides_tokens_by_the_distance_of_their_ids(places, seen_by):
    model, ids = tiny.model(n_layers=1, rope_window=6), tokens(batch=1, length=32)
    places = torch.tensor([list(places)])
    before = model(ids, position_ids=places).logits
    ids[0, 10] += 1
    changed = (model(ids, position_ids=places).logits - before).abs().amax(-1)[0] > 1e-4
    assert changed.nonzero().flatten().tolist() == seen_by


# --- the last positions alone ---

VARIANTS = [
    *({}, {"rope": False, "alibi": True}, {"rope": False}, {"block_group_size": 2}, {"block_type": "llama"}),
    {"norm_after": True, "attention_layer_norm": True, "n_kv_heads": 2},
    {"include_bias": True, "clip_qkv": 0.05},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("count", [1, 5, 12])
@torch.no_grad()
def test_logits_of_the_last_positions_are_those_of_all(changes, count):
    model = tiny.model(**changes)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (3, 12), generator=generator)
    ids = torch.arange(20)[torch.randperm(20, generator=generator)[:12].sort().values].expand(3, -1)
    whole = model(tokens, position_ids=ids).logits
    last = model(tokens, position_ids=ids, logits_to_keep=count).logits
    assert last.shape[1] == count
    torch.testing.assert_close(last, whole[:, -count:], atol=2e-5, rtol=0)
    assert model(tokens, position_ids=ids).logits.shape == whole.shape  # nothing stays cut
    past = model(tokens[:, :5], position_ids=ids[:, :5], use_cache=True, logits_to_keep=1).attn_key_values
    behind = model(tokens[:, 5:], position_ids=ids, past_key_values=past, logits_to_keep=min(count, 7)).logits
    torch.testing.assert_close(behind, whole[:, -min(count, 7) :], atol=2e-5, rtol=0)
