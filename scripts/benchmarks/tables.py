"""Tables of what the benchmarks measured: the rows of their JSON, under its own names."""

from __future__ import annotations

from typing import Any

import pandas as pd

from benchmarks.timing import Json

_OF_PARTS = ("tokens_per_second", "mfu", "mfu_goal", "share_of_matrix_product", "peak_memory_gb")

Rows = list[tuple[str, Json]]
"""Of each row its name, and what was measured."""


def print_tables(result: Json) -> None:
    """What was measured on what, and the tables of the result."""
    print(_about(result))
    for title, rows in _tables(result).items():
        columns = [key for key in dict.fromkeys(key for _, row in rows for key in row) if key != "seconds"]
        cells = [[name, *(_cell(row.get(key)) for key in columns)] for name, row in rows]
        print(f"\n{title}\n{pd.DataFrame(cells, columns=['', *columns]).to_string(index=False)}")


def _tables(result: Json) -> dict[str, Rows]:
    """The rows of each table, by its title."""
    tables: dict[str, Rows] = {}
    if "tasks" in result:
        title = (
            f"making a batch, as a share of a training step, which is to be below {result['largest_share']}"
        )
        tables[title] = list(result["tasks"].items())
    for timed in (result, result.get("steps", {})):
        if "results" in timed:
            title = "rate in {unit}, median of {rounds} rounds; ratio to {baseline}, lowest and highest"
            tables[title.format(**timed)] = list(timed["results"].items())
    if operations := result.get("operations"):
        tables["longest operations, without those that they call: a step's calls and milliseconds"] = list(
            operations.items()
        )
    if memory := result.get("loss_memory"):
        tables["loss: bytes beyond inputs and gradients, by vocabulary"] = list(memory.items())
    if parts := result.get("parts"):
        tables["parts, each in a process of its own"] = [
            (
                name,
                {
                    "outcome": "failed" if row["failed"] else "done",
                    "took_seconds": row["seconds"],
                    **{each: row.get(each) for each in _OF_PARTS},
                },
            )
            for name, row in parts.items()
        ]
    return tables | _influence_tables(result)


def _influence_tables(result: Json) -> dict[str, Rows]:
    """Those of the parts of `benchmarks.influence`."""
    tables: dict[str, Rows] = {}
    if blocks := result.get("blocks"):
        size, alone = blocks["targets_per_block"], blocks["targets_alone"]
        title = (
            f"blocks of {size} targets, {alone} of them alone: targets per second; ratio to the plain loop"
        )
        tables[title] = [
            (f"{selector}, {label}", row)
            for selector, timed in blocks.items()
            if isinstance(timed, dict)
            for label, row in timed["results"].items()
        ]
        tables["blocks: exactness, and the share of the machine's matrix product"] = [
            (selector, {name: value for name, value in timed.items() if isinstance(value, float)})
            for selector, timed in blocks.items()
            if isinstance(timed, dict)
        ]
    if whole := result.get("measurement"):
        tables["one measurement in a process of its own"] = [("measure", whole)]
    return tables


def _about(result: Json) -> str:
    """Benchmark, settings, machine and commit, in a line."""
    told = {**result, **result["machine"]}
    left_out = ("benchmark", "started", "command", "unit", "checksum", "kind", "version")
    return f"{result['benchmark']}: " + ", ".join(
        f"{name} {_cell(value)}"
        for name, value in told.items()
        if isinstance(value, str | int | float) and name not in left_out
    )


def _cell(value: Any) -> str:
    """A number with three digits, a ratio with its bounds, or nothing for None."""
    if isinstance(value, dict):
        return "{ratio:.3g} [{ratio_low:.3g}, {ratio_high:.3g}]".format(**value)
    if isinstance(value, float):
        return f"{value:,.3g}"
    return "" if value is None else str(value)
