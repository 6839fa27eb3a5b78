"""Parity with scratchpad, copy, variable assignment (docs/method.md 3.3, 3.4).

Shapes: B samples, n tokens of the longest input, A assignments of the longest prompt, c steps of the longest chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from olmo_sparsity.tasks.assemble import SPECIAL_TOKENS, Span, coupled_batch, letter_names
from olmo_sparsity.tasks.batch import TaskBatch, between
from olmo_sparsity.tasks.task import SPLITS, Draws, Sizes, Task, register
from olmo_sparsity.util.errors import UserError

_EQUALS, _FIRST = 3, 4
_QUERY, _FIRST_VALUE = 4, 5
Length = TypeVar("Length", int, np.ndarray)


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
    prompt = [Span(inputs, ids, length), Span.same(_EQUALS, 1, len(length))]
    return coupled_batch(prompt, [Span(outputs, ids, length)], length)


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
        """The special tokens, ``=`` and the two bits, which running parities are made of too."""
        return (*SPECIAL_TOKENS, "=", "0", "1")

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
        """The special tokens, ``=`` and the symbols, which are numbers from 0 on."""
        return (*SPECIAL_TOKENS, "=", *map(str, range(self.num_symbols)))

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        symbols = _FIRST + draws.named("symbols").integers(self.num_symbols, int(sizes.length.max(initial=0)))
        return _one_for_one(symbols, symbols, sizes.length)


@register("variable_assignment")
@dataclass(frozen=True)
class VariableAssignment(Task):
    """Assignments in random order and a query; the answer follows the query's chain to its value [paper; details ours].

    A chain of length c gives its first variable a value and each of the others the one before it: c assignments,
    ``a = 7``, ``b = a``, …. A prompt has several chains of the same length and, in proportion, distractors, each a
    further variable that gets a random variable of the chains; then ``?`` and the last variable of one chain. The
    response is that chain from the query on, c assignments, the value once more, and the end token.

    The tokens of the assignments have ids 2, 3, … in the order of the prompt, ``?`` and the query have 1. Every
    assignment of the response has the three ids of the one that it copies, and the value has that of the value it
    repeats. Length is c. Names are drawn from all variables, so that a longer chain has no name unseen in training.
    """

    train_length: tuple[int, int] = (1, 4)
    """Shortest and longest chain of a training sample in assignments, both included, uniform."""
    test_length: tuple[int, int] = (1, 12)
    """Shortest and longest chain of a test sample in assignments, both included, uniform."""
    chains: int = 2
    """How many chains a prompt has, the queried one included."""
    distractors: int = 1
    """How many assignments belong to no chain and hang on one, for each step of the length."""
    num_variables: int = 40
    """How many names of variables there are; the longest prompt takes (chains + distractors) x length of them."""
    num_values: int = 10
    """How many values there are; uniform."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The special tokens, ``=``, ``?``, the values (numbers), the variables (a … z, a1 … z1, …)."""
        return (
            *SPECIAL_TOKENS,
            "=",
            "?",
            *map(str, range(self.num_values)),
            *letter_names(self.num_variables),
        )

    def largest_id(self, length: int) -> int:
        """That of the last token of the last assignment."""
        return 1 + 3 * self._assignments(length)

    def max_tokens(self, length: int) -> int:
        """The assignments, the query, the chain and its value; begin and end."""
        return 3 * self._assignments(length) + 3 * length + 5

    def _assignments(self, length: Length) -> Length:
        return (self.chains + self.distractors) * length

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        length = sizes.length
        rows = len(sizes.length)
        count = self._assignments(length)
        triples = self._triples(length, count, draws)
        order = draws.named("order").order(between(0, count, triples.shape[1]))
        rank = np.argsort(order, axis=1)
        ids = 2 + 3 * rank[:, :, None] + np.arange(3)
        prompt_ids = np.broadcast_to(2 + np.arange(3 * order.shape[1]), (rows, 3 * order.shape[1]))
        # The queried chain is the first: its slots are 0 … c-1, from the value on.
        steps = np.maximum(length[:, None] - 1 - np.arange(int(length.max(initial=0))), 0)
        query = np.take_along_axis(triples[:, :, 0], length[:, None] - 1, axis=1)
        value = triples[:, :1, 2]
        single = np.ones(rows, dtype=np.int64)
        assignments = Span(_flat(triples, order), prompt_ids, 3 * count)
        prompt = [assignments, Span.same(_QUERY, 1, rows), Span(query, np.ones_like(query), single)]
        chain = Span(_flat(triples, steps), _flat(ids, steps), 3 * length)
        response = [chain, Span(value, ids[:, :1, 2], single)]
        return coupled_batch(prompt, response, length)

    def _triples(self, length: np.ndarray, count: np.ndarray, draws: Draws) -> np.ndarray:
        """The assignments as tokens (name, =, name or value), chain by chain, then distractors, (B, A, 3)."""
        rows = len(length)
        width = int(count.max(initial=0))
        slots = np.broadcast_to(np.arange(width), (rows, width))
        first_name = _FIRST_VALUE + self.num_values
        names = first_name + draws.named("names").order(np.ones((rows, self.num_variables), dtype=bool))
        in_chains = (self.chains * length)[:, None]
        hangs_on = draws.named("distractors").integers(in_chains[:, 0], width)
        source = np.where(slots < in_chains, np.maximum(slots - 1, 0), hangs_on)
        source_names = np.take_along_axis(names, source, axis=1)
        values = _FIRST_VALUE + draws.named("values").integers(self.num_values, width)
        starts_chain = (slots < in_chains) & (slots % length[:, None] == 0)
        right = np.where(starts_chain, values, source_names)
        return np.stack([names[:, :width], np.full_like(right, _EQUALS), right], axis=2)

    def _check(self) -> None:
        super()._check()
        if self.chains < 1 or self.distractors < 0 or self.num_values < 2:
            raise UserError(
                "variable_assignment: chains must be 1 or more, distractors 0 or more and num_values 2 or more"
            )
        for split in SPLITS:
            longest = self._length_range(split)[1]
            if (needed := self._assignments(longest)) > self.num_variables:
                raise UserError(
                    f"variable_assignment: {self.chains} chains of length {longest} and their distractors "
                    f"need {needed} variables, more than num_variables {self.num_variables}; raise it"
                )


def _flat(triples: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The triples (B, A, 3) at these slots (B, S), one after the other, (B, 3 S)."""
    return np.take_along_axis(triples, slots[:, :, None], axis=1).reshape(len(slots), 3 * slots.shape[1])
