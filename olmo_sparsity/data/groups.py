"""Groups of documents: the book, site or package that each is a part of (docs/method.md, 2.4 [ours]).

Documents of one group are not independent, so a group is in one split only. Beside a token file stands a file of JSON
lines, gzipped: the name of the group of each of its documents, in their order, or null for one that stands by itself.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file

GROUPS_SUFFIX = ".groups.jsonl.gz"


def group_of_url(url: str) -> str:
    """The work or site that a document with this ``url`` is a part of, in C4's layout.

    Web crawls have no fragments (``#…``), so one was put there to tell the parts of a work from each other: a number
    at its end counts slices of one work, and any other fragment is a part of what stands before it. Without a
    fragment it is the site: the host, without "www.". What is no web address is a name already.
    """
    if not re.match("https?://", url, re.IGNORECASE):
        return url
    whole, _, fragment = url.partition("#")
    if fragment:
        name = re.sub(r"-\d+$", "", fragment)
        return whole if name == fragment else f"{whole}#{name}"
    try:
        host = urlsplit(url).hostname or url
    except ValueError:  # a bracket without its partner
        return url
    return host.removeprefix("www.")


def choose_buckets(documents: np.ndarray, share: float, remedy: str) -> frozenset[int]:
    """Which groups to hold out so that about ``share`` of their documents is; ``documents`` counts them by bucket.

    Buckets are gone through in their order, which is as good as random, and held out where they still fit in the
    share; then one more, where that comes nearer to it. A group that is larger than the share thus stays in
    training. Raises `UserError`, which ends with ``remedy``, where less than half of the share can be held out.
    """
    wanted, held = share * documents.sum(), 0
    buckets = np.flatnonzero(documents).tolist()
    chosen: list[int] = []
    for bucket in buckets:
        if held + documents[bucket] <= wanted:
            chosen.append(bucket)
            held += int(documents[bucket])
    left = sorted(set(buckets) - set(chosen), key=lambda bucket: (documents[bucket], bucket))
    if len(left) > 1 and held + documents[left[0]] - wanted < wanted - held:
        chosen.append(left[0])
        held += int(documents[left[0]])
    if held < wanted / 2:
        raise UserError(
            f"the {documents.sum():,} documents are of {len(buckets):,} groups, too few or too large for whole groups "
            f"to make up {share:.3g} of the documents (the smallest has {documents[buckets].min():,}); {remedy}"
        )
    return frozenset(chosen)


def groups_name(token_file: str) -> str:
    """Name of the file of groups beside a token file."""
    return Path(token_file).stem + GROUPS_SUFFIX


class Groups:
    """What `write_groups` writes."""

    def __init__(self, file: BufferedIOBase):
        self.file = file
        self.has_names = False
        self.sha256: str | None = None
        """Checksum of the finished file; None where no document has a group, and there is no file."""

    def write(self, group: str | None) -> None:
        """The group of the next document."""
        self.has_names |= group is not None
        self.file.write(json.dumps(group).encode() + b"\n")


@contextmanager
def write_groups(path: Path) -> Iterator[Groups]:
    """Write the groups of the documents of a token file, whole or not at all."""
    with (
        atomic_path(path) as temporary,
        open(temporary, "wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file,  # no name, no time: the same bytes each time
    ):
        groups = Groups(file)
        yield groups
        if not groups.has_names:  # not renamed first and removed then: a process may be killed in between
            temporary.unlink()
            path.unlink(missing_ok=True)
    if groups.has_names:
        groups.sha256 = sha256_file(path)


def read_groups(path: Path, sha256: str, documents: int) -> list[str | None]:
    """The groups of the documents of a token file. Raises `UserError` where the file is missing or damaged."""
    if not path.is_file() or sha256_file(path) != sha256:
        raise UserError(
            f"{path}, the groups of its documents, is missing or damaged; copy it again from where it was prepared, "
            "or prepare the corpus again"
        )
    with gzip.open(path, "rt", encoding="utf8") as file:
        groups = [json.loads(line) for line in file]
    if len(groups) != documents:
        raise UserError(
            f"{path} has the groups of {len(groups):,} documents, and its token file {documents:,}; prepare the "
            "corpus again"
        )
    return groups


def shared_groups(heldout: frozenset[str | None], path: Path) -> set[str | None]:
    """Which of these groups are also in a file of groups; constant memory."""
    with gzip.open(path, "rt", encoding="utf8") as file:
        return {group for line in file if (group := json.loads(line)) in heldout}
