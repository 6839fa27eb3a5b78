"""The memory of the loss against the vocabulary: in chunks, and with all logits at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from analysis.model.memory import MemoryGrowth
from benchmarks.timing import Json, in_own_process
from olmo_sparsity.model.linear_loss import Head, linear_cross_entropy

ROWS, WIDTH = 4096, 256
VOCABULARIES = (8192, 32768, 131072)
CHUNKS, ALL_LOGITS = "in chunks", "all logits"


def measure_loss_memory(device: str) -> dict[str, Json]:
    """Bytes that loss and gradients take beyond weights and hidden states, by size of the vocabulary."""
    found = {}
    for vocabulary in VOCABULARIES:
        row: Json = {"weight_bytes": vocabulary * WIDTH * 4}
        for way in (CHUNKS, ALL_LOGITS):
            row[f"{way}_bytes"] = in_own_process(_peak_bytes, way, vocabulary, device)
        found[f"{vocabulary:,}"] = row
    return found


def _peak_bytes(way: str, vocabulary: int, device: str) -> int | None:
    _loss(way, 64, 128, device)  # what is set up once in a process
    memory = MemoryGrowth(torch.device(device))
    _loss(way, ROWS, vocabulary, device)
    growth = memory.growth_bytes()
    inputs = 4 * WIDTH * (ROWS + vocabulary)
    return None if growth is None else growth - 2 * inputs  # and their gradients


def _loss(way: str, rows: int, vocabulary: int, device: str) -> None:
    hidden, weight = (torch.randn(n, WIDTH, device=device, requires_grad=True) for n in (rows, vocabulary))
    labels = torch.zeros(rows, dtype=torch.long, device=device)
    if way == CHUNKS:
        loss, _ = linear_cross_entropy(hidden, Head(weight), labels)
    else:
        loss = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    loss.backward()
