"""How long a run is, and which of its steps are left out, as text says it."""

from __future__ import annotations

import re
from contextlib import suppress

from olmo_sparsity.util.errors import UserError


def parse_duration(value: int | str) -> tuple[float, str]:
    """The number in ``10000`` or ``"1e4"`` (steps), ``"2e12T"`` (tokens) or ``"2ep"`` (epochs), and its unit.

    Raises `UserError` for anything else.
    """
    match = re.fullmatch(r"(.*?)(T|ep|)", str(value).strip())
    units = {"": "steps", "T": "tokens", "ep": "epochs"}
    with suppress(ValueError, OverflowError):  # no number; infinity
        if match and (amount := float(match[1])) > 0 and amount == int(amount):
            return amount, units[match[2]]
    raise UserError(
        f"max_duration: {value!r} is no duration; give steps (10000), tokens (2e12T) or epochs (2ep)"
    )


def parse_steps(value: str | None) -> list[range]:
    """The ranges of ``data.skip_steps``: ``"5:8,20:21"`` is 5, 6, 7 and 20, where 1 is the run's first step.

    Raises `UserError` for anything else.
    """
    ranges = []
    for text in value.split(",") if value is not None else []:
        match = re.fullmatch(r"\s*(\d{1,18}):(\d{1,18})\s*", text)
        if not match or not 1 <= int(match[1]) < int(match[2]):
            raise UserError(
                f"data.skip_steps: {value!r} is no list of ranges of steps; give 1200:1210 to leave out steps 1200 to "
                "1209, and further ranges after commas (quoted in YAML)"
            )
        ranges.append(range(int(match[1]), int(match[2])))
    return ranges
