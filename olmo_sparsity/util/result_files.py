"""Results as one JSON file: checksums, shapes, and the record of an exact match."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json

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


EXACT_MATCH_NAME = "exact_match.json"
EXACT_MATCH = {"kind": "olmo-sparsity exact match", "version": 2}
"""What such a file says of itself. `olmo_sparsity.evaluate.exact_match` writes it; no torch is needed to read it."""


def read_exact_match(path: str | Path) -> Json:
    """The record in a file. Raises `UserError` where it is none, damaged, or of another version."""
    record: Json = read_json(path, remedy := "make it with olmo-sparsity exact_match")
    if not EXACT_MATCH.items() <= record.items():
        raise UserError(f"{path} holds no exact match of format version {EXACT_MATCH['version']}; {remedy}")
    return record
