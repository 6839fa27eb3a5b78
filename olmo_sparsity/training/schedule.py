"""Learning rate and clipping bound as pure functions of the optimizer step, whatever the number of processes."""

from __future__ import annotations

from dataclasses import dataclass

from olmo.config import SchedulerUnits
from olmo.optim import build_scheduler

from olmo_sparsity.config.schema import Config, parse_duration


@dataclass(frozen=True)
class Schedule:
    """OLMo's scheduler for one run of a known length."""

    config: Config
    max_steps: int
    """Optimizer steps of the whole run."""

    @classmethod
    def of_run(cls, config: Config, *, steps_per_epoch: int | None) -> Schedule:
        """The schedule of ``config``, whose `max_duration` counts steps, tokens ("2e9T") or epochs ("2ep")."""
        amount, unit = parse_duration(config.max_duration)
        steps = {
            "steps": amount,
            "tokens": amount / config.tokens_per_step,
            "epochs": amount * (steps_per_epoch or 0),  # None of a task, which has no epochs
        }[unit]
        return cls(config, max(1, int(steps)))

    @property
    def last_step(self) -> int:
        """The step after which the run stops: its duration, or `stop_at` where that is earlier."""
        return min(self.max_steps, self.config.stop_at or self.max_steps)

    def _position(self, step: int) -> tuple[int, int]:
        scale = self.config.tokens_per_step if self.config.scheduler.units == SchedulerUnits.tokens else 1
        return step * scale, self.max_steps * scale

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step ``step``; the first step is 1, as in OLMo."""
        current, total = self._position(step)
        scheduler = build_scheduler(self.config)
        return scheduler.get_lr(self.config.optimizer.learning_rate, current, total)

    def max_grad_norm(self, step: int) -> float | None:
        """Gradient clipping bound of optimizer step ``step``; None where gradients are not clipped."""
        current, total = self._position(step)
        return build_scheduler(self.config).get_max_grad_norm(self.config.max_grad_norm, current, total)
