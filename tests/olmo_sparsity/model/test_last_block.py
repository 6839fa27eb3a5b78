"""The last positions alone against all positions, for the variants of OLMo's block."""

import pytest
import torch

from tests.support import tiny

VARIANTS = {
    "rope": {},
    "alibi": {"rope": False, "alibi": True},
    "learned": {"rope": False},
    "grouped": {"n_kv_heads": 2},
    "biased": {"include_bias": True, "clip_qkv": 0.05},
    "olmo 2": {"norm_after": True, "attention_layer_norm": True, "layer_norm_type": "rms"},
    "grouped block": {"block_group_size": 2},
    "llama": {"block_type": "llama"},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("asked", [1, 5, 12])
@torch.no_grad()
def test_logits_of_the_last_positions_are_those_of_all(name, asked):
    model = tiny.model(**VARIANTS[name])
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (3, 12), generator=generator)
    ids = torch.arange(20)[torch.randperm(20, generator=generator)[:12].sort().values].expand(3, -1)
    whole = model(tokens, position_ids=ids).logits
    last = model(tokens, position_ids=ids, logits_to_keep=asked).logits
    assert last.shape[1] == asked
    torch.testing.assert_close(last, whole[:, -asked:], atol=2e-5, rtol=0)
    assert model(tokens, position_ids=ids).logits.shape == whole.shape  # nothing stays cut
    past = model(tokens[:, :5], position_ids=ids[:, :5], use_cache=True, logits_to_keep=1).attn_key_values
    behind = model(tokens[:, 5:], position_ids=ids, past_key_values=past, logits_to_keep=min(asked, 7)).logits
    torch.testing.assert_close(behind, whole[:, -min(asked, 7) :], atol=2e-5, rtol=0)
