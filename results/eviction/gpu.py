"""The study's question at N 8,192, within some minutes of one GPU: policies, aware and blind, and the reference.

    python results/eviction/gpu.py MODEL OUT books-long.jsonl code.jsonl releases-long.jsonl --minutes 8
    python results/eviction/gpu.py results/checkpoint OUT TEXT.jsonl --tiny          on a CPU, to try it

The texts are judged in turn, a block of 16 targets each time, as many as the minutes allow; blocks are drawn before, by
seed 0. OUT has after each block what was judged so far: one comparison of all texts (eviction.json and three Parquet
files), with the name of the text before that of a group, and speed.json, whose rows say seconds and gigabytes. All
policies are judged but kvzip, which reads the far context again: to ids of some 10,200, where SmolLM2 ends at 8,192.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis import eviction
from analysis.cache_eviction.contenders import every_policy
from analysis.cache_eviction.result import EvictionResult
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from analysis.sampling import sample_targets
from analysis.study_options import in_turn_until
from olmo_sparsity.util.arguments import Parser
from olmo_sparsity.util.files import write_json


def settings_of(tiny: bool) -> dict[str, Any]:
    """What `analysis.eviction` is told."""
    shape: dict[str, Any] = {"n_long": 8192, "n_short": 32, "targets_per_block": 16, "blocks": 20}
    if tiny:
        shape = {
            "n_long": 64,
            "n_short": 8,
            "targets_per_block": 8,
            "blocks": 4,
            "budgets": (0.12, 0.25, 0.5),
        }
    policies = [name for name in every_policy() if name != "kvzip"]
    return {**shape, "policies": policies, "progress": False}


def order_of(model: Any, text: Path, settings: dict[str, Any]) -> list[int]:
    """The numbers of the blocks that a text offers, in random order."""
    shape = {name: settings[name] for name in ("n_long", "n_short", "targets_per_block")}
    source = open_texts([text], model.reader)
    count = settings["blocks"] * settings["targets_per_block"]
    targets = sample_targets(source, count, **shape, seed=0, placebo=False)
    blocks = (targets["target_id"] // settings["targets_per_block"]).nunique()
    order: list[int] = np.random.default_rng(0).permutation(blocks).tolist()
    return order


def main(arguments: Sequence[str] | None = None) -> None:
    """Judge until the minutes are gone."""
    parser = Parser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    settings = settings_of(options.tiny)
    end = time.monotonic() + 60 * options.minutes
    model = open_model(options.model)
    orders = {text: order_of(model, text, settings) for text in options.texts}
    judged: dict[Path, list[EvictionResult]] = {}
    speed: list[dict[str, Any]] = []
    for text, number in in_turn_until(end, orders):
        before = time.monotonic()
        result = eviction(model, [text], only_blocks=[number], **settings)
        judged.setdefault(text, []).append(result)
        row = {"text": text.stem, "seconds": time.monotonic() - before}
        speed.append({**row, "gb": torch.cuda.max_memory_allocated() / 1e9})
        joined = {of.stem: EvictionResult.of_parts(parts) for of, parts in judged.items()}
        EvictionResult.pool(joined).save(options.out)
        write_json(options.out / "speed.json", speed)
        print(f"{text.stem}: block {number} in {row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
