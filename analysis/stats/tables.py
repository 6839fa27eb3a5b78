"""Frames of numbers with intervals, and their one printer: `show`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from olmo_sparsity.util.files import atomic_path

INTERVAL = ("value", "low", "high")
OF_RUNS = ("first_run", "second_run")
"""Columns of numbers of two pooled runs: the value in either by itself."""
NOTHING = "–"
"""Stands for a number that does not exist."""


def interval_frame(rows: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> pd.DataFrame:
    """Rows as a frame of the columns ``keys`` and `INTERVAL`, and of two runs `OF_RUNS`."""
    frame = pd.DataFrame(rows, columns=[*keys, *INTERVAL, *OF_RUNS])
    return without_empty_runs(frame)


def without_empty_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame without the columns `OF_RUNS` where they hold nothing, as there are not two runs."""
    empty = [name for name in OF_RUNS if name in frame and frame[name].isna().all()]
    return frame.drop(columns=empty)


def save_numbers(path: str | Path, frames: Mapping[str, pd.DataFrame]) -> None:
    """Write frames of numbers, one below the other, as one CSV file of six significant digits.

    Its first column ``of`` has the name of the frame. A column that a frame does not have is empty there; one that is
    empty everywhere is left out.
    """
    named = [frame.assign(of=name) for name, frame in frames.items()]
    below = pd.concat([frame.dropna(axis="columns", how="all") for frame in named], ignore_index=True)
    in_order = below[["of", *below.columns.drop("of")]].infer_objects()  # objects would keep all their digits
    with atomic_path(path) as temporary:
        in_order.to_csv(temporary, index=False, float_format="%.6g")


class Tables:
    """Frames of numbers of a study, which are printed as they are added, and can be written as one CSV file.

    Args:
        options: of `show`, for all tables to which `add` gives no others.
    """

    def __init__(self, **options: Any):
        self.options = options
        self.frames: dict[str, pd.DataFrame] = {}
        """By title."""

    def add(self, title: str, frame: pd.DataFrame, *, by: Sequence[str] = (), **options: Any) -> None:
        """Print a frame as `show` has it, behind an empty line. Raises `ValueError` for a title that is there.

        ``by``: columns; rows that differ in them are printed as tables of their own.
        """
        if title in self.frames:
            raise ValueError(f"there are two tables {title!r}")
        self.frames[title] = frame
        tables = [frame]
        if by:
            tables = [table for _, table in frame.groupby([*by], sort=False, dropna=False)]
        for table in tables:
            print("\n" + show(table, title=title, **{**self.options, **options}))

    def save(self, path: str | Path) -> None:
        """See `save_numbers`."""
        save_numbers(path, self.frames)


def show(
    frame: pd.DataFrame, *, across: str | None = None, percent: bool = True, digits: int = 1, title: str = ""
) -> str:
    """A tidy frame as a table of text: `interval_text` in each cell, a dash for what does not exist.

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
        if name in (*INTERVAL, *OF_RUNS) or name == across or frame[name].isna().all():
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

    The value alone where there is no interval. Of two pooled runs the values stand beside it where `runs_differ`:
    ``10 [8, 12] (runs 20 and 0)``.
    """
    scale = 100
    if not percent:
        scale = 1
        digits += 1

    def text_of(number: float) -> str:
        if not np.isfinite(number):
            return NOTHING
        # + 0.0: no minus before what is rounded to 0
        return f"{round(number * scale, digits) + 0.0:,.{digits}f}"

    value, low, high = (text_of(row[name]) for name in INTERVAL)
    text = value
    if not low == high == NOTHING:
        text = f"{value} [{low}, {high}]"
    first_run, second_run = (text_of(of_run) for of_run in _values_of_runs(row))
    if not runs_differ(row) or first_run == second_run:
        return text
    return f"{text} (runs {first_run} and {second_run})"


def runs_differ(row: Mapping[str, Any]) -> bool:
    """Whether the value of either of two pooled runs lies outside of the interval of both, or there is none [ours].

    The interval is by group alone: it says nothing of how runs differ. False where there are not two runs.
    """
    of_runs = _values_of_runs(row)
    inside = all(row["low"] <= of_run <= row["high"] for of_run in of_runs)
    return bool(np.isfinite(of_runs).all() and not inside)


def _values_of_runs(row: Mapping[str, Any]) -> list[float]:
    """`OF_RUNS` of a row, NaN where there are not two runs."""
    values = [row.get(name) for name in OF_RUNS]
    return [np.nan if value is None else value for value in values]


def _key_text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        # a column of whole numbers, some of which are missing, is one of floats
        return f"{int(value):,}" if value.is_integer() else f"{value:.3g}"
    return str(value)
