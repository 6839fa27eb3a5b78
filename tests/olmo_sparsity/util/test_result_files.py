"""Results as JSON files: a changed digit is seen, files without a checksum are read, all else is refused."""

import json
import random
import re
from pathlib import Path

import pytest

from analysis.records.results import COMPARISON, LADDER, LENGTH, LONGPPL, NEEDLE, RECALL
from analysis.stats.exact_match import load_records
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.result_files import EXACT_MATCH, INTERVAL, json_checksum, misfit

RESULTS = Path(__file__).parents[3] / "results"
COMMITTED = {
    "results/length/together/length.json": (LENGTH, LENGTH.load),
    "results/length/needle/needle.json": (NEEDLE, NEEDLE.load),
    "results/length/sizes/ladder.json": (LADDER, LADDER.load),
    "results/books/longppl/longppl.json": (LONGPPL, LONGPPL.load),
    "results/books/compare.json": (COMPARISON, COMPARISON.load),
    "results/synthetic/recall/recall.json": (RECALL, RECALL.load),
    "results/synthetic/records/planted/seed=1/exact_match.json": (EXACT_MATCH, lambda path: load_records([path])),
}  # fmt: skip
NAMES = [pytest.param(name, id=each[0].name) for name, each in COMMITTED.items()]
EARLIER = [
    path for path in RESULTS.rglob("*.json") if path.name in {each[0].name for each in COMMITTED.values()}
]


def committed(name: str) -> dict:
    return json.loads((RESULTS.parent / name).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_read(name: str) -> None:
    kind, load = COMMITTED[name]
    assert load(RESULTS.parent / name)
    assert kind.load(RESULTS.parent / name) == committed(name)


def test_every_committed_file_of_these_names_is_read() -> None:
    loads = {kind.name: kind.load for kind, _ in COMMITTED.values()}
    # nothing reads the times of a benchmark
    paths = [path for path in EARLIER if path != RESULTS / "benchmarks/length.json"]
    assert len(paths) > 30
    for path in paths:
        loads[path.name](path)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_read_back_and_no_flipped_bit_is(name: str, tmp_path: Path) -> None:
    kind, load = COMMITTED[name]
    expected, path = committed(name), tmp_path / kind.name
    kind.save(path, {key: each for key, each in expected.items() if key not in ("kind", "version")})
    assert load(path) and {**kind.load(path), **expected}.keys() == kind.load(path).keys()
    data, whole, draw = path.read_bytes(), kind.load(path), random.Random(name)
    for bit in draw.sample(range(8 * len(data)), 60):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        assert refused(load, path) if not reads_as(changed, whole) else kind.load(path) == whole
    text = data.decode()
    for digit in draw.sample([match.start() for match in re.finditer(r"\d", text)], 20):
        other = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
        path.write_text(other)
        assert refused(load, path) if not reads_as(other, whole) else kind.load(path) == whole


def reads_as(data: bytes | str, whole: dict) -> bool:
    """Whether it is the same to JSON: the last of 17 digits may change nothing."""
    try:
        return json.loads(data) == whole
    except ValueError:
        return False


def refused(load, path: Path) -> str:
    with pytest.raises(UserError) as error:
        load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value) and "scripts/" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_an_older_file_of_another_shape_is_one_line(name: str, tmp_path: Path) -> None:
    """No checksum protects it: whatever is missing or of another type is told, never met by a figure."""
    kind, load = COMMITTED[name]
    value, path = committed(name), tmp_path / kind.name
    fields = (
        [] if kind is LADDER else needed(kind.shape) if kind is not EXACT_MATCH else ["rows", "task", "seed"]
    )
    for field in [each for each in fields if each in value]:
        for damaged in ({**value, field: [[]]}, {key: each for key, each in value.items() if key != field}):
            path.write_text(json.dumps(damaged))
            refused(load, path)


def needed(shape: dict) -> list[str]:
    return [name for name in shape if name is not ...]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "3", "null", "[" * 100_000, '{"a":' * 100_000, "\0", '"\ud7ff"']
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_result_is_one_line(name: str, content: str, tmp_path: Path) -> None:
    kind, load = COMMITTED[name]
    path = tmp_path / kind.name
    path.write_text(content)
    refused(load, path)
    path.unlink()
    (path / kind.name).mkdir(parents=True)
    assert "cannot be read" in refused(kind.load, path)


def test_a_version_without_its_checksum_is_refused(tmp_path: Path) -> None:
    LENGTH.save(tmp_path / "length.json", committed("results/length/together/length.json"))
    value = json.loads((tmp_path / "length.json").read_text())
    assert value["version"] == 3
    for version, checksum, said in (
        (3, None, "checksum"),
        (2, value["checksum"], "of format version 3"),
        (4, "x", "3"),
    ):
        changed = {**value, "version": version, "checksum": checksum}
        if checksum is None:
            del changed["checksum"]
        (tmp_path / "length.json").write_text(json.dumps(changed))
        assert said in refused(LENGTH.load, tmp_path / "length.json")


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
        ({"value": 1, "low": None, "high": 2.5}, INTERVAL, None),
        ("x" * 99, int, "it is '" + "x" * 38 + "…"),
    ],
)
def test_shapes(value: object, shape: object, said: str | None) -> None:
    assert misfit(value, shape) == said
