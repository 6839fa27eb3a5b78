"""The fields of a configuration by their dotted names: values, and which of them a resumed run may change."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any

from olmo_sparsity.config.olmo_fields import IGNORED
from olmo_sparsity.config.rules import rules
from olmo_sparsity.config.schema import Config


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """The value of every field by its dotted name; a section that is null counts as a field."""
    values: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        inner = leaves(value, f"{prefix}{item.name}.") if is_dataclass(value) else {prefix + item.name: value}
        values |= inner
    return values


def field_value(config: Any, name: str) -> Any:
    """The value of a dotted name."""
    return reduce(getattr, name.split("."), config)


def is_set(config: Config, name: str) -> bool:
    """Whether a field differs from its default; null, false, 0 and empty count as the same."""
    value = field_value(config, name)
    default = field_value(Config(), name)
    return value != default and bool(value or default)


MAY_CHANGE_ON_RESUME = frozenset(name for name, _, rule in rules(Config()) if rule.may_change_on_resume)
"""Fields and sections that may differ in a resumed run: no loss depends on them but for rounding and what dropout
draws. The precision and the text are compared as such, not by these names."""
RECORDED_ON_RESUME = frozenset(name for name, _, rule in rules(Config()) if rule.recorded_on_resume)
"""Fields that decide losses and may differ in a resumed run all the same, as where it goes on after it diverged. What
changed is said, and recorded in `provenance.json` with the step."""
ABOUT_TEXT = frozenset(name for name, _, rule in rules(Config()) if rule.about_text)
"""Fields that mean nothing to a synthetic task."""


def may_change(name: str) -> bool:
    """Whether a resumed run may have another value of a field."""
    return any(
        f"{name}.".startswith(f"{section}.")
        for section in (*MAY_CHANGE_ON_RESUME, *RECORDED_ON_RESUME, *IGNORED)
    )
