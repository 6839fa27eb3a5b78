"""The numbers of this page, from the records in this folder; no model is needed.

    python results/demo/study.py
    python results/demo/study.py --numbers results/demo/numbers.csv

Prints, of all runs together and of each by itself, and with three placebos, what `olmo-sparsity figure2` prints. Then
the share of the first four tokens of two runs that are the same, at which distances chosen tokens are more frequent
than random ones, and the agreement of two runs on random subsets, from compare-6198-1.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import Result, load_study
from analysis.stats.comparisons import distances_beside_uniform, result_overlaps
from analysis.stats.numbers import placebos, recovery, shares
from analysis.stats.summary import every_number, summary
from analysis.stats.tables import interval_text, save_numbers, show
from analysis.study_options import study_parser

HERE = Path(__file__).parent
SEEDS = (6198, 1, 2)
K = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    study = load_study(given.records)
    runs = [study[f"seed-{seed}"] for seed in SEEDS]
    together = Result.join(runs)
    three_placebos = Result.join([study[f"placebos/seed-{seed}"] for seed in SEEDS])
    print(f"all runs\n{summary(together, K)}\n\nthree placebos\n{summary(three_placebos, K)}")
    of_placebos = placebos(three_placebos)
    parts = of_placebos[
        of_placebos["blind"].eq("leave-one-out-kl") & of_placebos["selector"].eq("leave-one-out")
    ]
    title = "parts of the gain of leave-one-out, by its blind form leave-one-out-kl [%]"
    print("\n" + show(parts, across="far_context", digits=0, title=title))

    by_run = {}
    for seed, run in zip(SEEDS, runs, strict=True):
        of_shares, of_recovery = shares(run), recovery(run, k=K)
        title = f"seed {seed}"
        by_run[title] = pd.concat([of_shares, of_recovery])
        print("\n" + show(of_shares[of_shares["name"].str.startswith("share")], title=title))
        print(show(of_recovery, across="far_context", digits=0))

    overlaps = result_overlaps(*runs[:2])
    title = "of the first tokens of seed 6198, the share that seed 1 chooses, too"
    print("\n" + show(overlaps[overlaps["k"] == K], across="far_context", digits=0, title=title))

    distances = distances_beside_uniform(together, selector="leave-one-out-kl", k=K)
    title = "times as frequent as under uniform choice"
    print("\n" + show(distances, across="far_context", percent=False, digits=0, title=title))

    compared = json.loads((HERE / "compare-6198-1.json").read_text(encoding="utf8"))["lds_ceiling"]
    for far_context, interval in compared.items():
        print(f"\nrank correlation of losses on the same subsets, {far_context}: {interval_text(interval)}")

    if given.numbers:
        agreement = pd.DataFrame(compared).T.rename_axis("far_context").reset_index()
        joined = {"all runs": together, "three placebos": three_placebos}
        # no page shows those by bins of the target, which would be most of the rows
        frames = {
            **{name: every_number({"": one}, K, without=["target_bins"]) for name, one in joined.items()},
            **by_run,
            "chosen by seed 6198 and by seed 1": overlaps,
            "beside uniform choice": distances,
            "rank correlation of losses on the same subsets": agreement,
        }
        save_numbers(given.numbers, frames)


if __name__ == "__main__":
    main()
