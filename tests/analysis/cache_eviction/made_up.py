"""A record of made-up losses, as a comparison of eviction policies gives it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from analysis.cache_eviction.record import FULL, NONE, SINKS
from analysis.cache_eviction.result import EvictionResult
from analysis.cache_eviction.settings import EvictionSettings
from analysis.settings import ContextSettings, ModelIdentity, TextsIdentity
from analysis.token_kinds import KINDS

B, BLOCKS = 8, 12
BUDGETS = (0.25, 0.5)
WAYS = [
    ("snapkv", "far and near", "kept"),
    ("snapkv", "far and near", "reread"),
    ("h2o", "far and near", "kept"),
    ("random", "nothing", "kept"),
    ("knorm", "far", "reread"),
    ("leave-one-out-kl", "targets", "kept"),
]


def made_up(
    seed: int = 0,
    gain: float = 1.0,
    far_contexts: tuple[str, ...] = ("true",),
    ways: Sequence[tuple[str, str, str]] = WAYS,
) -> EvictionResult:
    """Losses of 12 blocks of 8 targets, in texts of six groups; ``gain``: mean of L_short less the full loss."""
    generator = np.random.default_rng(seed)
    count = B * BLOCKS
    targets = pd.DataFrame({"target_id": np.arange(count)})
    targets["block"] = targets["target_id"] // B
    targets["place"] = targets["target_id"] % B
    targets["text"] = targets["block"]
    targets["group"] = [f"book {block // 2}" for block in targets["block"]]
    targets["position"] = 100 + targets["target_id"]
    targets["token"] = 7
    targets["kind"] = [KINDS[number % 3] for number in targets["target_id"]]
    full = generator.gamma(2, 1, count)
    short = full + generator.normal(gain, 1, count)
    targets["loss_full_nats"] = full.astype(np.float32)
    targets["loss_short_nats"] = short.astype(np.float32)

    losses = []
    choices = []
    for far_context in far_contexts:
        for near in ("kept", "reread"):
            for policy, budget, keys, values in (
                (FULL, 1.0, 8, full),
                (NONE, 0.0, 0, short),
                (SINKS, 0.125, 1, short),
            ):
                losses.append(_losses(targets, far_context, policy, near, budget, keys, values, 0 * values))
        for policy, sees, near in ways:
            for budget, keys in zip(BUDGETS, (2, 4), strict=True):
                over = generator.normal(1 - budget, 0.5, count)
                kl = generator.gamma(1, 1 - budget, count)
                losses.append(_losses(targets, far_context, policy, near, budget, keys, full + over, kl))
                spearman = generator.uniform(-1, 1, BLOCKS)
                spearman[0] = np.nan
                choices.append(
                    pd.DataFrame(
                        {
                            "block": np.arange(BLOCKS),
                            "far_context": far_context,
                            "policy": policy,
                            "sees": sees,
                            "near": near,
                            "budget": budget,
                            "keys": keys,
                            "spearman": spearman.astype(np.float32),
                            "overlap": generator.uniform(0, 1, BLOCKS).astype(np.float32),
                        }
                    )
                )
    settings = EvictionSettings(
        model=ModelIdentity("model", "0" * 64, "llama", 10, None, None, (), None, "fp32"),
        texts=TextsIdentity("texts", "1" * 64, "heldout"),
        contexts=ContextSettings(12, 4, 0, B),
        blocks_requested=BLOCKS,
        budgets=BUDGETS,
        sinks=1,
        policies=("snapkv", "h2o", "random", "knorm"),
        references=("leave-one-out-kl",),
        placebo=len(far_contexts) > 1,
    )
    frames = {"targets": targets, "losses": pd.concat(losses, ignore_index=True)}
    return EvictionResult(
        settings, choices=pd.concat(choices, ignore_index=True), provenance={"seconds": 1.0}, **frames
    )


def _losses(targets, far_context, policy, near, budget, keys, values, kl) -> pd.DataFrame:
    """Rows of `EvictionResult.losses`."""
    return pd.DataFrame(
        {
            "target_id": targets["target_id"],
            "far_context": far_context,
            "policy": policy,
            "near": near,
            "budget": budget,
            "keys": keys,
            "loss_nats": values.astype(np.float32),
            "kl_nats": kl.astype(np.float32),
        }
    )
