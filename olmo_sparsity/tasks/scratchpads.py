"""Parity with scratchpad and copy (docs/method.md 3.3, 3.4): one token of the response for each of the prompt.

Shapes: B samples, n tokens of the longest input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.draws import Draws
from olmo_sparsity.tasks.samples import MARKS, Part, TaskBatch, coupled_batch
from olmo_sparsity.tasks.task import Sizes, Task, register
from olmo_sparsity.util.errors import UserError

_EQUALS, _FIRST = 3, 4


class _OneForOne(Task):
    """Begin, n input tokens, ``=``, n output tokens, end. Input i and output i share id 1 + i, ``=`` has id 1."""

    def largest_id(self, length: int) -> int:
        """That of the last input and output."""
        return length + 1

    def max_tokens(self, length: int) -> int:
        """Input and output, begin, ``=`` and end."""
        return 2 * length + 3


def _one_for_one(inputs: np.ndarray, outputs: np.ndarray, length: np.ndarray) -> TaskBatch:
    """Samples with these inputs and outputs (B, n), of which each row has ``length`` (B,)."""
    ids = np.broadcast_to(np.arange(inputs.shape[1]) + 2, inputs.shape)
    prompt = [Part(inputs, ids, length), Part.same(_EQUALS, 1, len(length))]
    return coupled_batch(prompt, [Part(outputs, ids, length)], length)


@register("scratchpad_parity")
@dataclass(frozen=True)
class ScratchpadParity(_OneForOne):
    """n uniform bits, answered by their n running parities and the end token [paper].

    Bit i and running parity i share id 1 + i. An ``=`` with id 1 ends the prompt [ours], as in copy: without it a
    model that cannot see coupled ids could not tell where the bits end. Length is n, the number of bits.
    """

    train_length: tuple[int, int] = (5, 20)
    """Fewest and most bits of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (5, 200)
    """Fewest and most bits of a test sample, both included, uniform."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The marks, ``=`` and the two bits, which running parities are made of too."""
        return (*MARKS, "=", "0", "1")

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        bits = draws.named("bits").integers(2, int(sizes.length.max(initial=0)))
        parities = bits.cumsum(axis=1) % 2
        return _one_for_one(_FIRST + bits, _FIRST + parities, sizes.length)


@register("copy")
@dataclass(frozen=True)
class Copy(_OneForOne):
    """n uniform symbols, answered by the same and the end token; ids as Cho et al. (arXiv 2405.20671) couple them.

    Input i and output i share id 1 + i, ``=`` has id 1. Length is n, the number of symbols.
    """

    train_length: tuple[int, int] = (2, 20)
    """Fewest and most symbols of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (2, 200)
    """Fewest and most symbols of a test sample, both included, uniform."""
    num_symbols: int = 10
    """How many symbols there are."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The marks, ``=`` and the symbols, which are numbers from 0 on."""
        return (*MARKS, "=", *map(str, range(self.num_symbols)))

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        symbols = _FIRST + draws.named("symbols").integers(self.num_symbols, int(sizes.length.max(initial=0)))
        return _one_for_one(symbols, symbols, sizes.length)

    def _check(self) -> None:
        super()._check()
        if self.num_symbols < 2:
            raise UserError(f"copy: num_symbols {self.num_symbols} leaves nothing to copy; give 2 or more")
