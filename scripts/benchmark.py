"""Performance as ratios: everything that is compared is timed in turn, in one run, on the same machine.

examples:
  python scripts/benchmark.py train                          the demo's shape
  python scripts/benchmark.py train --config configs/base.yaml --rounds 5 --json

`train` times one optimizer step of (a) unmodified OLMo with a plain loop, (b) our model with position ids in the same
plain loop, and (c) this project's whole loop, data loading and PoSE included. Ratios are throughput over that of (a),
the median over rounds; a ratio above 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from olmo_sparsity.errors import run_script


def main() -> None:
    """Parse arguments, run one benchmark, print its table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(BENCHMARKS), help="what to measure")
    parser.add_argument(
        "--config", default="configs/demo.yaml", help="its shape, batch and precision (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="how often each is timed (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps per timing (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments, overrides = parser.parse_known_args()
    result = BENCHMARKS[arguments.name](arguments.config, overrides, arguments.rounds, arguments.steps)
    if arguments.json:
        print(json.dumps(result))
    else:
        print_table(result)


def benchmark_train(config_path: str, overrides: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Tokens per second of a training step, ours against unmodified OLMo."""
    from olmo_sparsity.config import load_config
    from olmo_sparsity.model import build_model
    from olmo_sparsity.training.engine import Engine

    config = load_config(config_path, overrides)
    config = replace(config, compile=None)  # both sides eager
    with tempfile.TemporaryDirectory() as folder:
        config = _with_random_tokens(config, Path(folder))
        engine = Engine(config, build_model(config))
        device, precision = engine.device, engine.accelerator.mixed_precision
        batch = _first_batch(config).to(device)
        olmo = _unmodified_olmo(config).to(device)
        positioned = build_model(config).to(device)
        runners = {
            "olmo": _plain_step(config, olmo, precision, batch.input_ids, batch.labels, {}),
            "position_ids": _plain_step(
                config,
                positioned,
                precision,
                batch.input_ids,
                batch.labels,
                {"position_ids": batch.position_ids},
            ),
            "loop": _loop_step(config, engine),
        }
        seconds = time_in_turn(runners, rounds, steps, _synchronise(device))
    tokens = steps * config.global_train_batch_size * config.model.max_sequence_length
    return summarise(seconds, baseline="olmo", amount=tokens, unit="tokens/s") | {
        "benchmark": "train",
        "device": str(device),
        "precision": precision,
        "parameters": sum(parameter.numel() for parameter in olmo.parameters()),
        "window": config.model.max_sequence_length,
        "batch": config.global_train_batch_size,
    }


def _with_random_tokens(config: Any, folder: Path) -> Any:
    """The same config over a file of random tokens, so that a benchmark needs no corpus."""
    import numpy as np

    count = 64 * config.global_train_batch_size * config.model.max_sequence_length
    dtype = np.uint16 if config.model.vocab_size <= 1 << 16 else np.uint32
    np.random.default_rng(0).integers(0, config.model.vocab_size, count).astype(dtype).tofile(
        folder / "tokens.npy"
    )
    data = replace(
        config.data, paths=[str(folder / "tokens.npy")], memmap_dtype=dtype.__name__, datasets=None
    )
    return replace(
        config, data=data, corpus=replace(config.corpus, path=None), save_folder=str(folder / "run")
    )


def _first_batch(config: Any) -> Any:
    from olmo_sparsity.data.windows import TrainingData

    return next(TrainingData(config).batches(0))


def _unmodified_olmo(config: Any) -> Any:
    """OLMo from its own wheel, same shape and weights."""
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    from olmo_sparsity.model import build_model

    values = {name: value for name, value in vars(config.model).items() if name != "nope"}
    model = OLMo(ModelConfig(**{**values, "init_device": "cpu"}))
    model.load_state_dict(build_model(config).state_dict())
    return model


def _plain_step(
    config: Any, model: Any, precision: str, ids: Any, labels: Any, options: dict
) -> Callable[[], None]:
    """Forward, backward, clip, step, as short as PyTorch allows; fused AdamW, micro-batches of the config."""
    import torch
    import torch.nn.functional as F
    from olmo.optim import get_param_groups

    groups = get_param_groups(config, model)
    optimizer = torch.optim.AdamW(groups, lr=1e-5, weight_decay=config.optimizer.weight_decay, fused=True)
    size = config.device_train_microbatch_size
    parts = [
        (
            ids[i : i + size],
            labels[i : i + size],
            {name: value[i : i + size] for name, value in options.items()},
        )
        for i in range(0, len(ids), size)
    ]

    def step() -> None:
        for part, label, more in parts:
            with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
                logits = model(part, **more).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), label[:, :-1].flatten()) / len(
                    parts
                )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _loop_step(config: Any, engine: Any) -> Callable[[], None]:
    """One step of this project's loop: read, draw positions, forward, backward, clip, step."""
    from olmo_sparsity.data.windows import TrainingData

    batches = TrainingData(config).batches(0)

    def step() -> None:
        engine.forward_backward(next(batches))
        engine.step(1e-5, config.max_grad_norm)

    return step


def _synchronise(device: Any) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def time_in_turn(
    runners: dict[str, Callable[[], None]], rounds: int, steps: int, synchronise: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of ``steps`` calls of each runner, round by round; the order turns so that none is always first."""
    names = list(runners)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-2, rounds):  # two rounds to warm up
        for shift in range(len(names)):
            name = names[(number + shift) % len(names)]
            synchronise()
            started = time.perf_counter()
            for _ in range(steps):
                runners[name]()
            synchronise()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def summarise(seconds: dict[str, list[float]], *, baseline: str, amount: float, unit: str) -> dict[str, Any]:
    """Median rate of each, and the median, lowest and highest of its round-by-round ratio to the baseline."""
    rows = {}
    for name, values in seconds.items():
        ratios = [base / value for base, value in zip(seconds[baseline], values, strict=True)]
        rows[name] = {
            "rate": amount / statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
        }
    return {"unit": unit, "baseline": baseline, "rounds": len(seconds[baseline]), "results": rows}


def print_table(result: dict[str, Any]) -> None:
    """The result as a table."""
    from rich.console import Console
    from rich.table import Table

    about = ", ".join(
        f"{key} {value}" for key, value in result.items() if key not in ("results", "benchmark")
    )
    table = Table(title=f"{result['benchmark']}: {about}", title_justify="left")
    table.add_column("")
    for column in (result["unit"], f"ratio to {result['baseline']}", "lowest", "highest"):
        table.add_column(column, justify="right")
    for name, row in result["results"].items():
        values = [f"{row['rate']:,.0f}", *(f"{row[key]:.3f}" for key in ("ratio", "ratio_low", "ratio_high"))]
        table.add_row(name, *values)
    Console().print(table)


BENCHMARKS = {"train": benchmark_train}


if __name__ == "__main__":
    run_script(main)
