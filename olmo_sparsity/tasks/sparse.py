"""Tasks whose label is decided by k planted tokens: what k-sparse planted correlations and sparse parity share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from olmo_sparsity.tasks.draws import Draws
from olmo_sparsity.tasks.task import Sizes, Task
from olmo_sparsity.util.errors import UserError


@dataclass(frozen=True)
class SparseTask(Task):
    """A prompt, then its label as a single token, predicted at the last token of the prompt.

    k is drawn first, then the length, uniformly from the range as far as it holds k: lengths too short for a k
    occur with smaller ones only [ours].
    """

    k_train: int = 4
    """
    K_train: a training sample has k planted tokens, k uniform on 1 … K_train.
    """

    k_test: tuple[int, ...] = (4, 6, 8, 10, 12, 14, 16)
    """
    A test sample has k planted tokens, k uniform on these.
    """

    tokens_per_place: ClassVar[int] = 1
    """How many tokens of the prompt each place takes that may be chosen; lengths are whole multiples of it."""

    @property
    def end_id(self) -> None:
        """None: the label is the whole response."""
        return None

    def largest_id(self, length: int) -> None:
        """None: nothing is coupled."""
        return None

    def max_tokens(self, length: int) -> int:
        """The prompt and the label."""
        return length + 1

    def at_k(self, k: int) -> Self:
        """The same task with k planted tokens in every test sample; the training split stays as it is.

        To restrict both, restrict k first: `at_length` refuses a length that does not hold every k of the task.
        """
        return replace(self, k_test=(k,))

    def _ks(self, split: str) -> np.ndarray:
        return np.arange(1, self.k_train + 1) if split == "train" else np.array(self.k_test)

    def _shortest(self, split: str, k: np.ndarray) -> np.ndarray:
        """The shortest sample of a split that holds k (B,)."""
        return np.maximum(self._length_range(split)[0], k * self.tokens_per_place)

    def _sizes(self, split: str, draws: Draws) -> Sizes:
        ks, unit = self._ks(split), self.tokens_per_place
        k = ks[draws.named("k").integer(len(ks))]
        shortest = self._shortest(split, k)
        steps = (self._length_range(split)[1] - shortest) // unit + 1
        return Sizes(shortest + unit * draws.named("length").integer(steps), k)

    def _smallest(self, split: str) -> Sizes:
        ks = np.unique(self._ks(split))
        return Sizes(self._shortest(split, ks), ks)

    def _check(self) -> None:
        super()._check()
        for split, name in (("train", "k_train"), ("test", "k_test")):
            ks, given, unit = self._ks(split), self._length_range(split), self.tokens_per_place
            if not len(ks) or ks.min() < 1:
                raise UserError(
                    f"{self.name}: {name} {getattr(self, name)} has no k above 0; give at least 1"
                )
            if any(length % unit for length in given):
                raise UserError(
                    f"{self.name}: {split}_length {list(given)} must be multiples of {unit}, the tokens of one place"
                )
            if ks.max() * unit > given[1]:
                raise UserError(
                    f"{self.name}: k = {ks.max()} of {name} needs {ks.max() * unit} tokens, more than "
                    f"{split}_length {list(given)} allows; lower it or lengthen the samples"
                )
