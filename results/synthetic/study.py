"""Numbers of these pages beside those of `figure1`: python results/synthetic/study.py

Prints after how many steps 99 % were right (`further/learn`; as many as were trained where never), how much more of
the samples is right with few planted tokens than with more in the same run, the recall of planted tokens, and the
agreement of rules that `couple.py` found. Differences are paired by run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.stats.bootstrap import LEAST_RUNS, student_t
from analysis.stats.tables import show

HERE = Path(__file__).parent
TEXT = {ids: f"text/records/{ids}/4/" for ids in ("contiguous", "pose", "coupled")}
"""Folders of tokens planted in books, K_train 4, by ids."""


def k_differences(rows: pd.DataFrame, folder: str, length: int, ks: Sequence[int]) -> pd.DataFrame:
    """Share of samples that are right with one k less that with the next, paired by run.

    Student's t over three runs or more, at least as wide as the normal interval of the samples; of two runs
    that of the samples alone, as everywhere. Columns: folder, length, runs, first, second, value, low, high.
    """
    of_folder = rows[rows["folder"].str.startswith(folder) & (rows["length"] == length)]
    exact, samples = (
        of_folder.pivot_table(index="folder", columns="k", values=name) for name in ("exact", "samples")
    )
    shares = exact / samples
    variances = shares * (1 - shares) / samples
    differences = []
    for first, second in pairwise(ks):
        apart = (shares[first] - shares[second]).to_numpy()
        runs = len(apart)
        variance = (variances[first] + variances[second]).sum() / runs**2
        half = student_t(np.inf) * np.sqrt(variance)
        if runs >= LEAST_RUNS:
            of_runs = student_t(runs - 1) * apart.std(ddof=1) / np.sqrt(runs)
            half = max(half, of_runs)
        keys = {"folder": folder, "length": length, "runs": runs, "first": first, "second": second}
        value = apart.mean()
        differences.append(keys | {"value": value, "low": value - half, "high": value + half})
    return pd.DataFrame(differences)


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """The last step of every run of `further/learn`, seed by seed."""
    learned = rows[rows["folder"].str.startswith("further/learn/")]
    part = learned["folder"].str.split("/").str[2]
    run = learned["folder"].str.split("/").str[3].str.replace(r",seed=\d+", "", regex=True)
    by_seed = learned.assign(part=part, run=run).groupby(["part", "run", "seed"])["step"].max()
    return by_seed.unstack("seed").astype("Int64")


def recalls(records: Path) -> pd.DataFrame:
    """Recall of the planted tokens among the first k, of every record of `recall.py`; of_0 and of_1 by their bit."""
    frames = []
    for path in sorted(records.rglob("recall.json")):
        content = json.loads(path.read_text(encoding="utf8"))
        frames.append(pd.DataFrame(content["recalls"]).assign(record=str(path.parent.relative_to(records))))
    of_all = pd.concat(frames, ignore_index=True)
    names = [f"token_{name}" for name in ("recall", "placebo_recall", "recall_of_0", "recall_of_1")]
    table = of_all[of_all["name"].isin(names)].pivot_table(
        index=["record", "planted", "selector", "k"], columns="name", values="value"
    )
    return table[names].round(2)


def agreements(records: Path) -> pd.DataFrame:
    """The share of tokens whose id the rule of a record of `couple.py` gives."""
    rows = []
    for path in sorted(records.rglob("coupling.json")):
        content = json.loads(path.read_text(encoding="utf8"))
        for segment in content["segments"]:
            rows.append({"record": str(path.parent.relative_to(records)), **segment})
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    records = parser.parse_args(arguments).records
    rows = pd.read_parquet(records / "exact_match.parquet")
    print("steps of the first part of training, by seed\n" + steps(rows).to_string())
    differences = [
        k_differences(rows, "records/sparse/8/", 150, (4, 6, 8)),
        k_differences(rows, "records/sparse/10/", 150, (4, 6, 8, 10)),
        *(k_differences(rows, of_ids, 640, (1, 4)) for of_ids in TEXT.values()),
    ]
    print("\n" + show(pd.concat(differences), title="right with one k less with the next [points]"))
    print("\nrecall of planted tokens\n" + recalls(records).to_string())
    print("\nagreement of the rules that were found\n" + agreements(records).to_string(index=False))


if __name__ == "__main__":
    main()
