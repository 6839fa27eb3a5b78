"""Sparse parity (METHOD 3.2). Shapes: B samples, l places (pairs of tokens) of the longest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from olmo_sparsity.tasks.draws import Draws
from olmo_sparsity.tasks.samples import TaskBatch, between, labelled_batch
from olmo_sparsity.tasks.sparse import SparseTask
from olmo_sparsity.tasks.task import Sizes, register

_OFF, _ON, _ZERO = 1, 2, 3


@register("sparse_parity")
@dataclass(frozen=True)
class SparseParity(SparseTask):
    """The XOR of the k bits whose selectors are on [paper; the pairs are ours].

    A prompt of length 2l is l pairs (selector, bit). Exactly k selectors are on, a uniform subset; all bits are
    uniform. The label is a bit token in column 2l, after the prompt: it is predicted at the last token of the prompt,
    and a sample has 2l + 1 tokens. The planted columns are those of the k selected bits. Length is that of the prompt,
    2l.
    """

    train_length: tuple[int, int] = (20, 50)
    """
    Shortest and longest training prompt 2l in tokens, both included and even, uniform.
    """

    test_length: tuple[int, int] = (20, 500)
    """
    Shortest and longest test prompt 2l in tokens, both included and even, uniform.
    """

    tokens_per_place: ClassVar[int] = 2

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Padding, the two selectors, the two bits; the label is one of the bits."""
        return ("<pad>", "off", "on", "0", "1")

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        places = sizes.length // 2
        width = int(places.max(initial=0))
        selected = draws.named("selectors").subset(between(0, places, width), sizes.k)
        bits = draws.named("bits").integers(2, width)
        pairs = np.stack([np.where(selected, _ON, _OFF), _ZERO + bits], axis=2)
        planted = np.stack([np.zeros_like(selected), selected], axis=2)
        label = _ZERO + (bits * selected).sum(axis=1) % 2
        rows = len(places)
        return labelled_batch(
            pairs.reshape(rows, 2 * width), sizes.length, label, planted.reshape(rows, 2 * width)
        )
