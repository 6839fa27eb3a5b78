"""Text that was written after a date, from source distributions of packages: texts.py FOLDER OUT.jsonl [YYYY-MM-DD]

Reads change logs and release notes in the .tar.gz files of FOLDER (from the package index), keeps the sections whose
headings carry a later date, and writes a text per file with its package as the group. A model that was trained before
the date has not read them, as far as releases after it describe new work.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from datetime import date, datetime
from pathlib import Path

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


def main(folder: str, out: str, after: str = "2025-09-01") -> None:
    """Write the texts, and say how many there are."""
    texts = []
    for path in sorted(Path(folder).glob("*.tar.gz")):
        package = path.name.rpartition("-")[0]
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and LOGS.search(member.name) and not OTHERS.search(member.name):
                    text = archive.extractfile(member).read().decode("utf8", errors="replace")
                    later = later_part(text, date.fromisoformat(after))
                    if len(later) >= SHORTEST_TEXT:
                        texts.append({"text": later, "group": package, "url": f"{path.name}/{member.name}"})
    Path(out).write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf8")
    packages = {text["group"] for text in texts}
    print(
        f"{len(texts)} texts of {len(packages)} packages, {sum(len(text['text']) for text in texts):,} characters"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
