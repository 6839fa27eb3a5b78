"""How much recent text predictions need: the loss given the last M tokens of N, for M from 16 up to N.

    python results/models/recent.py measure MODEL TEXTS.jsonl N TARGETS OUT.parquet [PREFIX]
    python results/models/recent.py                         prints the tables
    python results/models/recent.py --figures results/models  draws recent.png, too

Targets stand in blocks of 16, so that target b of a block has M + b tokens. A target whose loss given M tokens is
within 0.1 nats of its loss given N needs no more than M (compare arXiv 2512.08082). Key tokens are LongPPL's (arXiv
2410.23771): more than 2 nats gained beyond M tokens, and a loss below 2. OUT is called
recent-MODEL-TEXT-nN.parquet; the figure has a row for each of MODELS.
Shapes: T targets, C lengths of context.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.style import save_figure
from analysis.parquet import read_parquet
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.tables import show

HERE = Path(__file__).parent
SHORTEST, BLOCK, NEAR_NATS = 16, 16, 0.1
TAUS = (1, 2, 4)
TEXTS = ("books", "code", "releases")
MODELS = {"smollm2": "SmolLM2-135M-Instruct, Q4_1", "gemma": "Gemma 3 270M, Q4_K_M"}
KEY_NATS = 2  # alpha and beta of LongPPL


def lengths_of(n_long: int) -> list[int]:
    """16, 32, … N, (C,)."""
    return [SHORTEST * 2**i for i in range(20) if SHORTEST * 2**i <= n_long]


def measure(model: str, texts: str, n_long: int, targets: int, out: str, prefix: str = "auto") -> None:
    """Write the losses of sampled targets given each length of context: a row each, columns loss_16 … loss_N [nats]."""
    from analysis.contexts import NO_FAR, long_contexts
    from analysis.model.losses import Scorer
    from analysis.open_model import open_model
    from analysis.open_texts import open_texts
    from analysis.sampling import sample_targets

    loaded = open_model(model, prefix=prefix)
    source = open_texts([Path(texts)], loaded.reader)
    scorer = Scorer(loaded.model, device=loaded.device)
    places = sample_targets(source, targets, seed=0, targets_per_block=BLOCK, n_long=n_long, n_short=SHORTEST)
    columns: dict[int, list[np.ndarray]] = {length: [] for length in lengths_of(n_long)}
    for start in range(0, len(places), BLOCK):
        first = places.iloc[start : start + 1]
        block = long_contexts(
            source,
            first["text"].to_numpy(),
            first["position"].to_numpy(),
            first["target_id"].to_numpy(),
            targets_per_block=BLOCK,
            n_long=n_long,
            n_short=SHORTEST,
        )
        for length, of_blocks in columns.items():
            part = replace(block, n_short=length)
            of_blocks.append(scorer.losses(part, NO_FAR)[:, 0])
        print(f"\r{start + BLOCK:,} of {len(places):,} targets", end="", file=sys.stderr, flush=True)
    losses = {f"loss_{length}": np.concatenate(parts) for length, parts in columns.items()}
    frame = places[["text", "group", "position"]].assign(**losses).astype(dict.fromkeys(losses, "float32"))
    frame.to_parquet(out, compression="zstd", index=False)


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Tidy: name, context, value, low, high, with 95 % intervals by group and text."""
    losses = frame.filter(like="loss_").astype(float)
    lengths = [int(name.removeprefix("loss_")) for name in losses]
    whole = losses.iloc[:, -1]
    bootstrap = ClusterBootstrap.of(frame)
    ones = np.ones(len(frame))

    def row(name: str, context: int, values: np.ndarray | pd.Series) -> dict[str, str | int | float]:
        draws = bootstrap.ratio(np.asarray(values, dtype=float), ones)
        interval = bootstrap.interval(draws)
        if name.startswith("share"):
            interval = bootstrap.share(draws, len(frame))
        return {"name": name, "context": context, **vars(interval)}

    rows = []
    for length, loss in zip(lengths, losses.T.to_numpy(), strict=True):
        rows.append(row("loss_nats", length, loss))
        rows.append(row("share_near", length, np.abs(loss - whole) <= NEAR_NATS))
        rows.append(row("share_no_worse", length, loss - whole <= NEAR_NATS))
        is_key = (losses[f"loss_{length}"] - whole > KEY_NATS) & (whole < KEY_NATS)
        rows.append(row("share_key_tokens", length, is_key))
        for tau in TAUS:
            rows.append(row(f"share_gain_over_{tau}", length, loss - whole > tau))
            rows.append(row(f"share_gain_below_-{tau}", length, loss - whole < -tau))
    return pd.DataFrame(rows)


def gain_between(frame: pd.DataFrame, first: int, last: int) -> pd.DataFrame:
    """Tidy: targets that the tokens from first + 1 to last back give more than 1 nat, or take as much from."""
    gain = (frame[f"loss_{first}"] - frame[f"loss_{last}"]).to_numpy(float)
    bootstrap = ClusterBootstrap.of(frame)
    shares = {"share_gain_over_1": gain > 1, "share_gain_below_-1": gain < -1}
    rows = []
    for name, which in shares.items():
        interval = bootstrap.ratio_interval(which.astype(float), np.ones(len(frame)))
        rows.append({"name": name, **vars(interval)})
    return pd.DataFrame(rows)


def with_bos(records: Path) -> pd.DataFrame:
    """How many targets more, in pairs, gain more than 1 nat beyond 32 of 256 tokens where a BOS stands before."""
    bos, none = (read_parquet(records / f"recent-{name}-books-n256.parquet") for name in ("bos", "none"))
    more = [(frame["loss_32"] - frame["loss_256"] > 1).to_numpy(float) for frame in (bos, none)]
    bootstrap = ClusterBootstrap.of(none)
    ratio = bootstrap.ratio(more[0] - more[1], np.ones(len(none)))
    return pd.DataFrame([{"name": "with BOS minus without", **vars(bootstrap.interval(ratio))}])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of every file of losses, and draw those of trained models where a folder for it is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    figures = "folder to draw the figure into (default: it is not drawn)"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=figures)
    given = parser.parse_args(arguments)
    paths = sorted(given.records.glob("recent-*.parquet"))
    drawn = [model for model in MODELS if any(name_of(path)[0] == model for path in paths)]
    figure, panels = plt.subplots(len(drawn), 2, figsize=(8, 2.9 * len(drawn)), layout="constrained")
    for path in paths:
        model, text, n_long = name_of(path)
        frame = read_parquet(path)
        tidy = numbers(frame)
        title = f"{model}, {text}, N {n_long}: {len(frame):,} targets of {frame['text'].nunique()} texts"
        print("\n" + show(tidy, across="name", title=title))
        if "loss_128" in frame:
            between = gain_between(frame, 32, 128)
            print("\n" + show(between, title=f"{model}, {text}, N {n_long}: from 33 to 128 tokens back"))
        if model in drawn:
            draw(panels[drawn.index(model)], tidy, model, text)
    print("\n" + show(with_bos(given.records)))
    panels[0, 0].legend(fontsize=7)
    if given.figures:
        save_figure(figure, given.figures, "recent.png")
    plt.close(figure)


def name_of(path: Path) -> list[str]:
    """Model, text and N of a file of losses."""
    return path.stem.removeprefix("recent-").replace("-n", "-").split("-")


def draw(panels: Sequence[Axes], tidy: pd.DataFrame, model: str, text: str) -> None:
    """What the last tokens give on one text, in the two panels of a model."""
    colour = f"C{TEXTS.index(text)}"
    for panel, name in zip(panels, ("share_no_worse", "share_gain_over_1"), strict=True):
        line = tidy[(tidy["name"] == name) & (tidy["context"] < tidy["context"].max())]
        panel.plot(line["context"], 100 * line["value"], "o-", color=colour, label=text)
        panel.fill_between(line["context"], 100 * line["low"], 100 * line["high"], color=colour, alpha=0.15)
        panel.set_xscale("log", base=2)
        panel.set_xticks(line["context"], map(str, line["context"]))
        panel.set(xlabel="recent tokens read", title=MODELS.get(model, model))
    n_long = int(tidy["context"].max())
    panels[0].set_ylabel(f"loss at most {NEAR_NATS} nats above that\ngiven {n_long:,} tokens [% of targets]")
    panels[1].set_ylabel(f"gain of more than 1 nat from\nthe rest of {n_long:,} [% of targets]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        model, texts, n_long, targets, *others = sys.argv[2:]
        measure(model, texts, int(n_long), int(targets), *others)
    else:
        main()
