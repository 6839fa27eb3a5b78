"""Documents and their paragraphs, and the removal of those that also stand in the training text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from hashlib import blake2b
from typing import NamedTuple

PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# The characters of Unicode's property White_Space, as the tokenizers library has them; Python's \s has four more.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class Document(NamedTuple):
    """A text, and what it is a part of."""

    text: str
    group: str | None = None
    """Name of its book, site or package (docs/method.md, 2.4); None where it stands by itself."""


def split_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a text, which blank lines separate; indentation is kept."""
    return (paragraph for paragraph in PARAGRAPH_BREAK.split(text) if paragraph and not paragraph.isspace())


def paragraph_hash(paragraph: str) -> int:
    """64-bit hash of a paragraph whose runs of white space count as one space."""
    words = " ".join(paragraph.split())
    return int.from_bytes(blake2b(words.encode("utf8"), digest_size=8).digest(), "little")


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
