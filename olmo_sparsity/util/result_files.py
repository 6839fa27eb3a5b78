"""The record of an exact match, a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json

Json = dict[str, Any]

EXACT_MATCH_NAME = "exact_match.json"
EXACT_MATCH = {"kind": "olmo-sparsity exact match", "version": 2}
"""What such a file says of itself. `olmo_sparsity.evaluate.records` writes it; no torch is needed to read it."""


def read_exact_match(path: str | Path) -> Json:
    """The record in a file. Raises `UserError` where it is none, damaged, or of another version."""
    record: Json = read_json(path, remedy := "make it with olmo-sparsity exact_match")
    if not EXACT_MATCH.items() <= record.items():
        raise UserError(f"{path} holds no exact match of format version {EXACT_MATCH['version']}; {remedy}")
    return record
