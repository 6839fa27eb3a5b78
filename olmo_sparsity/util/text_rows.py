"""One file of text: whole, or its rows, with the line that each stands on; and what is wrong with one.

A file is one text (.txt, .md) or has one in every row: JSON lines, a JSON array, CSV, TSV or Parquet. All but Parquet
may be packed (.gz, .zst). What cannot be read is refused in one line that names the file, the line, and the remedy.
"""

from __future__ import annotations

import codecs
import csv
import errno
import glob
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.text_fields import MESSAGES_FIELD, USUAL_FIELDS, Fields, advice

KINDS = ".txt, .md, .jsonl or .ndjson, .json, .csv and .tsv, each also as .gz or .zst, and .parquet"
READ_BYTES, PARQUET_ROWS = 1 << 20, 64
"""Read at once: row groups of Parquet may be larger than memory."""
_NAME = re.compile(r"\.(txt|md|jsonl|ndjson|jsonlines|json|csv|tsv|parquet|pq)(\.gz|\.zst)?$", re.IGNORECASE)
_SAME_AS = {"ndjson": "jsonl", "jsonlines": "jsonl", "pq": "parquet"}
_PACKINGS = {".gz": "gzip", ".zst": "zstd"}
_FIRST_BYTES = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd"}
_OTHER_FORMATS = {
    _FIRST_BYTES["gzip"]: "it is packed with gzip; give it a name that ends in .gz",
    _FIRST_BYTES["zstd"]: "it is packed with Zstandard; give it a name that ends in .zst",
    b"PAR1": "it is Parquet; unpack it if it is packed, and give it a name that ends in .parquet",
    b"%PDF-": "it is a PDF; extract its text first",
    b"PK\x03\x04": "it is a ZIP archive, as .docx and .epub are; extract its text first",
    b"\xd0\xcf\x11\xe0": "it is an old Office document; save it as plain text first",
}
"""Formats that are taken for text, by their first bytes, and what to do about it."""
_BYTE_ORDER_MARKS = {  # that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_BETWEEN_ITEMS = re.compile(r"[\s,]*")


def kind_of(path: str | Path) -> str | None:
    """txt, md, jsonl, json, csv, tsv or parquet, by the file's name; None for any other, which is one text."""
    match = _NAME.search(str(path))
    if not match:
        return None
    kind = _SAME_AS.get(match[1].lower(), match[1].lower())
    return None if kind == "parquet" and match[2] else kind


def is_plain(path: str | Path) -> bool:
    """Whether the whole file is one text, rather than a row for every text."""
    return kind_of(path) in ("txt", "md", None)


def check_encoding(name: str) -> str:
    """The codec's own name of an encoding, such as utf-8 for UTF8. Raises `UserError` for one that there is not."""
    try:
        TextIOWrapper(BytesIO(), str(name))  # refuses codecs that are not of text, such as hex
        return codecs.lookup(str(name)).name.removesuffix("-sig")  # a byte-order mark is always dropped
    except (LookupError, ValueError):
        raise UserError(
            f"--encoding {name!r}: Python has no encoding of this name; give one such as utf-8, latin-1 or utf-16"
        ) from None


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """The text of a whole file, its line ends as they are, without a byte-order mark.

    Raises `UserError` for what cannot be read or is no text.
    """
    try:
        with _unpacked(path) as file:
            data = file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        text = TextIOWrapper(BytesIO(data), encoding, newline="").read()
    except UnicodeError as error:
        raise _no_text(path, BytesIO(data), encoding) from error
    if "\0" in text or data.startswith(tuple(_OTHER_FORMATS)):
        raise _no_text(path, BytesIO(data), encoding)
    return text.removeprefix("\ufeff")


def read_rows(
    path: str | Path, fields: Fields = USUAL_FIELDS, encoding: str = "utf-8"
) -> Iterator[tuple[str, Any]]:
    """Rows of a file that `is_plain` is false of, each after its location (file and line, for Parquet file and row).

    A row is what JSON has there, or a dict of the columns: of Parquet only of those that ``fields`` names. All but a
    JSON array is read piece by piece. Raises `UserError` for what cannot be read.
    """
    if kind_of(path) == "parquet":
        yield from _parquet_rows(path, fields)
        return
    try:
        with _unpacked(path) as file:
            is_json = kind_of(path) in ("jsonl", "json")
            lines = _Lines(file, encoding, is_json=is_json)
            rows = _json_rows(path, lines, fields) if is_json else _table_rows(path, lines, fields)
            for line_number, row in rows:
                yield f"{path}:{line_number}", row
    except UnicodeError as error:
        with _unpacked(path) as file:
            raise _no_text(path, file, encoding) from error
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def _unpacked(path: str | Path, buffer_bytes: int = READ_BYTES) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked where its name says that they are packed. Raises `OSError`, also for damage."""
    packing = _PACKINGS.get(Path(path).suffix.lower())
    with open(path, "rb") as raw:  # by Python: pyarrow's own errors do not say what the system refused
        if packing is None:
            yield raw
            return
        from pyarrow import ArrowException, CompressedInputStream

        try:
            yield BufferedReader(CompressedInputStream(raw, packing), buffer_bytes)
        except ArrowException as error:
            raise OSError(str(error)) from error


class _Lines:
    """Lines of a file, counted; a byte-order mark that a line begins with is dropped: files may have been joined.

    Raises `UnicodeError` for a NUL, too, which no text has.
    """

    def __init__(self, file: BinaryIO, encoding: str, *, is_json: bool):
        self.line_number = 0
        """Of the line that was read last, from 1."""
        self._lines = TextIOWrapper(
            file,
            encoding,
            errors="surrogatepass" if is_json else "strict",  # half an emoji: `_well_formed` replaces it
            newline=None if is_json else "",  # cells of CSV have line ends, too
        )

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.line_number += 1
        if "\0" in line:
            raise UnicodeError("NUL")
        return line.removeprefix("\ufeff")


def _json_rows(path: str | Path, lines: _Lines, fields: Fields) -> Iterator[tuple[int, Any]]:
    """Rows of JSON lines, with their lines; a .json file may also be one array or one object, on any lines."""
    is_first = True
    for line in lines:
        line_number = lines.line_number
        text = line.strip()
        if not text:
            continue
        is_whole = is_first and (text[0] == "[" or text[-1] in "{[,:")
        is_first = False
        if is_whole and kind_of(path) == "json":
            yield from _json_items(path, line + "".join(lines), line_number, fields)
            return
        hint = "; a file that is one array needs a name that ends in .json" if is_whole else ""
        row = _json_value(path, line, line_number, fields, hint)
        if hint and isinstance(row, list):
            raise UserError(
                f'{path}:{line_number} is a list, not one JSON object with a string "{fields.text}"{hint}'
            )
        yield line_number, row


def _json_items(path: str | Path, text: str, line: int, fields: Fields) -> Iterator[tuple[int, Any]]:
    """Items of a JSON array, with the lines that they begin on; ``line`` is the array's. An object is one item."""
    value = _json_value(path, text, line, fields)
    if not isinstance(value, list):
        yield line, value
        return
    decode = json.JSONDecoder().raw_decode  # once more: it says where an item ends
    end = text.index("[") + 1
    counted = 0
    for _ in value:
        between = _BETWEEN_ITEMS.match(text, end)
        start = between.end() if between else end
        line += text.count("\n", counted, start)
        counted = start
        item, end = decode(text, start)
        yield line, {fields.text: item} if isinstance(item, str) else item


def _json_value(path: str | Path, text: str, line: int, fields: Fields, hint: str = "") -> Any:
    """The value of a JSON text that begins on this line. Raises `UserError` with the line of what is wrong."""
    try:
        return json.loads(text.rstrip())  # an error at the end would be one of the next line
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            line += error.lineno - 1
        layout = f'each line must be one JSON object with a string "{fields.text}"'
        if kind_of(path) == "json":
            layout += ", or the file one array of these"
        raise UserError(
            f"{path}:{line} is no JSON ({reason}); {layout}: fix it, or put the file back whole{hint}"
        ) from error


def _table_rows(path: str | Path, lines: _Lines, fields: Fields) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of CSV or TSV, with the lines that they begin on."""
    csv.field_size_limit(sys.maxsize)  # a cell may hold a book
    is_tabs = kind_of(path) == "tsv"
    table = csv.reader(lines, delimiter="\t" if is_tabs else ",", strict=True)
    separators = "tabs" if is_tabs else "commas"
    quoting = "a cell with separators, quotes or line breaks stands in quotes, and a quote in it is doubled"
    header: list[str] = []
    while True:
        line_number = lines.line_number + 1
        try:
            cells = next(table, None)
        except csv.Error as error:
            reason = "a quote is not closed" if "end of data" in str(error) else first_line(error)
            raise UserError(
                f"{path}:{line_number}: the row that begins here is damaged ({reason}); {quoting}"
            ) from error
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not header:
            header = [name.strip() for name in cells]
            hint = f"the first line names the columns, with {separators} between them; "
            fields.check_columns(f"{path}:{line_number}", header, hint)
        elif len(cells) != len(header):
            raise UserError(
                f"{path}:{line_number} has {len(cells)} cells where the header has {len(header)}; {quoting}"
            )
        else:
            yield line_number, dict(zip(header, cells, strict=True))


def _parquet_rows(path: str | Path, fields: Fields) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of Parquet, each after its location."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    row_number = 0
    try:
        with open(path, "rb") as file:
            # with its own defaults it reads whole row groups
            table = ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
            schema = table.schema_arrow
            has_text = fields.text in schema.names
            if has_text or fields.text != USUAL_FIELDS.text or MESSAGES_FIELD not in schema.names:
                fields.check_columns(str(path), schema.names)
                _check_strings(path, fields.text, schema.field(fields.text).type)
            names = (fields.text, *(() if has_text else (MESSAGES_FIELD,)), *fields.groups)
            columns = [name for name in dict.fromkeys(names) if name in schema.names]
            for batch in table.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False):
                for values in zip(*batch.columns, strict=True):
                    row = {
                        name: value.as_py() for name, value in zip(batch.schema.names, values, strict=True)
                    }
                    row_number += 1
                    yield f"{path}:{row_number}", row
    except UserError:
        raise
    except (OSError, ArrowException, ValueError) as error:
        raise _unreadable(path, error, row=row_number + 1) from error


def _check_strings(path: str | Path, column: str, type_: Any) -> None:
    """Raise `UserError` where a column of Parquet does not hold strings."""
    from pyarrow import types

    if types.is_dictionary(type_):
        type_ = type_.value_type
    is_text = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_of(type_) for is_of in is_text):
        raise UserError(
            f'{path}: the column "{column}" holds {type_}, not strings; convert it, or name '
            f"another with {advice('--text-field', 'NAME')}"
        )


# --- what is wrong with a file ---


def _unreadable(path: str | Path, error: Exception, row: int | None = None) -> UserError:
    """The error for a file that the system refuses, or that is cut or damaged; ``row``: of Parquet, where it is."""
    if isinstance(error, OSError) and error.errno is not None:
        name = str(path) if len(str(path)) <= 200 else f"{str(path)[:80]!r}…"
        if os.path.islink(path) and not os.path.exists(path):
            return UserError(f"{name} is a link to {os.readlink(path)}, which is not there; fix it")
        if error.errno == errno.ENOENT and glob.has_magic(str(path)):
            return UserError(
                f"no file matches {name}: a shell hands on a pattern that matches nothing; fix it"
            )
        return UserError(f"{name} cannot be read ({error.strerror}); put the file back, or name another")
    packing = _PACKINGS.get(Path(path).suffix.lower())
    if packing is not None:
        with open(path, "rb") as file:
            begin = file.read(4)
        if not begin.startswith(_FIRST_BYTES[packing]):
            return UserError(
                f"{path}:1 cannot be read (it is not packed with {packing}, as its name says); put the file back "
                "whole, or give it the name of what it is"
            )
    line = _line_of_damage(path) if row is None else row
    return UserError(
        f"{path}:{line} cannot be read ({first_line(error)}); it is cut or damaged: put the file back whole"
    )


def _line_of_damage(path: str | Path) -> int:
    """The line on which a packed file cannot be unpacked any more."""
    line = 1
    intact = 0  # bytes before the damage, as far as is known
    for size in (READ_BYTES, 1 << 10, 1):  # what is read together with the damage is lost: read less and less
        with suppress(OSError), _unpacked(path, size) as file:
            skipped = 0
            while skipped < intact:
                skipped += len(file.read(min(READ_BYTES, intact - skipped)))
            while block := file.read(size):
                intact += len(block)
                line += block.count(b"\n")
    return line


def _no_text(path: str | Path, file: BinaryIO, encoding: str) -> UserError:
    """The error for bytes that are no text in this encoding, with the location of the first; reads piece by piece."""
    decoder = codecs.getincrementaldecoder(encoding)()
    begin = b""  # of the file
    damaged = b""  # what is read with the first byte that is no text
    beyond_ascii = 0  # characters before it
    offset_of_block = 0  # bytes before the block
    line = 1
    while True:
        block = file.read(READ_BYTES)
        begin = begin or block
        start = offset_of_block - len(decoder.getstate()[0])  # a character may begin in the previous block
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            damaged = error.object
            offset = start + error.start
            wrong = f"is not {encoding.upper()} (byte 0x{error.object[error.start]:02x} at offset {offset})"
            break
        except UnicodeError:  # UTF-16 or UTF-32
            offset = 0
            wrong = f"is not {encoding.upper()} (it has no byte-order mark at offset 0)"
            break
        if "\0" in text:
            offset = start + len(text[: text.index("\0")].encode(encoding))
            wrong = f"is no {encoding.upper()} text (it has a NUL at offset {offset})"
            break
        if not block:
            return UserError(f"{path} is no text: {_remedy(path, begin, encoding)}")
        beyond_ascii += sum(not character.isascii() for character in text)
        line += block.count(b"\n")
        offset_of_block += len(block)
    line += block.count(b"\n", 0, max(0, offset - offset_of_block))
    return UserError(f"{path}:{line} {wrong}: {_remedy(path, begin, encoding, damaged, beyond_ascii)}")


def _remedy(
    path: str | Path, begin: bytes, encoding: str, damaged: bytes = b"", beyond_ascii: int = 0
) -> str:
    """What to do about bytes that are no text in this encoding.

    ``begin``: the first bytes of the file. ``damaged``: its bytes around the damage, after ``beyond_ascii`` valid
    characters beyond ASCII.
    """
    for mark, name in _BYTE_ORDER_MARKS.items():
        if begin.startswith(mark) and not encoding.startswith(name):
            return f"read it with {advice('--encoding', name)}"
    for first_bytes, remedy in _OTHER_FORMATS.items():
        if begin.startswith(first_bytes):
            is_packed_twice = first_bytes in _FIRST_BYTES.values() and Path(path).suffix.lower() in _PACKINGS
            return "it is packed twice; unpack it once" if is_packed_twice else remedy
    even = begin[0::2].count(0)
    odd = begin[1::2].count(0)
    if max(even, odd) > max(2, len(begin) // 100, 10 * min(even, odd)):  # in UTF-16 every space has one
        return f"read it with {advice('--encoding', 'utf-16-be' if even > odd else 'utf-16-le')}"
    if even or odd:
        return "extract its text first if it is no text, or name its encoding with --encoding"
    if encoding != "utf-8":
        return "leave --encoding out, or name the encoding of the file"
    decoded = damaged.decode("utf-8", "replace")
    wrong = decoded.count("\ufffd")
    beyond_ascii += sum(not character.isascii() for character in decoded) - wrong
    if beyond_ascii >= wrong > 0:
        return "most of it is UTF-8, so it is damaged there, or cut; fix it"
    guess = "cp1252" if any(0x80 <= byte < 0xA0 for byte in damaged) else "latin-1"
    return f"if it is text, read it with {advice('--encoding', guess)} or its own encoding"
