"""Synthetic tasks: what making a batch costs beside a training step, and our steps against transformers' Trainer."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from olmo.optim import get_param_groups
from torch import Tensor

from benchmarks.settings import SyntheticSettings
from benchmarks.timing import Json, about_this_run, chosen_device, paired_ratio, summarise, time_in_turn
from benchmarks.train import use_cpu_without_gpu
from benchmarks.trainer import WARM_UP_STEPS, TimedTrainer, train_steps
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.task_batches import TaskData
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.neox import PositionedNeoX
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.tasks import TASKS
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.shipped import find_shipped

TRAINER, LOOP, READY = "transformers Trainer", "loop", "loop, batches made before"
LARGEST_SHARE = 0.05
"""A batch is to be made within this share of a training step."""
_LARGEST_LOSS_DIFFERENCE = {"no": 1e-5, "bf16": 1e-3}  # relative, by precision


def run(settings: SyntheticSettings) -> Json:
    """Both parts, and what they were measured on. Raises `UserError` for a config that has no part in them."""
    use_cpu_without_gpu()
    made = about_this_run(chosen_device())
    config = replace(load_config(settings.config, settings.overrides), compile=None)  # both sides eager
    _check(config, settings.config)
    with tempfile.TemporaryDirectory() as folder:
        comparison = StepComparison(config, settings.steps, Path(folder))
        compared = comparison.measure(settings.rounds)
    tasks = {
        name: generator_share(own, settings.steps, settings.rounds)
        for name, own in task_configs(config, settings).items()
    }
    return {
        "benchmark": "synthetic",
        "config": settings.config,
        "precision": comparison.engine.accelerator.mixed_precision,
        "clock": clock_of(comparison.device).__name__,
        "rounds": settings.rounds,
        "largest_share": LARGEST_SHARE,
        **made,
        "tasks": tasks,
        "steps": compared,
    }


def _check(config: Config, path: str) -> None:
    """Raise `UserError` where the Trainer cannot be given the same."""
    needed = [
        (config.task.name is None, "task.name: is missing; give a config of configs/synthetic"),
        (config.model.family != "gpt_neox", "model.family: the Trainer has GPT-NeoX; set it to gpt_neox"),
        (config.optimizer.name != "adamw", "optimizer.name: the Trainer has AdamW; set it to adamw"),
        (config.model.residual_dropout > 0, "model.residual_dropout: would differ; set every dropout to 0"),
    ]
    for is_wrong, text in needed:
        if is_wrong:
            raise UserError(f"{path}: {text}")


# --- what making a batch costs ---


def task_configs(config: Config, settings: SyntheticSettings) -> dict[str, Config]:
    """Every task's config beside that of ``settings``: copy-small.yaml beside addition-small.yaml."""
    found = {}
    given = find_shipped(settings.config)
    for name in TASKS:
        own = given.with_name(given.name.replace(config.task.name or "", name))
        if own == given or own.is_file():
            # One process has one precision.
            found[name] = replace(
                load_config(own, settings.overrides), precision=config.precision, compile=None
            )
    return {name: own for name, own in found.items() if own.task.name == name}


def generator_share(config: Config, steps: int, rounds: int) -> Json:
    """Seconds of making batches and of as many optimizer steps on batches made before, in turn.

    A batch: samples, position ids and tensors, as the loop makes them without workers.
    """
    engine = Engine(config, build_model(config))
    batches, steps = inline_batches(config), whole_blocks(config, steps)
    ready = [next(batches) for _ in range(steps)]

    def generate() -> None:
        for _ in range(steps):
            next(batches)

    def train() -> None:
        train_steps(engine, config, iter(ready), steps)

    seconds = time_in_turn(
        {"generate": generate, "step": train},
        rounds,
        engine.device.type,
        warm_up=1,
        clock=clock_of(engine.device),
    )
    share = paired_ratio(seconds["generate"], seconds["step"])
    samples = config.global_train_batch_size * steps
    return {
        "scheme": config.positions.scheme,
        "batch": config.global_train_batch_size,
        "window": config.model.max_sequence_length,
        "parameters": sum(parameter.numel() for parameter in engine.raw_model.parameters()),
        "steps_per_timing": steps,
        "samples_per_second": samples / statistics.median(seconds["generate"]),
        "steps_per_second": steps / statistics.median(seconds["step"]),
        "share": share["ratio"],
        "share_low": share["ratio_low"],
        "share_high": share["ratio_high"],
        "seconds": seconds,
    }


# --- what both do ---


def inline_batches(config: Config) -> Iterator[Batch]:
    """Batches of the task, made where they are asked for: workers would make them while something else is timed."""
    return TaskData(replace(config, data=replace(config.data, num_workers=0))).batches(0)


def whole_blocks(config: Config, steps: int) -> int:
    """``steps``, rounded up to whole blocks of steps whose batches are made at once."""
    at_once = TaskData(config).steps_at_once
    return -(-steps // at_once) * at_once


def clock_of(device: torch.device) -> Callable[[], float]:
    """Processor time where one thread computes everything, which other programs do not change; else wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


# --- our steps against the Trainer's ---


class StepComparison:
    """The same model, batches and optimizer in our loop and in transformers' Trainer, in turn.

    The Trainer knows one loss and no table of ids: ids of coupled schemes give way to PoSE, or to contiguous ones where
    the config has no target length. The loop makes its batches while the clock runs, the Trainer's were made
    before; `READY` is the loop with batches made before.
    """

    def __init__(self, config: Config, steps: int, folder: Path):
        self.config = plain_config(config)
        self.steps = whole_blocks(self.config, steps)
        self.engine = Engine(self.config, build_model(self.config))
        self.device = self.engine.device
        upcoming = inline_batches(self.config)
        # One more than the Trainer trains on: it reads a batch ahead, and the last step is to be like the others.
        self.ready = [next(upcoming) for _ in range(WARM_UP_STEPS + self.steps + 1)]
        positioned = build_model(self.config)
        assert isinstance(positioned, PositionedNeoX), "the config was checked, and its ids are plain"
        positioned.model.set_attn_implementation("sdpa")  # as users of transformers have it
        groups = get_param_groups(self.config, positioned)
        self._train = partial(train_steps, self.engine, self.config)
        rows, clock = samples(self.ready), clock_of(self.device)
        self.trainer = TimedTrainer(
            positioned.model, groups, rows, self.engine, self.config, self.steps, folder, clock
        )

    def measure(self, rounds: int) -> Json:
        """Steps per second of each, after their losses were compared."""
        losses = self.compare_losses()
        batches = inline_batches(self.config)
        runners: dict[str, Callable[[], object]] = {
            TRAINER: self.trainer,
            LOOP: lambda: self._train(batches, self.steps),
            READY: lambda: self._train(iter(self.ready), self.steps),
        }
        seconds = time_in_turn(runners, rounds, self.device.type, warm_up=1, clock=clock_of(self.device))
        return {
            "task": self.config.task.name,
            "scheme": self.config.positions.scheme,
            "steps_per_timing": self.steps,
            **summarise(seconds, baseline=TRAINER, amount=self.steps, unit="steps/s"),
            "seconds": seconds,
            "losses_nats": losses,
        }

    def compare_losses(self) -> dict[str, list[float]]:
        """Make the same first steps on both sides; raises `UserError` where a loss differs by more than rounding."""
        self.trainer()
        ours = self._train(iter(self.ready), WARM_UP_STEPS + self.steps)
        theirs = self.trainer.losses_nats()
        bound = _LARGEST_LOSS_DIFFERENCE[self.engine.accelerator.mixed_precision]
        for own, other in zip(ours, theirs, strict=True):
            if not abs(own - other) <= bound * abs(other):
                raise UserError(
                    f"the losses differ: {own:.7g} in the loop, {other:.7g} in the Trainer; so their speeds cannot be "
                    "compared, and one of the two is wrong: see tests/olmo_sparsity/training/test_task_training.py"
                )
        return {LOOP: ours, TRAINER: theirs}


def plain_config(config: Config) -> Config:
    """The same run with ids that need neither an embedding nor a head."""
    scheme = config.positions.scheme
    if scheme in COUPLED_SCHEMES:
        scheme = "contiguous" if config.positions.target_length is None else "pose"
    return replace(config, positions=replace(config.positions, scheme=scheme, rotate="ids"))


def samples(batches: list[Batch]) -> list[dict[str, Tensor]]:
    """The samples of batches as the Trainer wants them, one after the other."""
    return [
        dict(zip(inputs, values, strict=True))
        for inputs in map(trainer_inputs, batches)
        for values in zip(*inputs.values(), strict=True)
    ]


def trainer_inputs(batch: Batch) -> dict[str, Tensor]:
    """The batch (B, T) as transformers takes it: a label stands in its own column, -100 outside the response.

    The mask of ones keeps transformers from reading ids that jump as packed documents.
    """
    is_response = batch.loss_mask.roll(1, dims=1)
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": torch.ones_like(batch.input_ids),
        "labels": batch.input_ids.masked_fill(~is_response, -100),
    }
