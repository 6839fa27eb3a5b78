"""Numbers of this page beside those of `figure2`: python results/demo/study.py

Prints the share of the first four tokens of two runs that are the same, at which distances chosen tokens are more
frequent than random ones, and the agreement of two runs on random subsets, from compare-6198-1.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from analysis import Result, load_study
from analysis.stats.comparisons import distances_beside_uniform, result_overlaps
from analysis.stats.tables import interval_text, show

HERE = Path(__file__).parent
SEEDS = (6198, 1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print all numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = "folder of the records (default: the one of this file)"
    parser.add_argument("--records", type=Path, default=HERE, metavar="DIR", help=folder)
    records = parser.parse_args(arguments).records
    study = load_study(records)
    runs = [study[f"seed-{seed}"] for seed in SEEDS]

    overlaps = result_overlaps(*runs[:2])
    title = "of the first tokens of seed 6198, the share that seed 1 chooses, too"
    print(show(overlaps[overlaps["k"] == 4], across="far_context", digits=0, title=title))

    frame = distances_beside_uniform(Result.join(runs), selector="leave-one-out-kl", k=4)
    title = "times as frequent as under uniform choice"
    print("\n" + show(frame, across="far_context", percent=False, digits=0, title=title))

    compared = json.loads((HERE / "compare-6198-1.json").read_text(encoding="utf8"))
    for far_context, interval in compared["lds_ceiling"].items():
        print(f"\nrank correlation of losses on the same subsets, {far_context}: {interval_text(interval)}")


if __name__ == "__main__":
    main()
