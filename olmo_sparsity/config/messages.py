"""Parts of the messages about a config: the value that was given, the choices, and what was probably meant."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import Any

Problem = tuple[tuple[str, ...], str]
"""The fields that were looked at, the one to name first, and what is wrong with it."""


def choose(given: str, choices: Iterable[str]) -> str:
    """The remedy for a name that is none of ``choices``: the choices, and the one that was probably meant."""
    near = difflib.get_close_matches(given, list(choices), 1)
    return f"choose {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def show(value: Any) -> str:
    """A value as YAML has it, cut to fit a line."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return shorten(text, 60)


def shorten(text: str, length: int) -> str:
    """``text``, cut to ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 2]} …"


def section_of(hint: Any) -> type | None:
    """The dataclass of a field of type ``X`` or ``X | None``; None for any other type."""
    for choice in (hint, *typing.get_args(hint)):
        if isinstance(choice, type) and is_dataclass(choice) and typing.get_origin(hint) is not list:
            return choice
    return None


@cache
def dotted_names(cls: type, prefix: str = "") -> dict[str, bool]:
    """The full name of every key of ``cls``, and whether it is a section."""
    names: dict[str, bool] = {}
    for key, hint in typing.get_type_hints(cls).items():
        section = section_of(hint)
        names[f"{prefix}{key}"] = section is not None
        if section:
            names |= dotted_names(section, f"{prefix}{key}.")
    return names


def did_you_mean(key: str, prefix: str, is_section: bool, siblings: type, root: type) -> str:
    """What an unknown key may have meant: a key of ``siblings``, its section, else one of ``root``, else where to look.

    A section is only ever mistaken for a section, a value for a value.
    """
    near_by = {name: section for name, section in dotted_names(siblings).items() if "." not in name}
    alike = [name for name, section in near_by.items() if section == is_section]
    by_last_part: dict[str, list[str]] = {}
    for name, section in dotted_names(root).items():
        if section == is_section:
            by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    last = key.rpartition(".")[2]
    # A slip of the pen in a sibling, the right name in another section, then looser likenesses of both.
    for candidates, likeness in ((alike, 0.85), (by_last_part, 1.0), (alike, 0.6), (by_last_part, 0.75)):
        if near := difflib.get_close_matches(last, list(candidates), 1, likeness):
            meant = [prefix + near[0]] if candidates is alike else by_last_part[near[0]][:3]
            return f"did you mean {' or '.join(meant)}?"
    if len(near_by) <= 12:
        return f"{prefix.rstrip('.')} has {', '.join(near_by)}"
    return "the keys are the fields of Config in olmo_sparsity/config/schema.py and of TrainConfig in olmo/config.py"
