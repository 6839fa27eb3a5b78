"""Leave-one-out of all far tokens: by a plain loop, and by the engine in blocks, beside the machine's matrix product.

The plain loop has one forward pass per candidate, no batch, nothing shared, and shares no code with the engine.
Shapes: N long and M short context length, F = N - M far tokens, B targets of a block, at places 0 to B - 1 in it.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from analysis import Result, measure
from analysis.model.loaded import LoadedModel
from analysis.open_model import open_model
from analysis.open_texts import open_texts
from benchmarks.timing import PRODUCT, Json, about_this_run, matrix_product, rates, time_in_turn

PLAIN, BLOCK = "plain loop", "engine, blocks"
OVER_ALL = -1e6  # a tau, in nats, that every target's gain is over


def run(
    model: str, text: str | None, tokenizer: str | None, rounds: int, targets: int, blocks: int, **sizes: int
) -> Json:
    """Targets per second of both ways, ratios to the plain loop, and how far its influences are; all in fp32.

    ``sizes``: ``n_long``, ``n_short`` and ``targets_per_block``; ``targets`` of the plain loop, and how many ``blocks``
    the engine measures. Its time is that of a whole `measure` of an open model: trying the context, sampling, L_long,
    L_short and L_1 are in it. Its share of the product counts `operations_per_target` alone.
    """
    about, loaded = about_this_run(), open_model(model, tokenizer=tokenizer)
    texts = open_texts(text or sorted(Path("docs").glob("*.md")), loaded.reader)
    n_long, size = sizes["n_long"], sizes["targets_per_block"]
    options: Any = {"tau_nats": OVER_ALL, "ks": (1,), "placebos": (), "scores": True, "progress": False}
    options |= {"selectors": ("leave-one-out",), "targets": blocks * size, **sizes}
    engine = partial(measure, loaded, texts, **options)
    result = engine()
    chosen = result.targets.iloc[np.linspace(0, len(result.targets) - 1, targets).astype(int)]

    def plain() -> dict[int, np.ndarray]:
        """Influence of all far tokens (F) by target, on evenly spaced ones of the engine's."""
        influences = {}
        for row in chosen.itertuples():
            tokens = texts.tokens(row.text)[row.position - n_long - row.target_id % size : row.position + 1]
            influences[row.target_id] = plain_influence(loaded, tokens, n_long - sizes["n_short"])
        return influences

    kind = next(type(module) for module in loaded.model.modules() if isinstance(module, torch.nn.Linear))
    multiply, operations = matrix_product(loaded.device, torch.float32, kind)
    seconds = time_in_turn({PLAIN: plain, BLOCK: engine, PRODUCT: multiply}, rounds)
    product = operations / statistics.median(seconds[PRODUCT])
    counts = {PLAIN: targets, BLOCK: len(result.targets)}
    rows = rates({way: [second / counts[way] for second in seconds[way]] for way in counts}, 1, (PLAIN,))
    share = rows[BLOCK]["rate"] * operations_per_target(loaded, **sizes) / product
    rows[BLOCK] |= {"share_of_matrix_product": share, **agreement(result, plain())}
    about |= {"benchmark": "measure", "model": loaded.name, "parameters": loaded.parameters, **sizes}
    return {**about, "unit": "targets/s", "matrix_product_tflops": product / 1e12, "results": rows}


@torch.inference_mode()
def plain_influence(loaded: LoadedModel, tokens: np.ndarray, n_far: int) -> np.ndarray:
    """Influence in nats of the first F tokens on the last one (docs/method.md, 2.2), one forward pass for each."""
    whole, target = list(range(len(tokens) - 1)), torch.tensor([int(tokens[-1])], device=loaded.device)

    def loss_nats(kept: list[int]) -> float:
        ids, positions = (torch.tensor([row], device=loaded.device) for row in (tokens[kept].tolist(), kept))
        logits = loaded.model(ids, position_ids=positions).logits
        return F.cross_entropy(logits[:, -1].float(), target).item()

    long_nats = loss_nats(whole)
    return np.array([loss_nats([j for j in whole if j != i]) - long_nats for i in whole[:n_far]])


@torch.inference_mode()
def operations_per_target(loaded: LoadedModel, n_long: int, n_short: int, targets_per_block: int) -> float:
    """Floating-point operations that choosing a target's tokens needs in a block: products with weights alone.

    Only the tokens behind the one that is left out are read again, and logits are those of the B targets.
    """
    n_far, vocabulary = n_long - n_short, loaded.model.vocabulary_size
    tokens = n_far * (n_short + targets_per_block - 1) + n_far * (n_far - 1) // 2
    weights = (module.weight for module in loaded.model.modules() if isinstance(module, torch.nn.Linear))
    of_token = sum(weight.numel() for weight in weights if len(weight) < vocabulary)
    width = loaded.model.embed(torch.zeros(1, 1, dtype=torch.long, device=loaded.device)).shape[-1]
    return 2.0 * (tokens * of_token / targets_per_block + n_far * width * vocabulary)


def agreement(result: Result, plain: dict[int, np.ndarray], k: int = 8) -> Json:
    """Share of targets whose first k tokens are those of the plain loop, and the largest difference of an influence."""
    assert result.scores is not None
    scores = result.scores.set_index("target_id")["influence"]
    shared = np.stack([scores[target_id] for target_id in plain])
    one_by_one = np.stack([*plain.values()])
    first, expected = (
        np.sort(np.argsort(-influence, kind="stable")[:, :k]) for influence in (shared, one_by_one)
    )
    same, apart = (first == expected).all(axis=1).mean(), np.abs(shared - one_by_one).max()
    return {"same_set": float(same), "largest_difference_nats": float(apart)}
