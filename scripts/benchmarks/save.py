"""How long training stands still for a checkpoint: by rank 0, by all ranks, and by all ranks in the background."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.timing import Json, about_this_run, time_in_turn
from benchmarks.train import LEARNING_RATE, engine_of, with_random_tokens
from olmo_sparsity.checkpoint import TrainState, step_folder
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.build import open_training_data
from olmo_sparsity.new_checkpoint import NewCheckpoint, Share
from olmo_sparsity.training.build import build_saver
from olmo_sparsity.training.engine import Engine, export_state
from olmo_sparsity.training.loop import forward_backward
from olmo_sparsity.util.files import remove

BY_RANK_ZERO = "rank 0, all wait"
BY_ALL = "all ranks, all wait"
IN_BACKGROUND = "all ranks, in the background"
STEP = "a step"
STEP_BESIDE = "a step beside a save"
SHORT_STEPS = ("--model.max_sequence_length=64", "--device_train_microbatch_size=1", "--precision=null")
"""Of one window for each rank: long enough to see what a save does to a step, which is all they are for."""


def run(config: str, overrides: Sequence[str], rounds: int) -> Json:
    """Seconds that this rank's training stands still for a save, and the most memory of its process meanwhile."""
    about = about_this_run()
    with tempfile.TemporaryDirectory() as folder:
        batch = f"--global_train_batch_size={os.environ.get('WORLD_SIZE', '1')}"
        loaded = load_config(config, [*SHORT_STEPS, batch, *overrides])
        loaded = replace(loaded, compile=None, save_num_checkpoints_to_keep=1)
        of_run = with_random_tokens(loaded, Path(folder))
        engine = engine_of(of_run)
        saves = Saves(engine, replace(of_run, save_folder=engine.on_rank_zero(lambda: f"{folder}/run")))
        runners = {
            BY_RANK_ZERO: saves.by_rank_zero,
            BY_ALL: saves.by_all,
            IN_BACKGROUND: saves.in_background,
            STEP: saves.step,
        }
        seconds = time_in_turn({name: saves.watched(name, runners[name]) for name in runners}, rounds)
        engine.on_rank_zero(lambda: None)  # no rank removes its folder before the others are done
    seconds[STEP_BESIDE] = saves.steps_beside
    parameters = sum(weight.numel() for weight in engine.raw_model.parameters())
    rows: dict[str, Json] = {}
    for name, values in seconds.items():
        rows[name] = {"seconds": [statistics.median(values), min(values), max(values)]}
        if name in saves.peak_gb:
            rows[name]["peak_memory_gb"] = saves.peak_gb[name]
    for name in (BY_RANK_ZERO, BY_ALL, IN_BACKGROUND):
        ratios = [x / y for x, y in zip(seconds[name], seconds[BY_RANK_ZERO], strict=True)]
        rows[name]["to rank 0"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return {
        "benchmark": "save",
        "config": config,
        "parameters": parameters,
        "checkpoint_gb": 12e-9 * parameters,
        "processes": engine.world_size,
        "rank": engine.rank,
        **about,
        "results": rows,
        "seconds": seconds,
    }


class Saves:
    """The ways to save what an engine trains; each returns how many seconds it kept the training waiting."""

    def __init__(self, engine: Engine, config: Config):
        self.engine = engine
        self.config = config
        self.folder = Path(config.save_folder)
        self.saver = build_saver(config, engine, data_identity=None)
        self.batches = open_training_data(config, rank=engine.rank, world_size=engine.world_size).batches(0)
        self.number = 0
        self.steps_beside: list[float] = []
        self.peak_gb: dict[str, float | None] = {}
        self.step()  # the optimizer has a state

    def watched(self, name: str, save: Callable[[], float]) -> Callable[[], float]:
        """``save``, which also notes the most memory that the process has while it runs, of the last round."""

        def watch() -> float:
            self.number += 1
            self.engine.on_rank_zero(lambda: None)  # all ranks begin together
            forget_peak_memory()
            seconds = save()
            self.peak_gb[name] = peak_memory_gb()
            return seconds

        return watch

    def step(self) -> float:
        """Train one step."""
        started = time.perf_counter()
        forward_backward(self.engine, next(self.batches), None)
        self.engine.clip_gradients(self.config.max_grad_norm)
        self.engine.step(LEARNING_RATE)
        return time.perf_counter() - started

    def by_rank_zero(self) -> float:
        """Rank 0 writes the whole checkpoint, as it was done before there were shares (DDP alone)."""
        started = time.perf_counter()
        folder = step_folder(self.folder, self.number)
        named = dict(self.engine.raw_model.named_parameters()) if self.engine.is_rank_zero else {}
        weights = {name: parameter.detach().cpu() for name, parameter in named.items()}
        optimizer = export_state(self.engine.optimizer.optimizer, named)

        def write() -> None:
            checkpoint = NewCheckpoint.begin(folder)
            files = checkpoint.write(Share(weights, optimizer))
            checkpoint.finish(files, TrainState(self.number, 0), self.config, None)

        self.engine.on_rank_zero(write)
        seconds = time.perf_counter() - started
        self.engine.on_rank_zero(lambda: remove(folder))
        return seconds

    def by_all(self) -> float:
        """Every rank writes its share, and waits."""
        started = time.perf_counter()
        self.saver.save(self.number, finished=False)
        self.saver.finish()
        return time.perf_counter() - started

    def in_background(self) -> float:
        """Every rank writes its share and trains meanwhile: what waits is the copy, and putting it in its place."""
        started = time.perf_counter()
        self.saver.save(self.number, finished=False)
        seconds = time.perf_counter() - started
        while any(self.engine.any_rank(self.saver.is_writing)):
            self.steps_beside.append(self.step())
        started = time.perf_counter()
        self.saver.finish()
        return seconds + time.perf_counter() - started


def forget_peak_memory() -> None:
    """Begin to count the most memory anew, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif (switch := Path("/proc/self/clear_refs")).exists():
        switch.write_text("5")


def peak_memory_gb() -> float | None:
    """The most memory since then, 10^9 bytes, of tensors on a GPU or else of the process; None: not known."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024 / 1e9
