"""What one GPU can show of training in several processes: DDP, ZeRO 2 and recomputed layers, compiled against eager.

    PYTHONPATH=. python scripts/benchmarks/gpu_processes.py --out DIR [--minutes 7] [--tiny]

Every case is a process of its own that makes 20 optimizer steps of random tokens, so nothing but the tree is needed.
It leaves `cases.json`, written anew after each case: losses, gradient norms, tokens/s, MFU and memory; and prints a
table of them beside the plain eager case of the same model and precision. The same command goes on where it stopped.
--tiny tries it on a CPU with models of two layers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS, WINDOWS, TIMED = 20, 32, 10
KINDS = {"plain": (), "ddp": (), "zero2": ("--deepspeed.config=configs/deepspeed/zero2.json",)}
CASES = [
    *(f"150m {kind} {how} amp_bf16" for kind in KINDS for how in ("eager", "compiled")),
    *("1b plain eager amp_bf16", "1b plain compiled amp_bf16"),  # its config recomputes layers
    *("150m plain eager fp32", "150m ddp compiled fp32", "150m zero2 compiled fp32"),
    "1b zero2 compiled amp_bf16",
]
TINY = (
    *("--model.d_model=64", "--model.n_heads=2", "--model.n_layers=2", "--model.max_sequence_length=64"),
    *("--positions.target_length=128", "--global_train_batch_size=4", "--device_train_microbatch_size=2"),
)


def main() -> None:
    """Run the cases that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of cases.json")
    parser.add_argument("--minutes", type=float, default=7.0, help="no case starts after these")
    parser.add_argument("--tiny", action="store_true", help="two layers, on the CPU")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(arguments.case, arguments.out, arguments.tiny)))
        return
    started, path = time.monotonic(), arguments.out / "cases.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in CASES:
        if "losses_nats" in rows.get(name, {}) or time.monotonic() - started > 60 * arguments.minutes:
            continue
        rows[name] = run(name, arguments)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(in_words(name, rows), flush=True)


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case in a process; what it printed last, or the end of its error."""
    environment = dict(os.environ)
    if name.split()[1] != "plain":
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 23456}
        environment |= {key: str(value) for key, value in alone.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if arguments.tiny:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # -P: `profile` beside this file is not the one of the standard library.
    command = [sys.executable, "-P", __file__, "--out", str(arguments.out), "--case", name]
    command += ["--tiny"] * arguments.tiny
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, out: Path, tiny: bool) -> dict[str, Any]:
    """20 steps of a case in this process."""
    import numpy as np
    import torch

    from olmo_sparsity.config.load import load_config
    from olmo_sparsity.data.windows import TrainingData
    from olmo_sparsity.model.build import build_model
    from olmo_sparsity.training.engine import Engine
    from olmo_sparsity.training.flops import flops_per_token, peak_flops
    from olmo_sparsity.training.monitor import peak_memory_gb
    from olmo_sparsity.training.zero import ZeroEngine
    from olmo_sparsity.util.provenance import machine

    size, kind, how, precision = name.split()
    tokens = out / "tokens.npy"
    if not tokens.exists():
        np.random.default_rng(0).integers(0, 50_000, STEPS * WINDOWS * 1024, dtype=np.uint16).tofile(tokens)
    compiled = (
        ["--compile.from_steps=0", "--compile.fullgraph=true"] if how == "compiled" else ["--compile=null"]
    )
    config = load_config(
        f"configs/pose-c4-{size}.yaml",
        [
            *(
                "--corpus.path=null",
                f"--data.paths=[{tokens}]",
                "--data.num_workers=0",
                "--data.prefetch_factor=null",
            ),
            *(
                "--data.persistent_workers=false",
                f"--global_train_batch_size={WINDOWS}",
                "--scheduler.t_warmup=5",
            ),
            *(f"--max_duration={STEPS}", f"--precision={precision}", "--evaluation.interval=null"),
            *(*KINDS[kind], *compiled, *(TINY if tiny else ())),
        ],
        warn=False,
    )
    began = time.monotonic()
    engine = (ZeroEngine if kind == "zero2" else Engine)(config, build_model(config))
    batches = TrainingData(config).batches(0)
    losses, norms, seconds = [], [], []
    for _ in range(STEPS):
        start = time.monotonic()
        values = engine.forward_backward(next(batches)) | engine.clip_gradients(config.max_grad_norm)
        numbers = {key: float(value) for key, value in values.items()}
        numbers |= engine.step(config.optimizer.learning_rate)
        losses.append(numbers["loss_nats"])
        norms.append(numbers["grad_norm"])
        seconds.append(time.monotonic() - start)
    rate = config.tokens_per_step / statistics.median(seconds[-TIMED:])
    peak = peak_flops(config, engine.device)
    return {
        "model": type(engine.model).__name__,
        "is_compiled": engine.is_compiled,
        "losses_nats": losses,
        "grad_norms": norms,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(config) / peak if peak else None,
        "peak_memory_gb": peak_memory_gb(engine.device),
        "first_step_seconds": seconds[0],
        "seconds": time.monotonic() - began,
        "machine": {**machine(), "torch": torch.__version__},
    }


def in_words(name: str, rows: dict[str, Any]) -> str:
    """A line of the table."""
    row, size, precision = rows[name], name.split()[0], name.split()[3]
    if "error" in row:
        return f"{name:28} {row['error'].strip().splitlines()[-1]}"
    plain = rows.get(f"{size} plain eager {precision}", row)
    apart = max(abs(a - b) for a, b in zip(row["losses_nats"], plain["losses_nats"], strict=True))
    norm = row["grad_norms"][0] / plain["grad_norms"][0] - 1
    mfu = f"MFU {row['mfu']:5.1%}" if row["mfu"] else "MFU unknown"
    return (
        f"{name:28} {row['tokens_per_second']:10,.0f} tokens/s  {mfu}  {row['peak_memory_gb']:6.1f} GB  first norm "
        f"{norm:+.1e}, losses within {apart:.1e} nats of plain eager  ({row['seconds']:.0f} s, {row['model']})"
    )


if __name__ == "__main__":
    main()
