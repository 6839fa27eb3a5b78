"""Numbers with intervals as the cells of a table."""

from __future__ import annotations

from typing import Any


def interval_cell(interval: dict[str, Any], *, scale: float = 1.0, digits: int = 2) -> str:
    """``value [low, high]`` of an `Interval.as_dict`, times ``scale``; a dash for what does not exist."""
    texts = [
        "–" if interval[name] is None else f"{interval[name] * scale:,.{digits}f}"
        for name in ("value", "low", "high")
    ]
    zero = f"{0:.{digits}f}"
    return "{} [{}, {}]".format(*(zero if text == f"-{zero}" else text for text in texts))
