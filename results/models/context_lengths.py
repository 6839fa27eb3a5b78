"""How much recent text predictions need: the loss given the last 16, 32, … of N tokens, from the records in `recent/`.

    python results/models/context_lengths.py                            prints the tables
    python results/models/context_lengths.py --figures results/models   draws recent.png, too
    python results/models/context_lengths.py --numbers results/models/recent/numbers.csv   writes all numbers, too

`olmo-sparsity measure --selectors none --lengths …` makes such records, and their numbers are `Result.contexts()`.
Targets stand in blocks of 16, so that target b of a block has n + b tokens. The figure has a row for each of MODELS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import Result, load_study
from analysis.figures.style import save_figure
from analysis.stats.bootstrap import ClusterBootstrap
from analysis.stats.numbers import rows_with
from analysis.stats.tables import Tables
from analysis.study_options import study_parser

HERE = Path(__file__).parent
NEAR_NATS = 0.1
TEXTS = ("books", "code", "releases")
MODELS = {"smollm2": "SmolLM2-135M-Instruct, Q4_1", "gemma": "Gemma 3 270M, Q4_K_M"}


def between(result: Result, first: int, last: int) -> pd.DataFrame:
    """Shares of targets that the tokens from first + 1 to last back give more than tau, or take as much from."""
    return rows_with(
        result.contexts(reference=last), length=first, name=["share_over_tau", "share_below_minus_tau"]
    )


def more_over_tau(first: Result, second: Result, length: int) -> pd.DataFrame:
    """How many targets more, in pairs, gain more than tau beyond ``length`` tokens under the first of two results."""
    over = []
    for result in (first, second):
        rise = result.targets[f"loss_of_{length}_nats"] - result.targets["loss_long_nats"]
        over.append((rise > result.settings.choices.tau_nats).to_numpy(float))
    bootstrap = ClusterBootstrap.of(first.targets)
    difference = bootstrap.ratio(over[0] - over[1], np.ones(len(over[0])))
    return pd.DataFrame([{"name": "with BOS minus without", **vars(bootstrap.interval(difference))}])


def draw(panels: Sequence[Axes], result: Result, model: str, text: str) -> None:
    """What the last tokens give on one text, in the two panels of a model."""
    frame = result.contexts()
    colour = f"C{TEXTS.index(text)}"
    for panel, name in zip(panels, ("share_enough", "share_over_tau"), strict=True):
        line = frame[frame["name"] == name]
        panel.plot(line["length"], 100 * line["value"], "o-", color=colour, label=text)
        panel.fill_between(line["length"], 100 * line["low"], 100 * line["high"], color=colour, alpha=0.15)
        panel.set_xscale("log", base=2)
        panel.set_xticks(line["length"], [f"{length:.0f}" for length in line["length"]])
        panel.set(xlabel="recent tokens read", title=MODELS[model])
    n_long = result.settings.contexts.n_long
    panels[0].set_ylabel(f"loss at most {NEAR_NATS} nats above that\ngiven {n_long:,} tokens [% of targets]")
    panels[1].set_ylabel(f"gain of more than 1 nat from\nthe rest of {n_long:,} [% of targets]")


def draw_all(study: Mapping[str, Result], folder: Path) -> None:
    """The figure of the page: a row a model, with all its texts."""
    drawn = [model for model in MODELS if any(cell.startswith(model) for cell in study)]
    figure, panels = plt.subplots(
        len(drawn), 2, figsize=(8, 2.9 * len(drawn)), layout="constrained", squeeze=False
    )
    for cell, result in study.items():
        model, text, *_ = cell.split("-")
        if text in TEXTS:
            draw(panels[drawn.index(model)], result, model, text)
    panels[0, 0].legend(fontsize=7)
    save_figure(figure, folder, "recent.png")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables of every record; write them, and draw those of trained models, where that is asked for."""
    given = study_parser(__doc__, HERE, figures=True).parse_args(arguments)
    study = load_study(given.records / "recent")
    tables = Tables()
    for cell, result in study.items():
        counts = result.counts()
        title = f"{cell}: {counts['targets']:,} targets of {counts['documents']} texts"
        tables.add(title, result.contexts(), across="name")
        near = rows_with(result.contexts(tau_nats=NEAR_NATS), name="share_within_tau")
        tables.add(f"{cell}: loss within {NEAR_NATS} nats of that given all tokens", near)
        tables.add(f"{cell}: from 33 to 128 tokens back", between(result, 32, 128))
    with_bos = study["smollm2-bos-books-n256"]
    without = study["smollm2-none-books-n256"]
    title = "smollm2-books-n256: over tau beyond 32 tokens"
    tables.add(title, more_over_tau(with_bos, without, length=32))
    if given.numbers:
        tables.save(given.numbers)
    if given.figures:
        draw_all(study, given.figures)


if __name__ == "__main__":
    main()
