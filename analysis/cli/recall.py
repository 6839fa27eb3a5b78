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
from dataclasses import fields
from typing import Any

from rich.table import Table

from analysis.measure.settings import HandBuiltRecallSettings, TrainedRecallSettings
from olmo_sparsity.util.arguments import Parser, add_arguments, settings_from
from olmo_sparsity.util.errors import UserError


def main() -> None:
    """Measure, write and print."""
    arguments = _parser().parse_args()
    given = vars(arguments).keys()
    kind = TrainedRecallSettings if "checkpoint" in given else HandBuiltRecallSettings
    for name in given - {field.name for field in fields(kind)}:
        option = f"--{name.replace('_', '-')}"
        raise UserError(
            f"{option} is for a trained model; name one with --checkpoint, or leave {option} out"
            if kind is HandBuiltRecallSettings
            else f"{option} is for models built by hand; leave it out, or leave out --checkpoint"
        )
    from analysis.measure.planted import measure_hand_built, measure_trained
    from analysis.plots.recall import recall_figure
    from analysis.plots.style import save_figure
    from analysis.records.results import RECALL
    from analysis.tables.cells import print_result
    from olmo_sparsity.util.files import read_json

    if kind is HandBuiltRecallSettings:
        path = measure_hand_built(settings_from(HandBuiltRecallSettings, arguments))
        print_result([_table(read_json(path, ""))], [path])
        return
    path = measure_trained(settings_from(TrainedRecallSettings, arguments))
    result = RECALL.load(path)
    figures = save_figure(recall_figure(result), path.parent, "recall")
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
    # Without defaults: what was given is told from what was not.
    parser = Parser(description=__doc__, argument_default=argparse.SUPPRESS)
    add_arguments(parser, HandBuiltRecallSettings, only=("out", "n_short", "selectors", "seed"))
    by_hand = parser.add_argument_group("models built by hand")
    add_arguments(by_hand, HandBuiltRecallSettings, only=("n_long", "models"))
    trained = parser.add_argument_group("a trained model")
    trained.add_argument(
        "--checkpoint", metavar="RUN", help="a run (then its last checkpoint) or checkpoint on a planted task"
    )
    add_arguments(trained, TrainedRecallSettings)
    return parser
