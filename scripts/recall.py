"""Recall of planted tokens against k: do selectors find what a prediction depends on? A model built by hand tells.

example:
  python scripts/recall.py --out runs/recall

The model's answer depends on p far tokens that are known: each by itself ("sum"), or only all of them together ("all",
as a model that copies needs the earlier match and what followed it). Every other token gives a little noise. Prints
the share of the planted tokens among the first k selected, for every selector, and writes recall.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from olmo_sparsity.errors import UserError, run_script

PLANTED = (1, 2, 4, 8)
KS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure, print and write."""
    arguments = _parser().parse_args()
    from olmo_sparsity.files import write_json
    from olmo_sparsity.provenance import current_commit

    if not 0 < arguments.n_short < arguments.n_long - max(KS):
        raise UserError(f"--n-long must exceed --n-short by more than {max(KS)}, the largest k")
    names = tuple(name.strip() for name in arguments.selectors.split(","))
    rows = [
        row
        for rule in ("sum", "all")
        for planted in PLANTED
        for row in _measure(arguments, names, rule, planted)
    ]
    result = {"n_long": arguments.n_long, "n_short": arguments.n_short, "models": arguments.models, "ks": KS}
    write_json(arguments.out / "recall.json", {**result, "commit": current_commit(), "rows": rows})
    Console(highlight=False).print(_table(rows))
    print(f"wrote {arguments.out / 'recall.json'}")


def _measure(
    arguments: argparse.Namespace, names: tuple[str, ...], rule: str, planted: int
) -> list[dict[str, Any]]:
    """Mean recall over models with their own planted tokens, a row per selector."""
    from analysis.planted import PlantedModel, planted_contexts, recall_at
    from analysis.scorer import Scorer
    from analysis.selectors import Question, find_selector

    n_far = arguments.n_long - arguments.n_short
    generator = np.random.default_rng([arguments.seed, planted])
    recalls: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number in range(arguments.models):
        columns = np.sort(generator.choice(n_far, planted, replace=False))
        model = PlantedModel(columns.tolist(), arguments.n_long, rule=rule, seed=number)
        contexts = planted_contexts(1, arguments.n_long, arguments.n_short)
        for name in names:
            chosen = find_selector(name)(Question(Scorer(model), contexts, arguments.seed + number, max(KS)))
            recalls[name].append(recall_at(chosen.columns, columns[None], KS)[0])
    return [
        {"rule": rule, "planted": planted, "selector": name, "recall": np.mean(each, axis=0).tolist()}
        for name, each in recalls.items()
    ]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", title="recall of the planted tokens")
    for name in ("rule", "planted", "selector", *(f"k = {k}" for k in KS)):
        table.add_column(name, justify="right" if name.startswith("k") else "left")
    for row in rows:
        table.add_row(
            row["rule"], str(row["planted"]), row["selector"], *(f"{each:.2f}" for each in row["recall"])
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where recall.json goes")
    parser.add_argument("--n-long", type=int, default=128, help="N (default: %(default)s tokens)")
    parser.add_argument("--n-short", type=int, default=16, help="M (default: %(default)s tokens)")
    parser.add_argument(
        "--models",
        type=int,
        default=20,
        help="models, each with its own planted tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--selectors",
        default="leave-one-out,leave-one-in,greedy,gradient,attention,leave-one-out@gradient:32,random,nearest",
        help="comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of planted tokens and noise (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
