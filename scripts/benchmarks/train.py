"""Optimizer steps of our loop, and of a plain loop and transformers' Trainer on the same shape."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from olmo.model import OLMo
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.timing import PRODUCT, Json, about_this_run, matrix_product, rates, synchronise, time_in_turn
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import CompilerConfig
from olmo_sparsity.data.build import open_training_data
from olmo_sparsity.export import to_transformers
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.build import build_engine, prepare_model
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.training.loop import forward_backward
from olmo_sparsity.util.errors import UserError

OLMO, LOOP, TRAINER, COMPILED = "olmo", "loop", "transformers Trainer", ", compiled"
LEARNING_RATE = 1e-5  # of every side that is compared
Runner = Callable[[], object]


def run(config: str, overrides: Sequence[str], rounds: int, steps: int) -> Json:
    """Tokens per second of each, its ratios, its MFU, and its share of the machine's own matrix product."""
    about = about_this_run()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns on standard output
    with tempfile.TemporaryDirectory() as folder:
        of_run = with_random_tokens(load_config(config, overrides), Path(folder))
        compiler = replace(of_run.compile or CompilerConfig(), from_steps=0)
        torch._dynamo.config.recompile_limit = 1000  # the Trainer compiles anew whenever it is called
        loop = engine_of(replace(of_run, compile=None))
        compiled = engine_of(replace(of_run, compile=compiler))
        is_bf16 = loop.settings.precision == "bf16"
        of_trainer: Json = {"torch_compile_backend": compiler.backend, "torch_compile_mode": compiler.mode}
        multiply, operations = matrix_product(loop.device, torch.bfloat16 if is_bf16 else torch.float32)
        runners: dict[str, Runner] = {
            OLMO: plain_steps(of_run, loop.device, is_bf16, steps),
            LOOP: loop_steps(loop, of_run, steps),
            LOOP + COMPILED: loop_steps(compiled, of_run, steps),
            TRAINER: trainer_steps(of_run, loop.device, is_bf16, steps),
            TRAINER + COMPILED: trainer_steps(of_run, loop.device, is_bf16, steps, **of_trainer),
            PRODUCT: multiply,
        }
        seconds = time_in_turn(runners, rounds, warm_up=2)
        if not compiled.is_compiled:
            raise UserError("the loop was not compiled, as the log says; fix that")
    flops, peak = flops_per_token(of_run), peak_flops(of_run, loop.device)
    rows = rates(seconds, steps * of_run.tokens_per_step, (OLMO, TRAINER, TRAINER + COMPILED))
    product = operations / statistics.median(seconds[PRODUCT])
    del rows[PRODUCT]
    for row in rows.values():
        row["mfu"] = row["rate"] * flops / peak if peak else None
        row["share_of_matrix_product"] = row["rate"] * flops / product
    return {
        "benchmark": "train",
        "config": config,
        "precision": "bf16" if is_bf16 else "fp32",
        "parameters": sum(weight.numel() for weight in loop.raw_model.parameters()),
        "batch": [of_run.global_train_batch_size, of_run.model.max_sequence_length],
        "unit": "tokens/s",
        "matrix_product_tflops": product / 1e12,
        **about,
        "results": rows,
        "seconds": seconds,
    }


def with_random_tokens(config: Config, folder: Path) -> Config:
    """The same config over a file of random tokens, so that a benchmark needs no corpus."""
    dtype = "uint16" if config.model.vocab_size <= 2**16 else "uint32"
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 64 * config.tokens_per_step)
    tokens.astype(dtype).tofile(folder / "tokens.npy")
    data = replace(config.data, paths=[str(folder / "tokens.npy")], memmap_dtype=dtype, datasets=None)
    corpus = replace(config.corpus, path=None)
    return replace(config, data=data, corpus=corpus, save_folder=str(folder / "run"))


def engine_of(config: Config) -> Engine:
    """The engine of a run, its model prepared."""
    engine = build_engine(config)
    prepare_model(engine, config, build_model(config))
    return engine


def loop_steps(engine: Engine, config: Config, steps: int) -> Runner:
    """Optimizer steps as this project's loop makes them, with its data."""
    batches = open_training_data(config).batches(0)

    def run() -> None:
        for _ in range(steps):
            forward_backward(engine, next(batches), None)
            engine.clip_gradients(config.max_grad_norm)
            engine.step(LEARNING_RATE)

    return run


def plain_steps(config: Config, device: torch.device, is_bf16: bool, steps: int) -> Runner:
    """OLMo from its own wheel: forward, backward, clip, step, as short as PyTorch allows, with fused AdamW."""
    model = OLMo(replace(config.model, init_device="cpu"))
    model.load_state_dict(build_model(config).state_dict())
    model.to(device)
    decay = config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=decay, fused=True)
    parts = next(open_training_data(config).batches(0)).to(device).split(config.device_train_microbatch_size)

    def run() -> None:
        for _ in range(steps):
            for part in parts:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
                    logits = model(part.input_ids).logits[:, :-1].flatten(0, 1).float()
                    loss = F.cross_entropy(logits, part.labels[:, :-1].flatten()) / len(parts)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return run


def trainer_steps(config: Config, device: torch.device, is_bf16: bool, steps: int, **compiler: Any) -> Runner:
    """transformers' Trainer on its own model of this shape: a step that warms up, and ``steps`` that are timed.

    What the Trainer does before its steps is not counted. ``compiler``: the Trainer's arguments, where it compiles.
    """
    built: Any = build_model(config)
    batch = config.global_train_batch_size
    size = min(config.device_train_microbatch_size, batch)
    if batch % size:
        raise UserError(f"device_train_microbatch_size: {size} does not divide {batch}; give one that does")
    windows = next(open_training_data(config).batches(0)).input_ids
    clock = _Clock()
    trainer = Trainer(
        model=to_transformers(built, config),
        args=TrainingArguments(
            output_dir=config.save_folder,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=batch // size,
            max_steps=1 + steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.max_grad_norm or 0.0,
            bf16=is_bf16,
            use_cpu=device.type == "cpu",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **compiler,
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in windows] * (steps + 2),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)

    def run() -> float:
        trainer.train()
        return clock.seconds

    return run


class _Clock(TrainerCallback):
    """Seconds from the end of the Trainer's first step to its end."""

    started = seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step in (1, args.max_steps):
            synchronise()
            now = time.perf_counter()
            self.started, self.seconds = now, now - self.started
