"""The one printer of frames of numbers: `show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    keys = []
    alike = []
    for name in frame:
        if name in INTERVAL or name == across or frame[name].isna().all():
            continue
        if len(frame) > 1 and frame[name].nunique(dropna=False) == 1:
            alike.append(f"{name} {_key_text(frame[name].iloc[0])}")
        else:
            keys.append(name)
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in frame.to_dict("records"):
        head = "value"
        if across:
            head = _key_text(row[across])
        is_share = percent and not str(row.get("name", "")).endswith("_nats")
        key = tuple(_key_text(row[name]) for name in keys)
        cells = rows.setdefault(key, {})
        cells[head] = interval_text(row, percent=is_share, digits=digits)
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    table = [[*keys, *heads]]
    key_above: tuple[str, ...] = ()
    for key, cells in rows.items():
        values = [cells.get(head, "") for head in heads]
        table.append([*_without_repeats(key, key_above), *values])
        key_above = key
    lines = _aligned(table, left=len(keys))
    above = ", ".join(alike)
    if title and above:
        above = f"({above})"
    head = " ".join(filter(None, [title, above]))
    if head:
        lines.insert(0, head)
    return "\n".join(lines)


def _without_repeats(key: Sequence[str], key_above: Sequence[str]) -> list[str]:
    """The key of a row, without what repeats the key above it, and all before that too."""
    shown = list(key)
    for column, (text, text_above) in enumerate(zip(key, key_above, strict=False)):
        if text != text_above:
            break
        shown[column] = ""
    return shown


def _aligned(table: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as lines whose columns stand below each other, the first ``left`` at the left, others at the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = []
        for column, (text, width) in enumerate(zip(row, widths, strict=True)):
            if column < left:
                cells.append(text.ljust(width))
            else:
                cells.append(text.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def interval_text(row: Mapping[str, Any], *, percent: bool = False, digits: int = 1) -> str:
    """``value [low, high]``, in per cent (without the sign) or as it is, with one digit more; a dash for NaN.

    The value alone where there is no interval.
    """
    scale = 100
    if not percent:
        scale = 1
        digits += 1
    texts = []
    for name in INTERVAL:
        if np.isfinite(row[name]):
            # + 0.0: no minus before what is rounded to 0
            number = round(row[name] * scale, digits) + 0.0
            texts.append(f"{number:,.{digits}f}")
        else:
            texts.append(NOTHING)
    value, low, high = texts
    if low == high == NOTHING:
        return value
    return f"{value} [{low}, {high}]"


def _key_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
