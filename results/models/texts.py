"""The texts of the study: one of every group, so that no book or package weighs more than another.

    python results/models/texts.py releases SDISTS OUT.jsonl [YYYY-MM-DD]
    python results/models/texts.py one-each OUT.jsonl FILE.json.gz ...
    python results/models/texts.py joined OUT.jsonl FILE.jsonl
    python results/models/texts.py library OUT.jsonl

The first reads change logs and release notes in the .tar.gz files of SDISTS (source distributions), keeps the sections
whose headings carry a later date, and writes a text per file with its package as the group: a model that was trained
before the date has not read them, as far as releases after it describe new work. The second draws one text of every
group of at least 4,000 characters, the one whose address has the least SHA-256. A module of Python's own library is a
group, as a package is; others are as `olmo_sparsity.data.groups` has them. The third joins all texts of a group, if
they have at least 58,000 characters. The last draws as the second among the files of the library of this Python.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from datetime import date, datetime
from operator import itemgetter
from pathlib import Path

from olmo_sparsity.util.text_fields import group_of_url

LOGS = re.compile(r"(?i)(change|news|history|release|whats?.?new).*\.(rst|md|txt)$")
OTHERS = re.compile(r"vendor|subprojects|template|README|security")
MONTHS = "(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
DATES = (
    (re.compile(r"\b(20\d\d-\d\d-\d\d)\b"), "%Y-%m-%d"),
    (re.compile(rf"\b{MONTHS}[a-z]*\.? (\d{{1,2}}),? (20\d\d)\b"), "%b %d %Y"),
    (re.compile(rf"\b(\d{{1,2}}) {MONTHS}[a-z]*\.?,? (20\d\d)\b"), "%d %b %Y"),
)
HEADING_LENGTH = 120  # a date in a longer line is not a heading's
SHORTEST_TEXT = 1500  # characters
SHORTEST_DRAWN, SHORTEST_JOINED = 4000, 58_000


def date_of(line: str) -> date | None:
    """The date in a heading; None where there is none."""
    if len(line) > HEADING_LENGTH:
        return None
    for pattern, form in DATES:
        if match := pattern.search(line):
            try:
                return datetime.strptime(" ".join(match.groups()), form).date()
            except ValueError:  # the 31st of June
                return None
    return None


def later_part(text: str, after: date) -> str:
    """The lines of sections that begin with a heading of a later date."""
    kept, is_later = [], False
    for line in text.splitlines():
        if heading := date_of(line):
            is_later = heading > after
        if is_later:
            kept.append(line)
    return "\n".join(kept)


def releases(folder: str, out: str, after: str = "2025-09-01") -> None:
    """Write what was written later in the change logs of source distributions."""
    texts = []
    for path in sorted(Path(folder).glob("*.tar.gz")):
        package = path.name.rpartition("-")[0]
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and LOGS.search(member.name) and not OTHERS.search(member.name):
                    log = archive.extractfile(member)
                    assert log is not None, member.name
                    text = log.read().decode("utf8", errors="replace")
                    later = later_part(text, date.fromisoformat(after))
                    if len(later) >= SHORTEST_TEXT:
                        texts.append({"text": later, "url": f"{path.name}/{member.name}", "group": package})
    write(texts, out)


def one_each(out: str, *files: str) -> None:
    """Write one text of every group."""
    drawn: dict[str, tuple[str, str, dict[str, str]]] = {}
    for file in files:
        with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf8") as lines:
            for line in map(json.loads, lines):
                if len(line["text"]) >= SHORTEST_DRAWN:
                    group = line.get("group") or group_of(line["url"])
                    order = hashlib.sha256(line["url"].encode()).hexdigest()
                    text = {"text": line["text"], "url": line["url"], "group": group}
                    drawn[group] = min(drawn.get(group, (order, group, text)), (order, group, text))
    write([text for _, _, text in sorted(drawn.values())], out)


def joined(out: str, file: str) -> None:
    """Write all texts of a group as one."""
    groups: dict[str, list[dict[str, str]]] = {}
    for line in map(json.loads, Path(file).read_text(encoding="utf8").splitlines()):
        groups.setdefault(line["group"], []).append(line)
    texts = [lines[0] | {"text": "\n\n".join(line["text"] for line in lines)} for lines in groups.values()]
    write([text for text in texts if len(text["text"]) >= SHORTEST_JOINED], out)


def library(out: str) -> None:
    """Write one file of every module of Python's library."""
    root = Path(sysconfig.get_path("stdlib"))
    drawn: dict[str, tuple[str, dict[str, str]]] = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        text = path.read_text(encoding="utf8", errors="replace")
        if len(text) >= SHORTEST_DRAWN and not {"site-packages", "test", "tests", "idlelib"} & {*parts}:
            order = hashlib.sha256("/".join(parts).encode()).hexdigest()
            line = {"text": text, "url": "/".join(parts), "group": parts[0]}
            drawn[parts[0]] = min(drawn.get(parts[0], (order, line)), (order, line), key=itemgetter(0))
    write([line for _, line in sorted(drawn.values(), key=itemgetter(0))], out)


def group_of(url: str) -> str:
    """The work, package or module of Python's library that a text is a part of."""
    module = re.search(r"/cpython/.*/Lib/([^/]+)", url)
    return module[1] if module else group_of_url(url)


def write(texts: list[dict[str, str]], out: str) -> None:
    """A line for each text, and say how much it is."""
    Path(out).write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf8")
    groups = {text["group"] for text in texts}
    print(
        f"{len(texts)} texts of {len(groups)} groups, {sum(len(text['text']) for text in texts):,} characters"
    )


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "releases": releases,
        "one-each": one_each,
        "joined": joined,
        "library": library,
    }
    commands[sys.argv[1]](*sys.argv[2:])
