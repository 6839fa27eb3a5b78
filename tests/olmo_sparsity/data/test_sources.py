"""Sources of documents: what is read is what stands in the files, and bad input is named."""

from __future__ import annotations

import gzip
import random
import re
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmo_sparsity.data import docstrings
from olmo_sparsity.data import text as text_module
from olmo_sparsity.data.docstrings import clean_documents, docs_packages, is_english
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import (
    GroupField,
    HubShards,
    PrepareSettings,
    TextFiles,
    file_units,
    hub_units,
)
from olmo_sparsity.data.text import Unit, paragraph_hash, split_paragraphs
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.workers import StoppedEarly, run_jobs
from tests.support.corpora import (
    ENVIRONMENT,
    PROSE,
    ROOT,
    c4_folder,
    c4_texts,
    needs_c4_sample,
    some_texts,
    write_lines,
)
from tests.support.refusals import refused
from tests.support.slow import slow_but

NESTED = '{"text": ' + "[" * 100_000


def zstandard(data: bytes) -> bytes:
    return pa.Codec("zstd").compress(data, asbytes=True)


def write_packed(path: Path, data: bytes) -> None:
    """Write bytes as the file's name says that they are packed."""
    pack = {".gz": gzip.compress, ".zst": zstandard}.get(path.suffix, bytes)
    path.write_bytes(pack(data))


def texts_of(unit: Unit) -> list[str]:
    return [document.text for document in unit.documents()]


def documents_of(path: Path | str) -> list[str]:
    return texts_of(TextFiles((str(path),)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz"])
def test_json_lines_are_read_in_order_without_empty_ones(tmp_path, name):
    texts = ["one\n\ntwo", "", " \n", "schön \U0001f600"]
    assert documents_of(write_lines(tmp_path / name, texts)) == [texts[0], texts[3]]


def test_half_an_emoji_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "smile \\ud83d"}\n')
    assert documents_of(tmp_path / "a.jsonl") == ["smile ?"]


def test_a_text_file_is_one_document_and_small_ones_share_a_unit(tmp_path):
    (tmp_path / "a.txt").write_text("first\n\nfile")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    lines = write_lines(tmp_path / "c.jsonl", ["third"])
    units = file_units([str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz"), lines, str(tmp_path / "a.txt")])
    found = [texts_of(unit) for unit in units]
    assert found == [["first\n\nfile", "second"], ["third"], ["first\n\nfile"]]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.json.zst"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = "one" if ".txt" in name else '{"text": "one"}\n'
    write_packed(tmp_path / name, b"\xef\xbb\xbf" + text.encode())
    assert documents_of(tmp_path / name) == ["one"]


def test_frames_of_zstandard_are_read_one_after_the_other(tmp_path):
    frames = [zstandard(f'{{"text": "{number}"}}\n'.encode()) for number in range(3)]
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"
    (tmp_path / "a.jsonl.zst").write_bytes(frames[0] + skipped + frames[1] + frames[2])
    assert documents_of(tmp_path / "a.jsonl.zst") == ["0", "1", "2"]


def test_parquet_is_read_in_order_with_its_groups(tmp_path):
    texts, urls = [f"text {number}" for number in range(500)], ["https://a.org/b", None] * 250
    table = {"id": list(range(500)), "text": [*texts[:-1], " "], "url": urls}
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=130)
    found = list(TextFiles((str(tmp_path / "a.parquet"),), GroupField("url")).documents())
    assert [tuple(each) for each in found] == list(zip(texts, ["a.org", None] * 250, strict=True))[:-1]
    assert documents_of(tmp_path / "a.parquet") == texts[:-1]  # no group is asked for
    for table, message in [
        ({"content": ["a"]}, r'b\.parquet:1 has no text; .* a string "text"'),
        ({"text": ["a", None], "url": ["c", "d"]}, r"b\.parquet:2 has no text"),
        ({"text": [3]}, r"b\.parquet:1 has no text"),
        ({"text": ["a", "b"], "url": ["c", ""]}, r"b\.parquet:2 has no url to name its group"),
    ]:
        pq.write_table(pa.table(table), tmp_path / "b.parquet")
        with refused(message):
            list(TextFiles((str(tmp_path / "b.parquet"),), GroupField("url", is_needed=True)).documents())


def test_one_large_row_group_of_parquet_is_read_piece_by_piece(tmp_path):
    """100 MB of text in one row group, as pandas writes it."""
    texts = [random.Random(number).randbytes(500).hex() * 2 for number in range(50_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", compression="none")
    run = """if True:
        import re, sys; from pathlib import Path; import pyarrow.parquet
        from olmo_sparsity.data.sources import TextFiles
        for path in ([], sys.argv[1:]):
            print(sum(len(document.text) for document in TextFiles(path).documents()))
            print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    """
    command = [sys.executable, "-c", run, str(tmp_path / "a.parquet")]
    _, before, read, after = map(int, subprocess.check_output(command, env=ENVIRONMENT, cwd=ROOT).split())
    assert read == 100_000_000 and after - before < 40_000  # kB


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "middle", "other"])
def test_damaged_files_are_named(tmp_path, name, damage):
    texts = [str(random.Random(number).random()) for number in range(5000)]
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": texts}), tmp_path / name)
    else:
        write_packed(tmp_path / name, Path(write_lines(tmp_path / "plain.jsonl", texts)).read_bytes())
    whole = (tmp_path / name).read_bytes()
    broken = {"cut": whole[:-500], "middle": whole[:9000] + b"\x99" * 99 + whole[9099:], "other": b"text"}
    (tmp_path / name).write_bytes(broken[damage])
    with refused(rf"{name} is truncated or damaged|{name}:\d+ is not JSON") as error:
        documents_of(tmp_path / name)
    assert not isinstance(error.value, StoppedEarly)


@pytest.mark.parametrize("line", ["{not json", '["a list"]', '{"url": "u"}', '{"text": 3}', "\xff", NESTED])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n", encoding="latin1")
    with refused(r"a\.jsonl:3 .*one JSON object"):
        documents_of(path)


def test_a_truncated_gzip_is_named_after_its_whole_lines(tmp_path):
    draw = random.Random(0)
    texts = [str(draw.random()) for _ in range(5000)]
    path = Path(write_lines(tmp_path / "a.jsonl.gz", texts))
    path.write_bytes(path.read_bytes()[:-2000])
    read: list[str] = []
    with refused(r"a\.jsonl\.gz is truncated or damaged"):
        read.extend(document.text for document in TextFiles((str(path),)).documents())
    assert 0 < len(read) < len(texts) and read == texts[: len(read)]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with refused(r"b\.txt is not UTF-8"):
        documents_of(tmp_path / "b.txt")


@needs_c4_sample
def test_c4_shards_stream_from_a_local_copy(tmp_path, monkeypatch):
    dataset = str(c4_folder(tmp_path / "c4"))
    train, limit_tokens = hub_units(dataset, "en", "train")
    assert [texts_of(unit) for unit in train] == [c4_texts(0), c4_texts(1)]
    assert limit_tokens is None
    [validation], _ = hub_units(dataset, "en", "validation", limit_documents=3)
    assert texts_of(validation) == c4_texts(2)[:3]
    [unit], limit_tokens = hub_units(dataset, "en", "train", limit_documents=13, limit_tokens=1000)
    assert texts_of(unit) == (c4_texts(0) + c4_texts(1))[:13]
    assert limit_tokens == 1000
    monkeypatch.setattr("olmo_sparsity.data.sources.HUB_UNIT_DOCUMENTS", 5)
    units, _ = hub_units(dataset, "en", "train", limit_documents=13)
    assert [len(texts_of(unit)) for unit in units] == [7, 6]


@pytest.mark.parametrize("named", ["c4", "c4/en"])
def test_a_copy_of_c4_needs_no_readme(tmp_path, named):
    texts = {
        "train.00000": some_texts(5, 1),
        "train.00001": some_texts(4, 2),
        "validation.00000": some_texts(3, 3),
    }
    (tmp_path / "c4" / "en").mkdir(parents=True)
    for part, each in texts.items():
        urls = [f"https://{number}.org/{part}" for number in range(len(each))]
        write_lines(tmp_path / "c4" / "en" / f"c4-{part}-of-00002.json.gz", each, urls)
    (tmp_path / "c4" / "en" / "c4-train.00001-of-00002.json.gz.part").write_bytes(b"being copied")
    dataset = str(tmp_path / named)
    units = [unit for split in ("train", "validation") for unit in hub_units(dataset, "en", split)[0]]
    assert [texts_of(unit) for unit in units] == list(texts.values())
    with refused("has no readable split test"):
        hub_units(dataset, "en", "test")
    manifest = prepare(PrepareSettings("c4", dataset=dataset), tmp_path / "out", workers=1).manifest
    assert [len(files) for files in manifest.splits.values()] == [2, 1]
    assert manifest.settings["groups"] == {"heldout": 3, "in_both": 3}


@needs_c4_sample
def test_what_a_data_set_lacks_is_named(tmp_path):
    folder = c4_folder(tmp_path / "c4")
    with refused("config fr, has no readable split train"):
        hub_units(str(folder), "fr", "train")
    with refused("has no readable split test"):
        hub_units(str(folder), "en", "test")
    shard = folder / "en" / "c4-train.00000-of-00002.json.gz"
    shard.write_bytes(shard.read_bytes()[:3000])
    with refused("cannot be read"):
        list(HubShards(str(folder), "en", "train", 0, 2).documents())


def test_without_a_network_the_hub_fails_at_once(monkeypatch):
    import httpx
    from huggingface_hub import HfApi

    def unreachable(self, name, timeout):
        raise httpx.ConnectError("no route")

    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    with pytest.raises(StoppedEarly, match=r"cannot be reached \(no route\).*text --files"):
        hub_units("allenai/c4", "en", "train")


def test_docstrings_come_in_source_order_without_running_the_module(tmp_path):
    source = '"""Module."""\nraise SystemExit\nclass A:\n    """A."""\n    def f(self):\n        """A.f."""\n'
    source += 'async def g():\n    """g."""\n    def inner():\n        """inner."""\n"""not a docstring"""\n'
    (tmp_path / "good.py").write_text(source)
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b'"""caf\xe9"""\n')
    modules = [tmp_path / name for name in ("good.py", "bad.py", "latin.py", "none.py")]
    assert docstrings.read_docstrings(modules) == [["Module.", "A.", "A.f.", "g.", "inner."], [], [], []]


def test_the_default_packages_are_the_installed_requirements_only():
    packages = set(docs_packages())
    assert {"python", "numpy", "torch", "transformers", "certifi"} <= packages  # certifi only through others
    assert not {"olmo-sparsity", "pytest", "ruff", "mypy"} & packages
    with refused("package no-such-thing is not installed"):
        docs_packages(["no-such-thing"])


def test_the_default_packages_are_those_that_every_install_once_had():
    assert " ".join(docstrings.BASE) == (
        "ai2-olmo torch datasets transformers accelerate deepspeed numpy pyarrow scipy matplotlib pandas rich jinja2 "
        "tqdm safetensors tokenizers omegaconf packaging httpx"
    )


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


def _square_or_fail(number: int) -> int:
    if number < 0:
        raise UserError(f"{number} is negative")
    return number**2


@pytest.mark.parametrize("workers", slow_but([1, 2], 1))
def test_jobs_keep_their_order_and_their_errors(workers):
    shown = {"workers": workers, "description": "squares", "unit": "numbers"}
    assert run_jobs(_square_or_fail, range(5), **shown) == [0, 1, 4, 9, 16]
    with refused("-3 is negative"):
        run_jobs(_square_or_fail, [1, -3, 2], **shown)


@pytest.mark.parametrize("characters", [1, 2, 3, 5, 1000])
def test_paragraphs_have_the_same_hash_in_parts(monkeypatch, characters):
    monkeypatch.setattr(text_module, "_HASHED_CHARACTERS", characters)
    paragraphs = ["", " ", "one", "one two", "  one \t two\u3000three ", "a  b   c", "ab cd ef gh", " \x1c x"]
    for paragraph in paragraphs:
        words = " ".join(paragraph.split())
        expected = int.from_bytes(blake2b(words.encode(), digest_size=8).digest(), "little")
        assert paragraph_hash(paragraph) == expected, paragraph


def test_paragraphs_are_what_stands_between_blank_lines():
    for text in ["", "\n\n", "a", "a\n\nb", "\n \na\n\n\n b\n\n", "a\n \n \n  b\nc\n\n\x1c"]:
        expected = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
        assert list(split_paragraphs(text)) == expected
