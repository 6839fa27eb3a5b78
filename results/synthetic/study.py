"""The numbers of this page and the four beside it, from the records in this folder; no model is needed.

    python results/synthetic/study.py
    python results/synthetic/study.py --numbers results/synthetic/numbers.csv

Prints the exact match of every part of the study: over seeds with its interval, and of each seed. Then after how many
steps 99 % were right (`further/learn`; as many as were trained where never), how much more of the samples is right with
few planted tokens than with more in the same run, the recall of planted tokens, and the agreement of rules that
`couple.py` found. Differences are paired by run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.stats.bootstrap import LEAST_RUNS, student_t
from analysis.stats.tables import interval_text, save_numbers, show
from analysis.study_options import study_parser
from analysis.synthetic.exact_match import GROUP, load, pool

HERE = Path(__file__).parent
TEXT = {ids: f"text/records/{ids}/4/" for ids in ("contiguous", "pose", "coupled")}
"""Folders of tokens planted in books, K_train 4, by ids."""


def part_of(folder: str) -> str:
    """The folder whose runs belong together: records, or a part of what is beside them.

    Of ``further/learn`` and ``needs/found`` the third name counts, too.
    """
    names = folder.split("/")
    if names[0] == "records":
        return "records"
    length = 3 if names[1] in ("learn", "found") else 2
    return "/".join(names[:length])


def exact_matches(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for every point of every part; of_seeds has the per cent of each seed, first errors are shares."""
    shown = [*GROUP, "k", "length", "seeds", "samples", "value", "low", "high", "of_seeds"]
    first_errors = ["wrong_token", "wrong_id", "wrong_stop"]
    frames = []
    for part, of_part in rows.groupby(rows["folder"].map(part_of)):
        points = pool(of_part)
        of_seeds = [" ".join(f"{100 * share:.4g}" for share in shares) for shares in points["of_seeds"]]
        points = points.assign(of_seeds=of_seeds)[[*shown, *first_errors]]
        frames.append(points.assign(part=part))
    return pd.concat(frames, ignore_index=True)


def print_exact_matches(points: pd.DataFrame) -> None:
    """Print a table for each part."""
    texts = [interval_text(row, percent=True) for row in points.to_dict("records")]
    table = points.assign(exact_match=texts)
    columns = ["task", "k_train", "model", "k", "length", "samples", "exact_match", "of_seeds"]
    for part, of_part in table.groupby("part", sort=False):
        print(f"\n{part}: exact match [%, 95 % interval], and that of each seed")
        print(of_part[columns].to_string(index=False))


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
    names = learned["folder"].str.split("/", expand=True)
    run = names[3].str.replace(r",seed=\d+", "", regex=True)
    by_seed = learned.assign(part=names[2], run=run).groupby(["part", "run", "seed"])["step"].max()
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
    given = study_parser(__doc__, HERE).parse_args(arguments)
    records = given.records
    rows = load([records / "exact_match.parquet"])
    points = exact_matches(rows)
    print_exact_matches(points)
    steps_by_seed = steps(rows)
    print("\nsteps of the first part of training, by seed\n" + steps_by_seed.to_string())
    differences = [
        k_differences(rows, "records/sparse/8/", 150, (4, 6, 8)),
        k_differences(rows, "records/sparse/10/", 150, (4, 6, 8, 10)),
        *(k_differences(rows, of_ids, 640, (1, 4)) for of_ids in TEXT.values()),
    ]
    between_ks = pd.concat(differences)
    print("\n" + show(between_ks, title="right with one k less with the next [points]"))
    recalled = recalls(records)
    print("\nrecall of planted tokens\n" + recalled.to_string())
    agreeing = agreements(records)
    print("\nagreement of the rules that were found\n" + agreeing.to_string(index=False))
    if given.numbers:
        tables = {
            "exact match": points,
            "steps of the first part of training, by seed": steps_by_seed.rename(columns=str).reset_index(),
            "right with one k less with the next": between_ks,
            "recall of planted tokens": recalled.reset_index(),
            "agreement of the rules that were found": agreeing,
        }
        save_numbers(given.numbers, tables)


if __name__ == "__main__":
    main()
