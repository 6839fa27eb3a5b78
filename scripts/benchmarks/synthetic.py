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
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks.timing import paired_ratio, summarise, time_in_turn
from benchmarks.train import LEARNING_RATE, WARM_UP_STEPS, Runner
from olmo_sparsity.batch import Batch
from olmo_sparsity.build import build_model
from olmo_sparsity.config import Config, TaskConfig, load_config
from olmo_sparsity.config_schema import PositionsConfig
from olmo_sparsity.data.task_data import TaskData
from olmo_sparsity.errors import UserError
from olmo_sparsity.export import quiet_transformers
from olmo_sparsity.neox import PositionedNeoX
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.provenance import provenance
from olmo_sparsity.tasks import TASKS, make_task
from olmo_sparsity.training.engine import Engine

LOOP, TRAINER = "loop", "transformers Trainer"
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
        comparison = StepComparison(config, steps, Path(folder))
        timed = comparison.measure(rounds)
    tasks = {
        name: generator_share(task_config, steps, rounds)
        for name, task_config in task_configs(config, config_path, overrides).items()
    }
    engine = comparison.engine
    return {
        "benchmark": "synthetic",
        "config": config_path,
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": engine.accelerator.mixed_precision,
        "clock": _clock(engine.device).__name__,
        "load_average_before": load,
        "commit": made["commit"],
        "command": made["command"],
        "rounds": rounds,
        "steps_per_timing": steps,
        "generators": tasks,
        "steps": timed,
    }


def _check(config: Config, path: str) -> None:
    if config.task.name is None:
        raise UserError(f"{path}: task.name: names no task; give a config of configs/synthetic")
    if config.model.family != "gpt_neox":
        raise UserError(
            f"{path}: model.family: {config.model.family} is not what the Trainer is given; set it to gpt_neox"
        )
    if config.global_train_batch_size % config.device_train_microbatch_size:
        raise UserError(
            f"{path}: device_train_microbatch_size: {config.device_train_microbatch_size} does not divide "
            f"global_train_batch_size {config.global_train_batch_size}, as the Trainer needs; give one that does"
        )


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
    """Seconds of making ``steps`` batches and of as many optimizer steps on batches that are there, in turn.

    A batch: samples, position ids and tensors, as the loop makes them without workers.
    """
    engine = Engine(config, build_model(config))
    batches = _inline_batches(config)
    ready = [next(batches) for _ in range(steps)]

    def generate() -> None:
        for _ in range(steps):
            next(batches)

    def train() -> None:
        _train(engine, config, iter(ready), steps)

    seconds = _time_in_turn({"generate": generate, "step": train}, rounds, engine.device)
    share = paired_ratio(seconds["generate"], seconds["step"])
    samples = config.global_train_batch_size * steps
    return {
        "scheme": config.positions.scheme,
        "batch": config.global_train_batch_size,
        "window": config.model.max_sequence_length,
        "parameters": sum(parameter.numel() for parameter in engine.raw_model.parameters()),
        "samples_per_second": samples / statistics.median(seconds["generate"]),
        "steps_per_second": steps / statistics.median(seconds["step"]),
        "share_of_step": share["ratio"],
        "share_low": share["ratio_low"],
        "share_high": share["ratio_high"],
        "within_bound": share["ratio"] < LARGEST_SHARE,
        "seconds": seconds,
    }


def _inline_batches(config: Config) -> Iterator[Batch]:
    """Batches of the task, made where they are asked for: workers would make them while something else is timed."""
    return TaskData(replace(config, data=replace(config.data, num_workers=0))).batches(0)


def _train(engine: Engine, config: Config, batches: Iterator[Batch], steps: int) -> list[float]:
    """Optimizer steps as the loop makes them; the loss of each, in nats per response token."""
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(next(batches))["loss_nats"])
        engine.step(LEARNING_RATE, config.max_grad_norm)
    return losses


def _time_in_turn(runners: dict[str, Runner], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each runner in each round, by the clock of the device."""
    clock, synchronise = _clock(device), _synchroniser(device)

    def timed(run: Runner) -> float:
        started = clock()
        own = run()
        synchronise()
        return clock() - started if own is None else own

    return time_in_turn(
        {name: partial(timed, run) for name, run in runners.items()}, rounds, synchronise, warm_up=1
    )


def _clock(device: torch.device) -> Callable[[], float]:
    """The processor's time where one thread computes all: the same as the wall's, without what other programs take."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def _synchroniser(device: torch.device) -> Callable[[], None]:
    """What waits until the device has done what it was given."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


# --- our steps against the Trainer's ---


class StepComparison:
    """The same model, batches and optimizer in our loop and in transformers' Trainer.

    The Trainer knows one loss and no table of ids: ids of coupled schemes give way to PoSE, or to contiguous ones where
    the config has no target length. Our batches are made while the clock runs, the Trainer's are there.
    """

    def __init__(self, config: Config, steps: int, folder: Path):
        self.config, self.steps = plain_config(config), steps
        self.engine = Engine(self.config, build_model(self.config))
        self.batches = _inline_batches(self.config)
        upcoming = _inline_batches(self.config)
        # One more than it trains on: it reads a batch ahead, and the last step is to be like the others.
        first = [next(upcoming) for _ in range(WARM_UP_STEPS + steps + 1)]
        self.trainer = ClockedTrainer(self.config, self.engine, first, folder)

    def measure(self, rounds: int) -> Json:
        """Steps per second of both, after the losses were found to be the same."""
        losses = self.check_losses()
        runners: dict[str, Runner] = {TRAINER: lambda: self.trainer.run()[0], LOOP: self._run_loop}
        seconds = _time_in_turn(runners, rounds, self.engine.device)
        about = {"task": self.config.task.name, "scheme": self.config.positions.scheme, "loss_nats": losses}
        timed = summarise(seconds, baseline=TRAINER, amount=self.steps, unit="steps/s")
        return {**about, **timed, "seconds": seconds}

    def check_losses(self) -> dict[str, float]:
        """Mean loss of both over the same first steps, from the same weights.

        Raises `UserError` where they differ by more than rounding.
        """
        ours = _train(self.engine, self.config, self.batches, WARM_UP_STEPS + self.steps)
        _, theirs = self.trainer.run()
        losses = {LOOP: statistics.fmean(ours), TRAINER: theirs}
        bound = _LARGEST_LOSS_DIFFERENCE[self.engine.accelerator.mixed_precision]
        if not abs(losses[LOOP] - theirs) <= bound * abs(theirs):
            raise UserError(
                f"the losses differ: {losses[LOOP]:.7g} in the loop, {theirs:.7g} in the Trainer, so that speeds would "
                "not be compared; set every dropout to 0 and optimizer.name to adamw"
            )
        return losses

    def _run_loop(self) -> float:
        """Seconds of the steps after the first, as of the Trainer: the first finds caches as the other left them."""
        clock, synchronise = _clock(self.engine.device), _synchroniser(self.engine.device)
        _train(self.engine, self.config, self.batches, WARM_UP_STEPS)
        synchronise()
        started = clock()
        _train(self.engine, self.config, self.batches, self.steps)
        synchronise()
        return clock() - started


def plain_config(config: Config) -> Config:
    """The same run with ids that need neither an embedding nor a head."""
    scheme = config.positions.scheme
    if scheme in COUPLED_SCHEMES:
        scheme = "contiguous" if config.positions.target_length is None else "pose"
    return replace(config, positions=replace(config.positions, scheme=scheme, rotate="ids"))


class ClockedTrainer:
    """transformers' Trainer on its own GPT-NeoX, with the weights, batches and AdamW of the engine.

    It neither logs nor saves while the clock runs, and clips as the engine does.
    """

    def __init__(self, config: Config, engine: Engine, batches: list[Batch], folder: Path):
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        # Asked for first: the Trainer's arguments reset what every Accelerator of the process reads, until it is made.
        device, precision = engine.device, engine.accelerator.mixed_precision
        positioned = build_model(config)
        assert isinstance(positioned, PositionedNeoX), "the config was checked, and its ids are plain"
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=config.device_train_microbatch_size,
            gradient_accumulation_steps=config.global_train_batch_size // config.device_train_microbatch_size,
            max_steps=len(batches) - 1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=config.max_grad_norm or 0.0,
            train_sampling_strategy="sequential",
            bf16=precision == "bf16",
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type == "cuda",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        read_clock, synchronise, times = _clock(device), _synchroniser(device), []

        class Clock(TrainerCallback):
            def on_step_end(clock, args: Any, state: Any, control: Any, **more: Any) -> None:
                if state.global_step in (WARM_UP_STEPS, args.max_steps):
                    synchronise()
                    times.append(read_clock())

        optimizer = torch.optim.AdamW(
            get_param_groups(config, positioned),
            lr=LEARNING_RATE,
            betas=tuple(config.optimizer.betas),
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )
        self.trainer = Trainer(
            model=positioned.model,
            args=arguments,
            train_dataset=_Samples(batches),
            callbacks=[Clock()],
            optimizers=(optimizer, None),
        )
        self.trainer.remove_callback(PrinterCallback)
        self._times: list[float] = times

    def run(self) -> tuple[float, float]:
        """Train on all but the last batch: seconds of the steps after the first, and the mean loss of all in nats."""
        self._times.clear()
        with quiet_transformers():
            output = self.trainer.train()
        return self._times[1] - self._times[0], output.training_loss


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


# --- what is printed ---


def describe_run(result: Json) -> str:
    """One line: config, machine, commit."""
    return (
        f"{result['config']}; {result['device']}, {result['precision']}, threads: {result['threads']}, "
        f"{result['clock']}, load average before {result['load_average_before']:.1f}; medians of {result['rounds']} "
        f"rounds of {result['steps_per_timing']} steps; commit {result['commit']}"
    )


def synthetic_tables(result: Json) -> list[Table]:
    """A table for each part."""
    return [_generator_table(result["generators"]), _step_table(result["steps"])]


def _generator_table(tasks: Json) -> Table:
    bound = f"{100 * LARGEST_SHARE:.0f}"
    title = f"making a batch, in % of a training step [lowest, highest]; it is to be below {bound}"
    table = _table(title, ["task", "ids"], ["batch", "samples/s", "steps/s", "% of a step"])
    for name, row in tasks.items():
        share, low, high = (100 * row[key] for key in ("share_of_step", "share_low", "share_high"))
        rates = [f"{row['samples_per_second']:,.0f}", f"{row['steps_per_second']:,.3g}"]
        shown = f"{share:.1f} [{low:.1f}, {high:.1f}]{'' if row['within_bound'] else ' too slow'}"
        table.add_row(name, row["scheme"], str(row["batch"]), *rates, shown)
    return table


def _step_table(steps: Json) -> Table:
    title = (
        f"{steps['task']}, {steps['scheme']} ids, the same losses: × the Trainer's speed [lowest, highest]"
    )
    table = _table(title, [""], [steps["unit"], "× Trainer", "loss [nats]"])
    for name, row in steps["results"].items():
        ratio = f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
        table.add_row(name, f"{row['rate']:,.3g}", ratio, f"{steps['loss_nats'][name]:.6f}")
    return table


def _table(title: str, names: list[str], numbers: list[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
