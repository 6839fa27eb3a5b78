"""A dependency that is known: words that a text names once, far away, and needs at its end.

    python results/models/planted.py measure MODEL BOOKS.jsonl runs/models/planted     about a minute a text
    python results/models/planted.py collect runs/models/planted                       keeps the records in planted/
    python results/models/planted.py                                                   prints the tables
    python results/models/planted.py --figures results/models                          draws planted.png, too
    python results/models/planted.py --numbers results/models/planted/numbers.csv      writes all numbers, too

In a stretch of every book stands "The secret password is" and P random words, P of 1, 2, 4, and again "The secret
password is" at the end of the context: the targets are the P words. N 128, M 32, one block of P targets a text, of
which the far context has F = 96 tokens. A recall of 1 means that the first k chosen tokens hold the target's own word.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import Result, load, load_study, measure
from analysis.figures.figure2 import kept_as_figure
from analysis.figures.style import save_figure
from analysis.measurement import save_study
from analysis.open_model import open_model
from analysis.stats import numbers
from analysis.stats.recovery import Measured, Row
from analysis.stats.tables import Tables
from analysis.study_options import study_parser

HERE = Path(__file__).parent
RECORDS = HERE / "planted"
N_LONG, N_SHORT, KS = 128, 32, (1, 2, 4, 8, 16)
SELECTORS = ("leave-one-out-kl", "attention", "h2o", "snapkv", "nearest", "random")
PARTS = (1, 2, 4)
WORDS = [
    *("apple", "river", "stone", "candle", "winter", "garden", "silver", "mountain", "orange", "window"),
    *("butter", "castle", "dragon", "engine", "falcon", "guitar", "hammer", "island", "jacket", "kitchen"),
    *("ladder", "magnet", "needle", "ocean", "pencil", "rabbit", "saddle", "turtle", "velvet", "wagon"),
    *("yellow", "bridge", "carpet", "desert", "eagle", "forest", "hotel", "lemon", "market", "north"),
    *("paper", "queen", "rocket", "spider", "tiger", "uncle", "violin", "wheat"),
]
ANNOUNCED = "\nThe secret password is"
ANNOUNCED_TOKENS = 5


def text_with(
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str],
    filler: list[int],
    words: Sequence[str],
    generator: np.random.Generator,
) -> tuple[str, list[int]]:
    """A text of exactly N + P tokens with the words among its far tokens and at its end, and where: P positions."""
    assert len(encode(ANNOUNCED)) == ANNOUNCED_TOKENS, "another tokenizer"
    named = encode(ANNOUNCED + "".join(f" {word}" for word in words) + ".\n")
    asked_for = encode(ANNOUNCED + "".join(f" {word}" for word in words))
    length = N_LONG + len(words)
    place = int(generator.integers(4, N_LONG - N_SHORT - len(named)))
    for start in generator.permutation(len(filler) - length).tolist():
        before = filler[start : start + place]
        between = filler[start + place : start + length - len(named) - len(asked_for)]
        ids = [*before, *named, *between, *asked_for]
        if encode(decode(ids)) == ids:  # most places in a word or a run of spaces are read otherwise
            first = place + ANNOUNCED_TOKENS
            return decode(ids), list(range(first, first + len(words)))
    raise SystemExit("no stretch of the filler reads as it was put together")


def run(model: str, books: str, out: str) -> None:
    """Measure the three numbers of parts, with the texts and the places of the words beside."""
    Path(out).mkdir(parents=True, exist_ok=True)
    loaded = open_model(model)

    tokenizer = loaded.tokenizer
    assert tokenizer is not None, f"{model} comes without a tokenizer"

    def encode(text: str) -> list[int]:
        return loaded.encode(text).tolist()

    lines = [json.loads(line) for line in Path(books).read_text(encoding="utf8").splitlines()]
    single = [word for word in WORDS if len(encode(f" {word}")) == 1]
    for count in PARTS:
        texts, places = {}, {}
        for number, line in enumerate(lines):
            generator = np.random.default_rng([count, number])
            filler = encode(line["text"][-20_000:])
            words = generator.choice(single, count, replace=False).tolist()
            text, where = text_with(encode, tokenizer.tokenizer.decode, filler, words, generator)
            texts[line["group"]], places[line["group"]] = [text], where
        (Path(out) / f"parts-{count}.json").write_text(json.dumps(places), encoding="utf8")
        result = measure(
            loaded,
            texts,
            n_long=N_LONG,
            n_short=N_SHORT,
            targets=count * len(lines),
            targets_per_block=count,
            ks=KS,
            selectors=SELECTORS,
            keep_as=("text", "cache:4"),
            out=Path(out) / f"parts-{count}",
        )
        print(result)


def collect(runs: str) -> None:
    """Keep the results without their texts, and the places of the words: P position ids of the far context a text."""
    study, places = {}, {}
    for count in PARTS:
        cell = f"parts-{count}"
        study[cell] = replace(load(Path(runs) / cell), texts=None)
        places[cell] = json.loads((Path(runs) / f"{cell}.json").read_text(encoding="utf8"))
    save_study(RECORDS, study)
    (RECORDS / "places.json").write_text(json.dumps(places) + "\n", encoding="utf8")


def recall(result: Result, places: Mapping[str, list[int]]) -> pd.DataFrame:
    """Tidy: the share of the targets over tau whose word is among the first k, the share of all P words that are, and
    that of the targets whose first k all stand in the planted sentence."""
    measured = Measured(result)
    targets = result.targets.iloc[measured.over]
    of_text = np.array([places[group] for group in targets["group"]])  # (m, P)
    word = of_text[np.arange(len(targets)), targets["target_id"] % of_text.shape[1]]
    rows: list[Row] = []
    for selector in SELECTORS:
        selected = measured.of_choices("selected", selector, "true")
        is_word = selected == word[:, None]
        is_any = (selected[:, :, None] == of_text[:, None]).any(axis=-1)
        in_sentence = (selected >= of_text[:, :1] - ANNOUNCED_TOKENS) & (selected <= of_text[:, -1:])
        for k in KS:
            shares = {
                "its word": is_word[:, :k].sum(axis=1),
                "all words": is_any[:, :k].sum(axis=1) / of_text.shape[1],
                "nothing but the sentence": in_sentence[:, :k].all(axis=1),
            }
            for name, share in shares.items():
                interval = measured.bootstrap.share(measured.draws(share.astype(float)), len(targets))
                rows.append({"selector": selector, "recall": name, "k": k, **asdict(interval)})
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of every number of parts; write them, and draw the recovery of four, where that is asked for."""
    given = study_parser(__doc__, RECORDS, figures=True).parse_args(arguments)
    places = json.loads((given.records / "places.json").read_text(encoding="utf8"))
    study = load_study(given.records)
    if given.figures:
        figure = kept_as_figure(study["parts-4"])
        assert figure is not None, "kept in one way"
        save_figure(figure, given.figures, "planted.png")
    tables = Tables(digits=0)
    for cell, result in study.items():
        tables.add(f"{cell}: {len(result.targets)} targets", numbers.shares(result), digits=1)
        for name, rows in recall(result, places[cell]).groupby("recall"):
            tables.add(f"{cell}, recall of {name}", rows.drop(columns="recall"), across="k")
        tables.add(f"{cell}, recovery", numbers.recovery(result), by=("level", "sinks"), across="k")
    if given.numbers:
        tables.save(given.numbers)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"measure": run, "collect": collect}
    if sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](*sys.argv[2:])
    else:
        main()
