"""The numbers of this page, from the record in this folder; no model is needed.

    python results/retrieval/study.py
    python results/retrieval/study.py --numbers results/retrieval/numbers.csv

Exact match by length, depth and k, as `olmo-sparsity needle` prints it; and recall inside the window, the share of a
needle's tokens among the first k far tokens of a selector, of each run ("RoPE, 1"). The file has losses and gains, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.probes.needle import Needles
from analysis.stats.tables import Tables
from analysis.study_options import study_parser
from olmo_sparsity.util.files import read_json

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and write all numbers where that is asked for."""
    given = study_parser(__doc__, HERE).parse_args(arguments)
    needles = Needles.load(given.records)
    print(needles)
    tables = Tables(digits=0)
    tables.frames["needles"] = needles.cells
    record = read_json(given.records / "needle.json", "give the folder of a record")
    recall = pd.DataFrame(record["recalls"]).drop(columns="number")
    tables.add("recall", recall, by=("model",), across="k")
    if given.numbers:
        tables.save(given.numbers)


if __name__ == "__main__":
    main()
