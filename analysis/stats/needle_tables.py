"""Tables of `needle.json` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from analysis.stats.summary import percent_text, plain_table

Json = dict[str, Any]


def render_needle(needle_json: Json) -> Iterator[Table]:
    """Exact match by length and depth, a table per model; and the recall of the needle, where it was measured."""
    lengths = needle_json["settings"]["lengths"]
    for model in needle_json["models"]:
        yield _table_of_cells(model, lengths)
    for model in needle_json["models"]:
        for checkpoint in model["checkpoints"]:
            if checkpoint["recall"] is not None:
                yield _table_of_recall(model["label"], checkpoint)


def _table_of_cells(model: Json, lengths: list[int]) -> Table:
    table = plain_table("k", "depth", *(f"{length:,}" for length in lengths))
    table.title, table.title_justify = (
        Text(f"{model['label']}: exact match [%, 95 % interval] by context"),
        "left",
    )
    by_row: dict[tuple[int, Any], dict[int, str]] = {}
    for cell in model["cells"]:
        k, length = cell["value_tokens"], cell["length"]
        by_row.setdefault((k, cell["depth"]), {})[length] = percent_text(cell["exact"], 0)
        by_row.setdefault((k, "absent"), {})[length] = percent_text(cell["absent_exact"], 0)
    last = None
    for k, depth in sorted(by_row, key=lambda row: (row[0], row[1] == "absent", str(row[1]))):
        told = depth if isinstance(depth, str) else f"{depth:g}"
        cells = [Text(by_row[k, depth][length]) for length in lengths]
        table.add_row(str(k) if k != last else "", told, *cells)
        last = k
    return table


def _table_of_recall(label: str, checkpoint: Json) -> Table:
    recall = checkpoint["recall"]
    table = plain_table("selector", "context", *(f"k = {k}" for k in recall["ks"]))
    table.title = Text(f"{label}, seed {checkpoint['training_seed']}: recall of the needle's tokens")
    table.title_justify = "left"
    for name, by_k in recall["selectors"].items():
        for context, kind in (("true", "recall"), ("placebo", "placebo_recall")):
            values = [f"{each[kind]['value']:.2f}" for each in by_k.values()]
            table.add_row(name if context == "true" else "", context, *values)
    table.add_row("chance", "", *(f"{each:.2f}" for each in recall["chance"].values()))
    return table
