"""How fast a GPU trains and measures influence, beside its own matrix product; and ZeRO 2 against the plain loop."""

from __future__ import annotations

import gc
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import influence
from benchmarks.gpu_study import (
    TINY_SHAPE,
    WINDOWS,
    compile_overrides,
    corpus_of,
    part_numbers,
    token_file_overrides,
)
from benchmarks.settings import GpuSettings, InfluenceSettings
from benchmarks.timing import Json, time_beside_matrix_product
from benchmarks.train import use_cpu_without_gpu
from benchmarks.trainer import train_steps
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.windows import TrainingData
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.training.monitor import peak_memory_gb
from olmo_sparsity.training.zero import ZeroEngine
from olmo_sparsity.util.errors import UserError

GOALS = {"150m": 0.40, "1b": 0.45}
"""Model FLOPs utilisation that is aimed at, in bf16."""
COMPARED_STEPS, WARM_UP_STEPS, TIMED_STEPS, ROUNDS = 4, 2, 5, 3
LARGER = 4
"""Micro-batches are tried from this multiple of the YAML's down, and only then its activation checkpointing."""
ZERO_BOUND_NATS = {"no": 1e-4, "bf16": 2e-2}
"""Largest differences of a loss, by precision, that are taken for rounding [ours]."""
_MATRIX = 8192


def measure_training(settings: GpuSettings, size: str, *, compiled: bool) -> Json:
    """Tokens per second of optimizer steps of configs/pose-c4-SIZE.yaml, and the share of the device's peak."""
    overrides = compile_overrides(settings, compiled)
    for attempt in _attempts(settings, size):
        with suppress(torch.OutOfMemoryError):
            result = _speed(settings, size, [*overrides, *attempt])
            return {**result, "found": _in_words(result)}
        gc.collect()
        torch.cuda.empty_cache()
    raise UserError("the device has no memory for a single micro-batch; take a smaller model")


def _attempts(settings: GpuSettings, size: str) -> list[list[str]]:
    """Overrides of what decides the memory, the largest first."""
    if settings.tiny:
        return [["--device_train_microbatch_size=2", "--activation_checkpointing=null"]]
    shipped = load_config(_config(size), warn=False).device_train_microbatch_size
    sizes = [min(WINDOWS, shipped * times) for times in (LARGER, 2, 1)]
    attempts = [
        [f"--device_train_microbatch_size={each}", "--activation_checkpointing=null"] for each in sizes
    ]
    return [*attempts, [f"--device_train_microbatch_size={shipped}"]]


def _config(size: str) -> str:
    return f"configs/pose-c4-{size}.yaml"


def _speed(settings: GpuSettings, size: str, overrides: list[str]) -> Json:
    use_cpu_without_gpu()
    with tempfile.TemporaryDirectory() as folder:
        given = [
            *token_file_overrides(corpus_of(settings)),
            *(f"--global_train_batch_size={WINDOWS}", "--precision=amp_bf16", "--evaluation.interval=null"),
            *(("--global_train_batch_size=4", "--precision=fp32", *TINY_SHAPE) if settings.tiny else ()),
            *(*overrides, f"--save_folder={folder}/run"),
        ]
        config = load_config(_config(size), given, warn=False)
        engine = (Engine if config.deepspeed.config is None else ZeroEngine)(config, build_model(config))
        batches = TrainingData(config).batches(0)
        losses = train_steps(engine, config, batches, COMPARED_STEPS)
        steps = 1 if settings.tiny else TIMED_STEPS
        train_steps(engine, config, batches, WARM_UP_STEPS)
        timed, product = time_beside_matrix_product(
            {"loop": lambda: train_steps(engine, config, batches, steps)},
            ROUNDS,
            engine.device,
            torch.float32 if settings.tiny else torch.bfloat16,
            warm_up=1,
            size=64 if settings.tiny else _MATRIX,
        )
    seconds = timed["loop"]
    tokens = steps * config.tokens_per_step
    rate = tokens / statistics.median(seconds)
    return {
        **_shares(config, engine, size, rate, product),
        "tokens_per_second": rate,
        "tokens_per_second_low": tokens / max(seconds),
        "tokens_per_second_high": tokens / min(seconds),
        "micro_batch": config.device_train_microbatch_size,
        "checkpoints_activations": config.activation_checkpointing is not None,
        "precision": config.precision,
        "peak_memory_gb": peak_memory_gb(engine.device),
        "losses_nats": losses,
    }


def _shares(config: Config, engine: Engine, size: str, rate: float, product: float) -> Json:
    """Model FLOP/s as a share of the data sheet's peak, and of what the device's own matrix product reaches."""
    flops, peak = flops_per_token(config) * rate, peak_flops(config, engine.device)
    return {
        "parameters": sum(each.numel() for each in engine.raw_model.parameters()),
        "mfu": flops / peak if peak else None,
        "mfu_goal": GOALS.get(size),
        "matrix_product_tflops": product / 1e12,
        "share_of_matrix_product": flops / product,
    }


def _in_words(result: Json) -> str:
    mfu, goal = result["mfu"], result["mfu_goal"]
    parts = [f"{result['tokens_per_second']:,.0f} tokens/s"]
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}" + (f" (goal {goal:.0%})" if goal else ""))
    elif goal:
        parts.append(f"MFU unknown (goal {goal:.0%})")
    share, product = result["share_of_matrix_product"], result["matrix_product_tflops"]
    parts.append(f"{share:.0%} of the matrix product's {product:,.3g} TFLOP/s")
    return ", ".join([*parts, f"micro-batch {result['micro_batch']}, {result['peak_memory_gb']:.0f} GB"])


def measure_zero(settings: GpuSettings) -> Json:
    """The 150M model under ZeRO 2, one process: its first losses against the plain loop's, and its speed."""
    plain = part_numbers(settings, "train-150m-eager")
    attempt = [
        f"--device_train_microbatch_size={plain['micro_batch']}",
        *([] if plain["checkpoints_activations"] else ["--activation_checkpointing=null"]),
        "--deepspeed.config=configs/deepspeed/zero2.json",
    ]
    result = _speed(settings, "150m", attempt)
    pairs = zip(plain["losses_nats"], result["losses_nats"], strict=True)
    apart = max(abs(first - second) for first, second in pairs)
    found = f"losses within {apart:.1e} nats of the plain loop's; {_in_words(result)}"
    bound = ZERO_BOUND_NATS["no" if settings.tiny else "bf16"]
    return {**result, "found": found, "failed": not apart <= bound, "largest_loss_difference_nats": apart}


def measure_targets(settings: GpuSettings) -> Json:
    """Influence targets per second, 150M with random weights: a plain loop, the engine, and blocks of 32."""
    shape: dict[str, Any] = {"targets_per_block": 32, "repeats": 3}
    if settings.tiny:
        overrides = (*TINY_SHAPE, "--evaluation.interval=null")
        shape = {"n_long": 16, "n_short": 4, "targets_per_block": 4, "repeats": 1, "overrides": overrides}
    given = InfluenceSettings(out=Path(settings.out, "targets"), config=_config("150m"), **shape)
    blocks = influence.run(given)["blocks"]
    rates = [
        f"{selector}: "
        + ", ".join(f"{row['rate']:,.3g}/s {label}" for label, row in timed["results"].items())
        for selector, timed in blocks.items()
        if isinstance(timed, dict)
    ]
    return {"found": f"targets, {'; '.join(rates)}", "blocks": blocks}
