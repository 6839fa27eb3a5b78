"""Thirds of the training documents: by what their far context is worth, by chance, and by how easy they are.

    python results/thesis/selected/choose.py CORPUS RANKING OUT

CORPUS is a prepared corpus, RANKING what `measure --selectors none --split train` says of its documents. Writes
scores.parquet (a row a document: its scores, and how many of its tokens each third has), the documents of each third
(top.jsonl, easy.jsonl, random-SEED.jsonl) and heldout.jsonl, the same held-out text for all.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer

from analysis import Result, load
from analysis.project import PreparedTexts
from analysis.saved import without_folders, write_saved
from olmo_sparsity.data.text import Document, write_rows
from olmo_sparsity.data.tokens import TOKENIZER_NAME, load_tokenizer

HEAD, KIND, VERSION = "scores.json", "olmo-sparsity scores of documents", 1
"""As in `collect.py`: scripts of a study do not import one another."""
SEEDS = (2, 3, 4)
"""Of the trainings: each has a random third of its own."""
STRATUM = 30
"""About so many documents of nearly the same length are compared, of which a third is chosen."""
WINDOW = 256


def scores_of(result: Result) -> pd.DataFrame:
    """What is measured of each document: `Result.documents`, and long_nats, the mean L_long; by number."""
    scores = result.documents()
    loss_long = result.targets.groupby("text")["loss_long_nats"].mean()
    scores["long_nats"] = scores["text"].map(loss_long)
    names = ["text", "group", "tokens", "n_targets", "gain_nats", "gain_error_nats"]
    names += ["net_gain_nats", "net_gain_error_nats", "long_nats"]
    return scores[names].sort_values("text", ignore_index=True)


def strata_of(tokens: np.ndarray) -> list[np.ndarray]:
    """Places of documents in strata of nearly equal length, each a multiple of three; up to two, the shortest, in none.

    Args:
        tokens: of each document, (n,).
    """
    by_length = np.argsort(-tokens, kind="stable")
    triples = by_length[: len(tokens) // 3 * 3].reshape(-1, 3)
    count = max(1, 3 * len(triples) // STRATUM)
    return [stratum.ravel() for stratum in np.array_split(triples, count)]


def lowest_third(strata: Iterable[np.ndarray], values: np.ndarray) -> np.ndarray:
    """Places of the third of every stratum whose values, (n,), are lowest, ascending."""
    chosen = []
    for places in strata:
        ascending = places[np.argsort(values[places], kind="stable")]
        chosen.append(ascending[: len(places) // 3])
    return np.sort(np.concatenate(chosen))


def thirds_of(scores: pd.DataFrame) -> dict[str, np.ndarray]:
    """Rows of the documents of every third, by name."""
    strata = strata_of(scores["tokens"].to_numpy())
    thirds = {
        "top": lowest_third(strata, -scores["net_gain_nats"].to_numpy()),
        "easy": lowest_third(strata, scores["long_nats"].to_numpy()),
    }
    for seed in SEEDS:
        drawn = np.random.default_rng(seed).random(len(scores))
        thirds[f"random-{seed}"] = lowest_third(strata, drawn)
    return thirds


def cut(tokens: np.ndarray, total: int) -> np.ndarray:
    """How many tokens of each document are kept, (n,), so that they sum to ``total``: the longest lose their ends."""
    most = int(tokens.max())
    limit = bisect_right(range(most + 1), total, key=lambda limit: np.minimum(tokens, limit).sum()) - 1
    kept = np.minimum(tokens, limit)
    left = total - int(kept.sum())
    kept[np.flatnonzero(tokens > limit)[:left]] += 1
    return kept


def kept_tokens(scores: pd.DataFrame) -> pd.DataFrame:
    """How many tokens of each document, without its end of text, every third has: a column a third, 0 of the others.

    All thirds have equally many windows, as they have equally many documents and tokens. Half a window is left to
    spare: a text that was cut may be read as a token more or less.
    """
    thirds = thirds_of(scores)
    tokens = scores["tokens"].to_numpy()
    least = min(int((tokens[rows] + 1).sum()) for rows in thirds.values())
    windows = (2 * least - WINDOW) // (2 * WINDOW)
    kept = pd.DataFrame(0, index=scores.index, columns=list(thirds))
    for name, rows in thirds.items():
        total = windows * WINDOW + WINDOW // 2 - len(rows)
        kept.loc[rows, name] = cut(tokens[rows], total)
    return kept


def written(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Token ids as text."""
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def reads_back(tokenizer: Tokenizer, ids: np.ndarray) -> bool:
    """Whether these ids, written as text, are read as the same ids.

    They are not where the text spelled out the end of text, which a corpus leaves out.
    """
    return bool(tokenizer.encode(written(tokenizer, ids), add_special_tokens=False).ids == ids.tolist())


def choose(corpus: Path, ranking: Path, out: Path) -> None:
    """Write scores and texts; the scores' head comes last, so that it says that all are there."""
    result = load(ranking)
    texts = PreparedTexts(corpus, "train")
    tokenizer = load_tokenizer(corpus / TOKENIZER_NAME)
    scores = scores_of(result)
    is_text = np.array([reads_back(tokenizer, texts.tokens(number)) for number in scores["text"]])
    print(
        f"{len(scores):,} documents are ranked; left out, as they are not read back alike: {(~is_text).sum()}"
    )
    scores = scores[is_text].reset_index(drop=True)
    kept = kept_tokens(scores)
    out.mkdir(parents=True, exist_ok=True)
    for name in kept:
        documents = []
        for row in np.flatnonzero(kept[name]):
            ids = texts.tokens(scores["text"][row])[: kept[name][row]]
            documents.append(Document(written(tokenizer, ids), scores["group"][row]))
        write_rows(partial(iter, documents), out / f"{name}.jsonl")
    heldout = PreparedTexts(corpus, "heldout")
    assert heldout.groups is not None, "docstrings have packages"
    documents = []
    for number, group in enumerate(heldout.groups):
        documents.append(Document(written(tokenizer, heldout.tokens(number)), str(group)))
    write_rows(partial(iter, documents), out / "heldout.jsonl")
    shown = without_folders(result)
    about = {"settings": shown.settings.to_json(), "provenance": shown.provenance}
    head = {"kind": KIND, "version": VERSION, "cells": {"ranking": about}}
    write_saved(out / HEAD, head, {"scores": scores.join(kept)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Write scores and texts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("ranking", type=Path, metavar="RANKING")
    parser.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    choose(options.corpus, options.ranking, options.out)


if __name__ == "__main__":
    main()
