"""Steps of our loop, and transformers' Trainer that they are compared with: its settings, its clock, its losses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.timing import synchroniser
from olmo_sparsity.config.load import Config
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.exported import quiet_transformers
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.errors import UserError

LEARNING_RATE = 1e-5
"""Of every side that is compared."""
WARM_UP_STEPS = 1


def train_steps(engine: Engine, config: Config, batches: Iterator[Batch], steps: int) -> list[float]:
    """Optimizer steps as this project's loop makes them; the loss of each, in nats per token."""
    losses = []
    for _ in range(steps):
        loss = engine.forward_backward(next(batches))["loss_nats"]
        engine.clip_gradients(config.max_grad_norm)
        engine.step(LEARNING_RATE)
        losses.append(float(loss))
    return losses


class TimedTrainer:
    """Each call makes a step that warms up and ``steps`` optimizer steps, and returns the seconds of the latter.

    What the Trainer does before its steps is not counted. Batch, precision and clipping are those of ``config``.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[dict[str, Any]],
        rows: list[dict[str, Tensor]],
        engine: Engine,
        config: Config,
        steps: int,
        folder: Path,
        clock: Callable[[], float] = time.perf_counter,
        compiled: bool = False,
    ):
        self.clock = _Clock(clock, synchroniser(engine.device.type))
        optimizer = torch.optim.AdamW(
            groups,
            lr=LEARNING_RATE,
            betas=(config.optimizer.betas[0], config.optimizer.betas[1]),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.trainer = _LossKeepingTrainer(
            model=model,
            args=_arguments(engine, config, WARM_UP_STEPS + steps, folder, compiled),
            train_dataset=rows,
            callbacks=[self.clock],
            optimizers=(optimizer, None),
        )
        self.trainer.remove_callback(PrinterCallback)

    def __call__(self) -> float:
        """Train; the seconds after the warm-up."""
        with quiet_transformers():
            self.trainer.train()
        return self.clock.seconds

    def losses_nats(self) -> list[float]:
        """The loss of every step so far."""
        parts = torch.stack(self.trainer.kept_losses)  # of a micro-batch, its part of the mean over the batch
        return parts.view(-1, self.trainer.args.gradient_accumulation_steps).sum(dim=1).tolist()


def _arguments(engine: Engine, config: Config, steps: int, folder: Path, compiled: bool) -> TrainingArguments:
    """Nothing logged, nothing saved."""
    size = min(config.device_train_microbatch_size, config.global_train_batch_size)
    if config.global_train_batch_size % size:
        raise UserError(
            f"device_train_microbatch_size: {size} does not divide {config.global_train_batch_size}; give one that does"
        )
    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=config.global_train_batch_size // size,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=config.max_grad_norm or 0.0,
        train_sampling_strategy="sequential",
        torch_compile=compiled,
        torch_compile_backend=config.compile.backend if compiled and config.compile else None,
        bf16=engine.accelerator.mixed_precision == "bf16",
        use_cpu=engine.device.type == "cpu",
        dataloader_pin_memory=engine.device.type == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class _LossKeepingTrainer(Trainer):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.kept_losses: list[Tensor] = []

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)
        self.kept_losses.append(loss)
        return loss


class _Clock(TrainerCallback):
    """Seconds from the end of the Trainer's warm-up to its end."""

    def __init__(self, clock: Callable[[], float], synchronise: Callable[[], None]):
        self.clock, self.synchronise, self.started, self.seconds = clock, synchronise, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step in (WARM_UP_STEPS, args.max_steps):
            self.synchronise()
            now = self.clock()
            self.started, self.seconds = now, now - self.started
