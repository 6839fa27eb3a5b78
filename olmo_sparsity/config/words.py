"""How the messages about a config name things: what is expected, what was given, what was probably meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any


def section_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` is, or is optionally."""
    return next(
        (choice for choice in _union(hint) if isinstance(choice, type) and is_dataclass(choice)), None
    )


def list_section_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` is a list of."""
    return section_of(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else None


def _union(hint: Any) -> tuple:
    """The types that ``hint`` allows, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(choice for choice in typing.get_args(hint) if choice is not type(None))
    return (hint,)


def expectation(hint: Any, value: Any = None) -> str:
    """What a value is that does not fit ``hint``: "no whole number", "none of lionw, adamw"."""
    choices = _union(hint)
    if choices == (bool,):
        return "neither true nor false"
    if isinstance(choices[0], type) and issubclass(choices[0], Enum):
        names = [name for name in choices[0].__members__ if not name.startswith("_")]
        near = difflib.get_close_matches(str(value), names, 1)
        return f"none of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")
    return "no " + _noun(hint)


def _noun(hint: Any) -> str:
    choices = [choice for choice in _union(hint) if not (choice is int and float in _union(hint))]
    if len(choices) > 1:
        return " or ".join(_noun(choice) for choice in choices)
    (choice,), args = choices, typing.get_args(choices[0])
    if typing.get_origin(choice) is list:
        return f"list of {_noun(args[0])}s"
    if typing.get_origin(choice) is tuple:
        return f"list of {len(args)} {_noun(args[0])}s"
    if typing.get_origin(choice) is dict:
        return f"mapping of names to a {_noun(args[1])}"
    if is_dataclass(choice):
        return "section; write its keys below it"
    return {int: "whole number", float: "number", str: "text"}.get(choice, str(choice))


def choose(given: str, choices: Iterable[str]) -> str:
    """The remedy for a name that is none of ``choices``: what there is, and what was probably meant."""
    near = difflib.get_close_matches(given, list(choices), 1)
    return f"choose {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def show(value: Any) -> str:
    """A value as YAML has it, cut to fit a line."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return shorten(text, 60)


def shorten(text: str, length: int) -> str:
    """``text``, cut to ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 2]} …"


def printable(text: str) -> str:
    """``text`` with line ends, escape sequences and broken Unicode written out: one line, safe on a terminal."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


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


def did_you_mean(
    key: str, prefix: str, is_section: bool, siblings: dict[str, Any], names: dict[str, bool]
) -> str:
    """What an unknown key may have meant: a sibling, else a key of ``names``, else where to look.

    A section is only ever mistaken for a section, a value for a value.
    """
    alike = [name for name, hint in siblings.items() if (section_of(hint) is not None) == is_section]
    by_last_part: dict[str, list[str]] = {}
    for name, section in names.items():
        if section == is_section:
            by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    last = key.rpartition(".")[2]
    # A slip of the pen in a sibling, the right name in another section, then looser likenesses of both.
    for candidates, likeness in ((alike, 0.85), (by_last_part, 1.0), (alike, 0.6), (by_last_part, 0.75)):
        if near := difflib.get_close_matches(last, list(candidates), 1, likeness):
            meant = [prefix + near[0]] if candidates is alike else by_last_part[near[0]][:3]
            return f"did you mean {' or '.join(meant)}?"
    if len(siblings) <= 12:
        return f"{prefix.rstrip('.')} has {', '.join(siblings)}"
    return "the keys are the fields of Config in olmo_sparsity/config/load.py and of TrainConfig in olmo/config.py"
