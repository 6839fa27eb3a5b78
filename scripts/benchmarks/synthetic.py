"""Synthetic tasks: what making a batch costs beside a training step, and our steps against transformers' Trainer."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from olmo.optim import get_param_groups
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback

from benchmarks.timing import paired_ratio, summarise, time_in_turn
from benchmarks.trainer_arguments import LEARNING_RATE, trainer_arguments
from olmo_sparsity.config.load import Config, TaskConfig, load_config
from olmo_sparsity.config.schema import PositionsConfig
from olmo_sparsity.data.batches import Batch
from olmo_sparsity.data.task_batches import TaskData
from olmo_sparsity.export import quiet_transformers
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.neox import PositionedNeoX
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.tasks import TASKS, make_task
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.provenance import provenance

TRAINER, LOOP, READY = "transformers Trainer", "loop", "loop, batches made before"
LARGEST_SHARE = 0.05
"""A batch is to be made within this share of a training step."""
_LARGEST_LOSS_DIFFERENCE = {"no": 1e-5, "bf16": 1e-3}  # relative, by precision

Json = dict[str, Any]


def run_synthetic_benchmark(config_path: str, overrides: list[str], *, rounds: int, steps: int) -> Json:
    """Both parts, and what they were measured on. Raises `UserError` for a config that has no part in them."""
    if min(rounds, steps) < 1:
        raise UserError("--rounds and --steps take 1 or more")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on standard output
    made, load = provenance(), os.getloadavg()[0]  # first, so that the load of the machine is not our own
    config = load_config(config_path, overrides)
    _check(config, config_path)
    with tempfile.TemporaryDirectory() as folder:
        comparison = StepComparison(config, steps, rounds, Path(folder))
        compared = comparison.measure()
    tasks = {
        name: generator_share(task_config, steps, rounds)
        for name, task_config in task_configs(config, config_path, overrides).items()
    }
    device = comparison.device
    return {
        "benchmark": "synthetic",
        "config": config_path,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": comparison.precision,
        "clock": clock_of(device).__name__,
        "load_average_before": load,
        "commit": made["commit"],
        "command": made["command"],
        "rounds": rounds,
        "largest_share": LARGEST_SHARE,
        "tasks": tasks,
        "steps": compared,
    }


def _check(config: Config, path: str) -> None:
    """Raise `UserError` where the Trainer cannot be given the same."""
    batch, part = config.global_train_batch_size, config.device_train_microbatch_size
    needed = [
        (config.task.name is None, "task.name: is missing; give a config of configs/synthetic"),
        (config.model.family != "gpt_neox", "model.family: the Trainer has GPT-NeoX; set it to gpt_neox"),
        (config.optimizer.name != "adamw", "optimizer.name: the Trainer has AdamW; set it to adamw"),
        (config.model.residual_dropout > 0, "model.residual_dropout: would differ; set every dropout to 0"),
        (
            batch % part > 0,
            f"device_train_microbatch_size: {part} does not divide {batch}; give one that does",
        ),
    ]
    for is_wrong, text in needed:
        if is_wrong:
            raise UserError(f"{path}: {text}")


# --- what making a batch costs ---


def task_configs(config: Config, path: str, overrides: list[str]) -> dict[str, Config]:
    """A config for every task: its own, beside ``path``, or where there is none the same shape with its tokens.

    Its own is the file whose name has the task in place of the one of ``config``: copy-small.yaml beside
    addition-small.yaml.
    """
    found = {}
    for name in TASKS:
        own = Path(path).with_name(Path(path).name.replace(config.task.name or "", name))
        if name == config.task.name:
            found[name] = config
        elif own.name != Path(path).name and own.is_file():
            # One process has one precision.
            found[name] = replace(load_config(own, overrides), precision=config.precision)
        else:
            found[name] = _with_task(config, name)
    return found


def _with_task(config: Config, name: str) -> Config:
    """The same shape for another task with its default parameters; PoSE where nothing is coupled."""
    task = make_task(name, {})
    longest_test = task.test_length[1]
    largest_id = task.largest_id(longest_test)
    model = replace(
        config.model,
        vocab_size=len(task.vocabulary),
        embedding_size=None,
        max_sequence_length=task.max_tokens(task.train_length[1]),
    )
    if largest_id is None:
        positions = PositionsConfig(scheme="pose", target_length=task.max_tokens(longest_test))
    else:
        target = max(config.positions.target_length or 0, task.max_tokens(longest_test))
        positions = replace(config.positions, table_size=largest_id + 1, target_length=target)
    return replace(config, task=TaskConfig(name), model=model, positions=positions)


def generator_share(config: Config, steps: int, rounds: int) -> Json:
    """Seconds of making batches and of as many optimizer steps on batches that are there, in turn.

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

    runners = {
        "generate": partial(timed, generate, engine.device),
        "step": partial(timed, train, engine.device),
    }
    seconds = time_in_turn(runners, rounds, synchroniser(engine.device), warm_up=1)
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
    """At least ``steps``, so many that what is made at once for several steps is made for one timing."""
    at_once = TaskData(config).steps_at_once
    return -(-steps // at_once) * at_once


def train_steps(engine: Engine, config: Config, batches: Iterator[Batch], steps: int) -> list[float]:
    """Optimizer steps as the loop makes them; the loss of each, in nats per response token."""
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(next(batches))["loss_nats"])
        engine.step(LEARNING_RATE, config.max_grad_norm)
    return losses


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``run`` takes, by the clock of the device."""
    clock = clock_of(device)
    started = clock()
    run()
    synchroniser(device)()
    return clock() - started


def clock_of(device: torch.device) -> Callable[[], float]:
    """The processor's time where one thread computes all: the same as the wall's, without what other programs take."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done what it was given."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


# --- our steps against the Trainer's ---


class StepComparison:
    """The same model, batches and optimizer in our loop and in transformers' Trainer, in turn.

    The Trainer knows one loss and no table of ids: ids of coupled schemes give way to PoSE, or to contiguous ones where
    the config has no target length. The loop makes its batches while the clock runs, the Trainer's are there; what is
    called `READY` is the loop with batches that are there.
    """

    def __init__(self, config: Config, steps: int, rounds: int, folder: Path):
        self.config = plain_config(config)
        self.steps = whole_blocks(self.config, steps)
        self.engine = Engine(self.config, build_model(self.config))
        self.device, self.precision = self.engine.device, self.engine.accelerator.mixed_precision
        self.batches = inline_batches(self.config)
        upcoming = inline_batches(self.config)
        # One more than the Trainer trains on: it reads a batch ahead, and the last step is to be like the others.
        made_before = [next(upcoming) for _ in range((1 + rounds) * self.steps + 1)]
        self.ready = made_before[: self.steps]
        self.trainer = self._make_trainer(made_before, folder)
        self.seconds: dict[str, list[float]] = {TRAINER: [], LOOP: [], READY: []}
        self.losses: dict[str, list[float]] = {}

    def measure(self) -> Json:
        """Steps per second of each, from the second turn on; in the first the losses are compared."""
        with quiet_transformers():
            self.trainer.train()
        rates = summarise(self.seconds, baseline=TRAINER, amount=self.steps, unit="steps/s")
        return {
            "task": self.config.task.name,
            "scheme": self.config.positions.scheme,
            "steps_per_timing": self.steps,
            **rates,
            "seconds": self.seconds,
            "losses_nats": self.losses,
        }

    def _make_trainer(self, batches: list[Batch], folder: Path) -> _LossKeepingTrainer:
        """The Trainer of the same weights, batches and AdamW; it lets us train after every so many of its steps."""
        config = self.config
        positioned = build_model(config)
        assert isinstance(positioned, PositionedNeoX), "the config was checked, and its ids are plain"
        optimizer = torch.optim.AdamW(
            get_param_groups(config, positioned),
            lr=LEARNING_RATE,
            betas=tuple(config.optimizer.betas),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        trainer = _LossKeepingTrainer(
            model=positioned.model,
            args=trainer_arguments(config, self.device, self.precision, len(batches) - 1, folder),
            train_dataset=_Samples(batches),
            callbacks=[_Turns(self.steps, self.device, self._turn)],
            optimizers=(optimizer, None),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _turn(self, number: int, trainer_seconds: float) -> None:
        """Ours, after the Trainer's steps of a turn; turn 0 compares losses and warms up."""
        if number == 0:
            self._check_losses()
        ours = [(LOOP, self.batches), (READY, iter(self.ready))]
        taken = {TRAINER: trainer_seconds}
        for name, batches in ours[:: 1 if number % 2 else -1]:
            run = partial(train_steps, self.engine, self.config, batches, self.steps)
            taken[name] = timed(run, self.device)
        if number:
            for name, seconds in taken.items():
                self.seconds[name].append(seconds)

    def _check_losses(self) -> None:
        """Make the steps that the Trainer has made; raises `UserError` where a loss differs by more than rounding."""
        ours = train_steps(self.engine, self.config, self.batches, self.steps)
        theirs = torch.stack(self.trainer.kept_losses).view(self.steps, -1).sum(dim=1).tolist()
        self.losses = {LOOP: ours, TRAINER: theirs}
        bound = _LARGEST_LOSS_DIFFERENCE[self.precision]
        for own, other in zip(ours, theirs, strict=True):
            if not abs(own - other) <= bound * abs(other):
                raise UserError(
                    f"the losses differ: {own:.7g} in the loop, {other:.7g} in the Trainer; so their speeds cannot be "
                    "compared, and one of the two is wrong: see tests/olmo_sparsity/training/test_task_training.py"
                )


def plain_config(config: Config) -> Config:
    """The same run with ids that need neither an embedding nor a head."""
    scheme = config.positions.scheme
    if scheme in COUPLED_SCHEMES:
        scheme = "contiguous" if config.positions.target_length is None else "pose"
    return replace(config, positions=replace(config.positions, scheme=scheme, rotate="ids"))


class _LossKeepingTrainer(Trainer):
    """Keeps the loss of every micro-batch, its part of the mean over the global batch."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.kept_losses: list[Tensor] = []

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        loss = super().training_step(*arguments, **options)
        self.kept_losses.append(loss)
        return loss


class _Turns(TrainerCallback):
    """Clocks every ``steps`` of the Trainer's steps, and calls ``turn`` with their number and seconds."""

    def __init__(self, steps: int, device: torch.device, turn: Callable[[int, float], None]):
        self.steps, self.turn = steps, turn
        self.clock, self.synchronise = clock_of(device), synchroniser(device)
        self.started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.started = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        turns, rest = divmod(state.global_step, self.steps)
        if rest == 0:
            self.synchronise()
            self.turn(turns - 1, self.clock() - self.started)
            self.started = self.clock()


class _Samples(torch.utils.data.Dataset):
    """The samples of batches as the Trainer wants them, one after the other."""

    def __init__(self, batches: list[Batch]):
        self.rows = [
            dict(zip(inputs, values, strict=True))
            for inputs in map(trainer_inputs, batches)
            for values in zip(*inputs.values(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


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
