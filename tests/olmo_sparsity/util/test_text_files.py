"""Files of text: what is read of every kind, and what is refused, with file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from olmo_sparsity.util.text_fields import group_of_url
from olmo_sparsity.util.text_files import TextFiles
from olmo_sparsity.util.text_rows import kind_of, read_text
from tests.support.refusals import refused

BOOK = "https://www.example.org/ebooks/"
ROWS = [
    {"text": 'one "quoted", two\nthree', "url": "https://www.a.example.org/1"},
    {"text": "Zwei – ñ 𝄞", "url": ""},
    {"text": "three", "url": "https://b.example.org"},
]
READ = [("a.example.org", ROWS[0]["text"]), (None, ROWS[1]["text"]), ("b.example.org", ROWS[2]["text"])]


@pytest.mark.parametrize(
    ("url", "group"),
    [
        ("http://www.example.com/a/b?c=1", "example.com"),
        ("HTTPS://Example.com:8080/", "example.com"),
        (f"{BOOK}1023#Bleak-House-48", f"{BOOK}1023#Bleak-House"),
        ("https://example.org/project/sympy#sympy/core/add.py", "https://example.org/project/sympy"),
        ("https://example.com/page#", "example.com"),
        ("http://[broken", "http://[broken"),
        ("books/moby-dick-1", "books/moby-dick-1"),
    ],
)
def test_the_site_or_work_of_a_url(url: str, group: str) -> None:
    assert group_of_url(url) == group


# --- what is read ---


def pack(data: bytes, name: str) -> bytes:
    """Bytes as the file's name says that they are packed."""
    packing = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix.lower())
    return pa.Codec(packing).compress(data, asbytes=True) if packing else data


def written(kind: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """The rows as a file of this kind holds them."""
    if kind in ("csv", "tsv"):
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]), delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        return table.getvalue()
    if kind == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read(path: Path, content: str | bytes | None = None, **options: Any) -> list[tuple[str | None, Any]]:
    """What is read of a file with this content."""
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(pack(data, path.name))
    return TextFiles([path], **options).read()


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte-order mark"])
@pytest.mark.parametrize("packing", ["", ".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "JSONL"])
def test_rows_come_back_from_every_kind(tmp_path, kind, packing, mark):
    assert read(tmp_path / f"a.{kind}{packing}", mark + written(kind.lower())) == READ


def test_rows_come_back_from_parquet(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == READ
    words = pa.array(["a", "b", "a"])
    for column in (words.dictionary_encode(), words.cast(pa.large_string())):
        pq.write_table(pa.table({"text": column, "group": [1, None, 2]}), tmp_path / "b.parquet")
        assert read(tmp_path / "b.parquet") == [("1", "a"), (None, "b"), ("2", "a")]


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.TXT.gz", "a.md.zst", "a.rst", "a.py.gz", "a"])
def test_any_other_file_is_one_text_with_line_feeds(tmp_path, name):
    assert read(tmp_path / name, "\ufeff{one}\r\ntwo\rthree\n") == [(name, "{one}\ntwo\nthree\n")]
    assert read_text(tmp_path / name) == "{one}\r\ntwo\rthree\n"  # a corpus has the line ends of the file


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.jsonl", '{"text": "a"}\r\n\r\n \n{"text": "b"}', ["a", "b"]),
        ("a.jsonl", '{"text": "a"}\r{"text": "b"}\r', ["a", "b"]),
        ("a.jsonl", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n', ["a", "b"]),
        ("a.jsonl", '{"text": "half \\ud83d"}', ["half ?"]),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ("a.json", '\n[{"text": "a"}, "b"\n,\n{"text": "[,]"}]', ["a", "b", "[,]"]),
        ("a.json", '{\n "text": "a",\n "id": 1\n}\n', ["a"]),
        ("a.csv", 'id, text \n1,"a\r\nb"\n\n2,c\n', ["a\r\nb", "c"]),
        ("a.csv", "text\rone\rtwo\r", ["one", "two"]),
        ("a.csv", "text\n" + 70_000 * "book ", [70_000 * "book "]),  # more than a cell may hold by default
        ("a.tsv", 'text\tid\na, "b"\t1\n', ['a, "b"']),
    ],
)
def test_layouts(tmp_path, name, content, texts):
    assert read(tmp_path / name, content) == [(None, text) for text in texts]


@pytest.mark.parametrize("ending", ["jsonl", "ndjson", "NDJSON.gz", "jsonlines"])
def test_json_lines_have_many_endings(tmp_path, ending):
    assert read(tmp_path / f"a.{ending}", '{"text": "a"}\n{"text": "b"}\n') == [(None, "a"), (None, "b")]


@pytest.mark.parametrize(("ending", "warnings"), [("log", 1), ("txt", 1), ("jsonl", 0)])
def test_json_lines_that_are_read_as_one_text_are_warned_of(tmp_path, ending, warnings, caplog):
    read(tmp_path / f"a.{ending}", '\n{"text": "a"}\n{"text": "b"}\n')
    assert (
        caplog.text.count(f"a.{ending} is read as one text, though its first line is a JSON object")
        == warnings
    )
    read(tmp_path / f"b.{ending}", '{"text": "a"}' if ending == "jsonl" else "{braces}\n")
    assert "b." not in caplog.text


def test_messages_stand_for_a_text_in_json(tmp_path):
    chat = [{"role": "user", "content": "half \ud83d"}]
    rows = [{"messages": chat}, {"text": None, "messages": chat}, {"text": "plain", "messages": chat}]
    seen = [{"role": "user", "content": "half ?"}]
    lines = "\n".join(map(json.dumps, rows))
    assert read(tmp_path / "a.jsonl", lines) == [(None, seen), (None, seen), (None, "plain")]


@pytest.mark.parametrize("messages", [[], ["a"], [None], [{"role": "user", "content": "a"}, 3]])
def test_messages_that_are_none_are_named_with_their_line(tmp_path, messages):
    lines = [{"text": "a"}, {"messages": messages}]
    with refused(r'a\.jsonl:2: "messages" must be objects with "role" and "content"'):
        read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))


def test_messages_of_parquet_stand_for_a_text(tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    pq.write_table(pa.table({"messages": [chat, chat], "group": ["a", None]}), tmp_path / "a.pq")
    assert read(tmp_path / "a.pq") == [("a", chat), (None, chat)]
    with refused('no column "body"'):
        read(tmp_path / "a.pq", text_field="body")
    pq.write_table(pa.table({"messages": ["a"]}), tmp_path / "a.pq")
    with refused(r"a\.pq:1 has no text and no list of messages"):
        read(tmp_path / "a.pq")


@pytest.mark.parametrize(
    ("field", "groups"),
    [
        (None, ["mine", "x.org", "3", None]),
        ("none", [None] * 4),
        ("url", ["x.org", "x.org", "y.org", None]),
        ("book", ["b", "7", None, None]),
    ],
)
def test_groups(tmp_path, field, groups):
    rows = [
        {"text": "a", "group": "mine", "url": "https://x.org/1", "book": "b"},
        {"text": "b", "group": None, "url": "https://www.x.org/2", "book": 7},
        {"text": "c", "group": 3, "url": "http://y.org", "book": None},
        {"text": "d", "group": "", "url": None, "book": ""},
    ]
    assert read(tmp_path / "a.jsonl", written("jsonl", rows), group_field=field) == [
        (group, row["text"]) for group, row in zip(groups, rows, strict=True)
    ]
    whole = None if field == "none" else "a.txt"
    assert read(tmp_path / "a.txt", "one", group_field=field) == [(whole, "one")]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_the_text_may_be_in_another_field(tmp_path, kind):
    rows = [{"text": "no", "body": "yes"}, {"text": "no", "body": "also"}]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(written(kind, rows))
    assert read(path, text_field="body") == [(None, "yes"), (None, "also")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_group_that_is_missing_leaves_it_to_the_url(tmp_path, kind):
    nan = float("nan")
    rows = [
        {"text": "a", "group": group, "url": url} for group in (nan, None) for url in ("http://x.org/1", "")
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(written(kind, [*rows, {"text": "a", "group": "", "url": "http://x.org/1"}]))
    else:
        groups = pa.array([nan, nan, None, None], pa.float64())
        pq.write_table(
            pa.table({"text": ["a"] * 4, "group": groups, "url": [row["url"] for row in rows]}), path
        )
    assert [group for group, _ in read(path)] == ["x.org", None, "x.org", None, "x.org"][
        : 5 - (kind == "parquet")
    ]


@pytest.mark.parametrize("column", ["text", "group", "url"])
def test_a_column_that_a_table_has_twice_is_refused_where_it_is_read(tmp_path, column):
    names = ["text", "group", "url", column]
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 4, names=names), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(",".join(names) + "\na,a,a,a\n")
    for path in (tmp_path / "a.parquet", tmp_path / "a.csv"):
        with refused(f'has the column "{column}" twice'):
            read(path)
        if column != "text":
            assert read(path, group_field="none") == [(None, "a")]


# --- encodings ---


@pytest.mark.parametrize(
    "encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "UTF-16BE", "utf-32", "utf8"]
)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "tsv.gz"])
def test_an_encoding_that_is_named(tmp_path, kind, encoding):
    rows = [
        {"text": "Café\nau lait, déjà vu", "url": "https://x.org"},
        {"text": "zwölf", "url": "http://y.org"},
    ]
    path = tmp_path / f"a.{kind}"
    content = "Café\nau lait" if kind == "txt" else written(kind.removesuffix(".gz"), rows)
    expected = [("x.org", rows[0]["text"]), ("y.org", rows[1]["text"])]
    expected = [("a.txt", content)] if kind == "txt" else expected
    assert read(path, content.encode(encoding), encoding=encoding) == expected
    if encoding.startswith("utf"):
        marked = ("" if encoding in ("utf-16", "utf-32") else "\ufeff") + content
        assert read(path, marked.encode(encoding), encoding=encoding) == expected


LATIN = "Zeile 1\nCafé au lait\n".encode("latin-1")
LATIN_LINES = b'{"text": "a"}\n\n' + '{"text": "é"}\n'.encode("latin-1")
UTF_16 = 'text,"text"\n{"text": "a b"}\n'
RUSSIAN = "раз два три четыре пять\nшесть семь\n"


@pytest.mark.parametrize(
    ("name", "data", "line", "offset", "remedy"),
    [
        ("a.txt", LATIN, 2, 11, "--encoding latin-1 .*encoding=.latin-1"),
        ("a.txt.gz", LATIN, 2, 11, "--encoding latin-1"),
        ("a.md", "1\n“Café”".encode("cp1252"), 2, 2, "--encoding cp1252"),
        ("a.jsonl", LATIN_LINES, 3, 25, "--encoding latin-1"),
        ("a.json.zst", LATIN_LINES, 3, 25, "--encoding latin-1"),
        ("a.csv", 'id,text\n1,"a\nb"\n2,é\n'.encode("latin-1"), 4, 18, "--encoding latin-1"),
        ("a.txt", UTF_16.encode("utf-16"), 1, 0, r"--encoding utf-16 "),
        ("a.jsonl", UTF_16.encode("utf-16"), 1, 0, r"--encoding utf-16 "),
        ("a.csv", b"\xfe\xff" + UTF_16.encode("utf-16-be"), 1, 0, r"--encoding utf-16 "),
        ("a.txt", UTF_16.encode("utf-32"), 1, 0, "--encoding utf-32"),
        ("a.txt", UTF_16.encode("utf-16-le"), 1, 1, "--encoding utf-16-le"),
        ("a.jsonl.gz", UTF_16.encode("utf-16-be"), 1, 0, "--encoding utf-16-be"),
        ("a.txt", RUSSIAN.encode("utf-16-le"), 1, 7, "--encoding utf-16-le"),
        ("a.txt", "größer, schön und süß".encode() + b" caf\xe9 ", 1, 30, "most of it is UTF-8"),
        ("a.txt", b"x" * 3_000_000 + b"\n\xe9", 2, 3_000_001, "--encoding latin-1"),
        ("a.txt", b"x" * (2**20 - 1) + "é\n".encode() + b"\xff", 2, 2**20 + 2, "most of it is UTF-8"),
        (
            "a.txt",
            b"x\n" * 2**20 + "“it’s”\n".encode() + b"\xe2\x80",
            2**20 + 2,
            2**21 + 13,
            "most of it is UTF-8",
        ),
        ("a.txt", "It’s cut: ".encode() + b"\xe2\x80", 1, 12, "most of it is UTF-8"),
        ("a.txt", b"x\n" * 2**20 + "“Café”".encode("cp1252"), 2**20 + 1, 2**21, "--encoding cp1252"),
        ("a.txt", b"one\ntwo\0\n", 2, 7, "extract its text"),
        ("a.csv", b"text\ntwo\0\n", 2, 8, "extract its text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\0"}\n', 2, 24, "extract its text"),
        ("a.pdf", b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj", 2, 10, "a PDF; extract its text"),
        ("a.docx", b"PK\x03\x04\x14\0\x06\0", 1, 5, "ZIP archive, as .docx"),
        ("a.txt", gzip.compress(b"text", mtime=0), 1, 1, "gzip; give it a name that ends in .gz"),
        ("a.jsonl", pa.Codec("zstd").compress(b"text", asbytes=True), 1, 1, "ends in .zst"),
        (
            "a.txt.gz",
            gzip.compress(b"text", mtime=0),
            1,
            1,
            "it is packed twice; unpack it once",
        ),
    ],
)
def test_the_first_bad_byte_is_named(tmp_path, name, data, line, offset, remedy):
    with refused(rf"{name}:{line} is no[t ].*at offset {offset}\): .*{remedy}"):
        read(tmp_path / name, data)


@pytest.mark.parametrize(
    ("data", "encoding", "message"),
    [
        (b"%PDF-1.4\n1 0 obj", "utf-8", r"a\.txt is no text: it is a PDF"),
        (b"%PDF-1.4\n1 0 obj", "latin-1", r"a\.txt is no text: it is a PDF"),
        (b"abc\0", "latin-1", r"a\.txt:1 is no ISO8859-1 text \(it has a NUL at offset 3"),
        (
            b"plain text",
            "utf-16",
            r"a\.txt:1 is not UTF-16 \(it has no byte-order mark .*leave --encoding out",
        ),
        ("a b c d".encode("utf-16-le"), "utf-16", r"no byte-order mark .*--encoding utf-16-le"),
        ("é".encode(), "ascii", r"a\.txt:1 is not ASCII \(byte 0xc3 at offset 0\): leave --encoding out"),
        (b"a", "no-such", "Python has no encoding of this name"),
        (b"a", None, "None: Python has no encoding of this name"),
        (b"a", 8, "--encoding 8: Python has no encoding of this name"),
        (b"a", "hex", "Python has no encoding of this name"),
        (b"a", "a\0b", "Python has no encoding of this name"),
    ],
)
def test_an_encoding_that_does_not_fit(tmp_path, data, encoding, message):
    with refused(message):
        read(tmp_path / "a.txt", data, encoding=encoding)


# --- what is refused ---


NESTED = '{"text": ' + "[" * 100_000
LAYOUT = 'each line must be one JSON object with a string "text"'


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "cut', rf":4 is no JSON \(Unterminated string starting at column 10\); {LAYOUT}"),
        ("{'text': 'a'}", rf":4 is no JSON .*{LAYOUT}"),
        ('{"text": "a"}{"text": "b"}', ":4 is no JSON .*Extra data at column 14"),
        ('{"text": "tab\tin it"}', ":4 is no JSON .*Invalid control character at column 14"),
        (NESTED, ":4 is no JSON .*recursion"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", ":4 is no JSON .*4300 digits"),
        ('["a"]', ':4 is a list, not one JSON object with a string "text"'),
        ("3", ":4 is a number, not"),
        ('"a"', ":4 is a string, not"),
        ("null", ":4 is null, not"),
        ("true", ":4 is true or false, not"),
        ('{"text": null}', ':4: "text" is null, not a string; .*--text-field'),
        ('{"text": 3}', ':4: "text" is a number, not a string'),
        ('{"text": ["a"]}', ':4: "text" is a list, not a string'),
        (
            '{"body": "a", "id": 1}',
            r":4 has no text and no list of messages \(it has body, id\); .*--text-field",
        ),
        ("{}", r":4 has no text .*\(it has no fields\)"),
    ],
    ids=lambda value: value[:20],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, kind, row, message):
    with refused(rf"a\.{kind}{message}"):
        read(tmp_path / f"a.{kind}", '{"text": "good"}\n\n{"text": "good"}\n' + row + '\n{"text": "good"}\n')


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '[{"text": "a"}]', r"a\.jsonl:1 is a list.*a name that ends in \.json"),
        ("a.jsonl", '\n[\n{"text": "a"}\n]', r"a\.jsonl:2 is no JSON.*a name that ends in \.json"),
        ("a.json", '[\n {"text": "a"},\n\n {"id": 1}\n]', r"a\.json:4 has no text .*\(it has id\)"),
        ("a.json", '[\n {"text": "a"},\n\n 3]', r"a\.json:4 is a number"),
        ("a.json", '[\n {"text": "a"},\n {"text": \n', r"a\.json:3 is no JSON .*put the file back whole"),
        ("a.json", '[{"text": "a"}]\n[{"text": "b"}]\n', r"a\.json:2 is no JSON .*Extra data"),
        (
            "a.json",
            '{\n "data": [{"text": "a"}],\n "n": 1\n}',
            r'a\.json:1 has no text .*\(it has data, n\); .*"data"',
        ),
        ("a.json", '{"version": 1}', r"a\.json:1 has no text .*\(it has version\)"),
        (
            "a.csv",
            "id,body\n1,a\n",
            r'a\.csv:1 has no column "text" \(it has id, body\); .*commas.*--text-field',
        ),
        ("a.csv", "\nid;text\n1;a\n", r"a\.csv:2 has no column .*\(it has id;text\)"),
        ("a.tsv", "id,text\n1,a\n", r"a\.tsv:1 has no column .*tabs"),
        ("a.csv", "text,text\na,b\n", r'a\.csv:1 has the column "text" twice'),
        ("a.csv", 'id,text\n1,"a\nb"\n2,b,c\n', r"a\.csv:4 has 3 cells where the header has 2"),
        ("a.csv", "id,text\n1,a\n2\n", r"a\.csv:3 has 1 cells"),
        (
            "a.csv",
            'id,text\n1,a\n2,"open\n3,c\n',
            r"a\.csv:3: the row that begins here .*a quote is not closed",
        ),
        ("a.csv", 'id,text\n1,"a"b\n', r"a\.csv:2: the row that begins here is damaged"),
    ],
)
def test_a_bad_layout_is_named_with_its_line(tmp_path, name, content, message):
    with refused(message):
        read(tmp_path / name, content)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_group_field_that_is_not_there_is_named(tmp_path, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["a"], "url": ["u"]}), path)
    else:
        path.write_text(written(kind, [{"text": "a", "url": "u"}]))
    with refused(rf"a\.{kind}.* has no .*isbn.* \(it has text, url\).*--group-field"):
        read(path, group_field="isbn")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "id": [1]}, r'a\.parquet has no column "text" \(it has body, id\); .*--text-field'),
        ({"text": ["a", None]}, r'a\.parquet:2: "text" is null'),
        ({"text": pa.array([None, None])}, r'a\.parquet:1: "text" is null'),
        ({"text": [["a"], ["b"]]}, r'a\.parquet: the column "text" holds list<.*not strings; .*--text-field'),
        ({"text": [1, 2]}, r'a\.parquet: the column "text" holds int64'),
        ({"text": [b"a"]}, r'a\.parquet: the column "text" holds binary'),
    ],
)
def test_a_bad_table_is_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with refused(message):
        read(tmp_path / "a.parquet")


def test_a_row_of_parquet_that_is_no_utf_8_is_named(tmp_path):
    offsets = pa.py_buffer(b"".join(place.to_bytes(4, "little") for place in (0, 1, 2)))
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xe9")])},
                            ), tmp_path / "a.parquet")  # fmt: skip
    with refused(r"a\.parquet:2 cannot be read .*0xe9"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("damage", ["cut", "middle", "other", "empty"])
def test_a_damaged_table_is_named(tmp_path, damage):
    texts = [str(random.Random(number).random()) for number in range(5000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    broken = {
        "cut": whole[:-500],
        "middle": whole[:9000] + b"\x99" * 99 + whole[9099:],
        "other": b"text",
        "empty": b"",
    }
    with refused(r"a\.parquet:\d+ cannot be read .*put the file back whole"):
        read(tmp_path / "a.parquet", broken[damage])


def some_lines(kind: str) -> bytes:
    draw = random.Random(1)
    numbers = [str(draw.random()) for _ in range(40_000)]
    if kind == "csv":
        return "\n".join(["text", *numbers]).encode()
    return "\n".join(
        json.dumps({"text": number}) if kind == "jsonl" else number for number in numbers
    ).encode()


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("left", [0.03, 0.999])
def test_a_cut_gzip_file_is_named_with_the_line_of_the_cut(tmp_path, kind, left):
    packed = gzip.compress(some_lines(kind))
    packed = packed[: int(left * len(packed))]
    line = 1 + zlib.decompressobj(wbits=31).decompress(packed).count(b"\n")
    (tmp_path / f"a.{kind}.gz").write_bytes(packed)
    with refused(rf"a\.{kind}\.gz:{line} cannot be read .*cut or damaged: put the file back whole"):
        read(tmp_path / f"a.{kind}.gz")


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_packed_file_that_is_damaged_in_the_middle_is_named(tmp_path, packing):
    texts = [str(random.Random(number).random()) for number in range(5000)]
    whole = pack("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), f"a.jsonl{packing}")
    (tmp_path / f"a.jsonl{packing}").write_bytes(whole[:9000] + b"\x99" * 99 + whole[9099:])
    with refused(rf"a\.jsonl{packing}:\d+ cannot be read .*put the file back whole"):
        read(tmp_path / f"a.jsonl{packing}")


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_a_packed_file_that_is_cut_anywhere_or_no_packed_file(tmp_path, kind, packing):
    path = tmp_path / f"a.{kind}{packing}"
    whole = pack(b'[{"text": "one"}]' if kind == "json" else some_lines(kind)[:60], path.name)
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        with refused(rf"{path.name}:\d+ cannot be read .*put the file back whole"):
            read(path)
    path.write_bytes(b"plain text")
    with refused(rf"{path.name}:1 cannot be read \(it is not packed with .*, as its name says"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv.gz", "a.parquet"])
def test_a_file_that_is_not_there(tmp_path, name, monkeypatch):
    path = tmp_path / name
    with refused(rf"{name} cannot be read \(No such file or directory\); .*name another"):
        read(path)
    path.symlink_to("elsewhere")
    with refused(rf"{name} is a link to elsewhere, which is not there"):
        read(path)
    path.unlink()
    path.write_bytes(b"")

    def deny(*_: object, **__: object) -> None:  # root may read every file
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", deny)
    with refused(rf"{name} cannot be read \(Permission denied\); .*name another"):
        read(path)


def test_paths_that_are_none(tmp_path):
    with refused("no file of text is named"):
        TextFiles([])
    with refused("'None' is no path"):
        TextFiles([tmp_path / "a.txt", None])  # type: ignore[list-item]
    with refused("'5' is no path"):
        TextFiles(5)  # type: ignore[arg-type]
    with refused(r"'a.x00b.txt' is no path"):
        TextFiles(["a\0b.txt"])
    with refused("a path is empty"):
        TextFiles([""])
    with refused("text_field is the name of a field, not 5"):
        TextFiles(["a.txt"], text_field=5)  # type: ignore[arg-type]
    with refused("'a long text a long text .*File name too long"):
        TextFiles(["a long text " * 400]).read()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", ""),
        ("a.txt", " \n"),
        ("a.jsonl", "\n\n"),
        ("a.json", "[]"),
        ("a.csv", "text\n"),
        ("a.txt.gz", ""),
    ],
)
def test_an_empty_file_is_refused_by_itself_and_mentioned_among_others(tmp_path, name, content, caplog):
    with refused(rf"{name}: there is no text in it"):
        read(tmp_path / name, content)
    (tmp_path / "b.txt").write_text("text")
    texts = TextFiles([tmp_path / name, tmp_path / "b.txt"]).read()
    assert [text for _, text in texts if text.strip()] == ["text"]
    assert f"1 of 2 files have no text: {tmp_path / name}"[:60] in caplog.text


# --- folders ---


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (
            ["b.txt", "a.txt", ".c.txt", "cover.png", "README.md", "LICENSE", "LICENSE-MIT.md"],
            ["a.txt", "b.txt"],
        ),
        (["b.md", "README.md"], ["README.md", "b.md"]),
        (["a.txt.gz", "b.txt"], ["a.txt.gz", "b.txt"]),
        (["a.txt", "dataset_info.json", "config.json"], ["a.txt"]),
    ],
)
def test_a_folder_stands_for_its_files_of_one_kind(tmp_path, names, texts):
    for name in names:
        (tmp_path / name).write_bytes(pack(name.encode(), name))
    (tmp_path / "sub.txt").mkdir()
    assert TextFiles(tmp_path).read() == [(name, name) for name in texts]
    assert str(TextFiles([tmp_path])) == str(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["a.txt", "b.txt", "c.jsonl"],
            r"has several kinds of files of text \(2 \.txt, 1 \.jsonl\); name .*/\*\.txt",
        ),
        (["a.txt", "b.md"], "several kinds"),
        ([], r"neither a prepared corpus .* nor a folder of text: it is empty"),
        (["a.py", "README.md"], r"neither .* nor .*: it has only README\.md, a\.py"),
        (["tokenizer.json", "train-00000.npy"], r"no manifest\.json.* it has only tokenizer\.json"),
        (["manifest.json"], "is a prepared corpus and no folder of text"),
    ],
)
def test_a_folder_that_is_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with refused(message):
        TextFiles([tmp_path]).read()


def test_what_is_left_out_of_a_folder_is_said(tmp_path, caplog):
    for name in ("a.txt", "b.log", "README.md", ".hidden"):
        (tmp_path / name).write_text("text")
    (tmp_path / "more").mkdir()
    assert len(TextFiles(tmp_path).read()) == 1
    assert f"{tmp_path}: 1 of its files are read; left out: b.log, more" in caplog.text


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    def deny(*_: object) -> None:  # root may read every folder
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "stat", deny)
    monkeypatch.setattr(Path, "iterdir", deny)
    with refused("cannot be read \\(Permission denied\\); name another folder"):
        TextFiles(tmp_path).read()


def test_a_line_break_in_a_name_makes_no_second_line(tmp_path):
    with refused(r"new\\nline\.jsonl:1 is no JSON"):
        read(tmp_path / "new\nline.jsonl", "nope")


def test_a_link_in_a_folder_that_leads_nowhere_is_not_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.symlink("gone.txt", tmp_path / "b.txt")
    with refused(r"b\.txt is a link to gone\.txt"):
        TextFiles([tmp_path]).read()


def test_kinds_by_name():
    names = ["a.b.TXT.GZ", "a.parquet", "a.pq", "a.parquet.gz", "txt", "a.ndjson", "a.json.bz2"]
    assert [kind_of(name) for name in names] == ["txt", "parquet", "parquet", None, None, "jsonl", None]


def test_a_pattern_that_matches_nothing_is_said_to(tmp_path: Path) -> None:
    """A shell that finds no file hands the pattern itself on."""
    with refused(r"no file matches .*none/\*\.txt: a shell hands on a pattern"):
        TextFiles([tmp_path / "none" / "*.txt"]).read()
