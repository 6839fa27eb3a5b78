"""Kill a training run at random moments, resume it each time, and compare its end with a run that was never killed.

examples:
  python scripts/crash_test.py                                      20 kills of a tiny model on random tokens, minutes
  python scripts/crash_test.py --kills 100 --seed 3 --out runs/crash
  python scripts/crash_test.py --config configs/demo.yaml --max_duration=60 --save_interval=5

The run is killed with SIGKILL, so nothing is tidied up: in the middle of a step, of writing a checkpoint, of writing
metrics. Afterwards the final weights and the optimizer's state must equal those of the undisturbed run bit for bit (on
a CPU, in fp32, which this script sets), and metrics.jsonl must have every step once with the same losses.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from olmo_sparsity.errors import UserError, run_script

ROOT = Path(__file__).parents[1]
TINY = """\
seed: 1
model: {d_model: 64, n_heads: 4, n_layers: 2, mlp_ratio: 4, vocab_size: 256, embedding_size: 256, rope: true,
        include_bias: false, layer_norm_type: rms, attention_dropout: 0.0, residual_dropout: 0.1,
        embedding_dropout: 0.0, max_sequence_length: 64, weight_tying: true, eos_token_id: 0, pad_token_id: 0}
optimizer: {name: adamw, learning_rate: 1.0e-3, weight_decay: 0.1}
scheduler: {name: linear_with_warmup, t_warmup: 30, alpha_f: 0.0, warmup_min_lr: 0.0}
positions: {scheme: pose, target_length: 256}
max_duration: 4000
save_interval: 7
save_num_checkpoints_to_keep: 2
global_train_batch_size: 8
device_train_microbatch_size: 4
max_grad_norm: 1.0
"""


def main() -> int:
    """Run both, compare, and say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="train this instead of a tiny model on random tokens")
    parser.add_argument("--kills", type=int, default=20, help="how often it is killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: %(default)s)")
    parser.add_argument(
        "--longest", type=float, default=2.0, help="latest moment, seconds of training (default: %(default)s)"
    )
    parser.add_argument(
        "--out", default="runs/crash-test", help="folder of both runs, made anew (default: %(default)s)"
    )
    arguments, overrides = parser.parse_known_args()
    out = Path(arguments.out)
    if (out / "killed").exists() or (out / "whole").exists():
        raise UserError(f"{out} holds an earlier crash test; remove it or give another --out")
    config = arguments.config or _tiny_config(out)
    overrides = [*overrides, "--precision=fp32"]
    _train(config, out / "whole", overrides)
    moments = random.Random(arguments.seed)
    killed = 0
    while killed < arguments.kills:
        if _finished_before(config, out / "killed", overrides, moments.uniform(0, arguments.longest)):
            raise UserError(f"the run ended after {killed} kills; raise --max_duration or lower --longest")
        killed += 1
        print(f"kill {killed}: {_state(out / 'killed')}", flush=True)
    _train(config, out / "killed", overrides)
    return _compare(out / "whole", out / "killed", killed)


def _tiny_config(out: Path) -> str:
    import numpy as np

    out.mkdir(parents=True, exist_ok=True)
    np.random.default_rng(0).integers(1, 256, 200_000).astype(np.uint16).tofile(out / "tokens.npy")
    path = out / "config.yaml"
    path.write_text(f"{TINY}data: {{paths: ['{out / 'tokens.npy'}']}}\n", encoding="utf8")
    return str(path)


def _start(config: str, folder: Path, overrides: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), config, "--resume"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, f"--save_folder={folder}", *overrides],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _train(config: str, folder: Path, overrides: list[str]) -> None:
    process = _start(config, folder, overrides)
    _, errors = process.communicate()
    if process.returncode != 0:
        raise UserError(f"training {folder} failed: {errors.strip().splitlines()[-1]}")


def _finished_before(config: str, folder: Path, overrides: list[str], seconds: float) -> bool:
    """Kill the run so many seconds after it began to train; True if it ended by itself before that."""
    starts = _starts(folder)
    process = _start(config, folder, overrides)
    while _starts(folder) == starts and process.poll() is None:
        time.sleep(0.005)
    time.sleep(seconds)
    ended = process.poll() is not None
    process.kill()
    _, errors = process.communicate()
    if ended and process.returncode != 0:
        raise UserError(f"the run failed by itself: {errors.strip().splitlines()[-1]}")
    return ended


def _starts(folder: Path) -> int:
    """How often training began in this run: entries of its provenance.json."""
    path = folder / "provenance.json"
    return path.read_text(encoding="utf8").count('"started"') if path.is_file() else 0


def _state(folder: Path) -> str:
    from olmo_sparsity.checkpoint import checkpoints

    found = [path.name for path in checkpoints(folder)]
    left = len(list(folder.glob(".*.tmp-*")))
    return f"checkpoints {', '.join(found) or 'none'}" + (f"; {left} half-written, ignored" if left else "")


def _compare(whole: Path, killed: Path, kills: int) -> int:
    from safetensors.torch import load_file

    from olmo_sparsity.checkpoint import OPTIMIZER, WEIGHTS, checkpoints
    from olmo_sparsity.training.metrics import METRICS_NAME, read_metrics

    different = []
    for name in (WEIGHTS, OPTIMIZER):
        ours, theirs = (load_file(checkpoints(run)[-1] / name) for run in (killed, whole))
        if ours.keys() != theirs.keys():
            different.append(name)
        different += [f"{name}: {key}" for key in ours if not ours[key].equal(theirs[key])]
    losses = [
        [(row["step"], row["loss_nats"]) for row in read_metrics(run / METRICS_NAME)]
        for run in (killed, whole)
    ]
    if losses[0] != losses[1]:
        different.append(METRICS_NAME)
    if different:
        print(f"DIFFERENT after {kills} kills: {', '.join(different[:10])}")
        return 1
    steps = losses[0][-1][0]
    print(f"equal bit for bit after {kills} kills: {steps:,} steps, weights, optimizer state and every loss")
    return 0


if __name__ == "__main__":
    run_script(main)
