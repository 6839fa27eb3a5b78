"""What records that were made before version 0.2.0 call by other names: they are read under the names of today.

It is the one place for this: settings, values of settings, columns and values of columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

SETTINGS = {"give_back": "keep_as"}
"""Names of settings, old to new."""
UNITS = {"three": "neighbors"}
"""Values of the column ``unit`` of choices, and what stands behind the slash of ``keep_as``, old to new."""

FRAMES = {"trainings": "runs"}
"""Names of the frames of a probe, old to new."""


def renamed_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The flat settings of a record under the names of today, in their order."""
    renamed = {SETTINGS.get(name, name): value for name, value in flat.items()}
    if "keep_as" in renamed:
        renamed["keep_as"] = [_renamed_way(way) for way in renamed["keep_as"]]
    return renamed


def renamed_choices(choices: pd.DataFrame) -> pd.DataFrame:
    """The choices of a record with the units of today."""
    if not choices["unit"].isin(list(UNITS)).any():
        return choices
    return choices.assign(unit=choices["unit"].astype(object).replace(UNITS))


def renamed_frames(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the JSON file of a probe holds, under the names of today."""
    return {FRAMES.get(name, name): value for name, value in content.items()}


def _renamed_way(way: str) -> str:
    level, slash, unit = way.partition("/")
    return level + slash + UNITS.get(unit, unit)
