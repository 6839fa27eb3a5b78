"""Checksums and shapes of JSON, and records of exact match that are none."""

import json
import re
from pathlib import Path

import pytest

from olmo_sparsity.util.result_files import (
    EXACT_MATCH,
    EXACT_MATCH_NAME,
    json_checksum,
    misfit,
    read_exact_match,
)
from tests.support.refusals import refused


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 100_000, "{}", json.dumps({**EXACT_MATCH, "version": 99})]
)
def test_what_is_no_record_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / EXACT_MATCH_NAME
    path.write_text(content)
    with refused(re.escape(str(path))):
        read_exact_match(path)


def test_the_checksum_is_that_of_what_is_read_back() -> None:
    value = {
        "of numbers": {10: 1.5, 9: (1, 2)},
        "text": "é\u202e\ud800",
        "nothing": None,
        "nan": float("nan"),
    }
    assert json_checksum(value) == json_checksum(json.loads(json.dumps({**value, "checksum": "x"})))
    assert json_checksum(value) != json_checksum({**value, "nothing": 0})


@pytest.mark.parametrize(
    ("value", "shape", "said"),
    [
        (3, float, None),
        (3.5, int, "it is 3.5"),
        (True, int, "it is True"),
        (True, float, "it is True"),
        (True, bool, None),
        (None, (int, None), None),
        ("3", (int, None), "it is '3'"),
        ([1, "a"], [int], "an entry of it is 'a'"),
        ([], [int], "it is empty"),
        ({}, [int], "it is {}"),
        ({"a": {"b": "c"}}, {"a": {"b": int}}, "b is 'c'"),
        ({"a": {}}, {"a": {"b": int}}, "a has no b"),
        ({"a": 1, "b": "x"}, {...: int}, "b is 'x'"),
        ("x" * 99, int, "it is '" + "x" * 38 + "…"),
    ],
)
def test_shapes(value: object, shape: object, said: str | None) -> None:
    assert misfit(value, shape) == said
