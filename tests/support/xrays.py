"""An influence map of made-up numbers: what several tests share."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.xray import InfluenceMap

M = 16
WORDS = (
    " the", " house", " of", " Mr", ".", " Éva", ",", "\n", " said", "ing", " 42", " “", "”", "", " 家", "  ",
)  # fmt: skip
ABOUT = {
    "model": "runs/a", "model_sha256": "e" * 64, "text": "a.txt", "n_long": 512, "n_short": M, "prefix": [],
    "tau_nats": 1.0, "dtype": "fp32", "commit": "abc",
}  # fmt: skip


def made_map(length: int, pieces: list[str] | None = None) -> InfluenceMap:
    """Of ``length`` tokens, read in one window; a few influences are large."""
    rng = np.random.default_rng(length)
    long = np.array([np.nan, *rng.gamma(2.0, 1.2, length - 1)])
    gains = np.where(np.arange(length) > M, rng.exponential(0.7, length), 0.0)
    far = [(0.15 * rng.standard_cauchy(max(0, t - M))).clip(-4, 5).astype(np.float32) for t in range(length)]
    tokens = pd.DataFrame(
        {
            "token": rng.integers(50, size=length),
            "piece": pieces or [WORDS[i] for i in rng.integers(len(WORDS), size=length)],
            "loss_long_nats": long,
            "loss_short_nats": long + gains,
            "first_far": 0,
        }
    )
    return InfluenceMap(tokens.assign(influence=far), dict(ABOUT))
