"""The one printer of frames of numbers."""

from __future__ import annotations

import pandas as pd


def show(frame: pd.DataFrame, *, across: str | None = None, percent: bool = True, title: str = "") -> str:
    """A tidy frame as a table of text: ``value [low, high]``, a dash for what does not exist.

    Args:
        frame: columns value, low, high, and what they are of.
        across: the column whose values become columns, as ``far_context``; the others stay rows.
        percent: fractions in per cent; rows whose ``name`` ends with ``_nats`` never are.
        title: a line above.
    """
    raise NotImplementedError
