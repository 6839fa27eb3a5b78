"""Builds the books of the studies from their public addresses, and says which of them are the same as ours.

    python results/texts.py runs/texts                                        every set of results/texts.csv
    python results/texts.py runs/texts books-validation languages-de-train
    python results/texts.py runs/texts --from http://localhost:8000           a copy of the repositories

Writes SET.json.gz in the layout of C4, a document a line: `olmo-sparsity prepare_data text --files` reads it. The same
command goes on with the sets that are missing. texts.md tells what was cut, and how.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import html
import io
import json
import re
import sys
import unicodedata
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

LIST = Path(__file__).with_name("texts.csv")
GITHUB = "https://raw.githubusercontent.com"
CHARACTERS, SHORTEST = 12_000, {"merge": 5_000, "drop": 3_000}
TEI = "{http://www.tei-c.org/ns/1.0}"
BLOCKS = {"p", "head", "l", "lg", "quote", "label", "trailer", "div", "body"}
PICTURE = re.compile(r"\[(Illustration|Picture)[^\]]*\]")
TRANSCRIBER = re.compile(
    r"[\[*]?(Produced by|This eBook was|E-text prepared|Transcribed (from|by)|Transcriber|HTML version)", re.I
)
BEGIN = re.compile(r"(?im)^\*\*\* ?START OF (THE|THIS) PROJECT GUTENBERG.*$")
END = re.compile(r"(?im)^(\*\*\* ?END OF (THE|THIS) PROJECT GUTENBERG|End of (the )?Project Gutenberg).*$")


def gutenberg(raw: bytes) -> list[str]:
    """Paragraphs of a plain text of Project Gutenberg, without its header, license, notes and tables."""
    text = decoded(raw)
    if begins := [*BEGIN.finditer(text)]:
        text = text[begins[-1].end() :]
    if end := END.search(text):
        text = text[: end.start()]
    text = re.sub(r"\{\d+\w?\}", "", PICTURE.sub("", html.unescape(text)))  # numbers of pages
    text = re.sub(r"=(\S[^=\n]*)=", r"\1", text).replace("_", "")
    paragraphs = [joined for part in re.split(r"\n\s*\n", text) if (joined := " ".join(part.split()))]
    for number, paragraph in enumerate(paragraphs):
        if number > 0.9 * len(paragraphs) and re.fullmatch("footnotes[.:]?", paragraph, re.I):
            paragraphs = paragraphs[:number]
            break
    head = 100  # paragraphs in which those who made the file name themselves
    return [
        paragraph
        for number, paragraph in enumerate(paragraphs)
        if is_prose(paragraph) and not (number < head and TRANSCRIBER.match(paragraph))
    ]


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is no footnote, rule or table; rows of asterisks stay."""
    text = paragraph.replace(" ", "")
    if set(text) <= {"*"}:
        return True
    if not any(map(str.isalnum, text)) or paragraph.startswith("[Footnote"):
        return False
    return len(text) < 40 or sum(map(str.isalpha, text)) >= 0.5 * len(text)


def eltec(raw: bytes) -> list[str]:
    """Paragraphs, headings and verse of the body of a TEI file, without notes; a quoted verse is one paragraph."""
    paragraphs: list[str] = []
    pieces: list[str] = []

    def flush() -> None:
        text = PICTURE.sub("", unicodedata.normalize("NFC", "".join(pieces))).replace("_", "")
        pieces.clear()
        if any(map(str.isalnum, text)):
            paragraphs.append(" ".join(text.split()))

    def walk(element: ET.Element, in_verse: bool, in_paragraph: bool) -> None:
        tag = element.tag.removeprefix(TEI)
        if tag == "note":
            return
        is_block = tag in BLOCKS and not (tag == "l" and in_verse)
        if tag == "quote" and in_paragraph and element.find(f"{TEI}l") is None:
            is_block = False
        if is_block:
            flush()
        space = " " if tag in ("l", "lb") else ""
        pieces.append(space + (element.text or ""))
        for child in element:
            walk(child, in_verse or tag in ("lg", "quote"), in_paragraph or tag == "p")
            pieces.append(child.tail or "")
        pieces.append(space)
        if is_block:
            flush()

    body = ET.fromstring(raw).find(f".//{TEI}body")
    assert body is not None, "no body"
    walk(body, False, False)
    return paragraphs


def lines(raw: bytes) -> list[str]:
    """Paragraphs of a text that has one on every line."""
    text = re.sub(r"(?<=\w)_(?=\w)", "", re.sub(r"(?<=\w)#(?=\w)", "-", decoded(raw).replace("\a", "")))
    return [" ".join(line.split()) for line in text.split("\n") if any(map(str.isalnum, line))]


def decoded(raw: bytes) -> str:
    """UTF-8, where it is that, else Latin-1; line ends are one character."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


READERS = {"gutenberg": gutenberg, "nltk": gutenberg, "eltec": eltec, "lines": lines}


def documents(paragraphs: list[str], rest: str) -> list[str]:
    """Documents that end with the first paragraph beyond 12,000 characters; a short rest is merged, or dropped."""
    cut: list[list[str]] = []
    length = CHARACTERS
    for paragraph in paragraphs:
        if length >= CHARACTERS:
            cut.append([])
            length = 0
        cut[-1].append(paragraph)
        length += len(paragraph) + (2 if rest == "merge" else 0)
    if len(cut) > 1 and length < SHORTEST[rest]:
        last = cut.pop()
        if rest == "merge":
            cut[-1] += last
    return ["\n\n".join(part) for part in cut]


def sha256(texts: list[str]) -> str:
    """Of a book's documents, in their order."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def download(url: str) -> bytes | None:
    """What is there; None where there is nothing. Raises OSError where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def fetch(book: dict[str, str], root: str) -> list[str] | None:
    """The documents of a book: of the file whose hash is that of the list, else of the first that there is."""
    repository, _, commit = book["source"].partition("@")
    number = book["id"]
    tried = (f"{number}-0.txt", f"{number}-8.txt", f"{number}.txt")
    first = None
    for at in dict.fromkeys((commit, "HEAD")):
        for path in [book["path"]] if book["path"] else tried:
            raw = download(f"{root}/{repository}/{at}/{path}")
            if raw is None:
                continue
            if book["format"] == "nltk":
                raw = zipfile.ZipFile(io.BytesIO(raw)).read(f"gutenberg/{number}.txt")
            made = documents(READERS[book["format"]](raw), book["rest"])
            if sha256(made) == book["sha256"]:
                return made
            first = first or made
        if first:
            break
    return first


def build(rows: list[dict[str, str]], out: Path, root: str) -> int:
    """Write one set; returns how many books are missing."""
    missing, same, differ = [], 0, []
    path = out / f"{rows[0]['set']}.json.gz"
    partial = path.with_suffix(".part")
    with gzip.open(partial, "wt", encoding="utf8") as file:
        for book in rows:
            made = fetch(book, root)
            if made is None:
                missing.append(book["id"])
                continue
            if sha256(made) == book["sha256"]:
                same += 1
            else:
                differ.append(book["id"])
            for number, text in enumerate(made):
                file.write(json.dumps({"text": text, "url": f"{book['url']}-{number}"}) + "\n")
            print(f"\r{path.name}: {same + len(differ)} of {len(rows)} books", end="", file=sys.stderr)
    print(file=sys.stderr)
    if missing:
        partial.unlink()
    else:
        partial.replace(path)
    for name, ids in {"differ from ours": differ, "were not found; the set is not written": missing}.items():
        if ids:
            print(f"{path.name}: {len(ids)} {name}: {', '.join(ids)}")
    print(f"{path.name}: {same} of {len(rows)} books are the same as ours, character by character")
    return len(missing)


def main() -> int:
    """Parse arguments, build what is not there; 1 where a book was not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    with LIST.open(encoding="utf8", newline="") as file:
        books = list(csv.DictReader(file))
    names = list(dict.fromkeys(book["set"] for book in books))
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", nargs="*", metavar="SET", help=", ".join(names))
    parser.add_argument("--from", dest="root", default=GITHUB, metavar="URL", help=f"default: {GITHUB}")
    given = parser.parse_args()
    if unknown := [name for name in given.sets if name not in names]:
        parser.error(f"no set {unknown[0]}; choose of {', '.join(names)}")
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in given.sets or names if not (given.out / f"{name}.json.gz").is_file()]
    missing = 0
    for name in wanted:
        missing += build([book for book in books if book["set"] == name], given.out, given.root)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
