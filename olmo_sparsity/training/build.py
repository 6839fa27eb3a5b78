"""The parts of a run, made from its config: engine, optimizer, plan, evaluation, monitor, checkpoints.

Each part is handed what it reads. Of those that train none sees the config; a checkpoint takes it along.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections import defaultdict
from pathlib import Path

import torch
from olmo import optim
from olmo.config import ActivationCheckpointingStrategy, SchedulerType, SchedulerUnits

from olmo_sparsity.attention import SOFTMAX
from olmo_sparsity.checkpoint import load_weights
from olmo_sparsity.config.durations import parse_duration, parse_steps
from olmo_sparsity.config.schema import CompilerConfig, Config
from olmo_sparsity.data.build import run_tokenizer
from olmo_sparsity.data.training_batches import local_batch_size
from olmo_sparsity.evaluate.build import open_evaluation
from olmo_sparsity.evaluate.exact_match import TaskEvaluation
from olmo_sparsity.evaluate.heldout import HeldoutEvaluation
from olmo_sparsity.model.build import Model, build_model, empty_model
from olmo_sparsity.training.engine import Engine, EngineSettings, chosen_precision
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.training.log import MetricsFile, Monitor, Tracker, WeightsAndBiases
from olmo_sparsity.training.plan import Plan, Schedule
from olmo_sparsity.training.profile import StepProfiler, profiled_steps
from olmo_sparsity.training.saving import CheckpointSaver
from olmo_sparsity.training.zero import ZeroEngine, deepspeed_config, launched_processes
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import available_cpus

log = logging.getLogger(__name__)

# --- engine and optimizer ---


def build_engine(config: Config) -> Engine:
    """An engine that has met the other processes, and has no model yet: `prepare_model` hands it one."""
    if config.deepspeed.config is None:
        return Engine()
    return ZeroEngine(deepspeed_config(config, launched_processes()))


def initial_model(engine: Engine, config: Config, weights: Path | None, *, is_resumed: bool) -> Model:
    """The model on the engine's device. Rank 0 alone has its weights, until `prepare_model` sends them. Collective.

    ``weights``: the checkpoint that it reads them from; None: it draws them, the same for a seed on every machine.
    ``is_resumed``: they are all there; otherwise those of an attention that the checkpoint does not have are drawn.
    Raises `UserError` in every rank where the checkpoint cannot be read, or is of another model.
    """
    draws = weights is None or (config.model.attention != SOFTMAX and not is_resumed)
    models: list[Model] = []

    def draw_or_read() -> None:
        model = build_model(config) if draws else empty_model(config, engine.device)
        if weights is not None:
            load_weights(model, weights, attention_may_be_new=draws)
        models.append(model.to(engine.device))

    engine.on_rank_zero(draw_or_read)  # at 7B it takes longer than processes wait for each other
    return models[0] if engine.is_rank_zero else empty_model(config, engine.device)


def prepare_model(engine: Engine, config: Config, model: Model) -> None:
    """Make ``model`` the one that the engine trains, on its device and with OLMo's optimizer. Collective.

    The weights are those of rank 0: DDP and DeepSpeed broadcast them, whatever other ranks have in their memory.

    Raises `UserError` for a precision that the machine does not have, and what more than one process cannot do.
    """
    check_processes(config, engine.world_size)
    settings = engine_settings(config)
    model.to(engine.device)  # before the optimizer is made, as PyTorch requires
    engine.prepare(model, build_optimizer(config, model), settings)


def check_processes(config: Config, world_size: int) -> None:
    """Raise `UserError` where a step of this run cannot be shared by so many processes."""
    local_batch_size(config.global_train_batch_size, world_size)
    if config.task.length_groups is not None and world_size > 1:
        raise UserError("task.length_groups sorts all samples of a step: it is for one process; use one")


def engine_settings(config: Config) -> EngineSettings:
    """How a step of this run is computed on this machine."""
    model = config.model
    has_dropout = any((model.attention_dropout, model.residual_dropout, model.embedding_dropout))
    return EngineSettings(
        micro_batch_size=config.device_train_microbatch_size,
        precision=chosen_precision(config.precision),
        z_weight=_z_weight(config),
        dropout_seed=config.seed if has_dropout else None,
        activation_checkpointing=config.activation_checkpointing,
        compiler=chosen_compiler(config),
    )


def _z_weight(config: Config) -> float:
    if not config.softmax_auxiliary_loss:
        return 0.0
    return 1e-4 if config.auxiliary_loss_multiplier is None else config.auxiliary_loss_multiplier


def chosen_compiler(config: Config) -> CompilerConfig | None:
    """How the training step is compiled; None: it is not.

    Runs of fewer than `compile.from_steps` steps are not, nor is fine-grained checkpointing, which breaks the graph
    inside of every layer. The config alone decides, so a resumed run computes as it did before.
    """
    compiler = config.compile
    if compiler is None or compiler.from_steps == 0:
        return compiler
    is_broken = config.activation_checkpointing == ActivationCheckpointingStrategy.fine_grained
    # How many steps an epoch has is not known here.
    is_short = _steps(config, steps_per_epoch=math.inf) < compiler.from_steps
    return None if is_broken or is_short else compiler


def build_optimizer(config: Config, model: Model) -> torch.optim.Optimizer:
    """OLMo's optimizer of the model's parameters."""
    optimizer = optim.build_optimizer(config, model)
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            group["fused"] = True  # one kernel for all parameters; OLMo's builder has no switch for it
    return optimizer


def warn_of_workers(engine: Engine, num_workers: int) -> None:
    """Say, in rank 0, where the loader's workers of all ranks on a machine are more than their CPUs. Collective.

    Ranks may share their CPUs, as those of torchrun do, or each have its own, as those of srun.
    """
    machines = defaultdict(list)
    for name, cpus in engine.gather((platform.node(), available_cpus())):
        machines[name].append(cpus)
    for name, of_ranks in machines.items():
        num_cpus = len(set().union(*of_ranks))
        if engine.is_rank_zero and num_workers * len(of_ranks) > num_cpus:
            log.warning(
                "data.num_workers: %d for each of %d processes on %s, which have %d CPUs together: they wait for each "
                "other; set --data.num_workers=%d, or give the job more CPUs (submit --cpus, sbatch --cpus-per-task)",
                num_workers,
                len(of_ranks),
                name,
                num_cpus,
                num_cpus // len(of_ranks),
            )
            return


# --- the plan of the steps ---


def build_schedule(config: Config, steps_per_epoch: int | None) -> Schedule:
    """Learning rates and clipping bounds of the whole run; ``steps_per_epoch``: None of a task, which has no epochs.

    Raises `UserError` for a warm-up that is longer than the epochs; of steps and tokens `validate` does.
    """
    scheduler = config.scheduler
    counts_tokens = scheduler.units == SchedulerUnits.tokens
    max_steps = max(1, int(_steps(config, steps_per_epoch or 0)))
    units_per_step = config.tokens_per_step if counts_tokens else 1
    length = max_steps * units_per_step
    is_in_epochs = parse_duration(config.max_duration)[1] == "epochs" and steps_per_epoch is not None
    if is_in_epochs and scheduler.name != SchedulerType.constant and scheduler.t_warmup > length:
        raise UserError(
            f"scheduler.t_warmup: {scheduler.t_warmup:g} {scheduler.units} are longer than max_duration "
            f"{config.max_duration}, {length} {scheduler.units}; try --scheduler.t_warmup={length // 4}"
        )
    return Schedule(
        scheduler=optim.build_scheduler(config),
        initial_learning_rate=config.optimizer.learning_rate,
        initial_max_grad_norm=config.max_grad_norm,
        max_steps=max_steps,
        units_per_step=units_per_step,
    )


def _steps(config: Config, steps_per_epoch: float) -> float:
    """`max_duration` in steps, of which the last may be a part of one."""
    amount, unit = parse_duration(config.max_duration)
    return {
        "steps": amount,
        "tokens": amount / config.tokens_per_step,
        "epochs": amount * steps_per_epoch,
    }[unit]


def build_plan(
    config: Config, *, first_step: int, steps_per_epoch: int | None, evaluation_due: bool = False
) -> Plan:
    """What happens at each step from now on, after ``first_step`` steps are done.

    ``evaluation_due``: of the checkpoint that the run goes on from.
    """
    schedule = build_schedule(config, steps_per_epoch)
    last_step = min(
        schedule.max_steps,
        config.stop_at or schedule.max_steps,
        first_step + (config.stop_after or schedule.max_steps),
    )
    return Plan(
        schedule=schedule,
        first_step=first_step,
        evaluation_due=evaluation_due and config.evaluation.interval is not None,
        last_step=last_step,
        deadline=time.monotonic() + (config.time_limit or math.inf),
        skip_steps=config.data.skip_steps,
        skipped_ranges=parse_steps(config.data.skip_steps),
        length_groups=config.task.length_groups,
        save_interval=config.save_interval,
        evaluation_interval=config.evaluation.interval,
        garbage_interval=config.gen1_gc_interval,
        evaluation_until=config.evaluation.until,
    )


# --- what watches the steps ---


def open_run_evaluation(config: Config, engine: Engine) -> HeldoutEvaluation | TaskEvaluation | None:
    """This process's part of the evaluation while training; None where the config has none."""
    if config.evaluation.interval is None:
        return None
    if config.task.name is not None and engine.gathers_layers:
        # In every forward pass, which all make together: each process decodes everything.
        return open_evaluation(config)
    return open_evaluation(config, rank=engine.rank, world_size=engine.world_size)


def open_monitor(config: Config, engine: Engine, *, first_step: int, last_step: int) -> Monitor:
    """What shows and writes the metrics of the steps from ``first_step`` on, in rank 0."""
    trackers: list[Tracker] = []
    if engine.is_rank_zero:
        folder = Path(config.save_folder)
        trackers.append(MetricsFile(folder, first_step, interval=config.console_log_interval))
        if config.wandb:
            run_config = config.asdict(exclude=["wandb"])
            trackers.append(WeightsAndBiases(config.wandb, folder, first_step, run_config=run_config))
    return Monitor(
        trackers,
        first_step=first_step,
        last_step=last_step,
        tokens_per_step=config.tokens_per_step,
        speed_steps=config.speed_monitor.window_size,
        mfu_per_rate=_mfu_per_rate(config, engine) if engine.is_rank_zero else None,
        device=engine.device,
        enabled=engine.is_rank_zero,
    )


def _mfu_per_rate(config: Config, engine: Engine) -> float | None:
    """The model FLOPs utilisation of all devices at one token per second; None where their peak is not known."""
    peak = peak_flops(config, engine.device)
    return flops_per_token(config) / (peak * engine.world_size) if peak else None


def build_profiler(config: Config, engine: Engine, plan: Plan) -> StepProfiler:
    """What watches `profile` steps of the plan, in rank 0."""
    steps: list[int] = []
    if config.profile is not None and engine.is_rank_zero:
        steps = profiled_steps(plan.trained_steps(), config.profile)
        if len(steps) < 2:
            log.warning(
                "profile: fewer than two steps are left, and the profiler starts in the first; nothing is profiled"
            )
    return StepProfiler(Path(config.save_folder), steps, engine.device)


def build_saver(config: Config, engine: Engine, data_identity: str | None) -> CheckpointSaver:
    """What saves the run's checkpoints. The tokenizer is read now: the corpus may be gone when one is saved."""
    path = run_tokenizer(config) if engine.is_rank_zero else None
    return CheckpointSaver(
        engine=engine,
        folder=Path(config.save_folder),
        config=config,
        data_identity=data_identity,
        tokenizer=None if path is None else path.read_bytes(),
        tokens_per_step=config.tokens_per_step,
        keep_last=config.save_num_checkpoints_to_keep,
        keep_every=config.checkpoints.keep_every,
    )
