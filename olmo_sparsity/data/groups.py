"""Groups of documents: the book, site or package that each is a part of (docs/method.md, 2.4 [ours]), and splits.

Documents of one group are not independent, so a group is in one split only. Beside a token file stands a file of JSON
lines, gzipped: the name of the group of each of its documents, in their order, or null for one that stands by itself.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import numpy as np

from olmo_sparsity.data.text import Document, Unit
from olmo_sparsity.data.tokens import TokenFile, TokenFiles, check_sum, companion
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file

GROUPS_SUFFIX = ".groups.jsonl.gz"


@dataclass(frozen=True)
class SplitRule:
    """Which documents are held out: whole groups that were chosen, and a share of the documents without a group, by a
    hash of seed and text, so that equal texts stay together."""

    seed: int
    heldout_fraction: float
    """0 where the held-out documents are given otherwise."""
    heldout_buckets: frozenset[int] = frozenset()
    """Of the groups to hold out, see `choose_buckets`."""

    def is_heldout(self, document: Document) -> bool:
        """Whether this document is held out."""
        if document.group is not None:
            return self._hash(document.group, 2) in self.heldout_buckets
        return self.heldout_fraction > 0 and self._hash(document.text, 8) < self.heldout_fraction * 2**64

    def split(self, unit: Unit, *, heldout: bool) -> Iterator[Document]:
        """The documents of a unit that are held out, or the others."""
        return (document for document in unit() if self.is_heldout(document) == heldout)

    def count_groups(self, unit: Unit) -> Counter[int]:
        """Documents of a unit by their group's bucket, one of 2^16: counting takes no memory per group."""
        return Counter(self._hash(group, 2) for _, group in unit() if group is not None)

    def _hash(self, text: str, size: int) -> int:
        digest = blake2b(text.encode("utf8"), digest_size=size, key=str(self.seed).encode()).digest()
        return int.from_bytes(digest, "little")


def choose_buckets(documents: Mapping[int, int], share: float) -> frozenset[int]:
    """Which groups to hold out so that about ``share`` of their documents is; ``documents`` counts them by bucket.

    Buckets are gone through in their order, which is as good as random, and held out where they still fit in the
    share; then one more, where that comes nearer to it. A group that is larger than the share thus stays in
    training. Raises `UserError` where less than half of the share can be held out.
    """
    total = sum(documents.values())
    target = share * total
    held = 0
    chosen: set[int] = set()
    for bucket, size in sorted(documents.items()):
        if held + size <= target:
            chosen.add(bucket)
            held += size
    left = sorted((size, bucket) for bucket, size in documents.items() if bucket not in chosen)
    if len(left) > 1 and held + left[0][0] - target < target - held:
        chosen.add(left[0][1])
        held += left[0][0]
    if held < target / 2:
        raise UserError(
            f"the {total:,} documents are of {len(documents):,} groups, too few or too large for whole groups to make "
            f"up {share:.3g} of the documents (the smallest has {min(documents.values()):,}); choose another "
            "--heldout-fraction or --seed, name --heldout-files, or split by document with --group-field none"
        )
    return frozenset(chosen)


def write_groups(token_file: Path, groups: Sequence[str | None]) -> str | None:
    """Write the groups of the documents of a token file; returns the checksum. None, and no file: there are none."""
    if set(groups) <= {None}:
        return None
    path = companion(token_file, GROUPS_SUFFIX)
    with (
        atomic_path(path) as temporary,
        open(temporary, "wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,
    ):  # no name, no time: the same bytes each time
        file.writelines(json.dumps(group).encode() + b"\n" for group in groups)
    return sha256_file(path)


def read_groups(token_file: Path, described: TokenFile) -> list[str | None]:
    """The group of each document of a token file. Raises `UserError` where they are missing or damaged."""
    if described.groups_sha256 is None:
        return [None] * described.documents
    path = check_sum(companion(token_file, GROUPS_SUFFIX), described.groups_sha256)
    with gzip.open(path, "rt", encoding="utf8") as file:
        return [json.loads(line) for line in file]


def groups_of(files: TokenFiles) -> np.ndarray | None:
    """Name of the group of each document, (D,) strings; None where the corpus has no groups.

    A document that stands by itself is a group by itself. Raises `UserError` for a damaged file.
    """
    if not any(file.groups_sha256 for file in files.described):
        return None
    names = chain.from_iterable(map(read_groups, files.paths, files.described))
    named = [name or f"document {index} by itself" for index, name in enumerate(names)]
    return np.array(named, dtype=object)
