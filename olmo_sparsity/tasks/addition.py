"""Integer addition with reversed output (docs/method.md 3.4). Shapes: B samples, n digits of the longest operands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.draws import Draws
from olmo_sparsity.tasks.samples import MARKS, Part, TaskBatch, coupled_batch
from olmo_sparsity.tasks.task import Sizes, Task, register

_PLUS, _EQUALS, _ZERO = 3, 4, 5


@register("addition")
@dataclass(frozen=True)
class Addition(Task):
    """``a + b =`` answered by the n + 1 digits of the sum, least significant first, and the end token.

    Both operands are written with n digits, most significant first, each digit uniform, zeros in front included
    [ours]; the sum has n + 1 digits, a zero at its end included. Ids as Cho et al. (arXiv 2405.20671) couple them:
    digits of equal significance share an id, the least significant 2, upwards; ``+`` and ``=`` have 1. Length is n.
    """

    train_length: tuple[int, int] = (1, 10)
    """Fewest and most digits of the operands of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (1, 100)
    """Fewest and most digits of the operands of a test sample, both included, uniform."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The marks, ``+``, ``=`` and the digits."""
        return (*MARKS, "+", "=", *map(str, range(10)))

    def largest_id(self, length: int) -> int:
        """That of the sum's last digit."""
        return length + 2

    def max_tokens(self, length: int) -> int:
        """Two operands and their sum; begin, ``+``, ``=`` and end."""
        return 3 * length + 5

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        length, rows = sizes.length, len(sizes.length)
        width = int(length.max(initial=0))
        significance = np.arange(width + 1)
        present = significance < length[:, None]
        a = draws.named("a").integers(10, width + 1) * present
        b = draws.named("b").integers(10, width + 1) * present
        # Written order is most significant first; digits were drawn least significant first.
        written = np.maximum(length[:, None] - 1 - significance, 0)
        operands = [Part(_ZERO + np.take_along_axis(d, written, axis=1), written + 2, length) for d in (a, b)]
        prompt = [operands[0], Part.same(_PLUS, 1, rows), operands[1], Part.same(_EQUALS, 1, rows)]
        ids = np.broadcast_to(significance + 2, a.shape)
        return coupled_batch(prompt, [Part(_ZERO + add_digits(a, b), ids, length + 1)], length, None)


def add_digits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The decimal digits of a + b, given theirs, least significant first, (B, D); a last carry is dropped.

    A sum of 9 passes on the carry that reaches it, any other sum decides its own: the carry out of a digit is that of
    the last digit up to it whose sum is not 9.
    """
    sums = a + b
    decides = np.where(sums != 9, np.arange(sums.shape[1]), -1)
    decider = np.maximum.accumulate(decides, axis=1)
    carries_out = (np.take_along_axis(sums, np.maximum(decider, 0), axis=1) > 9) & (decider >= 0)
    carries_in = np.concatenate([np.zeros((len(sums), 1), dtype=bool), carries_out[:, :-1]], axis=1)
    return (sums + carries_in) % 10
