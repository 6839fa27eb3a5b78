"""Arithmetic with reversed output: addition, also of several numbers, multiplication by a digit (docs/method.md 3.4).

Shapes: B samples, n digits of the longest numbers, D digits of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.assemble import SPECIAL_TOKENS, Span, coupled_batch
from olmo_sparsity.tasks.batch import TaskBatch
from olmo_sparsity.tasks.task import Draws, Sizes, Task, register
from olmo_sparsity.util.errors import UserError

_OPERATOR, _EQUALS, _ZERO = 3, 4, 5


class _Arithmetic(Task):
    """Numbers are written most significant digit first, results least significant first.

    Digits of equal significance share an id, the least significant 2, upwards; operator and ``=`` have 1.
    """

    operator = "+"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The special tokens, the operator, ``=`` and the digits."""
        return (*SPECIAL_TOKENS, self.operator, "=", *map(str, range(10)))

    def largest_id(self, length: int) -> int:
        """That of the result's last digit."""
        return length + 2


@register("addition")
@dataclass(frozen=True)
class Addition(_Arithmetic):
    """``a + b =`` answered by the n + 1 digits of the sum, least significant first, and the end token.

    Both operands are written with n digits, most significant first, each digit uniform, zeros in front included
    [ours]; the sum has n + 1 digits, a zero at its end included. Ids as Cho et al. (arXiv 2405.20671) couple them:
    digits of equal significance share an id, the least significant 2, upwards; ``+`` and ``=`` have 1. Length is n.
    """

    train_length: tuple[int, int] = (1, 10)
    """Fewest and most digits of the operands of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (1, 100)
    """Fewest and most digits of the operands of a test sample, both included, uniform."""

    def max_tokens(self, length: int) -> int:
        """Two operands and their sum; begin, ``+``, ``=`` and end."""
        return 3 * length + 5

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        length = sizes.length
        a, b = (_digits(draws.named(name), length) for name in "ab")
        plus, equals = (Span.same(token, 1, len(length)) for token in (_OPERATOR, _EQUALS))
        prompt = [_written(a, length), plus, _written(b, length), equals]
        return coupled_batch(prompt, [_result(carried(a + b), length + 1)], length)


@register("multi_addition")
@dataclass(frozen=True)
class MultiAddition(_Arithmetic):
    """``a_1 + a_2 + … + a_k =`` answered by the running sums ``s_1 = s_2 = … = s_k`` and the end token.

    Two levels of coupling, after Cho et al. (arXiv 2410.15787): digits of equal significance share an id of the first,
    the least significant 2, upwards, and ``+`` and ``=`` have 1; number j, running sum j and the sign before them have
    j on the second level, and the first ``=`` has 1. So ids identify the tokens that decide a digit of s_j: the digits
    of a_j and of s_(j-1) of its significance, and the previous ones for the carry. Every number has n digits, each
    uniform, zeros in front included, a sum one more. s_1 repeats a_1, digits of operands are most significant first,
    and = stands between the sums [ours]. Length is n.
    """

    train_length: tuple[int, int] = (1, 10)
    """Fewest and most digits of the numbers of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (1, 30)
    """Fewest and most digits of the numbers of a test sample, both included, uniform."""
    k_train: int = 5
    """K_train: in training 2 to K_train numbers are added, uniform; 10 at most."""
    k_test: tuple[int, ...] = (2, 5, 10)
    """How many numbers are added in a test sample, uniform on these; 10 at most."""

    def ks(self, split: str) -> tuple[int, ...]:
        """2 … K_train, or `k_test`."""
        return tuple(range(2, self.k_train + 1)) if split == "train" else self.k_test

    def largest_second_id(self) -> int:
        """That of the last number."""
        return max(self.k_train, *self.k_test)

    def max_tokens(self, length: int) -> int:
        """The numbers and their sums, with a sign before each but the first; begin and end."""
        return self.largest_second_id() * (2 * length + 3) + 1

    def fewest_tokens(self, length: int) -> int:
        """Of two numbers and their sums."""
        return 2 * (2 * length + 3) + 1

    def _check(self) -> None:
        super()._check()
        for split, name in (("train", "k_train"), ("test", "k_test")):
            ks = self.ks(split)
            if not ks or not 2 <= min(ks) <= max(ks) <= 10:
                raise UserError(f"{self.name}: {name} {getattr(self, name)} is not from 2 to 10; change it")

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        length = sizes.length
        rows = len(sizes.length)
        plus, equals = (Span.same(token, 1, rows) for token in (_OPERATOR, _EQUALS))
        prompt: list[Span] = []
        response: list[Span] = []
        total = np.zeros((rows, int(length.max(initial=0)) + 1), dtype=np.int64)
        for j in range(1, int(sizes.k.max(initial=0)) + 1):
            has_operand = sizes.k >= j
            digits = _digits(draws.named(f"a{j}"), length)
            total = carried(total + digits)
            if j > 1:
                prompt.append(plus.where(has_operand, j))
                response.append(equals.where(has_operand, j))
            prompt.append(_written(digits, length).where(has_operand, j))
            response.append(_result(total, length + 1).where(has_operand, j))
        prompt.append(equals.where(np.ones(rows, dtype=bool), 1))
        return coupled_batch(prompt, response, length, id_levels=2)


@register("digit_multiplication")
@dataclass(frozen=True)
class DigitMultiplication(_Arithmetic):
    """``a * d =`` answered by the n + 1 digits of the product, least significant first, and the end token.

    Ids as Cho et al. (arXiv 2405.20671) couple them: digits of a and of the product of equal significance share an id,
    the least significant 2, upwards; d has 2, ``*`` and ``=`` have 1. a has n digits, each uniform, zeros in front
    included [ours], d one. Length is n.
    """

    operator = "*"
    train_length: tuple[int, int] = (1, 10)
    """Fewest and most digits of the number of a training sample, both included, uniform."""
    test_length: tuple[int, int] = (1, 100)
    """Fewest and most digits of the number of a test sample, both included, uniform."""

    def max_tokens(self, length: int) -> int:
        """The number and the product, the digit; begin, ``*``, ``=`` and end."""
        return 2 * length + 6

    def _make(self, sizes: Sizes, draws: Draws) -> TaskBatch:
        length = sizes.length
        rows = len(sizes.length)
        digits = _digits(draws.named("a"), length)
        factor = draws.named("d").integers(10, 1)
        factor_span = Span(_ZERO + factor, np.full_like(factor, 2), np.ones(rows, dtype=np.int64))
        times, equals = (Span.same(token, 1, rows) for token in (_OPERATOR, _EQUALS))
        prompt = [_written(digits, length), times, factor_span, equals]
        return coupled_batch(prompt, [_result(carried(digits * factor), length + 1)], length)


def carried(values: np.ndarray) -> np.ndarray:
    """The decimal digits of the numbers whose digit sums are ``values``, least significant first, (B, D).

    Digit sums are 0 to 90; what is carried out of the last digit is dropped.
    """
    digits = np.empty_like(values)
    carry = np.zeros(len(values), dtype=np.int64)
    for column in range(values.shape[1]):
        carry, digits[:, column] = np.divmod(values[:, column] + carry, 10)
    return digits


def _digits(draws: Draws, length: np.ndarray) -> np.ndarray:
    """Uniform digits of numbers of ``length`` (B,) digits, least significant first, then zeros, (B, n + 1)."""
    width = int(length.max(initial=0)) + 1
    return draws.integers(10, width) * (np.arange(width) < length[:, None])


def _written(digits: np.ndarray, length: np.ndarray) -> Span:
    """Such a number as it stands in a prompt, most significant digit first."""
    significance = np.maximum(length[:, None] - 1 - np.arange(digits.shape[1]), 0)
    return Span(_ZERO + np.take_along_axis(digits, significance, axis=1), significance + 2, length)


def _result(digits: np.ndarray, length: np.ndarray) -> Span:
    """Digits as they stand in a response, least significant first."""
    return Span(_ZERO + digits, np.broadcast_to(np.arange(digits.shape[1]) + 2, digits.shape), length)
