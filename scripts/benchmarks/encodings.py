"""Position encodings and attentions side by side: optimizer steps of our loop in turn, and the memory of a step."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from analysis.model.memory import MemoryGrowth
from benchmarks.settings import EncodingsSettings
from benchmarks.timing import (
    Json,
    about_this_run,
    chosen_device,
    in_own_process,
    summarise,
    time_beside_matrix_product,
)
from benchmarks.train import use_cpu_without_gpu, with_random_tokens
from benchmarks.trainer import LEARNING_RATE, train_steps
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.batches import open_training_data
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.errors import UserError


def run(settings: EncodingsSettings) -> Json:
    """Tokens per second of each config, its ratio to the first, and the bytes that its steps take beyond the weights.

    All are eager: attentions whose kernels are many would else be compared by what a compiler makes of them. Raises
    `UserError` where windows or batches differ.
    """
    use_cpu_without_gpu()
    os.environ.setdefault(
        "MALLOC_MMAP_THRESHOLD_", "65536"
    )  # of processes begun from here on: see `_step_bytes`
    made = about_this_run(chosen_device())
    with tempfile.TemporaryDirectory() as folder:
        configs = _configs(settings, Path(folder))
        first = next(iter(configs.values()))
        tokens = settings.steps * first.tokens_per_step
        engines = {name: Engine(config, build_model(config)) for name, config in configs.items()}
        baseline = engines[settings.configs[0]]
        device, precision = baseline.device, baseline.accelerator.mixed_precision
        runners = {
            name: partial(
                train_steps,
                engine,
                configs[name],
                open_training_data(configs[name]).batches(0),
                settings.steps,
            )
            for name, engine in engines.items()
        }
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        seconds, product_rate = time_beside_matrix_product(runners, settings.rounds, device, dtype)
        rates = summarise(seconds, baseline=settings.configs[0], amount=tokens, unit="tokens/s")
        for name, row in rates["results"].items():
            row["step_bytes"] = in_own_process(_step_bytes, configs[name])
    return {
        "benchmark": "encodings",
        "precision": precision,
        "window": first.model.max_sequence_length,
        "batch": first.global_train_batch_size,
        "matrix_product_tflops": product_rate / 1e12,
        **made,
        **rates,
        "seconds": seconds,
    }


def _configs(settings: EncodingsSettings, folder: Path) -> dict[str, Config]:
    found = {}
    for number, path in enumerate(settings.configs):
        own = folder / str(number)
        own.mkdir()
        config = replace(load_config(path, settings.overrides), compile=None, initial_weights=None)
        found[path] = with_random_tokens(config, own)
    shapes = {(each.model.max_sequence_length, each.global_train_batch_size) for each in found.values()}
    if len(shapes) > 1:
        raise UserError(
            f"the configs have different windows and batches, {sorted(shapes)}; give those of one"
        )
    return found


def _step_bytes(config: Config) -> int | None:
    """Peak bytes of a step beyond those in use before it; malloc has returned what the step before freed."""
    use_cpu_without_gpu()
    engine, batches = Engine(config, build_model(config)), open_training_data(config).batches(0)
    train_steps(engine, config, batches, 1)
    memory = MemoryGrowth(engine.device)
    engine.forward_backward(next(batches))
    engine.clip_gradients(config.max_grad_norm)
    engine.step(LEARNING_RATE)
    return memory.growth_bytes()
