"""Sources of documents: what is read is what stands in the files, and bad input is named."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import (
    PrepareSettings,
    Unit,
    clean_documents,
    docs_packages,
    file_units,
    is_english,
    read_docstrings,
    read_files,
)
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.text_fields import NO_GROUPS, Fields
from tests.support.corpora import PROSE, some_texts, text_settings, write_lines
from tests.support.refusals import refused


def write_packed(path: Path, data: bytes) -> None:
    """Write bytes as the file's name says that they are packed."""
    packing = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    path.write_bytes(pa.Codec(packing).compress(data, asbytes=True) if packing else data)


def texts_of(unit: Unit) -> list[str]:
    return [document.text for document in unit()]


def documents_of(path: Path | str) -> list[str]:
    return texts_of(lambda: read_files([str(path)], Fields(group=NO_GROUPS)))


def test_half_an_emoji_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "smile \\ud83d"}\n')
    assert documents_of(tmp_path / "a.jsonl") == ["smile ?"]


def test_a_text_file_is_one_document_and_small_ones_share_a_unit(tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nfile")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    lines = write_lines(tmp_path / "c.jsonl", ["third"])
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz"), lines, str(tmp_path / "a.txt")]
    units = file_units(files, Fields())
    texts_read = [texts_of(unit) for unit in units]
    assert texts_read == [["first\n\nfile", "second"], ["third"], ["first\n\nfile"]]


def test_parquet_is_read_in_order_with_its_groups(tmp_path):
    texts, urls = [f"text {number}" for number in range(500)], ["https://a.example.org/b", None] * 250
    table = {"id": list(range(500)), "text": [*texts[:-1], " "], "url": urls}
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=130)
    rows_read = list(read_files([str(tmp_path / "a.parquet")], Fields()))
    assert [tuple(row) for row in rows_read] == list(zip(texts, ["a.example.org", None] * 250, strict=True))[
        :-1
    ]
    assert documents_of(tmp_path / "a.parquet") == texts[:-1]  # no group is asked for
    for table, message in [
        ({"text": ["a", None], "url": ["c", "d"]}, r'b\.parquet:2: "text" is null'),
        ({"text": ["a", "b"], "url": ["c", ""]}, r"b\.parquet:2 has no url to name its group"),
    ]:
        pq.write_table(pa.table(table), tmp_path / "b.parquet")
        with refused(message):
            list(read_files([str(tmp_path / "b.parquet")], Fields(group="url")))


def test_messages_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    with refused(r"a\.jsonl:2 has no text but messages, which only `measure` reads"):
        documents_of(tmp_path / "a.jsonl")


@pytest.mark.parametrize("named", ["c4", "c4/en"])
def test_a_copy_of_the_folder_of_c4_with_all_or_some_of_its_text(tmp_path, named):
    texts = {
        "train.00000": some_texts(5, 1),
        "train.00001": some_texts(4, 2),
        "validation.00000": some_texts(3, 3),
    }
    (tmp_path / "c4" / "en").mkdir(parents=True)
    for part, texts_of_part in texts.items():
        urls = [f"https://{number}.org/{part}" for number in range(len(texts_of_part))]
        write_lines(tmp_path / "c4" / "en" / f"c4-{part}-of-00002.json.gz", texts_of_part, urls)
    (tmp_path / "c4" / "en" / "c4-train.00001-of-00002.json.gz.part").write_bytes(b"being copied")
    settings = PrepareSettings("c4", dataset=str(tmp_path / named))
    train, heldout = settings.units(tmp_path, 1)
    assert [texts_of(unit) for unit in (*train, *heldout)] == list(texts.values())
    manifest = prepare(settings, tmp_path / "out", workers=1)
    assert [len(files) for files in manifest.splits.values()] == [2, 1]
    assert manifest.settings["groups"] == {"heldout": 3, "in_both": 3}
    recorded = manifest.corpus, manifest.vocab_size, manifest.eos_token_id, manifest.dtype
    assert recorded == ("c4", 50280, 50279, "uint16")
    prepare(replace(settings, limit_tokens=200, heldout_documents=2), tmp_path / "limited", workers=1)
    files = TokenFiles.of_split(tmp_path / "limited", "train")
    *lengths, last = (end + 1 - start for _, start, end in files.document_bounds.tolist())
    assert sum(lengths) < 200 <= sum(lengths) + last == sum(files.lengths)
    assert len(TokenFiles.of_split(tmp_path / "limited", "heldout").document_bounds) == 2
    with refused("config en, split train cannot be read"):
        prepare(PrepareSettings("c4", dataset=str(tmp_path / "none")), tmp_path / "other")


def test_docstrings_come_in_source_order_without_running_the_module(tmp_path):
    source = '"""Module."""\nraise SystemExit\nclass A:\n    """A."""\n    def f(self):\n        """A.f."""\n'
    source += 'async def g():\n    """g."""\n    def inner():\n        """inner."""\n"""not a docstring"""\n'
    (tmp_path / "good.py").write_text(source)
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""\n')
    modules = [tmp_path / name for name in ("good.py", "bad.py", "latin.py", "none.py")]
    assert list(map(read_docstrings, modules)) == [
        ["Module.", "A.", "A.f.", "g.", "inner."],
        [],
        [],
        [],
    ]


def test_the_default_packages_are_the_installed_requirements_only():
    packages = set(docs_packages())
    assert {"python", "numpy", "torch", "transformers", "certifi"} <= packages  # certifi only through others
    assert not {"olmo-sparsity", "pytest", "ruff", "mypy"} & packages
    with refused("package no-such-thing is not installed"):
        docs_packages(["no-such-thing"])


def test_junk_short_and_repeated_text_is_left_out():
    long = [PROSE * 2 + str(number) for number in range(6)]
    documents = [
        [*long[:3], "Copyright 2020 by somebody. It is the licence of this.", "the end"],
        [long[0], *long[3:], "the end"],
        ["too short"],
        ["x1 = y1 * z1 + " * 100],
    ]
    first, second = [*(p.rstrip() for p in long[:3]), "the end"], [*long[3:], "the end"]
    cleaned = list(clean_documents(zip("abcd", documents, strict=True)))
    assert cleaned == [("\n\n".join(first), "a"), ("\n\n".join(second), "b")]
    assert is_english(PROSE)
    assert not is_english("les chats dorment sous une couverture quand il pleut dehors " * 3)
    assert not is_english("это предложение the of and to a in is for that")


# --- the kinds of files ---


def test_the_same_rows_make_the_same_corpus_from_every_kind_of_file(tmp_path):
    """And from a folder, another field, and another encoding, which the manifest then has."""
    texts = some_texts(40, 1)
    rows = [{"text": f"é {text}", "url": f"https://{n % 9}.org", "id": n} for n, text in enumerate(texts)]
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    named = [{"body": row["text"], "url": row["url"]} for row in rows]
    (tmp_path / "folder").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    contents = {
        "a.jsonl": (lines, {}),
        "folder/a.json.gz": (lines, {"files": (str(tmp_path / "folder"),)}),
        "b.json": (json.dumps(rows, indent=2, ensure_ascii=False), {}),
        "c.csv.zst": (table.getvalue(), {}),
        "d.json": (json.dumps(named), {"text_field": "body"}),
        "e.csv": (table.getvalue(), {"encoding": "latin-1"}),
    }
    made = {}
    for number, (name, (content, changes)) in enumerate(contents.items()):
        path = tmp_path / name
        write_packed(path, content.encode(changes.get("encoding", "utf-8")))
        settings = {"files": (str(path),), "heldout_fraction": 0.3, **changes}
        manifest = prepare(text_settings(**settings), tmp_path / str(number), workers=1)
        options = {key: value for key, value in changes.items() if key != "files"}
        options = {key: "iso8859-1" if key == "encoding" else value for key, value in options.items()}
        assert manifest.settings.items() >= options.items()
        assert ("text_field" in manifest.settings, "encoding" in manifest.settings) == (
            "text_field" in changes,
            "encoding" in changes,
        )
        made[name] = {
            path.name: path.read_bytes()
            for path in (tmp_path / str(number)).iterdir()
            if path.suffix != ".json"
        }
    assert made["a.jsonl"] and all(of_kind == made["a.jsonl"] for of_kind in made.values())
    with refused(r"other settings \(files, text_field\)"):
        prepare(text_settings((str(tmp_path / "a.jsonl"),), heldout_fraction=0.3), tmp_path / "4")


def test_files_of_no_kind_and_wrong_options_are_refused_before_anything_is_made(tmp_path):
    (tmp_path / "a.rst").write_text("text")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    for settings, message in [
        ({"files": (str(tmp_path / "a.rst"),)}, r"a\.rst is of no supported kind; give \.txt, \.md"),
        ({"files": (str(tmp_path / "a.txt"),)}, r"a\.txt is missing"),
        ({"files": (str(tmp_path / "empty.jsonl"),)}, r"there is no text in .*empty\.jsonl"),
        ({"files": (str(tmp_path / "folder"),)}, "neither a prepared corpus .* nor a folder of text"),
        ({"files": (str(tmp_path / "a.txt"),), "encoding": "no"}, "no encoding of this name"),
        *(
            (
                {"files": (str(tmp_path / "a.txt"),), name: value},
                f"--{name.replace('_', '-')} {value} is not above 0",
            )
            for name, values in (("heldout_fraction", (0.0, 1.0)), ("tokenizer_sample_mb", (-1.0, inf)))
            for value in (*values, nan)
        ),
    ]:
        with refused(message):
            prepare(text_settings(**settings), tmp_path / "out")
    for setting in ({"encoding": "latin-1"}, {"text_field": "body"}):
        with refused("is not for source docs"):
            prepare(PrepareSettings("docs", **setting), tmp_path / "out")
    assert not (tmp_path / "out").exists()
