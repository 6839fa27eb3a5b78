"""How much of a measurement is done, counted in tokens that models read, and how long the rest takes.

Targets that are not over tau take next to no time, and how many are over it is known only once the losses of their
batch are. So a batch of targets counts as done by the share of its tokens that were read. Batches are alike: what one
still takes is estimated by what the steps before took. The bar counts targets that are kept, whatever comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from analysis.contexts import OTHER_TARGET
from analysis.faithfulness import SUBSET_KEEP_RATE, SUBSETS, measured_lengths
from analysis.selectors.names import parse_names
from analysis.settings import Settings
from olmo_sparsity.util.progress import duration

log = logging.getLogger(__name__)

SECONDS_BEFORE_ESTIMATE = 10.0
"""The time that is said to be needed rests on so many seconds: the first passes may be slow."""
LIKELY_OVER = 0.25
"""Share of the targets that is taken to be over tau until their losses are known, for the time left [ours]."""


class Work:
    """The work of one run over batches of targets.

    Args:
        targets: of all batches.
        show: is given how many targets more are kept, and the time left in words.
    """

    def __init__(self, targets: int, show: Callable[[int, str], Any] = lambda kept, left: None):
        self.targets = targets
        self.show = show
        self.began = time.monotonic()
        self.is_estimated = False
        self.done = 0.0
        """Targets, a part of the batch that it is at included; it never goes back, though estimates change."""
        self._before = 0.0
        """Targets of finished batches."""
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

    def keep(self, targets: int) -> None:
        """So many more targets are kept, and will not be measured again."""
        self._show(targets)

    def _show(self, kept: int = 0) -> None:
        self.done = max(self.done, self._before + self._of_batch * self._fraction())
        seconds = time.monotonic() - self.began
        left = ""
        if seconds >= SECONDS_BEFORE_ESTIMATE and self.done:
            whole = seconds * self.targets / self.done
            left = f"{duration(whole - seconds)} left" if whole - seconds >= 0.5 else ""
            if not self.is_estimated:
                self.is_estimated = True
                log.info("about %s for %s targets", duration(whole), f"{self.targets:,}")
        self.show(kept, left)

    def _fraction(self) -> float:
        """Of the batch."""
        # what steps read for every token that was expected
        scale = 1.0
        if self._read_in_steps and self._expected_in_steps:
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


# --- how many tokens are read ---


def tokens_of_losses(settings: Settings, blocks: int) -> float:
    """About how many tokens the losses of all targets of some blocks read, those that need no selector."""
    lengths = settings.contexts
    faithfulness = settings.choices.faithfulness
    read = [lengths.n_context, lengths.n_short]
    if settings.selected_by is not None:
        read *= 2
    placebos = [name for name in settings.choices.far_contexts if name not in ("true", OTHER_TARGET)]
    read += [lengths.n_context] * len(placebos)
    if faithfulness:
        read.append(lengths.n_short)
    read += measured_lengths(lengths, faithfulness=faithfulness)
    read += [lengths.n_short] * len(lengths.longer_lengths)
    behind = lengths.targets_per_block - 1
    return blocks * sum(length + behind for length in read)


def likely_tokens_to_choose(settings: Settings, targets: int, blocks: int) -> float:
    """`tokens_to_choose`, before it is known how many of some targets are over tau."""
    with_choices = blocks * (1 - (1 - LIKELY_OVER) ** settings.contexts.targets_per_block)
    to_choose = tokens_to_choose(settings, LIKELY_OVER * targets, with_choices)
    return to_choose + tokens_of_effects(settings, blocks)


def tokens_of_effects(settings: Settings, blocks: int) -> float:
    """How many tokens the effects of single far keys and values on all targets of some blocks read."""
    if not settings.choices.effects:
        return 0.0
    lengths = settings.contexts
    return blocks * lengths.n_far * (lengths.n_short + lengths.targets_per_block - 1)


def tokens_to_choose(settings: Settings, targets: float, blocks: float) -> float:
    """About how many tokens choosing for so many targets of so many blocks reads, in all far contexts.

    Of selectors that are not named here nothing is expected: the first step says what they take.
    """
    choice_settings = settings.choices
    if not choice_settings.selectors:
        return 0.0
    lengths = settings.contexts
    n_far = lengths.n_far
    long = lengths.n_long + lengths.targets_per_block - 1
    short = lengths.n_short + lengths.targets_per_block - 1
    num_choices = len(choice_settings.selectors) * len(choice_settings.ks)
    of_losses = targets * num_choices * len(choice_settings.keep_as) * (short + choice_settings.k_max / 2)
    read = 0.0
    unscreened = [name for name in parse_names(choice_settings.selectors).values() if name.screen is None]
    # as text, what stands before the one left out is read once
    for level, cost in (("text", long / 2), ("cache", short)):
        methods = [name.registered.method for name in unscreened if name.ranked_in.level == level]
        if "leave-one-out" in methods:
            read += blocks * n_far * cost
        read += methods.count("halving") * (blocks + targets) * n_far * cost
    methods = [name.registered.method for name in unscreened]
    if "leave-one-in" in methods:
        read += blocks * n_far * (short + 1)
    greedy = methods.count("greedy")
    read += targets * greedy * choice_settings.k_max * n_far * (short + choice_settings.k_max / 2)
    if choice_settings.faithfulness:
        read += blocks * SUBSETS * (SUBSET_KEEP_RATE * n_far + short) + targets * num_choices * long
    # the tokens of another target were chosen before
    chosen_in = [far_context for far_context in choice_settings.far_contexts if far_context != OTHER_TARGET]
    return of_losses * len(choice_settings.far_contexts) + read * len(chosen_in)
