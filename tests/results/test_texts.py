"""The books of the studies, built by `results/texts.py`, against documents cut by hand."""

import gzip
import hashlib
import json
import runpy
from pathlib import Path

import pytest

TEXTS = runpy.run_path(str(Path(__file__).parents[2] / "results" / "texts.py"))
LONG = "word " * 2400  # 12,000 characters
TABLE = "12 .... 13 .... 14 .... 15 .... 16 .... 17 .... 18 .... 19"
GUTENBERG = (
    "The Project Gutenberg EBook\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\nProduced by A. B.\n\n"
    f"CHAPTER I\n\n_{LONG}end._\n\n* * *\n\n[Illustration: a\nhouse]\n\nwrapped\n  line\n\n{TABLE}\n\n"
    "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n\nlicense"
)
OF_GUTENBERG = [f"CHAPTER I\n\n{LONG}end.", "* * *\n\nwrapped line"]
ELTEC = (
    '<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><p>no</p></teiHeader><text><body><div><head>I</head>'
    "<p>One <hi>two</hi><note>not this</note><pb/>three.</p><quote><l>a verse</l><l>of two</l></quote>"
    "<p>he said <quote>so</quote> there</p><l>alone</l></div></body></text></TEI>"
)
OF_ELTEC = ["I\n\nOne twothree.\n\na verse of two\n\nhe said so there\n\nalone"]


def row(**columns):
    plain = {"set": "s", "url": "https://example.org/x", "path": "", "format": "gutenberg", "rest": "merge"}
    return plain | {"source": "someone/book@abc"} | columns


def sha256(documents):
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


@pytest.fixture
def books(monkeypatch):
    """What is at each address; it may be added to."""
    there = {}
    monkeypatch.setitem(TEXTS["fetch"].__globals__, "download", there.get)
    return there


@pytest.mark.parametrize("merged", [True, False])
def test_documents_are_those_cut_by_hand(merged):
    made = TEXTS["documents"](TEXTS["gutenberg"](GUTENBERG.encode()), "merge" if merged else "drop")
    assert made == (["\n\n".join(OF_GUTENBERG)] if merged else OF_GUTENBERG[:1])
    assert TEXTS["documents"](TEXTS["eltec"](ELTEC.encode()), "merge") == OF_ELTEC
    assert TEXTS["lines"]("М_а_ша\r\n-----\r\n  и\tдом ".encode()) == ["Маша", "и дом"]


def test_a_set_is_built_and_a_book_that_differs_is_named(books, tmp_path, capsys):
    books["root/someone/book/abc/7-0.txt"] = b"other edition, long enough to stay"
    books["root/someone/book/abc/7.txt"] = GUTENBERG.encode()
    books["root/someone/other/HEAD/8.txt"] = b"changed since"
    rows = [
        row(id="7", sha256=sha256(["\n\n".join(OF_GUTENBERG)])),
        row(id="8", sha256=sha256(["as it was"]), source="someone/other@gone"),
    ]
    assert TEXTS["build"](rows, tmp_path, "root") == 0
    content = gzip.decompress((tmp_path / "s.json.gz").read_bytes()).decode()
    written = [json.loads(line) for line in content.splitlines()]
    assert [one["text"] for one in written] == ["\n\n".join(OF_GUTENBERG), "changed since"]
    assert [one["url"] for one in written] == ["https://example.org/x-0"] * 2
    said = capsys.readouterr().out
    assert "1 differ from ours: 8" in said and "1 of 2 books are the same" in said
    (tmp_path / "s.json.gz").unlink()
    assert TEXTS["build"]([*rows, row(id="9", sha256="")], tmp_path, "root") == 1
    assert not (tmp_path / "s.json.gz").exists() and "were not found" in capsys.readouterr().out
