"""Position encodings: how position ids enter attention. One object each, independent of the scheme of ids.

What OLMo's configuration says with several switches is read here once; `model/olmo.py` builds what the object says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PositionEncoding:
    """What a position encoding does to a model."""

    name: str
    switch: str | None
    """The field of the model's configuration that asks for it; None: where no switch is on."""
    rotates: bool = False
    """Queries and keys are rotated by angles proportional to the ids."""
    biases: bool = False
    """Attention scores are lowered in proportion to the distance of ids, which needs a mask of its own."""
    has_table: bool = False
    """Ids are looked up in a table of `max_sequence_length` rows, so that larger ones have no encoding."""


ENCODINGS = (
    PositionEncoding("RoPE", "rope", rotates=True),
    PositionEncoding("ALiBi", "alibi", biases=True),
    PositionEncoding("NoPE", "nope"),
    PositionEncoding("learned positions", None, has_table=True),
)
SWITCHES = tuple(f"model.{encoding.switch}" for encoding in ENCODINGS if encoding.switch)
"""The fields of a configuration that an encoding depends on."""


def encoding_of(model: Any) -> PositionEncoding:
    """The position encoding of a model's configuration, of whose switches at most one is on."""
    return next(each for each in ENCODINGS if each.switch is None or getattr(model, each.switch))
