"""Results with made-up losses: what numbers, figures and pages are tested on.

The same random draws as `made_up_records`, so that a curve can be seen: every selector recovers what `CURVES` says.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.api import Result
from analysis.measurement import SELECTION
from analysis.settings import Settings

CURVES = {
    "leave-one-out": ((0.20, 0.60, 0.80, 0.90), (0.05, 0.10, 0.20, 0.30)),
    "greedy": ((0.40, 0.80, 1.00, 1.10), (0.20, 0.40, 0.55, 0.70)),
    "random": ((0.02, 0.03, 0.05, 0.10), (0.00, 0.00, 0.02, 0.02)),
}
"""Recovery at k = 1, 2, 4, 8 in the true and the placebo far context."""
KINDS = ("repeated pair", "repeated token", "name", "other")
BLOCK = 4


def made_result(
    n: int = 400,
    texts: int = 60,
    groups: int | None = None,
    *,
    tau_nats: float = 1.0,
    selectors: Sequence[str] = tuple(CURVES),
    far_contexts: Sequence[str] = ("true", "placebo"),
    crossfit: bool = False,
    run: int = 0,
    kinds: Sequence[str] = KINDS,
    **settings: Any,
) -> Result:
    """A Result of n targets in so many texts (and groups of them); ``run`` changes the losses, not the targets."""
    rng = np.random.default_rng(0)
    text = rng.integers(texts, size=n)
    gain = rng.exponential(1.2, n) * (rng.random(n) < 0.3) * np.exp(rng.normal(0, 0.3, texts)[text])
    gain += rng.normal(0, 0.1, n)
    long = rng.gamma(2.0, 1.2, n)
    position, token, kind = rng.integers(128, 900, n), rng.integers(8000, size=n), rng.choice(list(kinds), n)
    noise = np.random.default_rng(run)
    if run:
        gain = (1 + 0.2 * run) * gain + noise.normal(0, 0.3, n)
    evaluated = gain * noise.normal(0.5, 0.4, n) if crossfit else gain
    long, short = long.astype(np.float32).astype(float), (long + evaluated).astype(np.float32).astype(float)
    gain = gain if crossfit else short - long
    targets = pd.DataFrame(
        {
            "target_id": np.arange(n), "text": text, "position": position, "token": token, "loss_long_nats": long,
            "loss_short_nats": short, "over_tau": gain > tau_nats, "kind": kind, "placebo_text": (text + 1) % texts,
            "placebo_start": 0,
        }
    )  # fmt: skip
    if crossfit:
        targets["selecting_gain_nats"] = gain
    if groups is not None:
        names = np.array([f"book {number}" for number in range(groups)])
        targets["group"], targets["placebo_group"] = names[text % groups], names[(text + 1) % groups]
    options = {
        "model": f"runs/{run}", "model_sha256": f"{run:064}", "family": "olmo", "parameters": 1_000_000,
        "training_seed": run, "tokenizer_sha256": "t" * 64, "texts": "data/docs", "texts_sha256": "c" * 64,
        "split": "heldout", "n_long": 128, "n_short": 16, "targets_per_block": BLOCK, "tau_nats": tau_nats,
        "ks": [1, 2, 4, 8], "selectors": list(selectors), "far_contexts": list(far_contexts),
        "keep_as": ["text"], "prefix": [],
        "rope_scaling": None, "dtype": "fp32", "seed": 0, "targets_requested": n, "faithfulness": False,
        "selected_by": {"model": "runs/b", "model_sha256": "e" * 64, "training_seed": 2} if crossfit else None,
        "proposed_by": None, "complete": True, **settings,
    }  # fmt: skip
    made = Settings.from_json(options)
    n_far, ks = made.contexts.n_far, made.choices.ks
    rows = []
    for target in np.flatnonzero(targets["over_tau"]):
        for selector in selectors:
            for far_context in far_contexts:
                curve = CURVES.get(selector, CURVES["greedy"])[far_context != "true"][: len(ks)]
                recovery = np.array(curve) + noise.normal(0, 0.1)
                loss = short[target] - (short - long)[target] * recovery
                selected = noise.permutation(n_far)[: ks[-1]].astype(np.int32)
                influence = np.sort(noise.gamma(1.0, 1.0, ks[-1]))[::-1].astype(np.float32)
                rows.append((target, selector, far_context, "text", "token", 0, selected, influence, loss))
    columns = ["target_id", *SELECTION, "selected", "influence", "loss_nats"]
    return Result(
        made, targets, pd.DataFrame(rows, columns=columns), provenance={"commit": "abc", "command": "made"}
    )
