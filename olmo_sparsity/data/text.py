"""Documents and their paragraphs: which split a document is in, and which paragraphs two splits share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from hashlib import blake2b

PARAGRAPH_BREAK = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class SplitRule:
    """Which documents are held out: a share, by a hash of seed and text, so equal texts stay together."""

    seed: int
    heldout_fraction: float
    """0 where the held-out documents are given otherwise."""

    def is_heldout(self, text: str) -> bool:
        """Whether this document is held out."""
        digest = blake2b(text.encode("utf8"), digest_size=8, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little") < self.heldout_fraction * 2**64


def split_paragraphs(text: str) -> list[str]:
    """Paragraphs of a text: what stands between blank lines, indentation kept."""
    return [paragraph for paragraph in PARAGRAPH_BREAK.split(text) if paragraph.strip()]


def paragraph_hash(paragraph: str) -> int:
    """64-bit hash of a paragraph whose runs of white space count as one space."""
    return int.from_bytes(
        blake2b(" ".join(paragraph.split()).encode("utf8"), digest_size=8).digest(), "little"
    )


def paragraph_hashes(text: str, min_characters: int = 0) -> Iterator[int]:
    """Hashes of the paragraphs of a text that have at least ``min_characters``."""
    return (paragraph_hash(p) for p in split_paragraphs(text) if len(p) >= min_characters)


@dataclass
class Decontamination:
    """Takes paragraphs that also stand in training documents out of held-out ones, and counts them."""

    contaminated: Set[int]
    """Hashes of the paragraphs to remove."""
    counts: dict[str, int] = field(
        default_factory=lambda: {
            "paragraphs": 0,
            "removed_paragraphs": 0,
            "changed_documents": 0,
            "dropped_documents": 0,
        }
    )

    def clean(self, text: str) -> str:
        """The text without those paragraphs; as it was where there are none, empty where nothing is left."""
        paragraphs = split_paragraphs(text)
        kept = [p for p in paragraphs if paragraph_hash(p) not in self.contaminated]
        self.counts["paragraphs"] += len(paragraphs)
        self.counts["removed_paragraphs"] += len(paragraphs) - len(kept)
        self.counts["changed_documents"] += 0 < len(kept) < len(paragraphs)
        self.counts["dropped_documents"] += not kept
        return text if len(kept) == len(paragraphs) else "\n\n".join(kept)
