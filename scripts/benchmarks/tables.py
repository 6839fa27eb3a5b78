"""Tables of what the benchmarks measured: the rows of their JSON, under its own names."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from analysis.tables.cells import percent_text, plain_table, print_result
from benchmarks.timing import Json

_OF_PARTS = ("tokens_per_second", "mfu", "mfu_goal", "share_of_matrix_product", "peak_memory_gb")

Rows = list[tuple[str, Json]]
"""Of each row its name, and what was measured."""


def print_tables(result: Json) -> None:
    """What was measured on what, and the tables of the result."""
    print_result([_about(result), *(_table(*each) for each in _tables(result).items())], [])


def _table(title: str, rows: Rows) -> Table:
    columns = [key for key in dict.fromkeys(key for _, row in rows for key in row) if key != "seconds"]
    table = plain_table("", *columns)
    table.title = title
    for name, row in rows:
        table.add_row(name, *(_cell(row.get(key)) for key in columns))
    return table


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
    if speed := result.get("speed"):
        tables["speed: targets per second; ratio to the plain loop, and what both choose"] = [
            (f"{selector}, {label}", {**row, **timed["selections"].get(label, {})})
            for selector, timed in speed["selectors"].items()
            for label, row in timed["results"].items()
        ]
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
    if agreement := result.get("agreement"):
        tables[f"the same {agreement['targets']} targets: net recovery by k, with and without blocks"] = [
            (name, {**_flat(row), **{k: percent_text(each) for k, each in row["net_recovery"].items()}})
            for name, row in agreement.items()
            if isinstance(row, dict)
        ]
    if screened := result.get("screened"):
        title = (
            f"{screened['over_tau']} targets over tau, k = {screened['k']}: what selectors cost and recover"
        )
        tables[title] = [
            (name, {**_flat(row), **_at_k(row, str(screened["k"]))})
            for name, row in screened["selectors"].items()
        ]
    if cost := result.get("cost"):
        tables["cost: every point in a process of its own, random tokens"] = [
            (varied, point) for varied, points in cost["sweeps"].items() for point in points
        ]
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


def _at_k(row: Json, k: str) -> Json:
    """Percentages at ``k`` with their intervals, of the measures that are given by k."""
    return {name: percent_text(value[k]) for name, value in row.items() if isinstance(value, dict)}


def _flat(row: Json) -> Json:
    return {name: value for name, value in row.items() if not isinstance(value, dict)}


def _cell(value: Any) -> str:
    """A number with three digits, a ratio with its bounds, or nothing for None."""
    if isinstance(value, dict):
        return "{ratio:.3g} [{ratio_low:.3g}, {ratio_high:.3g}]".format(**value)
    if isinstance(value, float):
        return f"{value:,.3g}"
    return "" if value is None else str(value)
