"""What far context gives a real model, and what a few tokens recover, within some minutes of one GPU.

    python results/models/gpu.py MODEL TEXTS.jsonl OUT --n-long 1024 --minutes 8
    python results/models/gpu.py MODEL TEXTS.jsonl OUT --n-long 4096 --minutes 8 --proposals 64
    python results/models/gpu.py results/checkpoint TEXTS.jsonl OUT --tiny          on a CPU, to try it

Batches are measured in an order that spreads them over the texts, as many as the minutes allow; OUT has what was
measured so far after each of them: result.json, targets.parquet, choices.parquet, and speed.json, whose rows say
seconds, targets over tau and gigabytes.
"""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from analysis import Result, measure
from analysis.open_model import open_model
from analysis.study_options import in_turn_until
from olmo_sparsity.util.arguments import Parser
from olmo_sparsity.util.files import write_json

SELECTORS = ("leave-one-out-kl", "attention", "input-x-gradient", "h2o", "snapkv", "nearest", "random")
KEEP_AS = ("text", "cache:4", "text/word")


def settings_of(given):
    """What `analysis.measure` is told."""
    exact, *others = SELECTORS
    first = exact if given.proposals is None else f"{exact}@attention:{given.proposals}"
    if given.tiny:
        shape = {"n_long": 64, "n_short": 8, "targets": 256, "targets_per_block": 8, "ks": (1, 4)}
    else:
        shape = {"n_long": given.n_long, "n_short": 32, "targets": 6400, "targets_per_block": 32}
        shape["ks"] = (1, 2, 4, 8, 16, 32, 64)
    return {**shape, "selectors": (first, *others), "keep_as": KEEP_AS, "progress": False}


def main():
    """Measure until the minutes are gone."""
    parser = Parser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--n-long", type=int, default=1024)
    parser.add_argument("--proposals", type=int, help="screen leave-one-out-kl by attention")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    end, settings = time.monotonic() + 60 * given.minutes, settings_of(given)
    model = open_model(given.model)
    results: list[Result] = []
    speed = []
    order = np.random.default_rng(0).permutation(-(-settings["targets"] // 64)).tolist()
    for texts, number in in_turn_until(end, {given.texts: order}):
        before = time.monotonic()
        result = measure(model, [texts], batches=[number], **settings)
        results.append(result)
        row = {"seconds": time.monotonic() - before, "over_tau": len(result.over)}
        speed.append({**row, "gb": torch.cuda.max_memory_allocated() / 1e9})
        replace(Result.of_parts(results), texts=None).save(given.out)
        write_json(given.out / "speed.json", speed)
        print(f"{row['over_tau']} over tau in {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
