"""Leave-one-out and leave-one-in of all far tokens: a plain loop, one target at a time by the engine, and in blocks.

The plain loop has one forward pass per candidate, no batch, nothing shared, and shares no code with the engine.
Shapes: N long and M short context length, F = N - M far tokens, B targets of a block, at places 0 to B - 1 in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from analysis import Result, measure
from analysis.contexts import Texts, open_texts
from analysis.model.loading import LoadedModel, open_model
from benchmarks.timing import about_this_run, rates, synchronise, time_in_turn
from olmo_sparsity.util.files import write_json
from olmo_sparsity.util.result_files import Json

PLAIN, ALONE, BLOCK = "plain loop", "engine, one target at a time", "engine, blocks"
SELECTORS = ("leave-one-out", "leave-one-in")
OVER_ALL = -1e6
"""A tau, in nats, that every target's gain is over."""
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 65_536}
"""Of a forward pass of the engine: given, so that no time is spent on finding it out."""
_DOCUMENTATION = Path(__file__).parents[2] / "docs"


def run(
    model: str,
    text: str | None,
    tokenizer: str | None,
    out: Path | None,
    device: str | None,
    rounds: int,
    **sizes: int,
) -> Json:
    """Targets per second and exactness; ``sizes`` are those of `compare_ways`."""
    about = about_this_run()
    loaded = open_model(model, tokenizer=tokenizer, device=device)
    pages = {path.name: path.read_text(encoding="utf8") for path in sorted(_DOCUMENTATION.glob("*.md"))}
    result = {
        "benchmark": "influence",
        "model": loaded.name,
        "parameters": loaded.parameters,
        "texts": text or "the documentation",
        **sizes,
        "unit": "targets/s",
        **about,
        "results": compare_ways(loaded, open_texts(text or pages, loaded.encode), rounds=rounds, **sizes),
    }
    if out is not None:
        write_json(out / "influence.json", result)
    return result


def compare_ways(
    loaded: LoadedModel,
    texts: Texts,
    *,
    n_long: int,
    n_short: int,
    targets: int,
    alone: int,
    blocks: int,
    targets_per_block: int,
    rounds: int,
) -> dict[str, Json]:
    """Rates of the three ways by selector, ratios to the plain loop, and how far its influences are.

    The plain loop measures ``targets``, the engine so many ``alone`` and in ``blocks``. Its time is that of a whole
    `measure` of an open model: trying the context, sampling, L_long, L_short and L_1 are in it.
    """
    rows: dict[str, Json] = {}
    for selector in SELECTORS:
        found: dict[str, Any] = {}

        def engine(way: str, size: int, count: int, name: str = selector, found: dict = found) -> float:
            started = time.perf_counter()
            found[way] = measure(
                loaded,
                texts,
                n_long=n_long,
                n_short=n_short,
                targets=count,
                targets_per_block=size,
                tau_nats=OVER_ALL,
                ks=(1,),
                selectors=(name,),
                placebos=(),
                scores=True,
                tokens_per_batch=TOKENS_PER_BATCH[loaded.device.type],
                progress=False,
            )
            synchronise(loaded.device.type)
            return (time.perf_counter() - started) / len(found[way].targets)

        def plain(name: str = selector, found: dict = found) -> float:
            started = time.perf_counter()
            found[PLAIN] = plain_influences(name, loaded, texts, found[ALONE], n_short=n_short, count=targets)
            return (time.perf_counter() - started) / targets

        engine(ALONE, 1, alone)
        ways: dict[str, Callable[[], object]] = {
            PLAIN: plain,
            ALONE: partial(engine, ALONE, 1, alone),
            BLOCK: partial(engine, BLOCK, targets_per_block, blocks * targets_per_block),
        }
        seconds = time_in_turn(ways, rounds, loaded.device.type)
        of_blocks = plain_influences(selector, loaded, texts, found[BLOCK], n_short=n_short, count=targets)
        compared = {ALONE: agreement(found[ALONE], found[PLAIN]), BLOCK: agreement(found[BLOCK], of_blocks)}
        for way, row in rates(seconds, 1, (PLAIN,)).items():
            rows[f"{selector}, {way}"] = row | compared.get(way, {}) | {"seconds": seconds[way]}
    return rows


@torch.inference_mode()
def plain_influences(
    selector: str, loaded: LoadedModel, texts: Texts, result: Result, *, n_short: int, count: int
) -> dict[int, np.ndarray]:
    """Influence of all far tokens (F) by target, on ``count`` targets of a result, evenly spaced."""
    size, n_long = (result.settings[name] for name in ("targets_per_block", "n_long"))
    frame = result.targets
    chosen = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, count).astype(int))]
    influences = {}
    for target_id, text, position in chosen[["target_id", "text", "position"]].itertuples(index=False):
        tokens = texts.tokens(text)[position - n_long - target_id % size : position + 1]
        influences[target_id] = plain_influence(
            selector, loaded.model, loaded.device, tokens, n_long - n_short
        )
    return influences


def plain_influence(
    selector: str, model: Any, device: torch.device, tokens: np.ndarray, n_far: int
) -> np.ndarray:
    """Influence in nats of the first F tokens on the last one (docs/method.md, 2.2), one forward pass for each."""
    far, whole = range(n_far), list(range(len(tokens) - 1))
    short, target = whole[n_far:], torch.tensor([int(tokens[-1])], device=device)

    def loss_nats(kept: list[int]) -> float:
        ids, positions = (torch.tensor([row], device=device) for row in (tokens[kept].tolist(), kept))
        return F.cross_entropy(model(ids, position_ids=positions).logits[:, -1].float(), target).item()

    if selector == "leave-one-out":
        long_nats = loss_nats(whole)
        return np.array([loss_nats([j for j in whole if j != i]) - long_nats for i in far])
    short_nats = loss_nats(short)
    return np.array([short_nats - loss_nats([i, *short]) for i in far])


def agreement(result: Result, plain: dict[int, np.ndarray], k: int = 8) -> Json:
    """Share of targets whose first k tokens are those of the plain loop, and the largest difference of an influence."""
    assert result.scores is not None
    scores: pd.Series = result.scores.set_index("target_id")["influence"]
    same, apart = [], 0.0
    for target_id, influence in plain.items():
        ours = np.asarray(scores[target_id])
        first = [set(np.argsort(-each, kind="stable")[:k].tolist()) for each in (influence, ours)]
        same.append(first[0] == first[1])
        apart = max(apart, float(np.abs(ours - influence).max()))
    return {"same_set": float(np.mean(same)), "largest_difference_nats": apart}
