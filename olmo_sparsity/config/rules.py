"""What holds of one field of the configuration, written where the field stands: its bounds, and who reads it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

EVERY_FAMILY = ("olmo", "gpt_neox", "tuples")
NOT_FIXED = object()
_KEY = "olmo_sparsity.rule"
_MOST_BITS = 63  # besides the sign: integers reach PyTorch and NumPy


@dataclass(frozen=True)
class Rule:
    """What holds of a field. A number has a bound, or says that it is ``unbounded``."""

    at_least: float | None = None
    """The smallest value; of a list, of each of its elements."""
    above: float | None = None
    """A bound that the value itself may not have."""
    at_most: float | None = None
    """The largest value."""
    below: float | None = None
    """An upper bound that the value itself may not have."""
    unbounded: bool = False
    """Any number will do."""
    may_change_on_resume: bool = False
    """Whether a resumed run may have another value: no loss depends on it but for rounding and what dropout draws."""
    recorded_on_resume: bool = False
    """Whether a resumed run may have another value though losses depend on it: the change is said and recorded."""
    about_text: bool = False
    """Whether it means nothing to a synthetic task."""
    families: tuple[str, ...] = ("olmo",)
    """Of a field of `model`: the values of `model.family` that read it."""
    in_neox: Any = NOT_FIXED
    """What GPT-NeoX always has, where OLMo has a choice."""

    @property
    def bounds(self) -> str:
        """The bounds in words; empty where there are none."""
        if self.at_least is not None and self.at_most is not None:
            return f"in {self.at_least} … {self.at_most}"
        words = {
            "{:g} or more": self.at_least,
            "above {:g}": self.above,
            "at most {:g}": self.at_most,
            "below {:g}": self.below,
        }
        return " and ".join(text.format(bound) for text, bound in words.items() if bound is not None)

    def is_read_by(self, family: str) -> bool:
        """Whether ``model.family: family`` reads the field, or always has one of its values."""
        return family in self.families or (family == "gpt_neox" and self.in_neox is not NOT_FIXED)

    def complaint(self, value: Any) -> str | None:
        """What is wrong with ``value``, to follow it in a message; None where nothing is, or where it is no number."""
        if isinstance(value, list | tuple):
            return next((wrong for element in value if (wrong := self.complaint(element))), None)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return "is no finite number"
        if isinstance(value, int) and self.at_most is None and value.bit_length() > _MOST_BITS:
            return f"has more than {_MOST_BITS} bits"
        if (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        ):
            return f"is not {self.bounds}"
        return None


def checked(default: Any = MISSING, *, default_factory: Any = MISSING, **rule: Any) -> Any:
    """A dataclass's field with a `Rule`, whose arguments are named: ``chunks: int = checked(2, at_least=1)``."""
    metadata = {_KEY: Rule(**rule)}
    if default_factory is not MISSING:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def rule_of(item: Field[Any]) -> Rule:
    """The rule of a field; one without bounds where none is written."""
    return item.metadata.get(_KEY, Rule())


def rules(config: Any, prefix: str = "") -> Iterable[tuple[str, Any, Rule]]:
    """The dotted name, the value and the rule of every field and section of ``config``, outer ones first."""
    for item in fields(config):
        name = prefix + item.name
        value = getattr(config, item.name)
        yield name, value, rule_of(item)
        if is_dataclass(value):
            yield from rules(value, f"{name}.")
