"""The training loop: batch, forward, backward, step, log, save. One for every model, task and number of processes."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path

from olmo_sparsity.checkpoint import (
    CHECKSUMS,
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
from olmo_sparsity.training.engine import Engine, chosen_precision
from olmo_sparsity.training.metrics import rows_of_done_steps
from olmo_sparsity.training.monitor import Monitor
from olmo_sparsity.training.resume import (
    append_provenance,
    errors_noted,
    initial_checkpoint,
    is_finished,
    refuse_other_data,
    run_folder,
    save,
    saved_tokenizer,
    saves_at,
    starting_checkpoint,
)
from olmo_sparsity.training.schedule import Schedule
from olmo_sparsity.training.zero import ZeroEngine
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.signals import StoppedBySignal, StopRequest

log = logging.getLogger(__name__)


def train(config: Config, *, resume: bool = False) -> Path:
    """Train to the end of `max_duration`; returns the last checkpoint's folder.

    With ``resume`` a run goes on from its last whole checkpoint, and its losses equal those of a run that was never
    interrupted; another number of processes or ZeRO stage changes rounding, and what dropout draws. Raises `UserError`
    for a folder that holds another run or is in use, damaged metrics, bad data, and a loss or a gradient that is not
    finite (before the weights are changed; the gradient under ZeRO before they are saved), and `StoppedBySignal` after
    saving on SIGUSR1, SIGTERM or Ctrl-C.
    """
    engine = (Engine if config.deepspeed.config is None else ZeroEngine)(config)
    with errors_noted(config, engine):
        return _train(config, engine, resume)


def _train(config: Config, engine: Engine, resume: bool) -> Path:
    # One process looks at the folder, and hashes what it finds: another may be shown an older state of it.
    last, weights, finished = engine.on_main(lambda: _beginning(config, resume))
    if finished:
        assert last is not None
        log.info("%s is finished already", last)
        return last
    model = build_model(config)
    if weights is not None:
        load_weights(model, weights, attention_may_be_new=last is None)
    engine.prepare(model)
    data = open_training_data(config, rank=engine.rank, world_size=engine.processes)
    engine.refuse_unequal(str(data.identity), "the text to train on")
    with run_folder(config, engine, last, resume):
        return _train_from(config, engine, data, last)


def _beginning(config: Config, resume: bool) -> tuple[Path | None, Path | None, bool]:
    """The checkpoint to go on from, that to take weights from, and whether the run is finished already."""
    last = starting_checkpoint(config, resume)
    if last is None:
        return None, initial_checkpoint(config), False
    finished = is_finished(config, last)
    if finished:  # refuses metrics that are lost or damaged
        rows_of_done_steps(config.save_folder, load_state(last).step, finished=True)
    return last, last, finished


def _train_from(config: Config, engine: Engine, data: TrainingBatches, last: Path | None) -> Path:
    """Train from the checkpoint ``last``, or from the start, to the end."""
    if last is None:  # a run that goes on has its text's checksums, of the manifest, in its checkpoint
        engine.on_main(lambda: verify_checksums(config))
    schedule = Schedule.of_run(config, steps_per_epoch=data.steps_per_epoch)
    first_step = 0
    if last is not None:
        state = load_state(last)
        content = (last / CHECKSUMS).read_text(encoding="utf8")
        engine.refuse_unequal(f"step {state.step}, {content}", f"the checkpoint {last}")
        refuse_other_data(state, last, data.identity)
        first_step = state.step
        engine.load_optimizer_tensors(load_tensors(last / OPTIMIZER))
        log.info("resuming from %s", last)

    def note() -> None:
        told = {"precision": chosen_precision(config)}
        if last is None and config.initial_weights is not None:
            told["initial_weights_sha256"] = weights_sha256(config.initial_weights)
        append_provenance(config.save_folder, **told)

    engine.on_main(note)
    return _run(config, engine, data, schedule, first_step)


def _run(config: Config, engine: Engine, data: TrainingBatches, schedule: Schedule, first_step: int) -> Path:
    """The loop itself, from after ``first_step`` steps to the last; returns the last checkpoint's folder."""
    interval, until = config.evaluation.interval, config.evaluation.until
    evaluation = engine.open_evaluation(config) if interval else None
    last_step = min(schedule.last_step, first_step + (config.stop_after or schedule.max_steps))
    deadline = time.monotonic() + (config.time_limit or math.inf)
    batches, tokenizer = data.batches(first_step), saved_tokenizer(config) if engine.is_main else None
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
            on_device |= engine.clip_gradients(schedule.max_grad_norm(step))
            # Read together: the processor waits once for the device, which has then nothing to do for a moment.
            values = _finite({name: float(value) for name, value in on_device.items()}, step)
            learning_rate = schedule.learning_rate(step)
            values |= _finite(engine.step(learning_rate), step)
            monitor.log(step, {**values, "learning_rate": learning_rate})
            ends = engine.any_process(stop.received is not None or time.monotonic() > deadline)
            has_learned = False
            saving = partial(save, config, engine, step, data.identity, tokenizer)
            with monitor.paused():
                if ends:  # first of all: there may be seconds left
                    folder = saving(finished=step >= schedule.max_steps)
                if evaluation is not None and interval and (step == last_step or step % interval == 0):
                    found = engine.evaluate(evaluation)
                    monitor.log_evaluation(step, found)
                    has_learned = until is not None and exact_share(found) >= until
                if has_learned or (not ends and (step == last_step or saves_at(config, step))):
                    folder = saving(finished=has_learned or step >= schedule.max_steps)
            if has_learned:
                log.info("finished after step %d: exact match reached evaluation.until", step)
                break
            if ends and step < last_step:
                why = stop.received or "a signal to another process, or time_limit"
                raise StoppedBySignal(
                    f"stopped after step {step} ({why}); saved {folder}; go on with --resume"
                )
    return folder


def _finite(values: dict[str, float], step: int) -> dict[str, float]:
    """The values. Raises `UserError` where a loss or a gradient's norm is not finite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} at step {step}; earlier checkpoints are whole: lower optimizer.learning_rate or "
                "max_grad_norm, or set --precision=fp32, and --resume"
            )
    return values
