"""Are the targets that gain from far context chosen by luck? Those chosen by one half of it, measured by the other.

    python results/models/halves.py measure MODEL TEXTS.jsonl N M TARGETS results/models/halves-TEXTS.parquet
    python results/models/halves.py                         prints the tables
    python results/models/halves.py --numbers results/models/numbers-halves.csv   writes all numbers, too

The loss of a target is measured given the last M tokens, all N, and the last M with every second far token: the odd or
the even ones. Targets whose odd half gains them more than tau are chosen; their gain from the even half owes nothing to
what the choice saw of the far context (the short loss is the same in both). Persistence is the second over the first.
Shapes: T targets in blocks of 16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.parquet import read_parquet
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.tables import Tables
from analysis.study_options import study_parser

HERE = Path(__file__).parent
BLOCK, TAUS = 16, (1, 2, 4)


def measure(model: str, texts: str, n_long: int, n_short: int, targets: int, out: str) -> None:
    """Write the losses of sampled targets: a row each, columns short, long, odd, even [nats]."""
    from analysis.contexts import NO_FAR, long_contexts
    from analysis.model.losses import Scorer
    from analysis.open_model import open_model
    from analysis.open_texts import open_texts
    from analysis.sampling import sample_targets

    loaded = open_model(model)
    source = open_texts([Path(texts)], loaded.reader)
    scorer = Scorer(loaded.model, device=loaded.device)
    places = sample_targets(source, targets, seed=0, targets_per_block=BLOCK, n_long=n_long, n_short=n_short)
    far = np.arange(n_long - n_short)[None]
    subsets = {"short": NO_FAR, "long": far, "odd": far[:, 1::2], "even": far[:, ::2]}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in subsets}
    for start in range(0, len(places), BLOCK):
        first = places.iloc[start : start + 1]
        block = long_contexts(
            source,
            first["text"].to_numpy(),
            first["position"].to_numpy(),
            first["target_id"].to_numpy(),
            targets_per_block=BLOCK,
            n_long=n_long,
            n_short=n_short,
        )
        for name, kept in subsets.items():
            columns[name].append(scorer.losses(block, kept)[:, 0])
        print(f"\r{start + BLOCK:,} of {len(places):,} targets", end="", file=sys.stderr, flush=True)
    losses = {name: np.concatenate(parts).astype(np.float32) for name, parts in columns.items()}
    places[["text", "group", "position"]].assign(**losses).to_parquet(out, compression="zstd", index=False)


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Tidy: name, tau_nats, value, low, high, with 95 % intervals by group and text; chosen by the odd half."""
    bootstrap, ones = ClusterBootstrap.of(frame), np.ones(len(frame))
    gain = {name: (frame["short"] - frame[name]).to_numpy(float) for name in ("odd", "even", "long")}
    rows = []
    for tau in TAUS:
        over, below = gain["odd"] > tau, gain["odd"] < -tau
        both = {
            "share_over_tau": (over, ones),
            "share_below_minus_tau": (below, ones),
            "persistence": (over * gain["even"], over * gain["odd"]),
            "persistence_below": (below * -gain["even"], below * -gain["odd"]),
            "even_over_tau_too": (over * (gain["even"] > tau), over),
            "long_over_tau_too": (over * (gain["long"] > tau), over),
        }
        for name, (part, whole) in both.items():
            ratio = bootstrap.ratio(np.asarray(part, float), np.asarray(whole, float))
            interval = bootstrap.interval(ratio)
            if not name.startswith("persistence"):
                interval = bootstrap.share(ratio, float(np.sum(whole)))
            rows.append({"name": name, "tau_nats": tau, **vars(interval)})
    return pd.DataFrame(rows)


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Tidy: the mean gain of all targets from the whole, the odd and the even far context [nats]."""
    bootstrap, ones = ClusterBootstrap.of(frame), np.ones(len(frame))
    gains = {name: (frame["short"] - frame[name]).to_numpy(float) for name in ("long", "odd", "even")}
    return pd.DataFrame(
        {"name": f"gain_{name}_nats", **vars(bootstrap.interval(bootstrap.ratio(gain, ones)))}
        for name, gain in gains.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables of each file of losses, and write them where that is asked for."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    tables = Tables()
    for path in sorted(given.records.glob("halves-*.parquet")):
        frame = read_parquet(path)
        title = f"{path.stem}: {len(frame):,} targets of {frame['text'].nunique()} texts"
        tables.add(title, numbers(frame), across="tau_nats")
        tables.add(f"{path.stem}: mean gain", means(frame), percent=False, digits=2)
    if given.numbers:
        tables.save(given.numbers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        model, texts, n_long, n_short, targets, out = sys.argv[2:]
        measure(model, texts, int(n_long), int(n_short), int(targets), out)
    else:
        main()
