"""Whatever a file holds, a reader of it gives a right value or one line of what is wrong; never anything else.

Hypothesis makes the files up; `derandomize` makes the same ones every time. `make test-slow` tries many more.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from analysis.result import load
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import leaves
from olmo_sparsity.data.sources import TextFiles
from olmo_sparsity.util.errors import UserError
from tests.support import tiny
from tests.support.results import made_result

SLOWER = 15


def examples(fast: int) -> pytest.MarkDecorator:
    """Run a test with so many examples, and with `SLOWER` times as many where slow tests run."""
    return pytest.mark.parametrize("count", [fast, pytest.param(SLOWER * fast, marks=pytest.mark.slow)])


def holds(count: int, check: Callable[..., None], *strategies: st.SearchStrategy, also: tuple = ()) -> None:
    """Try ``check`` on ``count`` examples of the strategies, the same every time, and on those of ``also``."""
    tried = given(*strategies)(check)
    for each in also:
        tried = example(*each)(tried)
    skipped = list(HealthCheck)  # examples wait for the disk and for other tests
    settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=skipped
    )(tried)()


def right_or_refused(read: Callable[[], Any]) -> Any:
    """What ``read`` gives, or None where it raises a `UserError` of one line, or of one and indented ones."""
    try:
        return read()
    except UserError as error:
        first, *rest = str(error).splitlines() or [""]
        assert first.strip() and len(first) < 2000
        assert all(line.startswith("  ") for line in rest)
        return None


# What files are made of.

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 2**64, 10**30]),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["", "???", "nan", "1e5", "../x", "/etc/passwd", "a\0b", "a\nb", "\x1b[31m", "x" * 300]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
interpolations = [
    "${seed}", "${model.d_model}", "${nowhere}", "${run_name", "${oc.env:HOME}", "${oc.env:SLURM_JOB_ID,x}",
    r"\${seed}", "${oc.decode:'[1,${seed}]'}", "${oc.create:{a: 1}}", "${oc.select:seed}", "${.name}", "${}",
    "${path.glob:/none/*}", "${path.choose:/,a}", "${path.last_checkpoint:/none}", "${model}", "${${run_name}}",
]  # fmt: skip
yaml_scalars = scalars | st.binary(max_size=5) | st.sampled_from(interpolations)
yaml_values = st.recursive(
    yaml_scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(sorted(leaves(Config())))


def changed(data: bytes, places: list[tuple[int, int]], cut: int | None) -> bytes:
    """``data`` with some bytes replaced and its end cut off."""
    damaged = bytearray(data)
    for place, value in places:
        if damaged:
            damaged[place % len(damaged)] = value
    return bytes(damaged if cut is None else damaged[: cut % (len(damaged) + 1)])


places = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4)
cuts = st.none() | st.integers(0, 1 << 20)


def json_text(value: Any) -> bytes:
    return json.dumps(value).encode()


# Configs.


def check_config(path: Path) -> None:
    """A config is refused, or what is saved of it is read back equal."""
    config = right_or_refused(lambda: load_config(path, warn=False))
    if config is not None:
        config.save(path.with_name("saved.yaml"))
        assert load_config(path.with_name("saved.yaml"), warn=False) == config


@examples(50)
def test_configs_with_any_value(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.yaml"

    def check(changes: dict[str, Any]) -> None:
        values: dict[str, Any] = {}
        for name, value in changes.items():
            *sections, key = name.split(".")
            inner = values
            for section in sections:
                inner = inner.setdefault(section, {})
                if not isinstance(inner, dict):
                    return
            inner[key] = value
        path.write_text(yaml.safe_dump(values), encoding="utf8")
        check_config(path)

    holds(count, check, st.dictionaries(names, yaml_values, min_size=1, max_size=2))


@examples(60)
def test_configs_of_checkpoints_with_damage(tmp_path: Path, count: int) -> None:
    load_config(tiny.write_yaml(tmp_path, tmp_path / "corpus"), warn=False).save(tmp_path / "whole.yaml")
    whole, path = (tmp_path / "whole.yaml").read_bytes(), tmp_path / "config.yaml"

    def check(places: list[tuple[int, int]], cut: int | None) -> None:
        path.write_bytes(changed(whole, places, cut))
        check_config(path)

    holds(count, check, places, cuts)


# Corpora.


def documents_of(path: Path) -> list[str]:
    return [text for text, _ in TextFiles((str(path),)).documents()]


@examples(300)
def test_corpora_of_any_bytes(tmp_path: Path, count: int) -> None:
    def check(lines: list[bytes], suffix: str, packed: bool, places: list, cut: int | None) -> None:
        path, data = tmp_path / f"x{suffix}", b"\n".join(lines)
        path.write_bytes(changed(gzip.compress(data, mtime=0) if packed else data, places, cut))
        for document in right_or_refused(lambda: documents_of(path)) or []:
            assert document.strip() and document.encode("utf8").decode("utf8") == document

    row = st.fixed_dictionaries({"text": st.text(max_size=20)}, optional={"id": json_values})
    line = st.one_of(row.map(json_text), json_values.map(json_text), st.binary(max_size=30))
    deep, long = b'{"text": ' + b"[" * 100_000, b'{"text": "a", "n": ' + b"9" * 5000 + b"}"
    also = tuple(([each], ".jsonl", False, [], None) for each in (deep, long, b"\xef\xbb\xbf{}"))
    suffixes = st.sampled_from([".jsonl", ".json", ".txt", ".jsonl.gz", ".json.gz", ".txt.gz"])
    holds(count, check, st.lists(line, max_size=4), suffixes, st.booleans(), places, cuts, also=also)


@examples(150)
def test_documents_come_back(tmp_path: Path, count: int) -> None:
    def check(texts: list[str], packed: bool) -> None:
        path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
        data = b"\n".join(json_text({"text": text}) for text in texts)
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
        assert documents_of(path) == [text for text in texts if text.strip()]
        (tmp_path / "x.txt").write_bytes("".join(texts).encode("utf8"))
        assert documents_of(tmp_path / "x.txt") == ["".join(texts)] * bool("".join(texts).strip())

    holds(count, check, st.lists(st.text(max_size=40), max_size=4), st.booleans())


# Results.


@examples(120)
def test_results_with_damage(tmp_path: Path, count: int) -> None:
    expected = made_result(40, 5)
    expected.save(tmp_path)
    names = ("targets.parquet", "choices.parquet")
    whole = {name: (tmp_path / name).read_bytes() for name in names}

    def check(name: str, places: list, cut: int | None) -> None:
        for each in names:
            (tmp_path / each).write_bytes(changed(whole[each], places, cut) if each == name else whole[each])
        result = right_or_refused(lambda: load(tmp_path))
        if result is not None:
            assert len(result.over) <= len(expected.over)
            assert set(result.choices["selector"]) <= set(expected.selectors)

    holds(count, check, st.sampled_from(names), places, cuts)
