"""An influence map of made-up numbers: what several tests share."""

from __future__ import annotations

import numpy as np

from analysis.report.influence_map import InfluenceMap
from tests.support.made_up_records import WORDS

M = 16
CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
SIGNS = "‹ALM›‹LRM›‹RLM›‹LRE›‹RLE›‹PDF›‹LRO›‹RLO›‹LRI›‹RLI›‹FSI›‹PDI›"
ABOUT = {
    "model": "runs/a",
    "model_sha256": "e" * 64,
    "text": "a.txt",
    "n_long": 512,
    "n_short": M,
    "tau_nats": 1.0,
    "dtype": "fp32",
    "device": "cpu",
    "commit": "abc",
}


def made_up_map(length: int, pieces: list[str] | None = None) -> InfluenceMap:
    """Of ``length`` tokens, read in one window; a few influences are large."""
    rng = np.random.default_rng(length)
    long = np.array([np.nan, *rng.gamma(2.0, 1.2, length - 1)])
    gains = np.where(np.arange(length) > M, rng.exponential(0.7, length), 0.0)
    return InfluenceMap(
        tokens=rng.integers(50, size=length),
        pieces=pieces or [WORDS[i] for i in rng.integers(len(WORDS), size=length)],
        loss_long_nats=long,
        loss_short_nats=long + gains,
        first_far=np.zeros(length, dtype=np.int64),
        influence_nats=[
            (0.15 * rng.standard_cauchy(max(0, t - M))).clip(-4, 5).astype(np.float32) for t in range(length)
        ],
        about=dict(ABOUT),
    )
