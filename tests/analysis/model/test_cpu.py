"""Multiplication by oneDNN: what it gives, and that it is given rows that follow one another."""

import pytest
import torch

from analysis.model import cpu


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_onednn_is_given_rows_that_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one head lie apart in a tensor of all heads, and oneDNN took 500 times as long for them."""
    multiply = torch.ops.mkldnn._linear_pointwise
    are_contiguous = []

    def noted(inputs: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        are_contiguous.append((inputs.is_contiguous(), weight.is_contiguous()))
        return multiply(inputs, weight, *rest)

    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    draw = torch.Generator().manual_seed(0)
    queries = torch.rand(96, 256, generator=draw)[:, 64:128]
    keys = torch.rand(32, 256, generator=draw)[:, 64:128]
    with torch.inference_mode():
        torch.testing.assert_close(cpu.product(queries, keys), queries @ keys.T)
    assert are_contiguous == [(True, True)]
