"""Multiplication by oneDNN: what it gives, and that keys of one head, whose rows lie apart, take no longer."""

import time
from collections.abc import Callable

import pytest
import torch

from analysis.model import cpu


def seconds(call: Callable[[], object]) -> float:
    """The least processor time of some calls."""
    times = []
    for _ in range(4):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return min(times)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_rows_that_lie_apart_are_multiplied_as_fast(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As queries and keys of one head do in a tensor of all heads."""
    monkeypatch.setattr(cpu, "mkl_is_slow", lambda: True)
    draw = torch.Generator().manual_seed(0)
    queries = torch.rand(1008, 256, generator=draw)[:, 64:128]
    keys = torch.rand(224, 256, generator=draw)[:, 64:128]
    with torch.inference_mode():
        torch.testing.assert_close(cpu.product(queries, keys), queries @ keys.T)
        together = seconds(lambda: cpu.product(queries.contiguous(), keys.contiguous()))
        apart = seconds(lambda: cpu.product(queries, keys))
    assert apart < 20 * together  # it was 500 times
