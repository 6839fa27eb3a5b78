"""Training, to be read downward: batch, forward, backward, clip, step, log, save, stop.

One loop for every model, task and number of processes. `build.py` makes the parts from a config. `engine.py`
has what depends on processes and devices, `zero.py` the same over DeepSpeed, `plan.py` what happens at which step,
`saving.py` checkpoints, written in the background, `resume.py` which of them a run goes on from.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from olmo_sparsity.checkpoint import (
    CHECKSUMS,
    OPTIMIZER,
    WEIGHTS,
    TrainState,
    load_optimizer,
    load_state,
    step_of,
    verify_checkpoint,
)
from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.build import open_training_data, verify_token_files
from olmo_sparsity.data.training_batches import Batch, TrainingBatches
from olmo_sparsity.evaluate.exact_match import TaskEvaluation, exact_share
from olmo_sparsity.evaluate.heldout import HeldoutEvaluation
from olmo_sparsity.training.build import (
    build_engine,
    build_plan,
    build_profiler,
    build_saver,
    initial_model,
    open_monitor,
    open_run_evaluation,
    prepare_model,
    warn_of_workers,
)
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.log import METRICS_NAME, Monitor, repair_metrics
from olmo_sparsity.training.plan import Plan
from olmo_sparsity.training.profile import DATA, StepProfiler
from olmo_sparsity.training.resume import (
    append_provenance,
    initial_checkpoint,
    is_finished,
    refuse_change,
    run_folder,
    starting_checkpoint,
)
from olmo_sparsity.training.saving import CheckpointSaver
from olmo_sparsity.util.errors import NotFinite
from olmo_sparsity.util.signals import StoppedBySignal, StopRequest

log = logging.getLogger(__name__)


def train(config: Config, *, resume: bool = False) -> Path:
    """Train to the end of `max_duration`; returns the last checkpoint's folder.

    With ``resume`` a run goes on from its last checkpoint, and its losses equal those of a run that was never
    interrupted; another number of processes or ZeRO stage changes rounding, and what dropout draws. Raises `UserError`
    for a folder that holds another run or is in use, bad data, and a loss or a gradient that is not finite (before the
    weights are changed; the gradient under ZeRO before they are saved), and `StoppedBySignal` after saving on SIGUSR1,
    SIGTERM or Ctrl-C.
    """
    engine = build_engine(config)
    # Only rank 0 lists the folder: on a network file system another rank may see an older state of it.
    last = engine.on_rank_zero(lambda: starting_checkpoint(config, resume))
    if last is not None and engine.on_rank_zero(lambda: is_finished(config, last)):
        metrics = Path(config.save_folder) / METRICS_NAME
        engine.on_rank_zero(lambda: repair_metrics(metrics, step_of(last), is_finished=True))
        log.info("%s is finished already", last)
        return last
    weights = engine.on_rank_zero(lambda: initial_checkpoint(config)) if last is None else last
    names = [WEIGHTS] if last is None else [WEIGHTS, OPTIMIZER]
    # In the background: hashing the 84 GB of a 7B model takes about as long as the rest of the start.
    wait_for_verification = engine.start_on_rank_zero(
        lambda: verify_checkpoint(weights, names) if weights else None
    )
    model = initial_model(engine, config, weights, is_resumed=last is not None)
    prepare_model(engine, config, model)
    data = open_training_data(config, rank=engine.rank, world_size=engine.world_size)
    engine.assert_same_on_all_ranks(str(data.identity), "the text to train on")
    warn_of_workers(engine, config.data.num_workers)
    with run_folder(config, engine, last, resume):
        # A run that goes on has its text's checksums, of the manifest, in its checkpoint; held-out text may be another.
        engine.on_rank_zero(lambda: verify_token_files(config, only_heldout=last is not None))
        wait_for_verification()
        done = TrainState(step=0, tokens=0) if last is None else restore(engine, last, data.identity)
        engine.on_rank_zero(lambda: append_provenance(config, last))
        plan = build_plan(
            config,
            first_step=done.step,
            steps_per_epoch=data.steps_per_epoch,
            evaluation_due=done.evaluation_due,
        )
        evaluation = open_run_evaluation(config, engine)
        saver = build_saver(config, engine, data.identity)
        monitor = open_monitor(config, engine, first_step=done.step, last_step=plan.last_step)
        profiler = build_profiler(config, engine, plan)
        return run_steps(engine, data, plan, evaluation, saver, monitor, profiler)


def restore(engine: Engine, last: Path, data_identity: str | None) -> TrainState:
    """Load the optimizer's state of the checkpoint ``last``; returns where the run stood.

    Raises `UserError` where it was trained on other text than that of ``data_identity``.
    """
    state = load_state(last)
    content = (last / CHECKSUMS).read_text(encoding="utf8")
    engine.assert_same_on_all_ranks(f"step {state.step}, {content}", f"the checkpoint {last}")
    if state.data is not None:
        refuse_change(last, "the text it is trained on, by its sha256,", state.data, data_identity)
    engine.load_optimizer_tensors(load_optimizer(last))
    log.info("resuming from %s", last)
    return state


def run_steps(
    engine: Engine,
    data: TrainingBatches,
    plan: Plan,
    evaluation: HeldoutEvaluation | TaskEvaluation | None,
    saver: CheckpointSaver,
    monitor: Monitor,
    profiler: StepProfiler,
) -> Path:
    """The loop itself, over the steps of ``plan``; returns the last checkpoint's folder."""
    for steps in plan.skipped_ranges:
        if steps.stop > plan.first_step + 1:
            log.info(
                "data.skip_steps: steps %d to %d are counted and not trained", steps.start, steps.stop - 1
            )
    step = plan.first_step
    batches = data.batches(plan.first_step)
    with (
        monitor,
        StopRequest() as stop,
        saver,
        profiler,
        collecting_between_steps(plan.garbage_interval),
    ):
        if plan.evaluation_due:
            with monitor.paused():
                has_learned = evaluate_and_save(engine, plan, evaluation, saver, monitor, step)
            if has_learned:
                return saver.folder_of(step)
        for step in range(plan.first_step + 1, plan.last_step + 1):
            with profiler.step(step):
                with record_function(DATA):
                    batch = next(batches)
                if plan.skips(step):
                    monitor.log_skipped(step)
                else:
                    monitor.log(step, train_step(engine, batch, plan, step))
            if plan.collects_garbage_after(step):
                gc.collect(1)

            is_stopping = stop.received is not None or time.monotonic() > plan.deadline
            stops, is_writing = engine.any_rank(is_stopping, saver.is_writing)
            with monitor.paused():
                if not is_writing:
                    saver.finish()
                is_last, is_evaluated = step == plan.last_step, plan.evaluates_after(step)
                if stops and (is_evaluated or not is_last):
                    # before the evaluation: there may be only seconds left
                    folder = saver.save(step, finished=False, evaluation_due=is_evaluated)
                    saver.finish()
                    if not is_last:
                        why = stop.received or "a signal to another process, or time_limit"
                        raise StoppedBySignal(
                            f"stopped after step {step} ({why}); saved {folder}; go on with --resume"
                        )
                if evaluate_and_save(engine, plan, evaluation, saver, monitor, step):
                    break
    return saver.folder_of(step)


def evaluate_and_save(
    engine: Engine,
    plan: Plan,
    evaluation: HeldoutEvaluation | TaskEvaluation | None,
    saver: CheckpointSaver,
    monitor: Monitor,
    step: int,
) -> bool:
    """Evaluate and save after ``step``, where they are due. Returns whether the run has learned its task, and ends."""
    has_learned = False
    if evaluation is not None and plan.evaluates_after(step):
        measures = engine.evaluate(evaluation)
        monitor.log_evaluation(step, measures)
        until = plan.evaluation_until
        has_learned = until is not None and exact_share(measures) >= until
    if has_learned or plan.saves_after(step):
        saver.save(step, finished=has_learned or plan.is_complete_after(step))
    if has_learned:
        log.info("finished after step %d: exact match reached evaluation.until", step)
    return has_learned


@contextmanager
def collecting_between_steps(interval: int | None) -> Iterator[None]:
    """Where there is an ``interval`` Python does not collect garbage by itself, as in OLMo: all ranks would wait.

    The loop does, in all ranks after the same step.
    """
    was_enabled = gc.isenabled()
    if interval is not None:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def train_step(engine: Engine, batch: Batch, plan: Plan, step: int) -> dict[str, float]:
    """Forward, backward, clip, update the weights; returns what is logged. Raises `UserError` as `finite` does."""
    engine.seed_dropout(step)  # after reading: the loader draws from the same generator
    metrics = forward_backward(engine, batch, plan.length_groups)
    metrics |= engine.clip_gradients(plan.schedule.max_grad_norm(step))
    # Copied from the device together: the processor waits only once, while the device is idle.
    values = finite({name: float(value) for name, value in metrics.items()}, step, plan.skip_steps)
    learning_rate = plan.schedule.learning_rate(step)
    values |= finite(engine.step(learning_rate), step, plan.skip_steps)
    return {**values, "learning_rate": learning_rate}


def forward_backward(engine: Engine, batch: Batch, length_groups: int | None) -> dict[str, Tensor]:
    """Accumulate gradients of the mean loss per token of the global batch; returns it and its terms by name, scalars.

    They are on the device, so reading one waits until it is computed. With `task.length_groups` the gradients are of
    the group of lengths with the largest loss alone.
    """
    if length_groups is None:
        return accumulate_gradients(engine, batch)
    groups = batch.by_length(length_groups)
    sums = engine.all_reduce_sum(torch.stack([loss_and_count(engine, group) for group in groups]))
    worst = int((sums[:, 0] / sums[:, 1]).argmax())
    mean = sums[:, 0].sum() / sums[:, 1].sum()
    return {**accumulate_gradients(engine, groups[worst]), "mean_loss_nats": mean}


def accumulate_gradients(engine: Engine, batch: Batch) -> dict[str, Tensor]:
    """Forward and backward passes of this process's micro-batches.

    Each contributes its sum over tokens divided by the number of loss tokens of the *global* batch, so the split into
    processes and micro-batches changes nothing but rounding.
    """
    # At least 1: where the instance filter leaves no window of a batch, its loss and gradient are 0, as in OLMo.
    count = engine.all_reduce_sum(torch.tensor(float(batch.num_loss_tokens))).clamp_min(1)
    totals: dict[str, Tensor] = {}
    micro_batches = batch.micro_batches(engine.settings.micro_batch_size)
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with engine.gradient_sync(is_last):
            sums = engine.loss_sums(micro_batch)
            # Ranks average their gradients; times the world size this is the sum over the global batch.
            engine.backward(sums["loss_nats"] * (engine.world_size / count), is_last)
        totals = {name: totals.get(name, 0) + value.detach() for name, value in sums.items()}
    means = engine.all_reduce_sum(torch.stack(list(totals.values()))) / count
    return dict(zip(totals, means, strict=True))


@torch.no_grad()
def loss_and_count(engine: Engine, batch: Batch) -> Tensor:
    """The sum of the losses of this process's examples and how many tokens count, (2,)."""
    total = torch.zeros((), device=engine.device)
    for micro_batch in batch.micro_batches(engine.settings.micro_batch_size):
        total += engine.loss_sums(micro_batch)["loss_nats"]
    return torch.stack([total, torch.tensor(float(batch.num_loss_tokens), device=engine.device)])


def finite(values: dict[str, float], step: int, skipped: str | None) -> dict[str, float]:
    """The values. Raises `NotFinite` where a loss or a gradient's norm is not finite.

    ``skipped``: `data.skip_steps` of the run, which the option in the message has to repeat.
    """
    previous_ranges = f"{skipped}," if skipped else ""
    for name, value in values.items():
        if not math.isfinite(value):
            raise NotFinite(
                f"{name} is {value} at step {step}; earlier checkpoints are whole: go on with --resume and a lower "
                "--optimizer.learning_rate or --max_grad_norm, --precision=fp32, or without this batch, "
                f"--data.skip_steps={previous_ranges}{step}:{step + 1}"
            )
    return values
