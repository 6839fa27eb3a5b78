"""Optimizer steps of our loop, and of a plain loop and transformers' Trainer on the same shape."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from olmo.config import ModelConfig
from olmo.model import OLMo
from olmo.optim import get_param_groups
from torch import Tensor, nn

from benchmarks.loss_memory import measure_loss_memory
from benchmarks.settings import TrainSettings
from benchmarks.timing import (
    Json,
    about_this_run,
    chosen_device,
    paired_ratio,
    summarise,
    time_beside_matrix_product,
)
from benchmarks.trainer import LEARNING_RATE, TimedTrainer, train_steps
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import CompilerConfig
from olmo_sparsity.corpus.tokens import dtype_name
from olmo_sparsity.data.windows import TrainingData
from olmo_sparsity.export import to_transformers
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.util.errors import UserError

OLMO, LOOP, TRAINER, COMPILED = "olmo", "loop", "transformers Trainer", ", compiled"
Runner = Callable[[], object]


def run(settings: TrainSettings) -> Json:
    """Tokens per second of each, its share of the machine's own matrix product, and the memory of the loss.

    ``loop_mfu`` is the compiled loop's share of the device's peak, where that is known.
    """
    made = about_this_run(chosen_device())
    with tempfile.TemporaryDirectory() as folder:
        benchmark = TrainBenchmark(settings, Path(folder))
        dtype = torch.bfloat16 if benchmark.precision == "bf16" else torch.float32
        runners = benchmark.runners()
        seconds, product_rate = time_beside_matrix_product(runners, settings.rounds, benchmark.device, dtype)
        if not benchmark.compiled_engine.is_compiled:
            raise UserError("compiling failed, as the line above says; mend that to measure what is compiled")
    rates = summarise(
        seconds, baseline=OLMO, amount=settings.steps * benchmark.config.tokens_per_step, unit="tokens/s"
    )
    about = benchmark.about()
    for name, row in rates["results"].items():
        row["share_of_matrix_product"] = row["rate"] * about["flops_per_token"] / product_rate
        for other in (TRAINER, TRAINER + COMPILED):
            row[f"to {other}"] = paired_ratio(seconds[other], seconds[name])
    flops_per_second = rates["results"][LOOP + COMPILED]["rate"] * about["flops_per_token"]
    mfu = flops_per_second / about["peak_flops"] if about["peak_flops"] else None
    return {
        "benchmark": "train",
        "config": settings.config,
        **about,
        "loop_mfu": mfu,
        "matrix_product_tflops": product_rate / 1e12,
        **made,
        **rates,
        "seconds": seconds,
        "loss_memory": measure_loss_memory(benchmark.device.type),
    }


def use_cpu_without_gpu() -> None:
    """Keep DeepSpeed from warning on standard output where there is no GPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


class TrainBenchmark:
    """Everything that is timed, on one shape, batch and precision; each call makes ``steps`` optimizer steps."""

    def __init__(self, settings: TrainSettings, folder: Path):
        use_cpu_without_gpu()
        self.config = with_random_tokens(load_config(settings.config, settings.overrides), folder)
        self.steps, self.folder = settings.steps, folder
        eager = replace(self.config, compile=None)
        always = replace(self.config.compile or CompilerConfig(), from_steps=0)
        self.engine = Engine(eager, _olmo_model(eager))
        self.compiled_engine = Engine(replace(self.config, compile=always), _olmo_model(self.config))
        torch._dynamo.config.recompile_limit = 1000  # the Trainer compiles anew whenever it is called
        self.device = self.engine.device
        self.precision = self.engine.accelerator.mixed_precision
        self.batch = next(TrainingData(self.config).batches(0)).to(self.device)

    def runners(self) -> dict[str, Runner]:
        """What is timed, by name."""
        ids = {"input_ids": self.batch.input_ids}
        ids_and_positions = {**ids, "position_ids": self.batch.position_ids}

        def loop(engine: Engine) -> Runner:
            batches = TrainingData(self.config).batches(0)
            return lambda: train_steps(engine, self.config, batches, self.steps)

        return {
            OLMO: self._plain_steps(_unmodified_olmo(self.config), ids),
            "position_ids": self._plain_steps(_olmo_model(self.config), ids_and_positions),
            LOOP: loop(self.engine),
            LOOP + COMPILED: loop(self.compiled_engine),
            TRAINER: self._trainer_steps(compiled=False),
            TRAINER + COMPILED: self._trainer_steps(compiled=True),
        }

    def about(self) -> dict[str, Any]:
        """Precision and shape."""
        config = self.config
        return {
            "precision": self.precision,
            "parameters": sum(parameter.numel() for parameter in self.engine.raw_model.parameters()),
            "window": config.model.max_sequence_length,
            "batch": config.global_train_batch_size,
            "flops_per_token": flops_per_token(config),
            "peak_flops": peak_flops(config, self.device),
        }

    def _plain_steps(self, model: nn.Module, inputs: dict[str, Tensor]) -> Runner:
        """Forward, backward, clip, step, as short as PyTorch allows; fused AdamW, micro-batches of the config."""
        config, size, labels = self.config, self.config.device_train_microbatch_size, self.batch.labels
        model = model.to(self.device)
        groups = get_param_groups(config, model)
        optimizer = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, weight_decay=config.optimizer.weight_decay, fused=True
        )
        starts = range(0, len(labels), size)

        def run() -> None:
            for _ in range(self.steps):
                for i in starts:
                    part = {name: value[i : i + size] for name, value in inputs.items()}
                    with torch.autocast(
                        self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"
                    ):
                        logits = model(**part).logits
                        losses = logits[:, :-1].flatten(0, 1).float(), labels[i : i + size, :-1].flatten()
                        loss = F.cross_entropy(*losses) / len(starts)
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return run

    def _trainer_steps(self, compiled: bool) -> Runner:
        """transformers' Trainer on its own model of this shape."""
        config = self.config
        model = to_transformers(_olmo_model(config), config)
        matrices, vectors = (
            [p for p in model.parameters() if (p.dim() >= 2) is wide] for wide in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": config.optimizer.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        dataset = TrainingData(config).dataset
        read = min(
            len(dataset), (self.steps + 2) * config.global_train_batch_size
        )  # warm-up, and a batch ahead
        windows = [torch.from_numpy(dataset[index]["input_ids"]) for index in range(read)]
        rows = [{"input_ids": ids, "labels": ids} for ids in windows]
        return TimedTrainer(
            model, groups, rows, self.engine, config, self.steps, self.folder, compiled=compiled
        )


def _olmo_model(config: Config) -> PositionedOLMo:
    model = build_model(config)
    if not isinstance(model, PositionedOLMo):
        raise UserError(f"model.family {config.model.family}: give a config of an OLMo model")
    return model


def with_random_tokens(config: Config, folder: Path) -> Config:
    """The same config over a file of random tokens, so that a benchmark needs no corpus."""
    count = 64 * config.tokens_per_step
    dtype = dtype_name(config.model.vocab_size)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, count).astype(dtype)
    tokens.tofile(folder / "tokens.npy")
    data = replace(config.data, paths=[str(folder / "tokens.npy")], memmap_dtype=dtype, datasets=None)
    corpus = replace(config.corpus, path=None)
    return replace(config, data=data, corpus=corpus, save_folder=str(folder / "run"))


def _unmodified_olmo(config: Config) -> OLMo:
    """OLMo from its own wheel, same shape and weights."""
    values = {field.name: getattr(config.model, field.name) for field in fields(ModelConfig)}
    model = OLMo(ModelConfig(**{**values, "init_device": "cpu"}))
    model.load_state_dict(_olmo_model(config).state_dict())
    return model
