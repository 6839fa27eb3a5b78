"""Numbers behind a name, as in ``snapkv:window=64:pool=7``: the fields of a dataclass, with their bounds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from decimal import Decimal
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.registry import Registry


def at_least_0(default: int) -> Any:
    """A field of a whole number that may be 0; others are 1 at least."""
    return field(default=default, metadata={"at_least": 0})


def defaults(item: Any) -> dict[str, Any]:
    """The parameters of what is registered by a name, with their defaults; most have none."""
    if not (isinstance(item, type) and is_dataclass(item)):
        return {}
    return {parameter.name: parameter.default for parameter in fields(item)}


def changed(item: Any, thing: Any) -> dict[str, Any]:
    """The parameters of a thing, which `made` made of ``item``, that are not as by default."""
    values = {name: getattr(thing, name) for name in defaults(item)}
    return {name: value for name, value in values.items() if value != defaults(item)[name]}


def written(parameters: Mapping[str, Any]) -> list[str]:
    """Parameters as they are written behind the name, such as ``window=32``; yes is 1, no is 0, None none."""
    texts = []
    for name, value in parameters.items():
        if value is None:
            texts.append(f"{name}=none")
            continue
        number = int(value) if isinstance(value, bool) else value
        texts.append(f"{name}={Decimal(str(number)):f}")  # without an exponent
    return texts


def made(item: Any, text: str, parts: Sequence[str]) -> Any:
    """The thing with the parameters of ``parts``, such as ``pool=7``; without parameters the thing itself.

    ``text`` is the whole name, for errors. Raises `UserError` where a part is no parameter or no such number.
    """
    name = text.partition(":")[0]
    of_item = {parameter.name: parameter for parameter in fields(item)} if defaults(item) else {}
    values = {}
    for part in parts:
        parameter, _, number = part.partition("=")
        value = None
        if parameter in of_item:
            least = of_item[parameter].metadata.get("at_least", 1)
            value = _number(number, of_item[parameter].default, least)
        if value is None:
            remedy = "it has none"
            if of_item:
                remedy = f"write NAME=NUMBER, by default {', '.join(written(defaults(item)))}"
            raise UserError(f"{text!r}: {part!r} is no parameter of {name}; {remedy}")
        values[parameter] = value
    return item(**values) if isinstance(item, type) else item


def find(registry: Registry[Any], text: str) -> Any:
    """What is registered by NAME or NAME:PARAMETER=NUMBER:…, made with these parameters.

    Raises `UserError` that lists the choices.
    """
    name, *parts = text.split(":")
    return made(registry[name], text, parts)


def _number(text: str, default: Any, least: int) -> Any:
    """A number of the default's kind; None where the text is none, or it is too small."""
    if isinstance(default, bool):
        return {"0": False, "1": True}.get(text)
    if isinstance(default, float):
        return float(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII) else None
    if re.fullmatch(r"\d+", text, re.ASCII) and int(text) >= least:
        return int(text)
    return None
