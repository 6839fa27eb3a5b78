"""Documents, their pieces and their paragraphs: which split a document is in, and which paragraphs two splits share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol, TextIO

GROUP_FIELD = "group"
PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# The characters of Unicode's property White_Space, as the tokenizers library has them; Python's \s has four more.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
PIECE_CHARACTERS = 1 << 18
"""A longer document is tokenized in pieces, cut before a single space, where a tokenizer cuts anyway."""
MAX_PIECE_CHARACTERS = 1 << 20
"""A piece without such a space ends before other white space or, where there is none either, at this length."""
_SEAM = re.compile(r"(?<=\w) (?=\w)")
_ANY_SPACE = re.compile(rf"(?<=[^{SPACE}])[{SPACE}]")
_HASHED_CHARACTERS = 1 << 20
BUCKETS = 1 << 16


class Document(NamedTuple):
    """A text, and what it is a part of."""

    text: str
    group: str | None = None
    """Name of its book, site or package (docs/method.md, 2.4); None where it stands by itself."""


@dataclass(frozen=True)
class SplitRule:
    """Which documents are held out: whole groups that were chosen, and a share of the documents without a group.

    Those are chosen by a hash of seed and text, so equal texts stay together.
    """

    seed: int
    heldout_fraction: float
    """0 where the held-out documents are given otherwise."""
    heldout_buckets: frozenset[int] = frozenset()
    """Of the groups to hold out, see `olmo_sparsity.data.groups.choose_buckets`."""

    def is_heldout(self, document: Document) -> bool:
        """Whether this document is held out."""
        if document.group is not None:
            return self.bucket(document.group) in self.heldout_buckets
        if not self.heldout_fraction:
            return False
        return self._hash(document.text, 8) < self.heldout_fraction * 2**64

    def bucket(self, group: str) -> int:
        """One of `BUCKETS`. Each goes to one split as a whole, so that counting takes no memory per group."""
        return self._hash(group, 2)

    def _hash(self, text: str, size: int) -> int:
        digest = blake2b(text.encode("utf8"), digest_size=size, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little")


def split_pieces(text: str) -> Iterator[str]:
    """Pieces of a text in order, each of at most `MAX_PIECE_CHARACTERS`."""
    start = 0
    while (end := _end_of_piece(text, start)) < len(text):
        yield text[start:end]
        start = end
    yield text[start:]


def _end_of_piece(text: str, start: int) -> int:
    limit = start + MAX_PIECE_CHARACTERS
    for seam in (_SEAM, _ANY_SPACE):
        if found := seam.search(text, start + PIECE_CHARACTERS, limit):
            return found.start()
        if len(text) <= limit:
            return len(text)
    return limit


def split_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a text, which blank lines separate; indentation is kept."""
    return (paragraph for paragraph in PARAGRAPH_BREAK.split(text) if paragraph and not paragraph.isspace())


def paragraph_hash(paragraph: str) -> int:
    """64-bit hash of a paragraph whose runs of white space count as one space."""
    digest, begun, inside_word = blake2b(digest_size=8), False, False
    for start in range(0, len(paragraph), _HASHED_CHARACTERS):  # all words at once take ten times the memory
        part = paragraph[start : start + _HASHED_CHARACTERS]
        if words := " ".join(part.split()):
            goes_on = inside_word and not part[0].isspace()
            digest.update((" " * (begun and not goes_on) + words).encode("utf8"))
            begun = True
        inside_word = not part[-1].isspace()
    return int.from_bytes(digest.digest(), "little")


def paragraph_hashes(text: str, min_characters: int = 0) -> Iterator[int]:
    """Hashes of the paragraphs of a text that have at least ``min_characters``."""
    return (paragraph_hash(p) for p in split_paragraphs(text) if len(p) >= min_characters)


class Decontamination:
    """Removes paragraphs that also occur in training documents from held-out ones, and counts them."""

    def __init__(self, contaminated: Set[int]):
        """``contaminated``: hashes of the paragraphs to remove."""
        self.contaminated = contaminated
        names = ("paragraphs", "removed_paragraphs", "changed_documents", "dropped_documents")
        self.counts = dict.fromkeys(names, 0)

    def clean(self, text: str) -> str:
        """The text without those paragraphs: unchanged where it has none, empty where nothing is left."""
        paragraphs = list(split_paragraphs(text))
        kept = [p for p in paragraphs if paragraph_hash(p) not in self.contaminated]
        self.counts["paragraphs"] += len(paragraphs)
        self.counts["removed_paragraphs"] += len(paragraphs) - len(kept)
        self.counts["changed_documents"] += 0 < len(kept) < len(paragraphs)
        self.counts["dropped_documents"] += not kept
        return text if len(kept) == len(paragraphs) else "\n\n".join(kept)


class Unit(Protocol):
    """A part of a corpus that becomes one token file.

    It can be read again, in any process, and gives the same documents in the same order each time.
    """

    def documents(self) -> Iterator[Document]:
        """Its documents, no text empty. Raises `UserError` for unreadable input."""
        ...


def write_document(file: TextIO, document: Document) -> None:
    """Write a document as a line of JSON, as `sources.TextFiles` reads them, with its group in `GROUP_FIELD`."""
    if document.group is None:
        file.write('{"text": "')
    else:
        file.write(f'{{"{GROUP_FIELD}": {json.dumps(document.group)}, "text": "')
    for piece in split_pieces(document.text):  # a copy of all of it, escaped, would be several times as large
        file.write(json.dumps(piece)[1:-1])
    file.write('"}\n')
