"""How the pages write numbers, intervals and units."""

from __future__ import annotations

from markupsafe import Markup

from analysis.stats.recovery import CONTROLS
from olmo_sparsity.util.result_files import Json

NO_BREAK = "\u00a0"
"""A space at which no line ends."""


def number(value: float | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """``value`` times ``scale`` with a true minus sign; a dash for what does not exist."""
    if value is None:
        return "–"
    text = f"{value * scale:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def bounds(interval: Json, *, scale: float = 1.0, digits: int = 2) -> str:
    """``[low, high]``, or ``no interval`` where the data support none."""
    if interval["low"] is None and interval["high"] is None:
        return "no interval"
    low, high = (number(interval[name], scale=scale, digits=digits) for name in ("low", "high"))
    return f"[{low},{NO_BREAK}{high}]"


def percent(interval: Json, digits: int = 0) -> str:
    """``90 % [82, 98]``."""
    value = number(interval["value"], scale=100, digits=digits)
    return f"{value}{NO_BREAK}% {bounds(interval, scale=100, digits=digits)}"


def value_cell(interval: Json, *, scale: float = 1.0, digits: int = 2) -> str:
    """A value with its interval behind or below it; a dash where there is no value."""
    if interval["value"] is None:
        return "–"
    looks: Json = {"scale": scale, "digits": digits}
    return Markup("{}<small>{}</small>").format(number(interval["value"], **looks), bounds(interval, **looks))


def percent_cell(interval: Json, *, digits: int = 0) -> str:
    """`value_cell` in per cent."""
    return value_cell(interval, scale=100, digits=digits)


def influence_unit(selector: str) -> str:
    """Unit of a selector's influence; empty for the controls, whose order says nothing about the model."""
    name = selector.partition("@")[0]  # EXACT@PROPOSER:m measures as EXACT does
    if name in CONTROLS:
        return ""
    if name.endswith("-tv") or name == "integrated-gradients":
        return "of the probability"
    return {"attention": "of the attention", "saliency": "nats per unit of the embedding"}.get(name, "nats")
