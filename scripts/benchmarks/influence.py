"""Leave-one-out and leave-one-in of all far tokens: by a plain loop, and by the engine in blocks.

The plain loop has one forward pass per candidate, no batch, nothing shared, and shares no code with the engine.
Shapes: N long and M short context length, F = N - M far tokens, B targets of a block, at places 0 to B - 1 in it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from analysis import Result, measure
from analysis.contexts import Texts, open_texts
from analysis.model.loading import LoadedModel, open_model
from benchmarks.timing import Json, about_this_run, rates, time_in_turn

PLAIN, BLOCK = "plain loop", "engine, blocks"
OVER_ALL = -1e6  # a tau, in nats, that every target's gain is over


def run(model: str, text: str | None, tokenizer: str | None, rounds: int, **sizes: int) -> Json:
    """Targets per second of both ways by selector, ratios to the plain loop, and how far its influences are.

    ``sizes``: ``n_long``, ``n_short`` and ``targets_per_block``, ``targets`` of the plain loop, and how many ``blocks``
    the engine measures. Its time is that of a whole `measure` of an open model: trying the context, sampling, L_long,
    L_short and L_1 are in it.
    """
    about = about_this_run()
    loaded = open_model(model, tokenizer=tokenizer)
    texts = open_texts(text or sorted(Path("docs").glob("*.md")), loaded.encode)
    rows = {
        f"{selector}, {way}": row
        for selector in ("leave-one-out", "leave-one-in")
        for way, row in compare_ways(selector, loaded, texts, rounds, **sizes).items()
    }
    of_model = {"model": loaded.name, "parameters": loaded.parameters, "texts": text or "the documentation"}
    return {"benchmark": "influence", **of_model, **sizes, "unit": "targets/s", **about, "results": rows}


def compare_ways(
    selector: str, loaded: LoadedModel, texts: Texts, rounds: int, *, targets: int, blocks: int, **sizes: int
) -> dict[str, Json]:
    """The rows of one selector, by way; sizes as for `run`."""
    n_long, size = sizes["n_long"], sizes["targets_per_block"]
    options: Any = {"tau_nats": OVER_ALL, "ks": (1,), "placebos": (), "scores": True, "progress": False}
    options |= {"selectors": (selector,), "targets": blocks * size, **sizes}
    engine = partial(measure, loaded, texts, **options)
    result = engine()
    chosen = result.targets.iloc[np.linspace(0, len(result.targets) - 1, targets).astype(int)]

    def plain() -> dict[int, np.ndarray]:
        """Influence of all far tokens (F) by target, on evenly spaced ones of the engine's."""
        influences = {}
        for row in chosen.itertuples():
            tokens = texts.tokens(row.text)[row.position - n_long - row.target_id % size : row.position + 1]
            influences[row.target_id] = plain_influence(selector, loaded, tokens, n_long - sizes["n_short"])
        return influences

    seconds = time_in_turn({PLAIN: plain, BLOCK: engine}, rounds)
    counts = {PLAIN: targets, BLOCK: len(result.targets)}
    rows = rates({way: [each / counts[way] for each in seconds[way]] for way in seconds}, 1, (PLAIN,))
    rows[BLOCK] |= agreement(result, plain())
    return rows


@torch.inference_mode()
def plain_influence(selector: str, loaded: LoadedModel, tokens: np.ndarray, n_far: int) -> np.ndarray:
    """Influence in nats of the first F tokens on the last one (docs/method.md, 2.2), one forward pass for each."""
    whole, target = list(range(len(tokens) - 1)), torch.tensor([int(tokens[-1])], device=loaded.device)
    far, short = whole[:n_far], whole[n_far:]

    def loss_nats(kept: list[int]) -> float:
        ids, positions = (torch.tensor([row], device=loaded.device) for row in (tokens[kept].tolist(), kept))
        logits = loaded.model(ids, position_ids=positions).logits
        return F.cross_entropy(logits[:, -1].float(), target).item()

    if selector == "leave-one-out":
        long_nats = loss_nats(whole)
        return np.array([loss_nats([j for j in whole if j != i]) - long_nats for i in far])
    short_nats = loss_nats(short)
    return np.array([short_nats - loss_nats([i, *short]) for i in far])


def agreement(result: Result, plain: dict[int, np.ndarray], k: int = 8) -> Json:
    """Share of targets whose first k tokens are those of the plain loop, and the largest difference of an influence."""
    assert result.scores is not None
    scores = result.scores.set_index("target_id")["influence"]
    ours, theirs = np.stack([scores[target_id] for target_id in plain]), np.stack([*plain.values()])
    first, expected = (np.sort(np.argsort(-each, kind="stable")[:, :k]) for each in (ours, theirs))
    same, apart = (first == expected).all(axis=1).mean(), np.abs(ours - theirs).max()
    return {"same_set": float(same), "largest_difference_nats": float(apart)}
