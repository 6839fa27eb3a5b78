"""How much of a measurement is done, counted in tokens that models read, and how long the rest takes.

Targets that are not over tau take next to no time, and how many are over it is known only once the losses of their
batch are. So a batch of targets counts as done by the share of its tokens that were read. Batches are alike: what one
still takes is estimated by what the steps before took.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from olmo_sparsity.util.progress import duration

log = logging.getLogger(__name__)

SECONDS_BEFORE_ESTIMATE = 10.0
"""The time that is said to be needed rests on so many seconds: the first passes may be slow."""


class Work:
    """The work of one run over batches of targets.

    Args:
        targets: of all batches.
        advance: is given how many targets more are done; a part of one where it is at it.
    """

    def __init__(self, targets: int, advance: Callable[[float], Any] = lambda targets: None):
        self.targets = targets
        self.advance = advance
        self.began = time.monotonic()
        self.is_estimated = False
        self._done = self._before = 0.0
        """Targets, and those of finished batches."""
        self._read_in_steps = self._expected_in_steps = 0.0
        """Tokens of all finished steps."""
        self.begin_batch(0, 0, 0)

    def begin_batch(self, targets: int, tokens: float, later_tokens: float) -> None:
        """Begin with the losses of the next batch.

        Args:
            targets: of the batch.
            tokens: that their losses read.
            later_tokens: that the steps after it read, as far as that is known before.
        """
        self._of_batch = targets
        self._loss_tokens = tokens
        self._read = 0.0
        self._steps: list[float] = [later_tokens]
        self._finished_steps = 0
        self._in_steps = False

    def begin_steps(self, tokens: Sequence[float]) -> None:
        """The losses are measured; what follows takes so many steps, which read about so many tokens each."""
        self._steps, self._in_steps, self._read = list(tokens), True, 0.0
        self._show()

    def read(self, tokens: int) -> None:
        """A model has read so many tokens."""
        self._read += tokens
        self._show()

    def finish_step(self) -> None:
        """One of the steps is done."""
        self._read_in_steps += self._read
        self._expected_in_steps += self._steps[self._finished_steps]
        self._finished_steps, self._read = self._finished_steps + 1, 0.0
        self._show()

    def finish_batch(self) -> None:
        """All of the batch is done."""
        self._before += self._of_batch
        self.begin_batch(0, 0, 0)
        self._show()

    def _show(self) -> None:
        done = self._before + self._of_batch * self._fraction()
        if done > self._done:  # it never goes back, though estimates change
            self.advance(done - self._done)
            self._done = done
        seconds = time.monotonic() - self.began
        if seconds >= SECONDS_BEFORE_ESTIMATE and done and not self.is_estimated:
            self.is_estimated = True
            log.info("about %s for %s targets", duration(seconds * self.targets / done), f"{self.targets:,}")

    def _fraction(self) -> float:
        """Of the batch."""
        # what steps read for every token that was expected
        scale = 1.0
        if self._read_in_steps:
            scale = self._read_in_steps / self._expected_in_steps
        losses = min(self._read, self._loss_tokens)
        step = 0.0
        if self._in_steps:
            losses = self._loss_tokens
            if self._finished_steps < len(self._steps):
                step = min(self._read, scale * self._steps[self._finished_steps])
        done = losses + scale * sum(self._steps[: self._finished_steps]) + step
        whole = self._loss_tokens + scale * sum(self._steps)
        return done / whole if whole else 0.0
