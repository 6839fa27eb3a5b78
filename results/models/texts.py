"""The texts of the study: one of every group, so that no book or package weighs more than another.

    python results/models/texts.py sdists results/models/sdists.txt SDISTS
    python results/models/texts.py releases SDISTS OUT.jsonl
    python results/models/texts.py one-each OUT.jsonl FILE.json.gz ...
    python results/models/texts.py joined OUT.jsonl FILE.jsonl ...
    python results/models/texts.py library OUT.jsonl

`sdists` downloads the source distributions of a list, each by its hash, from the index that pip is configured with
(https://pypi.org/simple unless it names another). It builds nothing, keeps what is there already, and names those that
cannot be had. `releases` reads change logs and release notes in the .tar.gz files of SDISTS, keeps the sections whose
headings carry a date after 1 September 2025, and writes a text per file with its package as the group: a model that was
trained before has not read them, as far as later releases describe new work. `one-each` draws one text of every group
of at least 4,000 characters, the one whose address has the least SHA-256. A module of Python's own library is a group,
as a package is; others are as `olmo_sparsity.util.text_fields` has them. `joined` joins all texts of a group, if they
have at least 58,000 characters. `library` draws as `one-each` among the files of the library of this Python.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import http.client
import json
import re
import ssl
import subprocess
import sys
import sysconfig
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import InvalidVersion, Version

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path
from olmo_sparsity.util.text_fields import group_of_url

LOGS = re.compile(r"(?i)(change|news|history|release|whats?.?new).*\.(rst|md|txt)$")
OTHERS = re.compile(r"vendor|subprojects|template|README|security|/cargo/|/tests/")
MONTHS = "(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
BEGIN, END = r"(?<![^\W_])", r"(?![^\W_])"  # as \b, but the underscores of _emphasis_ are not part of a date
DATES = (
    (re.compile(rf"{BEGIN}(20\d\d-\d\d-\d\d){END}"), "%Y-%m-%d"),
    (re.compile(rf"{BEGIN}{MONTHS}[a-z]*\.? (\d{{1,2}}),? (20\d\d){END}"), "%b %d %Y"),
    (re.compile(rf"{BEGIN}(\d{{1,2}}) {MONTHS}[a-z]*\.?,? (20\d\d){END}"), "%d %b %Y"),
)
AFTER = date(2025, 9, 1)
HEADING_LENGTH = 120  # a date in a longer line is not a heading's
UNDERLINE = re.compile(r"\s*([=\-~^#*+\"`.])\1{2,}\s*")
WORDS_BESIDE_A_DATE = {"release", "released", "date", "version", "on"}
SHORTEST_TEXT = 1500  # characters
SHORTEST_DRAWN, SHORTEST_JOINED = 4000, 58_000
DEFAULT_INDEX = "https://pypi.org/simple"
PIN = re.compile(r"([\w.-]+)==(\S+)\s+--hash=sha256:([0-9a-f]{64})")
SECONDS_TO_WAIT = 60
DOWNLOAD_ERRORS = (OSError, http.client.HTTPException, ValueError)
"""No connection or a full disk, an answer that breaks off, and one that is no page of an index."""


def date_of(line: str, next_line: str) -> date | None:
    """The date in a heading, or in the line under it that has nothing but the date; None for other lines.

    A date in a sentence ("will be removed in version 13 (2026-10-15)") begins no section.
    """
    if len(line) > HEADING_LENGTH:
        return None
    for pattern, form in DATES:
        if match := pattern.search(line):
            is_title = line.startswith("#") or UNDERLINE.fullmatch(next_line)
            if not is_title and not is_a_date_alone(line, match):
                return None
            try:
                return datetime.strptime(" ".join(match.groups()), form).date()
            except ValueError:  # the 31st of June
                return None
    return None


def is_a_date_alone(line: str, date_match: re.Match[str]) -> bool:
    """Whether a line has at most a version and the like beside its date, and does not end a sentence."""
    rest = line[: date_match.start()] + line[date_match.end() :]
    words = {word.lower() for word in re.findall(r"[^\W\d_]{2,}", rest)}
    return words <= WORDS_BESIDE_A_DATE and not line.rstrip().endswith(".")


def later_part(text: str) -> str:
    """The lines of sections that begin with a heading of a date after `AFTER`."""
    kept, is_later = [], False
    lines = text.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if heading := date_of(line, next_line):
            is_later = heading > AFTER
        if is_later:
            kept.append(line)
    return "\n".join(kept)


@dataclass(frozen=True)
class Pin:
    """A source distribution in a list, in the form in which pip checks hashes."""

    name: str
    version: Version
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class IndexedFile:
    """A source distribution in a package index."""

    filename: str
    url: str
    pin: Pin


class PackageIndex:
    """The indexes that pip is configured with, read by the simple API (PEP 503)."""

    def __init__(self) -> None:
        settings = pip_settings()
        self.urls = [
            settings.get("index-url", DEFAULT_INDEX),
            *settings.get("extra-index-url", "").split(),
        ]
        self.tls = ssl.create_default_context(cafile=settings.get("cert"))

    def sdists(self, name: str) -> list[IndexedFile]:
        """The .tar.gz source distributions of a package whose SHA-256 is known; none where no index has it."""
        files = []
        for index in self.urls:
            page_url = f"{index.rstrip('/')}/{name}/"
            if page_url.startswith("file:"):
                page_url += "index.html"
            try:
                page = self.read(page_url).decode()
            except urllib.error.URLError as error:
                if not is_absent(error):
                    raise
                continue
            for filename, url, sha256 in files_of(page):
                try:
                    file_name, version = parse_sdist_filename(filename)
                except (InvalidSdistFilename, InvalidVersion):  # a wheel, or a name of long ago
                    continue
                if file_name == name and filename.endswith(".tar.gz") and sha256:
                    pin = Pin(name, version, sha256)
                    files.append(IndexedFile(filename, urljoin(page_url, url), pin))
        return files

    def read(self, url: str) -> bytes:
        """What is there, with the password that pip has for this host."""
        request = urllib.request.Request(without_password(url), headers={"User-Agent": "olmo-sparsity"})
        for index in map(urlsplit, self.urls):
            if index.username and urlsplit(request.full_url).netloc == index.netloc.rpartition("@")[2]:
                secret = f"{unquote(index.username)}:{unquote(index.password or '')}"
                encoded = base64.b64encode(secret.encode()).decode()
                request.add_unredirected_header("Authorization", f"Basic {encoded}")
        with urllib.request.urlopen(request, timeout=SECONDS_TO_WAIT, context=self.tls) as answer:
            return answer.read()


def pip_settings() -> dict[str, str]:
    """What pip is configured with, by option; its environment variables hold over its files, as in pip itself."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    settings = {}
    for section in ("global", "download", ":env:"):
        for line in lines:
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = ast.literal_eval(value)
    return settings


def without_password(url: str) -> str:
    """The address without the user and password before its host."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_absent(error: urllib.error.URLError) -> bool:
    """Whether an index answered that it does not have something, rather than failed."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (404, 410)
    return isinstance(error.reason, FileNotFoundError | NotADirectoryError)


def files_of(page: str) -> Iterator[tuple[str, str, str | None]]:
    """Name, address and SHA-256 of every file on a package's page."""
    parser = LinkParser()
    parser.feed(page)
    for link in parser.links:
        parts = urlsplit(link["href"] or "")
        sha256 = re.fullmatch("sha256=([0-9a-f]{64})", parts.fragment)
        filename = unquote(parts.path.rpartition("/")[2])
        url = urlunsplit(parts._replace(fragment=""))
        yield filename, url, sha256[1] if sha256 else None


class LinkParser(HTMLParser):
    """Collects the attributes of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes)


def sdists(list_path: str, folder: str) -> None:
    """Download the source distributions of a list that are not in the folder yet.

    Raises `UserError` where the folder has others, which `releases` would read too, where the index does not answer,
    and, after all others are there, where some cannot be had.
    """
    pins = read_list(list_path)
    Path(folder).mkdir(parents=True, exist_ok=True)
    missing = missing_from(Path(folder), pins, list_path)
    print(f"{len(pins) - len(missing)} of {len(pins)} are in {folder}")
    index = PackageIndex()
    not_had = 0
    for pin in missing:
        try:
            problem = download(pin, index, Path(folder))
        except DOWNLOAD_ERRORS as error:
            raise UserError(f"{pin} was not downloaded ({error}); run this again, it goes on") from None
        if problem:
            not_had += 1
            print(f"{pin} cannot be had: {problem}")
    if not_had:
        raise UserError(f"{not_had} of {len(pins)} cannot be had; the texts of the others can be made")
    print(f"all {len(pins)} are in {folder}")


def read_list(path: str) -> list[Pin]:
    """The lines ``name==version --hash=sha256:…`` of a list."""
    pins: dict[str, Pin] = {}
    for number, line in enumerate(lines_of(path), 1):
        if not line:
            continue
        match = PIN.fullmatch(line)
        if match is None:
            raise UserError(f'{path}, line {number}: write name==version --hash=sha256:HEX, not "{line}"')
        try:
            pin = Pin(canonicalize_name(match[1]), Version(match[2]), match[3])
        except InvalidVersion:
            raise UserError(f'{path}, line {number}: "{match[2]}" is no version') from None
        if pin.name in pins:
            raise UserError(f"{path}, line {number} has {pin.name} again; keep one of its lines")
        pins[pin.name] = pin
    if not pins:
        raise UserError(f"{path} has no packages; give a list of them")
    return list(pins.values())


def lines_of(path: str) -> list[str]:
    """The lines of a file without comments."""
    try:
        text = Path(path).read_text(encoding="utf8")
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; name one with a package a line") from None
    return [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]


def missing_from(folder: Path, pins: list[Pin], list_path: str) -> list[Pin]:
    """Those that the folder does not have with their hash. Raises `UserError` where it has others."""
    listed = {(pin.name, pin.version): pin for pin in pins}
    present = set()
    for path in sorted(folder.glob("*.tar.gz")):
        try:
            pin = listed.get(parse_sdist_filename(path.name))
        except (InvalidSdistFilename, InvalidVersion):
            pin = None
        if pin is None:
            raise UserError(f"{path} is not in {list_path}; move it away, its texts would be read too")
        if sha256_of(path.read_bytes()) == pin.sha256:
            present.add(pin)
    return [pin for pin in pins if pin not in present]


def download(pin: Pin, index: PackageIndex, folder: Path) -> str | None:
    """Download a source distribution; what is wrong where it cannot be had. Raises `OSError` where the index fails."""
    files = index.sdists(pin.name)
    if not files:
        return "the package index has no source distribution of this package"
    file = next((file for file in files if file.pin == pin), None)
    if file is None:
        versions = {file.pin.version for file in files}
        if pin.version in versions:
            return "the package index has another file of this version"
        return f"the package index does not have this version; its newest is {max(versions)}"
    try:
        content = index.read(file.url)
    except urllib.error.URLError as error:
        if is_absent(error):
            return f"{file.filename} is listed in the package index, but is not there"
        raise
    if sha256_of(content) != pin.sha256:
        return f"{file.filename} has another hash than the package index says"
    with atomic_path(folder / file.filename) as temporary:
        temporary.write_bytes(content)
    return None


def sha256_of(content: bytes) -> str:
    """As hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def releases(folder: str, out: str) -> None:
    """Write what was written after `AFTER` in the change logs of source distributions."""
    texts = []
    for path in sorted(Path(folder).glob("*.tar.gz")):
        package = path.name.rpartition("-")[0]
        with tarfile.open(path) as archive:
            for member in archive:
                if member.isfile() and LOGS.search(member.name) and not OTHERS.search(member.name):
                    log = archive.extractfile(member)
                    assert log is not None, member.name
                    text = log.read().decode("utf8", errors="replace")
                    later = later_part(text)
                    if len(later) >= SHORTEST_TEXT:
                        texts.append({"text": later, "url": f"{path.name}/{member.name}", "group": package})
    write(texts, out)


def one_each(out: str, *files: str) -> None:
    """Write one text of every group."""
    write_drawn(read(files), out)


def write_drawn(texts: Iterable[dict[str, str]], out: str) -> None:
    """Write of every group the text whose address has the least SHA-256, of those that are long enough."""
    long_enough = [text for text in texts if len(text["text"]) >= SHORTEST_DRAWN]
    drawn: dict[str, dict[str, str]] = {}
    for text in sorted(long_enough, key=lambda text: (sha256_of(text["url"].encode()), text["group"])):
        drawn.setdefault(text["group"], text)
    write([*drawn.values()], out)


def joined(out: str, *files: str) -> None:
    """Write all texts of a group as one, the slices of a book (``…-0``, ``…-1``) in their order."""
    groups: dict[str, list[dict[str, str]]] = {}
    for text in read(files):
        groups.setdefault(text["group"], []).append(text)
    whole = []
    for texts in groups.values():
        texts.sort(key=slice_of)
        whole.append(texts[0] | {"text": "\n\n".join(text["text"] for text in texts)})
    write([text for text in whole if len(text["text"]) >= SHORTEST_JOINED], out)


def slice_of(text: dict[str, str]) -> int:
    """The number at the end of a web address's fragment; 0 where there is none, so that order in the file stays."""
    number = re.search(r"#.*-(\d+)$", text["url"])
    return int(number[1]) if number else 0


def library(out: str) -> None:
    """Write one file of every module of Python's library."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if not {"site-packages", "test", "tests", "idlelib"} & {*parts}:
            text = path.read_text(encoding="utf8", errors="replace")
            texts.append({"text": text, "url": "/".join(parts), "group": parts[0]})
    write_drawn(texts, out)


def group_of(url: str) -> str:
    """The work, package or module of Python's library that a text is a part of."""
    module = re.search(r"/cpython/.*/Lib/([^/]+)", url)
    return module[1] if module else group_of_url(url)


def read(files: Iterable[str]) -> Iterator[dict[str, str]]:
    """The text, url and group of every line of .jsonl and .json.gz files."""
    for file in files:
        with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf8") as lines:
            for line in map(json.loads, lines):
                group = line.get("group") or group_of(line["url"])
                yield {"text": line["text"], "url": line["url"], "group": group}


def write(texts: list[dict[str, str]], out: str) -> None:
    """A line for each text, and say how much it is."""
    Path(out).write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf8")
    groups = {text["group"] for text in texts}
    print(
        f"{len(texts)} texts of {len(groups)} groups, {sum(len(text['text']) for text in texts):,} characters"
    )


COMMANDS: dict[str, Callable[..., None]] = {
    "sdists": sdists,
    "releases": releases,
    "one-each": one_each,
    "joined": joined,
    "library": library,
}


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    try:
        COMMANDS[sys.argv[1]](*sys.argv[2:])
    except UserError as error:
        sys.exit(f"error: {error}")
