"""How the pages write numbers and units."""

from __future__ import annotations

from analysis.stats.recovery import CONTROLS


def number(value: float | None, *, scale: float = 1.0, digits: int = 2) -> str:
    """``value`` times ``scale`` with a true minus sign; a dash for what does not exist."""
    if value is None:
        return "–"
    text = f"{value * scale:,.{digits}f}"
    return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text.replace("-", "−")


def influence_unit(selector: str) -> str:
    """Unit of a selector's influence; empty for the controls, whose order says nothing about the model."""
    name = selector.partition("@")[0]  # EXACT@PROPOSER:m measures as EXACT does
    if name in CONTROLS:
        return ""
    if name.endswith("-tv") or name == "integrated-gradients":
        return "of the probability"
    return {"attention": "of the attention", "saliency": "nats per unit of the embedding"}.get(name, "nats")
