"""Attention of short sequences: in float32 where a CPU trains in bf16, and as it is everywhere else."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from olmo_sparsity.attention import LONGEST_IN_FLOAT32, attend
from tests.support import tiny


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_float32(masked):
    q, k, v = (torch.randn(2, 3, 12, 8).bfloat16().requires_grad_() for _ in range(3))
    # Half of the keys that come before, of every query its own.
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.bfloat16)
    mask = mask.masked_fill(~(torch.rand(2, 1, 12, 12) < 0.5).tril() & ~torch.eye(12, dtype=torch.bool), -1e9)
    options = {} if masked else {"is_causal": True}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attended = attend(F.scaled_dot_product_attention, q, k, v, mask if masked else None, **options)
    found = torch.autograd.grad(attended.sum(), (q, k, v))

    own = [each.detach().double().requires_grad_() for each in (q, k, v)]
    scores = own[0] @ own[1].transpose(-1, -2) / 8**0.5
    bias = mask.double() if masked else torch.full((12, 12), -1e9, dtype=torch.double).triu(1)
    expected = (scores + bias).softmax(dim=-1) @ own[2]
    assert attended.dtype == torch.float32
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(expected.sum(), own), strict=True):
        torch.testing.assert_close(one, other.bfloat16(), rtol=1e-2, atol=1e-6)  # one rounding to bf16


@pytest.mark.parametrize("family", [tiny.model, tiny.neox])
@pytest.mark.parametrize(
    ("tokens", "autocast", "learns", "expected"),
    [
        (16, True, True, torch.float32),
        (LONGEST_IN_FLOAT32 + 1, True, True, torch.bfloat16),
        (16, True, False, torch.bfloat16),
        (16, False, True, torch.float32),
    ],
)
def test_every_decoder_attends_so(monkeypatch, family, tokens, autocast, learns, expected):
    found = []
    original = F.scaled_dot_product_attention

    def record(q, *inputs, **options):
        used = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
        found.append(used)
        return original(q, *inputs, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    model = family(max_sequence_length=2 * LONGEST_IN_FLOAT32)
    ids = torch.arange(tokens)[None] % model.config.vocab_size
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(), torch.set_grad_enabled(learns):
        model(ids, position_ids=torch.arange(tokens)[None])
    assert found == [expected] * model.config.n_layers
