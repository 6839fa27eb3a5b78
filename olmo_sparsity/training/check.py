"""What would end a run before its first step, looked for before a job waits for its machines.

Model, optimizer, schedule, compiler and DeepSpeed are made as training makes them, without memory for weights; what
their libraries refuse, they word. Shapes: T tokens of a training window.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from olmo_sparsity.config.schema import Config, SchedulerConfig
from olmo_sparsity.data.training_batches import Batch
from olmo_sparsity.model.build import Model, empty_model
from olmo_sparsity.training.build import build_optimizer, build_schedule, check_processes
from olmo_sparsity.training.engine import compile_options
from olmo_sparsity.training.plan import Schedule
from olmo_sparsity.training.zero import check_deepspeed
from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

_STEPS_LOOKED_AT = 1000


def check_run(config: Config, world_size: int, steps_per_epoch: int | None = None) -> Model:
    """Raise `UserError` for what would end a run of ``world_size`` processes before, or soon after, its first step.

    ``steps_per_epoch``: None where the text is not there yet. Returns the model, whose weights are on no device.
    """
    check_processes(config, world_size)
    positions = config.positions
    if (
        positions.scheme == "random_start"
        and config.task.name is None
        and config.target_length == config.model.max_sequence_length
    ):
        log.warning(
            "positions.scheme: random_start trains as contiguous does, as all ids below target_length %d are those of "
            "a window; raise positions.target_length",
            config.target_length,
        )
    with _one_line("model"):
        model = empty_model(config, device="meta")
        _read_once(config)
    with _one_line("optimizer"):
        build_optimizer(config, model)
    with _one_line("scheduler"):
        _check_schedule(build_schedule(config, steps_per_epoch), config.scheduler)
    if config.compile is not None:
        with _one_line("compile"):
            torch.compile(nn.Identity(), **compile_options(config.compile))
    if config.deepspeed.config is not None:
        check_deepspeed(config, world_size)
    return model


def _read_once(config: Config) -> None:
    """A forward and a backward pass of one window, (1, T), through tensors that have shapes and no numbers."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it prints what is raised
    with FakeTensorMode():
        model = empty_model(config).train()
        ids = torch.zeros(1, config.model.max_sequence_length, dtype=torch.int64)
        id_labels = ids if config.positions.predicts_ids else None
        batch = Batch(ids, ids, labels=ids, loss_mask=ids == ids, id_labels=id_labels)
        # Sparse attention reads the numbers themselves: what follows in the pass is left to the run.
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            model(**batch.model_inputs, **batch.targets, z_weight=0.0)["loss_nats"].backward()


def _check_schedule(schedule: Schedule, options: SchedulerConfig) -> None:
    """Refuse learning rates and clipping bounds that are none, at steps spread over the run."""
    steps = {
        *range(1, schedule.max_steps + 1, max(1, schedule.max_steps // _STEPS_LOOKED_AT)),
        schedule.max_steps,
    }
    for edge in (options.t_warmup, options.t_max or 0):
        edge_step = int(edge / schedule.units_per_step)
        steps |= {step for step in range(edge_step - 1, edge_step + 2) if 1 <= step <= schedule.max_steps}
    for step in sorted(steps):
        rate = schedule.learning_rate(step)
        bound = schedule.max_grad_norm(step)
        if not (math.isfinite(rate) and rate >= 0) or (bound is not None and not math.isfinite(bound)):
            raise UserError(
                f"scheduler: at step {step} the learning rate would be {rate:g} and max_grad_norm {bound}; "
                "change scheduler, optimizer.learning_rate or max_grad_norm"
            )


@contextmanager
def _one_line(section: str) -> Iterator[None]:
    """What a library refuses here becomes a `UserError` with its words, or the assertion that failed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many kinds: OLMo, transformers and PyTorch have no common one
        frame = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split()) or frame.line
        raise UserError(
            f"{section}: {words} ({type(error).__name__}); change this section of the config"
        ) from error
