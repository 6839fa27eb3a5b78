"""Whatever a file holds, a reader of it gives a right value or one line of what is wrong; never anything else.

Hypothesis makes the files up; `derandomize` makes the same ones every time.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from olmo_sparsity.config.fields import leaves
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data.sources import read_files
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.text_fields import Fields
from olmo_sparsity.util.text_files import TextFiles

same_every_time = settings(
    max_examples=100, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
made_up = ["", "???", "nan", "1e5", "../x", "a\0b", "a\nb", "\x1b[31m", "x" * 300, 2**63, 10**30]
interpolations = [
    "${seed}", "${model.d_model}", "${nowhere}", "${run_name", "${oc.env:HOME}", "${oc.env:SLURM_JOB_ID,x}",
    r"\${seed}", "${oc.decode:'[1,${seed}]'}", "${oc.create:{a: 1}}", "${oc.select:seed}", "${.name}", "${}",
    "${path.glob:/none/*}", "${path.choose:/,a}", "${path.last_checkpoint:/none}", "${model}", "${${run_name}}",
]  # fmt: skip
scalars = st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | st.text(max_size=12)
scalars |= st.binary(max_size=5) | st.sampled_from(made_up) | st.sampled_from(interpolations)
keys = st.text(max_size=5) | st.integers() | st.booleans() | st.none()
yaml_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted(leaves(Config())))


@same_every_time
@given(changes=st.dictionaries(names, yaml_values, min_size=1, max_size=2))
def test_a_config_is_refused_or_what_is_saved_of_it_is_read_back_equal(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path, saved = tmp_path / "x.yaml", tmp_path / "saved.yaml"
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
    try:
        config = load_config(path, warn=False)
    except UserError as error:
        first, *rest = str(error).splitlines() or [""]
        assert first.strip() and len(first) < 2000 and all(line.startswith("  ") for line in rest)
    else:
        config.save(saved)
        assert load_config(saved, warn=False) == config


@same_every_time
@given(texts=st.lists(st.text(max_size=40), max_size=4), packed=st.booleans())
def test_documents_come_back(tmp_path: Path, texts: list[str], packed: bool) -> None:
    path, whole = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl"), tmp_path / "x.txt"
    data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    assert [text for text, _ in read_files([str(path)], Fields())] == [text for text in texts if text.strip()]
    joined = "".join(texts).replace("\0", "")  # no text file has a NUL
    whole.write_bytes(joined.encode("utf8"))
    one = [text for text, _ in read_files([str(whole)], Fields())]
    assert one == ([joined] if joined.strip() else [])


SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".rst")
ROWS = '{"text": "one", "group": "a"}\n{"text": "two"}\n'
TABLE = 'text,group\n"one\ntwo",a\nthree,b\n'
HOLDINGS = (ROWS, TABLE, TABLE.replace(",", "\t"), "[" + ROWS.replace("\n{", ",\n{") + "]", "plain text, é\n")


@same_every_time
@given(
    data=st.binary(max_size=40) | st.sampled_from([text.encode() for text in HOLDINGS]),
    changes=st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=3)), max_size=2),
    suffix=st.sampled_from(SUFFIXES),
    packing=st.sampled_from(["", ".gz", ".zst"]),
    encoding=st.sampled_from(["utf-8", "latin-1", "utf-16", "utf-16-le", "cp1252", "gbk"]),
)
def test_a_damaged_file_of_text_is_read_or_refused_in_one_line(
    tmp_path: Path, data: bytes, changes: list[tuple[int, bytes]], suffix: str, packing: str, encoding: str
) -> None:
    if packing == ".gz" and changes:
        data = gzip.compress(data, mtime=0)
    for place, inserted in changes:
        data = data[:place] + inserted + data[place + 2 :]
    path = tmp_path / f"x{suffix}{packing}"
    path.write_bytes(data)
    try:
        texts = TextFiles([path], encoding=encoding).read()
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and "\0" not in str(error)
    else:
        assert all(isinstance(text, str) for _, text in texts) and any(text.strip() for _, text in texts)
