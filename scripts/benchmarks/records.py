"""The numbers of recorded benchmarks as tables: what the pages of results/benchmarks show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.stats.tables import INTERVAL
from olmo_sparsity.util.files import last_line, read_json

Json = Mapping[str, Any]
ABOUT_THE_FILE = ("checksum", "kind", "version")


def show(paths: Iterable[Path]) -> str:
    """Every number of these records (.json, or .jsonl of which the last line is shown).

    What stands beside each other in a record stands in one row, with its place in the record before it; rows with the
    same columns are one table. In brackets are lowest and highest, or the interval; of a list stands its median.
    """
    return "\n\n".join(_show_record(path) for path in paths)


def _show_record(path: Path) -> str:
    if path.suffix == ".jsonl":
        record = json.loads(last_line(path))
    else:
        record = read_json(path, "give a record that benchmark.py wrote with --json, or a part of gpu")
    tables: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for place, cells in _rows(record, ""):
        tables.setdefault((*cells,), {})[place] = cells
    shown = [f"{path}:"]
    for rows in tables.values():
        if len(rows) == 1:
            [(place, cells)] = rows.items()
            line = ", ".join(f"{name} {value}" for name, value in cells.items())
            shown.append(": ".join(filter(None, [place, line])))
        else:
            shown.append(pd.DataFrame.from_dict(rows, orient="index").to_string())
    return "\n\n".join(shown)


def _rows(node: Json, place: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Place in the record, and name and text of every value there, of all dictionaries that have values."""
    cells = {}
    parts: list[tuple[str, Json]] = []
    bounds = {f"{name}_{bound}" for name in node for bound in ("low", "high")}
    for name, value in node.items():
        if name in (*ABOUT_THE_FILE, *bounds):
            continue
        if isinstance(value, Mapping) and set(value) != set(INTERVAL):
            parts.append((name, value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            parts += [(f"{name} {number}", part) for number, part in enumerate(value, 1)]
        else:
            cells[name] = _text(_with_bounds(node, name))
    if cells:
        yield place, cells
    for name, part in parts:
        inside = name
        if place:
            inside = f"{place}, {name}"
        yield from _rows(part, inside)


def _with_bounds(node: Json, name: str) -> Any:
    """A value, or with its lowest and highest where they stand beside it as NAME_low and NAME_high."""
    value = node[name]
    if isinstance(value, Mapping):
        return tuple(value[bound] for bound in INTERVAL)
    if f"{name}_low" in node:
        return value, node[f"{name}_low"], node[f"{name}_high"]
    return value


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, int | float) for one in value):
        value = float(np.median(value)), min(value), max(value)
    if isinstance(value, tuple):
        middle, low, high = (_number(one) for one in value)
        return f"{middle} [{low}, {high}]"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _number(value: float) -> str:
    """With four digits, or all that stand before the point."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
