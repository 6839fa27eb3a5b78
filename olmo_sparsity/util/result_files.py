"""Results as one JSON file, which says of what kind and version it is and carries a checksum of all that it says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import file_in, read_json, write_json

Json = dict[str, Any]

CHECKSUM = "checksum"


def json_checksum(value: Json) -> str:
    """SHA-256, in hexadecimal, of a JSON object but for its field `CHECKSUM`; the same before writing and after."""
    rest = {name: each for name, each in value.items() if name != CHECKSUM}
    as_read = json.loads(json.dumps(rest))  # keys that are numbers would sort in another order
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def misfit(value: Any, shape: Any, name: str = "it") -> str | None:
    """What of a JSON value is not as ``shape`` says, in words; None where all is.

    A shape is a type (whole numbers are float, too), None, a tuple of alternatives, a list with the shape of each of
    one or more entries, or a dict with the shape of each field that is needed, or with ``...`` for that of all fields.
    """
    if isinstance(shape, tuple):
        return None if any(misfit(value, one) is None for one in shape) else f"{name} is {_brief(value)}"
    if isinstance(shape, dict) and isinstance(value, dict):
        wanted = dict.fromkeys(value, shape[...]) if ... in shape else shape
        for key, each in wanted.items():
            if key not in value:
                return f"{name} has no {key}"
            if found := misfit(value[key], each, key):
                return found
        return None
    if isinstance(shape, list) and isinstance(value, list):
        return next(
            filter(None, (misfit(each, shape[0], f"an entry of {name}") for each in value)), None
        ) or (None if value else f"{name} is empty")
    if shape is None and value is None:
        return None
    is_of_type = isinstance(shape, type) and isinstance(value, (float, int) if shape is float else shape)
    if is_of_type and (shape is bool or not isinstance(value, bool)):
        return None
    return f"{name} is {_brief(value)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


@dataclass(frozen=True)
class ResultFile:
    """A kind of result."""

    name: str
    """Of the file, such as length.json."""
    kind: str
    """What the file calls itself."""
    version: int
    """Of the format. Files of the version before, which had no checksum, are read as well."""
    holds: str
    """What is in it, for messages."""
    script: str
    """What makes it."""
    shape: Json = field(default_factory=dict)
    """What its readers need, see `misfit`."""
    before: Json | None = None
    """What a file of the version before says of itself, where that is not kind and version."""

    def stamped(self, result: Json) -> Json:
        """``result`` with kind, version and checksum before it."""
        head = {"kind": self.kind, "version": self.version}
        value = {**head, **result, **head}
        return {CHECKSUM: json_checksum(value), **value}

    def save(self, path: str | Path, result: Json) -> None:
        """Write ``result``, stamped, atomically."""
        write_json(path, self.stamped(result))

    def load(self, path: str | Path) -> Json:
        """The result, given its file or folder. Raises `UserError` where it is none, of another version or damaged."""
        path, again = file_in(path, self.name), f"make it with {self.script}"
        found = read_json(path, again)
        is_stamped = CHECKSUM in found or self._says(found, self.version)
        known = self._says(found, self.version) if is_stamped else self._is_of_before(found)
        if known and is_stamped and found.get(CHECKSUM) != _checksum_of(found):
            raise UserError(f"{path} was edited or damaged (it does not fit its checksum); {again}")
        odd = misfit(found, self.shape) if known else None
        if not known or (odd and self.before == {}):
            raise UserError(f"{path} holds no {self.holds} of format version {self.version}; {again}")
        if odd:
            raise UserError(f"{path} is damaged ({odd}); {again}")
        return found

    def _says(self, found: Json, version: int) -> bool:
        return (found.get("kind"), found.get("version")) == (self.kind, version)

    def _is_of_before(self, found: Json) -> bool:
        if self.before is None:
            return self._says(found, self.version - 1)
        unnamed = not {"kind", "version"} & found.keys()
        return unnamed and all(found.get(name) == value for name, value in self.before.items())


def _checksum_of(found: Json) -> str | None:
    try:
        return json_checksum(found)
    except RecursionError:  # nested deeper than it can be written
        return None


EXACT_MATCH = ResultFile(
    "exact_match.json",
    "olmo-sparsity exact match",
    2,
    "exact match",
    "scripts/exact_match.py",
    before={"format": 1},
)
"""Written by `olmo_sparsity.evaluate.exact_match`, read without torch."""
