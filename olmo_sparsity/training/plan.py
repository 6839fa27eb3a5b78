"""What a run does at which step: learning rate, clipping bound, steps left out, evaluations, checkpoints, the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from olmo.optim import Scheduler


@dataclass(frozen=True)
class Schedule:
    """OLMo's scheduler for one run: pure functions of the optimizer step, whatever the number of processes.

    The first step is 1, as in OLMo.
    """

    scheduler: Scheduler
    initial_learning_rate: float
    initial_max_grad_norm: float | None
    max_steps: int
    """Of the whole run."""
    units_per_step: int = 1
    """The scheduler counts steps, or tokens: those of a step."""

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``."""
        return self.scheduler.get_lr(
            self.initial_learning_rate, step * self.units_per_step, self.max_steps * self.units_per_step
        )

    def max_grad_norm(self, step: int) -> float | None:
        """Gradient clipping bound of optimizer step ``step``; None where gradients are not clipped."""
        return self.scheduler.get_max_grad_norm(
            self.initial_max_grad_norm, step * self.units_per_step, self.max_steps * self.units_per_step
        )


@dataclass(frozen=True)
class Plan:
    """The steps of one start of a run: of a fresh one, or one that goes on after ``first_step`` steps."""

    schedule: Schedule
    first_step: int
    """Steps that are done already."""
    evaluation_due: bool
    """The last start was stopped before the evaluation after ``first_step``."""
    last_step: int
    """The run's last one, or where `stop_at` or `stop_after` ends this start."""
    deadline: float
    """When `time_limit` is over, by `time.monotonic`; infinite without one."""
    skip_steps: str | None
    """The config's `data.skip_steps`, as it stands there."""
    skipped_ranges: Sequence[range]
    """The same, read."""
    length_groups: int | None
    """The config's `task.length_groups`."""
    save_interval: int | None
    evaluation_interval: int | None
    garbage_interval: int | None
    """Between how many steps Python's garbage collector runs; None: when Python calls it."""
    evaluation_until: float | None
    """The run has learned its task when the exact match at the longest training length reaches this."""

    def skips(self, step: int) -> bool:
        """Whether ``step`` is counted and not trained."""
        return any(step in steps for steps in self.skipped_ranges)

    def trained_steps(self) -> Iterator[int]:
        """The steps that are trained, in order."""
        return (step for step in range(self.first_step + 1, self.last_step + 1) if not self.skips(step))

    def evaluates_after(self, step: int) -> bool:
        """Whether held-out measures are due after ``step``."""
        if step == self.first_step:
            return self.evaluation_due
        return self.evaluation_interval is not None and self._is_due(step, self.evaluation_interval)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``."""
        return self._is_due(step, self.save_interval)

    def collects_garbage_after(self, step: int) -> bool:
        """Whether Python's garbage collector is called after ``step``, in all ranks at once."""
        return self.garbage_interval is not None and step % self.garbage_interval == 0

    def is_complete_after(self, step: int) -> bool:
        """Whether ``step`` is the last of the whole run."""
        return step >= self.schedule.max_steps

    def _is_due(self, step: int, interval: int | None) -> bool:
        return step == self.last_step or (interval is not None and step % interval == 0)
