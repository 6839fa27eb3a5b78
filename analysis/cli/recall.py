"""Recall of planted tokens against k: do selectors find what a prediction depends on?

examples:
  olmo-sparsity recall --out runs/recall
  olmo-sparsity recall --checkpoint runs/planted --out runs/planted/recall
  olmo-sparsity recall --checkpoint runs/parity --length 50 --ks 1,2,4 --samples 200 --out runs/parity/recall

Without --checkpoint selectors are tested on a model built by hand: its answer depends on p far tokens that are known,
each by itself ("sum"), or only all of them together ("all", as a model that copies needs the earlier match and what
followed it). Every other token gives a little noise. Prints the share of the planted tokens among the first k
selected, for every selector, and writes recall.json.

With --checkpoint, a run or checkpoint trained on sparse_parity or planted: the context is the prompt of a test sample,
the target its label, the placebo the far context of a sample with another label. Measured are samples whose planted
tokens all stand before the last --n-short tokens. Writes recall.json and the figure recall.png and recall.pdf.
How to read them: docs/method.md, 2.6.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from olmo_sparsity.util.arguments import Parser, out_folder, seed_number, texts, whole_number, whole_numbers
from olmo_sparsity.util.errors import UserError

SELECTORS = ("leave-one-out", "leave-one-in", "greedy", "gradient", "attention", "random", "nearest")
HAND_BUILT = {
    "n_long": 128,
    "n_short": 16,
    "models": 20,
    "selectors": (*SELECTORS[:-2], "leave-one-out@gradient:32", *SELECTORS[-2:]),
    "seed": 0,
}
TRAINED = {
    "n_short": 2,
    "length": None,
    "ks": None,
    "samples": 100,
    "selectors": SELECTORS,
    "seed": 0,
    "device": None,
}


def main() -> None:
    """Measure, write and print."""
    given = vars(_parser().parse_args())
    checkpoint, out = given.pop("checkpoint", None), given.pop("out")
    defaults = HAND_BUILT if checkpoint is None else TRAINED
    for name in given.keys() - defaults.keys():
        option = f"--{name.replace('_', '-')}"
        raise UserError(
            f"{option} is for a trained model; name one with --checkpoint, or leave {option} out"
            if checkpoint is None
            else f"{option} is for models built by hand; leave it out, or leave out --checkpoint"
        )
    from analysis.measure.planted import measure_hand_built, measure_trained
    from analysis.plots.recall import recall_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import RECALL
    from analysis.tables.cells import print_result
    from olmo_sparsity.util.files import read_json

    options: dict[str, Any] = {**defaults, **given}
    if checkpoint is None:
        path = measure_hand_built(out, **options)
        print_result([_table(read_json(path, ""))], [path])
        return
    path = measure_trained(checkpoint, out, **options)
    result = RECALL.load(path)
    figures = save_figure(recall_figure(result), out, "recall")
    print_result(_tables_of_checkpoint(result), [path, *figures])


def _tables_of_checkpoint(result: dict[str, Any]) -> Iterator[str | Table]:
    from analysis.tables.cells import percent_text

    for cell in result["cells"]:
        right = percent_text(cell["accuracy"], 1)
        yield f"{cell['planted']} planted: {right} % of {cell['samples']:,} samples are answered right"
    for what in result["chance"]:
        yield _table_of_checkpoint(result, what)


def _table_of_checkpoint(result: dict[str, Any], what: str) -> Table:
    """Rows for every number of planted tokens, selector and sort of context; ``what``: token or place."""
    from analysis.tables.cells import plain_table

    counted = {"token": "planted tokens", "place": "planted pairs, found by either token"}[what]
    table = plain_table("planted", "selector", "context", *(f"k = {k}" for k in result["ks"]))
    table.title = f"recall of the {counted}"
    for column in table.columns[1:3]:
        column.justify = "left"
    for cell in result["cells"]:
        sorts = {"true": "recall", "placebo": "placebo_recall"}
        if 0 < cell["accuracy"]["value"] < 1:
            sorts["true, right"] = "recall_right"
        planted = str(cell["planted"])
        for name, by_k in cell["selectors"].items():
            for context, sort in sorts.items():
                recalls = [f"{each[f'{what}_{sort}']['value']:.2f}" for each in by_k.values()]
                table.add_row(planted, name if context == "true" else "", context, *recalls)
                planted = ""
    table.add_row("", "chance", "", *(f"{each:.2f}" for each in result["chance"][what].values()))
    return table


def _table(result: dict[str, Any]) -> Table:
    from analysis.tables.cells import plain_table

    table = plain_table("rule", "planted", "selector", *(f"k = {k}" for k in result["ks"]))
    table.title = "recall of the planted tokens"
    for row in result["rows"]:
        recalls = [f"{each:.2f}" for each in row["recall"]]
        table.add_row(row["rule"], str(row["planted"]), row["selector"], *recalls)
    return table


def _parser() -> Parser:
    parser = Parser(description=__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--out", type=out_folder, required=True, metavar="DIR", help="where recall.json goes")
    parser.add_argument(
        "--n-short",
        type=whole_number,
        help=f"M in tokens (default: {HAND_BUILT['n_short']}; of a checkpoint {TRAINED['n_short']})",
    )
    parser.add_argument(
        "--selectors",
        type=texts,
        help=f"comma-separated (default: {','.join(SELECTORS)}; of models built by hand a screened one, too)",
    )
    parser.add_argument("--seed", type=seed_number, help="of planted tokens, noise and samples (default: 0)")
    by_hand = parser.add_argument_group("models built by hand")
    by_hand.add_argument("--n-long", type=whole_number, help=f"N (default: {HAND_BUILT['n_long']} tokens)")
    by_hand.add_argument(
        "--models",
        type=whole_number,
        help=f"each with its own planted tokens (default: {HAND_BUILT['models']})",
    )
    trained = parser.add_argument_group("a trained model")
    trained.add_argument(
        "--checkpoint", metavar="RUN", help="a run (then its last checkpoint) or checkpoint on a planted task"
    )
    trained.add_argument(
        "--length", type=whole_number, help="N: tokens of every prompt (default: the longest of training)"
    )
    trained.add_argument(
        "--ks",
        type=whole_numbers,
        help="numbers of planted tokens of a sample, comma-separated (default: powers of 2 up to training's k_train)",
    )
    trained.add_argument(
        "--samples", type=whole_number, help=f"test samples for each of --ks (default: {TRAINED['samples']})"
    )
    trained.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")
    return parser
