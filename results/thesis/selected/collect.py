"""The records of the study of chosen training text: what `study.py` reads, made of the cells that run.sh has measured.

    python results/thesis/selected/collect.py OUT

Records: scores (training documents, and which third has them), losses (sums over the held-out targets of a document, of
each training) and positions (loss by position). OUT is the folder that was given to run.sh.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import Result, load
from analysis.probes.length import LossByPosition
from analysis.saved import read_head, without_folders, write_saved
from olmo_sparsity.data.tokens import CorpusManifest

HERE = Path(__file__).parent
HEAD, KIND, VERSION = "records.json", "olmo-sparsity records of chosen training text", 1
"""As in `study.py`."""
SCORES, KIND_OF_SCORES = "scores.json", "olmo-sparsity scores of documents"
"""As in `choose.py`."""
CELL = re.compile(r"heldout-(?P<third>top|random|easy)-(?P<seed>\d+)")
WINDOW, BATCH = 256, 16
"""Tokens of a window, and windows of a step, as in configs/demo.yaml."""


def collect(out: Path, records: Path) -> None:
    """Make the records of all complete cells in a folder of run.sh."""
    selected = out / "selected"
    about = read_head(
        selected / "chosen" / SCORES, KIND_OF_SCORES, VERSION, "run results/thesis/selected/run.sh"
    )
    cells = dict(about["cells"])
    check_corpora(out)
    scores = pd.read_parquet(selected / "chosen" / "scores.parquet")
    losses = []
    first: Result | None = None
    for folder in sorted(selected.glob("heldout-*")):
        match = CELL.fullmatch(folder.name)
        if match is None or not (folder / "result.json").is_file():
            continue
        result = load(folder)
        first = first or result
        columns = ["target_id", "text", "position", "token"]
        if not first.targets[columns].equals(result.targets[columns]):
            raise SystemExit(
                f"{folder.name} was measured on other targets than the cells before it: measure it again"
            )
        losses.append(sums_of(result).assign(third=match["third"], seed=int(match["seed"])))
        shown = without_folders(result)
        cells[folder.name] = {"settings": shown.settings.to_json(), "provenance": shown.provenance}
    if not losses:
        raise SystemExit(f"{selected} has no complete cells: run results/thesis/selected/run.sh first")
    frames = {"scores": scores, "losses": pd.concat(losses, ignore_index=True)}
    if (selected / "length" / "length.json").is_file():
        frames["positions"] = LossByPosition.load(selected / "length").numbers
    write_records(records, cells, **frames)


def write_records(folder: Path, about: dict[str, object], **frames: pd.DataFrame) -> None:
    """Write scores, losses and positions into a folder, as `study.Records` has them."""
    decimals = {name: 5 for name in frames["scores"].columns if name.endswith("_nats")}
    frames["scores"] = frames["scores"].round(decimals)
    frames["losses"] = frames["losses"].round(4)
    write_saved(folder / HEAD, {"kind": KIND, "version": VERSION, "cells": about}, frames)


def sums_of(result: Result) -> pd.DataFrame:
    """Of each document: text, group, n_targets, and sums of L_short, L_long and the placebo's loss in nats."""
    by_text = result.targets.groupby(["text", "group"], as_index=False)
    return by_text.agg(
        n_targets=("target_id", "size"),
        short=("loss_short_nats", "sum"),
        long=("loss_long_nats", "sum"),
        placebo=("loss_placebo_nats", "sum"),
    )


def check_corpora(out: Path) -> None:
    """End where thirds differ in held-out text, documents, or batches an epoch, by which texts are repeated."""
    [heldout] = CorpusManifest.load(out / "data").splits["heldout"]
    seen = {}
    for folder in sorted((out / "selected").glob("data-*")):
        splits = CorpusManifest.load(folder).splits
        [train] = splits["train"]
        [file] = splits["heldout"]
        if file.sha256 != heldout.sha256:
            raise SystemExit(f"{folder.name} has another held-out text than the corpus; make it again")
        seen[folder.name] = (train.documents, train.tokens // WINDOW // BATCH)
    if len(set(seen.values())) > 1:
        raise SystemExit(f"thirds differ in documents, or batches an epoch: {seen}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that was given to run.sh")
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    options = parser.parse_args(arguments)
    collect(options.out, options.records)


if __name__ == "__main__":
    main()
