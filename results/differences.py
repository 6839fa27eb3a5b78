"""Differences between models or texts of one study, each with an interval of its own; no model is needed.

    python results/differences.py
    python results/differences.py --numbers results/differences.csv

Two intervals that overlap do not show that two numbers are alike. Of each pair: the first minus the second, in the
share of targets over tau, in that share with equal weight of every group, and in net recovery at k = 4, in points.
Groups that both have are left out of both at once. First interval: 95 %, by group, for the runs at hand. Second:
the same at 1 - 0.05 / pairs (Bonferroni).

Last, persistence: of the targets over tau under one run, the gain under another, and the share that is over tau
there, too; mean of all ordered pairs, 95 %, by group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pandas as pd

from analysis import Result, load_study
from analysis.stats.comparisons import persistence_between, result_differences
from analysis.stats.recovery import NET
from analysis.stats.tables import interval_text, save_numbers
from analysis.study_options import study_parser

HERE = Path(__file__).parent
LANGUAGES = ("english", "french", "german", "spanish", "russian")
SIZES = ("0.3m", "0.6m", "pose", "1.9m")
ENCODINGS = ("rope", "pose", "pose4", "pose16", "random_start", "nope", "alibi")
BLIND, SIGNED = "leave-one-out-kl", "leave-one-out"
PROPOSED = f"{BLIND}@input-x-gradient:16"
COLUMNS = {"share_over_tau": "share", "share_over_tau_equal_groups": "equal", "recovery": "net"}

Side = tuple[str, Result, str]
"""Name, result and selector of one side of a difference."""


def show(title: str, pairs: Iterable[tuple[Side, Side]], tests: int) -> dict[str, pd.DataFrame]:
    """Print a row for each pair; returns all differences."""
    rows = []
    frames = []
    for (first_name, first, first_selector), (second_name, second, second_selector) in pairs:
        row = {"": f"{first_name} − {second_name}"}
        for confidence, label in ((0.95, "95 %"), (1 - 0.05 / tests, "corrected")):
            frame = result_differences(
                first, second, selectors=(first_selector, second_selector), k=4, confidence=confidence
            )
            frames.append(frame.assign(pair=row[""], confidence=confidence))
            frame = frame[frame["name"].isin(COLUMNS) & frame["far_context"].fillna(NET).eq(NET)]
            for difference in frame.to_dict("records"):
                digits = 0 if difference["name"] == "recovery" else 2
                column = f"{COLUMNS[difference['name']]}, {label}"
                row[column] = interval_text(difference, percent=True, digits=digits)
        rows.append(row)
    print(f"\n{title}, corrected for {tests}\n{pd.DataFrame(rows).to_string(index=False)}")
    return {title: pd.concat(frames)}


def show_persistence(title: str, runs: Sequence[Result]) -> dict[str, pd.DataFrame]:
    """Print what is left of the gain under another run; gains only where a result has all losses. Returns it."""
    names = {
        "share_still_over_tau": "still over tau [%]",
        "selecting_gain_nats": "gain there [nats]",
        "gain_nats": "gain under the other [nats]",
    }
    frame = persistence_between(runs)
    for row in frame.to_dict("records"):
        is_share = row["name"] == "share_still_over_tau"
        shown = interval_text(row, percent=is_share, digits=2 if is_share else 1)
        print(f"{title}: {names[row['name']]} {shown}")
    return {f"{title}, under the other run": frame}


def joined(study: dict[str, Result], cells: Iterable[str], selector: str, name: str) -> Side:
    """Runs of one model as a side."""
    return name, Result.join([study[cell] for cell in cells]), selector


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all differences."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    records = given.records

    study = load_study(records / "languages")
    texts = [
        joined(study, [f"{name}/seed-1", f"{name}/seed-2"], BLIND, name) for name in (*LANGUAGES, "python")
    ]
    frames = show("languages", combinations(texts[:5], 2), 10)
    frames |= show("Python", [(texts[5], one) for one in texts[:5]], 5)

    study = load_study(records / "books")
    lengths = [
        joined(study, [f"n{n}-m32-seed-1", f"n{n}-m32-seed-2"], BLIND if n == 128 else PROPOSED, f"N {n}")
        for n in (1024, 512, 128)
    ]
    frames |= show("books", combinations(lengths, 2), 3)

    study = load_study(records / "length")
    cells = {name: [f"influence/config={name},seed={seed}" for seed in (1, 2)] for name in (*SIZES, "rope")}
    sizes = [joined(study, of_size, SIGNED, name) for name, of_size in cells.items()]
    frames |= show("sizes", combinations(sizes[3::-1], 2), 6)
    frames |= show("RoPE less RoPE + PoSE", [(sizes[4], sizes[2])], 1)
    alone: list[Side] = [(name, study[f"influence/config={name},seed=1"], SIGNED) for name in ENCODINGS]
    frames |= show("encodings, seed 1", [(one, alone[0]) for one in alone[1:]], 6)

    for name, result, _ in texts:
        frames |= show_persistence(name, result.runs or (result,))
    study = load_study(records / "demo")
    frames |= show_persistence("demo", [study[f"seed-{seed}"] for seed in (6198, 1, 2)])
    if given.numbers:
        save_numbers(given.numbers, frames)


if __name__ == "__main__":
    main()
