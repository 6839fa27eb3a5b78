"""Results as JSON files: a changed digit is seen, and what is no result is refused in one line."""

import json
import random
import re
from pathlib import Path

import pytest

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import EXACT_MATCH, json_checksum, misfit

VALUE = {"run": "a", "seed": 1, "rows": [{"length": 10 * n, "exact": 0.1 * n} for n in range(20)]}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        EXACT_MATCH.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def reads_as(data: bytes | str, whole: dict) -> bool:
    """Whether it is the same to JSON: the last of 17 digits may change nothing."""
    try:
        return json.loads(data) == whole
    except ValueError:
        return False


def test_what_is_saved_is_read_back_and_no_flipped_bit_is(tmp_path: Path) -> None:
    path = tmp_path / EXACT_MATCH.name
    EXACT_MATCH.save(path, VALUE)
    data, whole, draw = path.read_bytes(), EXACT_MATCH.load(path), random.Random("flips")
    assert {name: whole[name] for name in VALUE} == VALUE
    for bit in draw.sample(range(8 * len(data)), 60):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        assert refused(path) if not reads_as(changed, whole) else EXACT_MATCH.load(path) == whole
    text = data.decode()
    for digit in draw.sample([match.start() for match in re.finditer(r"\d", text)], 20):
        other = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
        path.write_text(other)
        assert refused(path) if not reads_as(other, whole) else EXACT_MATCH.load(path) == whole


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "[" * 100_000, '{"a":' * 100_000, "\0"])
def test_what_is_no_result_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / EXACT_MATCH.name
    path.write_text(content)
    refused(path)


def test_another_version_or_no_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / EXACT_MATCH.name
    EXACT_MATCH.save(path, VALUE)
    value = json.loads(path.read_text())
    for change in ({"version": 99}, {"checksum": "x"}, {"kind": "other"}):
        path.write_text(json.dumps({**value, **change}))
        refused(path)


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
