"""Tasks whose label is decided by k planted tokens, and sparse parity, one of them (docs/method.md 3.2).

Shapes: B samples, l places (pairs of tokens) of the longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from olmo_sparsity.tasks.draws import Draws
from olmo_sparsity.tasks.samples import TaskBatch, between, labelled_batch
from olmo_sparsity.tasks.task import Sizes, Task, register
from olmo_sparsity.util.errors import UserError


@dataclass(frozen=True)
class SparseTask(Task):
    """A prompt, then its label as a single token, predicted at the last token of the prompt.

    k is drawn first, then the length, uniformly from the range as far as it holds k: lengths too short for a k
    occur with smaller ones only [ours].
    """

    k_train: int = 4
    """K_train: a training sample has k planted tokens, k uniform on k_train_min … K_train."""
    k_train_min: int = 1
    """The smallest k of training."""
    k_test: tuple[int, ...] = (4, 6, 8, 10, 12, 14, 16)
    """A test sample has k planted tokens, k uniform on these."""

    end_id = None

    def max_tokens(self, length: int) -> int:
        """The prompt and the label."""
        return length + 1

    def ks(self, split: str) -> tuple[int, ...]:
        """k_train_min … K_train, or `k_test`."""
        return tuple(range(self.k_train_min, self.k_train + 1)) if split == "train" else self.k_test

    def holds(self, length: int, k: int) -> bool:
        """Whether it has k places."""
        return k * self.tokens_per_place <= length

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        return np.maximum(super()._shortest(split, k), k * self.tokens_per_place)

    def _check(self) -> None:
        super()._check()
        if not 1 <= self.k_train_min <= self.k_train:
            raise UserError(
                f"{self.name}: k_train_min {self.k_train_min} is not in 1 … k_train {self.k_train}; change one of them"
            )
        for split, name in (("train", "k_train"), ("test", "k_test")):
            ks, given, unit = self.ks(split), self._length_range(split), self.tokens_per_place
            if not ks or min(ks) < 1:
                raise UserError(f"{self.name}: {name} {getattr(self, name)} must be 1 or more; raise it")
            if any(length % unit for length in given):
                raise UserError(
                    f"{self.name}: {split}_length {list(given)} must be multiples of {unit}, the tokens of one place"
                )
            if (most := max(ks)) * unit > given[1]:
                raise UserError(
                    f"{self.name}: k = {most} of {name} needs {most * unit} tokens, more than "
                    f"{split}_length {list(given)} allows; lower it or lengthen the samples"
                )


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
    """Shortest and longest training prompt 2l in tokens, both included and even, uniform."""
    test_length: tuple[int, int] = (20, 500)
    """Shortest and longest test prompt 2l in tokens, both included and even, uniform."""
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
        prompt = np.empty((len(places), 2 * width), dtype=np.int64)
        prompt[:, ::2], prompt[:, 1::2] = np.where(selected, _ON, _OFF), _ZERO + bits
        planted = np.zeros(prompt.shape, dtype=bool)
        planted[:, 1::2] = selected
        label = _ZERO + (bits * selected).sum(axis=1) % 2
        return labelled_batch(prompt, sizes.length, label, planted)
