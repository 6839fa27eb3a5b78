"""The training loop: batch, forward, backward, step, log, save. One for every model, task and number of processes."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

from olmo_sparsity.checkpoint import (
    OPTIMIZER,
    load_state,
    load_tensors,
    load_weights,
    step_folder,
    weights_sha256,
)
from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.batches import TrainingBatches, open_training_data, verify_checksums
from olmo_sparsity.evaluate.exact_match import exact_share
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.engine import Engine, chosen_precision, lost_peers_in_words
from olmo_sparsity.training.metrics import rows_of_done_steps
from olmo_sparsity.training.monitor import Monitor
from olmo_sparsity.training.resume import (
    initial_checkpoint,
    is_finished,
    refuse_other_data,
    run_folder,
    save,
    saves_at,
    starting_checkpoint,
)
from olmo_sparsity.training.schedule import Schedule
from olmo_sparsity.training.zero import ZeroEngine
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import append_provenance
from olmo_sparsity.util.signals import StoppedBySignal, StopRequest

log = logging.getLogger(__name__)


def train(config: Config, *, resume: bool = False) -> Path:
    """Train to the end of `max_duration`; returns the last checkpoint's folder.

    With ``resume`` a run goes on from its last whole checkpoint, and its losses equal those of a run that was never
    interrupted; another number of processes or ZeRO stage changes rounding, and what dropout draws. Raises `UserError`
    for a folder that holds another run or is in use, damaged metrics, bad data, a loss or a gradient that is not finite
    (before it is saved), or another process that is lost, and `StoppedBySignal` after saving on SIGUSR1 or SIGTERM.
    """
    last = starting_checkpoint(config, resume)
    if last is not None and is_finished(config, last):
        done_steps = load_state(last).step
        rows_of_done_steps(config.save_folder, done_steps, finished=True)  # refuses what is lost or damaged
        log.info("%s is finished already", last)
        return last
    weights = last or initial_checkpoint(config)
    model = build_model(config)
    if weights is not None:
        load_weights(model, weights, attention_may_be_new=last is None)
    with lost_peers_in_words():
        engine = (Engine if config.deepspeed.config is None else ZeroEngine)(config, model)
        data = open_training_data(config, rank=engine.rank, world_size=engine.processes)
        with run_folder(config, engine, last, resume):
            return _train_from(config, engine, data, last)


def _train_from(config: Config, engine: Engine, data: TrainingBatches, last: Path | None) -> Path:
    """Train from the checkpoint ``last``, or from the start, to the end."""
    engine.on_main(lambda: verify_checksums(config))
    schedule = Schedule.of_run(config, steps_per_epoch=data.steps_per_epoch)
    first_step = 0
    if last is not None:
        state = load_state(last)
        refuse_other_data(state, last, data.identity)
        first_step = state.step
        engine.load_optimizer_tensors(load_tensors(last / OPTIMIZER))
        log.info("resuming from %s", last)
    told = {"precision": chosen_precision(config)}
    if last is None and config.initial_weights is not None:
        told["initial_weights_sha256"] = weights_sha256(config.initial_weights)
    engine.on_main(lambda: append_provenance(config.save_folder, **told))
    return _run(config, engine, data, schedule, first_step)


def _run(config: Config, engine: Engine, data: TrainingBatches, schedule: Schedule, first_step: int) -> Path:
    """The loop itself, from after ``first_step`` steps to the last; returns the last checkpoint's folder."""
    interval, until = config.evaluation.interval, config.evaluation.until
    evaluation = engine.open_evaluation(config) if interval else None
    last_step = min(schedule.last_step, first_step + (config.stop_after or schedule.max_steps))
    deadline = time.monotonic() + (config.time_limit or math.inf)
    batches = data.batches(first_step)
    folder = step_folder(config.save_folder, first_step)
    monitor = Monitor(
        config,
        first_step=first_step,
        last_step=last_step,
        enabled=engine.is_main,
        device=engine.device,
        processes=engine.processes,
    )
    with monitor, StopRequest() as stop:
        for step in range(first_step + 1, last_step + 1):
            batch = next(batches)
            # After reading: PyTorch's loader draws from the same generator.
            engine.seed_dropout(config.seed, step)
            on_device = engine.forward_backward(batch)
            learning_rate = schedule.learning_rate(step)
            grad_norm = engine.step(learning_rate, schedule.max_grad_norm(step))
            # Read only now: a GPU would have nothing to do until its step is asked for.
            losses = {name: float(value) for name, value in on_device.items()}
            if not math.isfinite(losses["loss_nats"]):
                raise _diverged(f"the loss is {losses['loss_nats']} at step {step}")
            if not math.isfinite(grad_norm):
                raise _diverged(f"the gradient's norm is {grad_norm} at step {step}")
            monitor.log(step, {**losses, "learning_rate": learning_rate, "grad_norm": grad_norm})
            ends = engine.any_process(stop.received is not None or time.monotonic() > deadline)
            has_learned = False
            with monitor.paused():
                if evaluation is not None and interval and (step == last_step or step % interval == 0):
                    found = engine.evaluate(evaluation)
                    monitor.log_evaluation(step, found)
                    has_learned = until is not None and exact_share(found) >= until
                if step == last_step or ends or has_learned or saves_at(config, step):
                    finished = has_learned or step >= schedule.max_steps
                    folder = save(config, engine, step, data.identity, finished=finished)
            if has_learned:
                log.info("finished after step %d: exact match reached evaluation.until", step)
                break
            if ends and step < last_step:
                why = stop.received or "a signal to another process, or time_limit"
                raise StoppedBySignal(
                    f"stopped after step {step} ({why}); saved {folder}; go on with --resume"
                )
    return folder


def _diverged(what: str) -> UserError:
    return UserError(
        f"{what}; earlier checkpoints are whole: lower optimizer.learning_rate or max_grad_norm, or set "
        "--precision=fp32, and --resume"
    )
