"""The study's question at N 4,096 and 8,192, within some minutes of one GPU.

    python results/cache/gpu.py MODEL OUT books-long.jsonl code.jsonl releases-long.jsonl --n-long 4096 --minutes 4
    python results/cache/gpu.py MODEL OUT books-long.jsonl code.jsonl releases-long.jsonl --n-long 8192 --minutes 4
    python results/cache/gpu.py results/checkpoint OUT TEXT.jsonl --tiny          on a CPU, to try it

The texts are measured in turn, a batch of four blocks of 16 targets each time, as many as the minutes allow; blocks are
drawn before, by seed 0. OUT has after each batch what was measured so far: a study of one cell a text, and speed.json,
whose rows say seconds, targets over tau and gigabytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis import Result, measure
from analysis.engine import targets_per_batch
from analysis.measurement import save_study
from analysis.open_model import open_model
from analysis.study_options import in_turn_until
from olmo_sparsity.util.arguments import Parser
from olmo_sparsity.util.files import write_json

SELECTORS = ("leave-one-out-kl/cache:4", "attention", "snapkv")


def settings_of(n_long: int, tiny: bool) -> dict[str, Any]:
    """What `analysis.measure` is told."""
    shape: dict[str, Any] = {"n_long": n_long, "n_short": 32, "targets": 960, "targets_per_block": 16}
    shape["ks"] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    if tiny:
        shape = {"n_long": 64, "n_short": 8, "targets": 64, "targets_per_block": 8, "ks": (1, 4)}
    return {**shape, "selectors": SELECTORS, "keep_as": ("cache:4",), "effects": True, "progress": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure until the minutes are gone."""
    parser = Parser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--n-long", type=int, default=4096)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    settings = settings_of(options.n_long, options.tiny)
    end = time.monotonic() + 60 * options.minutes
    model = open_model(options.model)
    batches = settings["targets"] // targets_per_batch(settings["targets_per_block"])
    orders = {text: np.random.default_rng(0).permutation(batches).tolist() for text in options.texts}
    measured: dict[Path, list[Result]] = {text: [] for text in options.texts}
    speed: list[dict[str, Any]] = []
    for text, number in in_turn_until(end, orders):
        before = time.monotonic()
        result = measure(model, [text], batches=[number], **settings)
        measured[text].append(result)
        row = {"text": text.stem, "seconds": time.monotonic() - before, "over_tau": len(result.over)}
        speed.append({**row, "gb": torch.cuda.max_memory_allocated() / 1e9})
        save_study(
            options.out,
            {
                f"{text.stem}-n{settings['n_long']}": replace(Result.of_parts(of), texts=None)
                for text, of in measured.items()
                if of
            },
        )
        write_json(options.out / "speed.json", speed)
        print(f"{text.stem}: {row['over_tau']} over tau in {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
