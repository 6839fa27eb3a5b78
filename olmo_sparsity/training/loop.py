"""The training loop: batch, forward, backward, step, log, save. One for every model, task and number of processes."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from olmo_sparsity.checkpoint import (
    CONFIG,
    OPTIMIZER,
    TrainState,
    checkpoints,
    load_state,
    load_tensors,
    load_weights,
    save_checkpoint,
    step_folder,
)
from olmo_sparsity.config import Config, load_config
from olmo_sparsity.data.windows import TrainingData, run_tokenizer
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import remove
from olmo_sparsity.model import PositionedOLMo, build_model
from olmo_sparsity.progress import progress
from olmo_sparsity.provenance import append_provenance
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.metrics import MetricsFile
from olmo_sparsity.training.optimizer_state import export_state, import_state
from olmo_sparsity.training.schedule import Schedule

log = logging.getLogger(__name__)


def train(config: Config, *, resume: bool = False) -> Path:
    """Train to the end of `max_duration`; returns the last checkpoint's folder.

    With ``resume`` a run goes on from its last checkpoint, and its losses equal those of a run that was never
    interrupted. Raises `UserError` for a folder that holds another run, bad data, or a loss that is not finite (before
    the optimizer steps on it).
    """
    last = _last_checkpoint(config, resume)
    if last is not None and load_state(last).finished:
        log.info("%s is finished already", last)
        return last
    engine = Engine(config, _initial_model(config, last))
    data = TrainingData(
        config, rank=engine.accelerator.process_index, world_size=engine.accelerator.num_processes
    )
    schedule = Schedule.of_run(
        config, tokens_per_step=data.tokens_per_step, steps_per_epoch=data.steps_per_epoch
    )
    first_step = 0
    if last is not None:
        first_step = load_state(last).step
        import_state(engine.raw_optimizer, load_tensors(last / OPTIMIZER))
        log.info("resuming from %s", last)
    if engine.is_main:
        append_provenance(config.save_folder)
    return _run(config, engine, data, schedule, first_step)


def _run(config: Config, engine: Engine, data: TrainingData, schedule: Schedule, first_step: int) -> Path:
    """The loop itself, from after ``first_step`` steps to the last; returns the last checkpoint's folder."""
    last_step = min(schedule.last_step, first_step + (config.stop_after or schedule.max_steps))
    deadline = time.monotonic() + (config.time_limit or math.inf)
    batches = data.batches(first_step)
    folder = step_folder(config.save_folder, first_step)
    with _Monitor(config, data, first_step, last_step, enabled=engine.is_main) as monitor:
        for step in range(first_step + 1, last_step + 1):
            batch = next(batches)
            engine.seed_dropout(
                config.seed, step
            )  # after reading: PyTorch's loader draws from the same generator
            loss = engine.forward_backward(batch)
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss is {loss} at step {step}, before the optimizer stepped on it; earlier checkpoints are "
                    "whole: lower optimizer.learning_rate or max_grad_norm, or set --precision=fp32, and --resume"
                )
            learning_rate = schedule.learning_rate(step)
            grad_norm = engine.step(learning_rate, schedule.max_grad_norm(step))
            monitor.log(step, {"loss_nats": loss, "learning_rate": learning_rate, "grad_norm": grad_norm})
            out_of_time = time.monotonic() > deadline
            if step == last_step or out_of_time or _saves_at(config, step):
                folder = _save(config, engine, schedule, step)
            if out_of_time:
                log.warning("time_limit reached after step %d; go on with --resume", step)
                break
    return folder


class _Monitor:
    """Progress bar and metrics.jsonl of the main process; silent in the others."""

    def __init__(self, config: Config, data: TrainingData, first_step: int, last_step: int, *, enabled: bool):
        self.tokens_per_step = data.tokens_per_step
        self.log_interval, self.last_step = config.console_log_interval, last_step
        self.step_times = deque([time.monotonic()], maxlen=config.speed_monitor.window_size + 1)
        self.metrics = MetricsFile(config.save_folder, first_step) if enabled else None
        total, done = last_step * data.tokens_per_step, first_step * data.tokens_per_step
        self.bar = progress("training", total, "tokens", done=done, enabled=enabled)

    def __enter__(self) -> _Monitor:
        self.advance = self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.__exit__(*error)
        if self.metrics is not None:
            self.metrics.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show and, at the interval, write one step's values."""
        self.step_times.append(time.monotonic())
        self.advance(self.tokens_per_step, note=f"loss {values['loss_nats']:.3f}")
        if self.metrics is not None and (step % self.log_interval == 0 or step == self.last_step):
            seconds = self.step_times[-1] - self.step_times[0]
            rate = (len(self.step_times) - 1) * self.tokens_per_step / seconds
            row = {"step": step, "tokens": step * self.tokens_per_step, **values, "tokens_per_second": rate}
            self.metrics.write(row)


def _last_checkpoint(config: Config, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a fresh start."""
    found = checkpoints(config.save_folder)
    if not found:
        return None
    if resume:
        _refuse_another_run(config, found[-1])
        return found[-1]
    if not config.save_overwrite:
        raise UserError(
            f"{config.save_folder} already holds {found[-1].name}; go on with --resume, start over with "
            "--save_overwrite, or choose another --save_folder"
        )
    for folder in found:
        remove(folder)
    return None


def _refuse_another_run(config: Config, folder: Path) -> None:
    """A run goes on only with the settings that decide its losses; its length and what it writes may change."""
    before, now = asdict(load_config(folder / CONFIG, warn=False)), asdict(config)
    for section in ("model", "optimizer", "positions", "corpus", "data", "seed", "global_train_batch_size"):
        old, new = before[section], now[section]
        if not isinstance(old, dict):
            old, new = {"": old}, {"": new}
        for key in old:
            if old[key] != new.get(key) and key not in (
                "init_device",
                "num_workers",
                "prefetch_factor",
                "pin_memory",
            ):
                name = f"{section}.{key}".rstrip(".")
                raise UserError(
                    f"cannot resume {folder}: {name} was {old[key]} and is now {new.get(key)}; set it back, or choose "
                    "another --save_folder"
                )


def _initial_model(config: Config, last: Path | None) -> PositionedOLMo:
    model = build_model(config)
    if last is not None:
        load_weights(model, last)
    return model


def _saves_at(config: Config, step: int) -> bool:
    intervals = (config.save_interval, config.save_interval_unsharded)
    return any(interval is not None and step % interval == 0 for interval in intervals)


def _save(config: Config, engine: Engine, schedule: Schedule, step: int) -> Path:
    """Write a checkpoint from the main process and drop those beyond the number to keep."""
    engine.wait()
    if engine.is_main:
        state = TrainState(step, step * schedule.tokens_per_step, finished=step >= schedule.max_steps)
        weights, optimizer = engine.weights(), export_state(engine.raw_optimizer)
        save_checkpoint(config.save_folder, config, state, weights, optimizer, run_tokenizer(config))
        keep = max(config.save_num_checkpoints_to_keep, config.save_num_unsharded_checkpoints_to_keep)
        for old in checkpoints(config.save_folder)[: -keep if keep > 0 else 0]:
            remove(old)
    engine.wait()
    return step_folder(config.save_folder, step)
