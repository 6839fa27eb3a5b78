"""The one printer of frames of numbers: `show`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd

INTERVAL = ("value", "low", "high")
NOTHING = "–"
"""Stands for a number that does not exist."""


def show(
    frame: pd.DataFrame, *, across: str | None = None, percent: bool = True, digits: int = 1, title: str = ""
) -> str:
    """A tidy frame as a table of text: ``value [low, high]`` in each cell, a dash for what does not exist.

    Args:
        frame: value, low and high, and columns that say what they are of. One that is the same in all rows stands above
            the table instead, one without values nowhere.
        across: the column whose values become columns, as ``far_context``.
        percent: fractions in per cent. Rows whose ``name`` ends with ``_nats`` never are.
        digits: behind the point of per cents; other numbers have one more.
        title: stands above the table.
    """
    keys = [name for name in frame if name not in (*INTERVAL, across) and frame[name].notna().any()]
    alike = [name for name in keys if len(frame) > 1 and frame[name].nunique(dropna=False) == 1]
    above = [f"{name} {_key_text(frame[name].iloc[0])}" for name in alike]
    keys = [name for name in keys if name not in alike]
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in frame.to_dict("records"):
        head = _key_text(row[across]) if across else "value"
        is_share = percent and not str(row.get("name", "")).endswith("_nats")
        cells = rows.setdefault(tuple(_key_text(row[name]) for name in keys), {})
        cells[head] = interval_text(row, percent=is_share, digits=digits)
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    table = [[*keys, *heads]]
    for key, above_it in zip(rows, [(), *rows], strict=False):
        # a key that repeats the one above it, with all before it, is left out
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(key, above_it, strict=False))))
        table.append([*[""] * same, *key[same:], *(rows[key].get(head, "") for head in heads)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < len(keys) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    head = f"{title} ({', '.join(above)})" if title and above else title or ", ".join(above)
    return "\n".join([head, *lines] if head else lines)


def interval_text(row: Mapping[str, Any], *, percent: bool = False, digits: int = 1) -> str:
    """``value [low, high]``, in per cent (without the sign) or as it is, with one digit more; a dash for NaN.

    The value alone where there is no interval.
    """
    scale, digits = (100, digits) if percent else (1, digits + 1)
    # + 0.0: no minus before what is rounded to 0
    texts = [
        f"{round(row[name] * scale, digits) + 0.0:,.{digits}f}" if np.isfinite(row[name]) else NOTHING
        for name in INTERVAL
    ]
    value, low, high = texts
    return value if low == high == NOTHING else f"{value} [{low}, {high}]"


def _key_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
