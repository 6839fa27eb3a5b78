"""Numbers behind a name, as in ``snapkv:window=64:pool=7``: the fields of a dataclass, with their bounds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from decimal import Decimal
from types import CodeType
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
        if isinstance(value, str):
            texts.append(f"{name}={value}")
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
        if parameter not in of_item:
            remedy = "it has none"
            if of_item:
                remedy = f"write NAME=NUMBER, by default {', '.join(written(defaults(item)))}"
            raise UserError(f"{text!r}: {part!r} is no parameter of {name}; {remedy}")
        default = of_item[parameter].default
        least = of_item[parameter].metadata.get("at_least", 1)
        value = _number(number, default, least)
        if value is None:
            raise UserError(f"{text!r}: {parameter} of {name} is {_kind(default, least)}, not {number!r}")
        values[parameter] = value
    return item(**values) if isinstance(item, type) else item


def find(registry: Registry[Any], text: str) -> Any:
    """What is registered by NAME or NAME:PARAMETER=NUMBER:…, made with these parameters.

    Raises `UserError` that lists the choices.
    """
    name, *parts = text.split(":")
    return made(registry[name], text, parts)


def definitions(items: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """Of what is used of ``items`` by these names and is a user's: "NAME DIGEST of its code".

    A user's are classes and functions that were not defined in this package, and objects, such as a press as a policy.

    So a measurement does not go on with a definition that was changed. What the code calls is not in it.
    """
    digests = {}
    for part in "@".join(names).split("@"):
        name = re.split("[:/]", part)[0]
        item = items.get(name)
        is_defined_here = str(getattr(item, "__module__", "")).startswith("analysis.")
        is_object = not isinstance(item, type) and not hasattr(item, "__code__")
        if item is not None and (is_object or not is_defined_here):
            code = "\n".join(_code_of(item))
            digests[name] = hashlib.sha256(code.encode()).hexdigest()[:12]
    return tuple(f"{name} {digest}" for name, digest in digests.items())


def _code_of(item: Any) -> Iterator[str]:
    """The code of a function, of the functions of a class, or of those of an object's class and its values."""
    if isinstance(item, CodeType):
        yield item.co_code.hex()
        yield repr(item.co_names)
        for value in item.co_consts:
            if isinstance(value, CodeType):
                yield from _code_of(value)
            else:
                yield repr(sorted(value, key=repr) if isinstance(value, frozenset) else value)
    elif code := getattr(item, "__code__", None):
        yield from _code_of(code)
        if (wrapped := getattr(item, "__wrapped__", None)) is not None:
            yield from _code_of(wrapped)
        around = [cell.cell_contents for cell in item.__closure__ or ()]
        yield from (repr(value) for value in (*around, *(item.__defaults__ or ())) if _is_plain(value))
    elif isinstance(item, type):
        for of_class in item.__mro__:
            if of_class.__module__.startswith(("analysis.", "builtins", "abc")):
                continue
            for name, value in sorted(vars(of_class).items()):
                if hasattr(value, "__code__"):
                    yield name
                    yield from _code_of(value)
                elif _is_plain(value) and not name.startswith("__"):
                    yield f"{name}={value!r}"
    else:
        yield from _code_of(type(item))
        for name, value in sorted(getattr(item, "__dict__", {}).items()):
            if _is_plain(value):
                yield f"{name}={value!r}"
            else:
                yield from _code_of(value if is_dataclass(value) else type(value))


def _is_plain(value: Any) -> bool:
    """Whether it is told apart by how it is written."""
    return value is None or isinstance(value, int | float | str)


def _number(text: str, default: Any, least: int) -> Any:
    """A number of the default's kind; None where the text is none, or it is too small. Text where the default is."""
    if isinstance(default, str):
        return text or None
    if isinstance(default, bool):
        return {"0": False, "1": True}.get(text)
    if isinstance(default, float):
        return float(text) if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text, re.ASCII) else None
    if re.fullmatch(r"\d+", text, re.ASCII) and int(text) >= least:
        return int(text)
    return None


def _kind(default: Any, least: int) -> str:
    """What `_number` takes, for errors."""
    if isinstance(default, str):
        return "text"
    if isinstance(default, bool):
        return "0 or 1"
    if isinstance(default, float):
        return "a number of at least 0, without an exponent"
    return f"a whole number of at least {least}"
