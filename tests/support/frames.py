"""Rows of tidy frames, by the values of their columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd


def rows_of(frame: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows with these values; None: with none."""
    is_one = [frame[name].isna() if value is None else frame[name] == value for name, value in where.items()]
    return frame[np.all(is_one, axis=0)]


def row_of(frame: pd.DataFrame, **where: Any) -> pd.Series:
    """The single row with these values."""
    rows = rows_of(frame, **where)
    assert len(rows) == 1, rows
    return rows.iloc[0]
