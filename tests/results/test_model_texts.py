"""The texts of the study of real models, built by `results/models/texts.py`, from an index on this machine."""

import hashlib
import io
import json
import tarfile
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module

import pytest

from olmo_sparsity.util.errors import UserError

texts = import_module("results.models.texts")
LOG = "# 2.0 (2026-01-05)\n" + "new\n" * 500 + "# 1.0 (2024-01-05)\nold\n"


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def sdist(name, version):
    """A source distribution, the same bytes each time: archives of plain files have no time of today."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        member = tarfile.TarInfo(f"{name}-{version}/CHANGES.md")
        member.size = len(LOG.encode())
        archive.addfile(member, io.BytesIO(LOG.encode()))
    return content.getvalue()


class Index:
    """A package index: what it has at each path, and which paths were read, with their passwords."""

    def __init__(self):
        self.content = {}
        self.read = []
        self.passwords = set()
        self.url = ""

    def add(self, name, *files):
        """Give a package these files, by file name."""
        for filename, content in files:
            self.content[f"/files/{filename}"] = ("application/gzip", content)
        links = [
            f'<a href="{self.url}/files/{filename}#sha256={sha256(content)}">{filename}</a>'
            for filename, content in files
        ]
        self.content[f"/simple/{name}/"] = ("text/html", f"<html>{''.join(links)}</html>".encode())


class Handler(BaseHTTPRequestHandler):
    """Answers with what an `Index` has."""

    def __init__(self, index, *arguments):
        self.index = index
        super().__init__(*arguments)

    def do_GET(self):
        self.index.read.append(self.path)
        self.index.passwords.add(self.headers["Authorization"])
        if self.path not in self.index.content:
            self.send_error(404)
            return
        content_type, content = self.index.content[self.path]
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def index(monkeypatch):
    """An index that pip is configured with; what it has may be added to."""
    index = Index()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, index))
    index.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(texts, "pip_settings", lambda: {"index-url": f"{index.url}/simple"})
    yield index
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def listed(tmp_path):
    """Writes a list of the given (name, version, content)."""

    def write(*pins):
        path = tmp_path / "list.txt"
        lines = [f"{name}=={version} --hash=sha256:{sha256(content)}\n" for name, version, content in pins]
        path.write_text("# a comment\n\n" + "".join(lines))
        return str(path)

    return write


def test_a_list_is_downloaded_and_gone_on_with(index, listed, tmp_path, capsys):
    one, two = sdist("one_pkg", "1.0"), sdist("two", "2.0")
    others = (("one_pkg-0.9.tar.gz", b"older"), ("one_pkg-odd.tar.gz", b"odd"))
    index.add("one-pkg", *others, ("one_pkg-1.0.tar.gz", one))
    index.add("two", ("two-2.0.tar.gz", two), ("two-2.0-py3-none-any.whl", b"wheel"))
    path = listed(("One.Pkg", "1.0", one), ("two", "2.0", two))
    folder = tmp_path / "sdists"
    texts.sdists(path, str(folder))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "one_pkg-1.0.tar.gz": one,
        "two-2.0.tar.gz": two,
    }
    index.read.clear()
    texts.sdists(path, str(folder))
    assert index.read == []

    (folder / "two-2.0.tar.gz").write_bytes(two[:100])  # a download that broke off
    texts.sdists(path, str(folder))
    assert index.read == ["/simple/two/", "/files/two-2.0.tar.gz"]
    assert (folder / "two-2.0.tar.gz").read_bytes() == two

    texts.releases(str(folder), str(tmp_path / "out.jsonl"))
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [text["group"] for text in written] == ["one_pkg", "two"]
    assert [text["url"] for text in written][1] == "two-2.0.tar.gz/two-2.0/CHANGES.md"


def test_what_cannot_be_had_is_named_and_the_rest_is_there(index, listed, tmp_path, capsys):
    right = sdist("last", "1.0")
    index.add("changed", ("changed-1.0.tar.gz", b"other content"))
    index.add("older", ("older-2.0.tar.gz", b"newer"))
    index.add("broken", ("broken-1.0.tar.gz", b"right"))
    index.content["/files/broken-1.0.tar.gz"] = ("application/gzip", b"wrong")
    index.add("lost", ("lost-1.0.tar.gz", b"lost"))
    del index.content["/files/lost-1.0.tar.gz"]
    index.add("last", ("last-1.0.tar.gz", right))
    pins = [(name, "1.0", b"right") for name in ("absent", "changed", "older", "broken")]
    path = listed(*pins, ("lost", "1.0", b"lost"), ("last", "1.0", right))
    folder = tmp_path / "sdists"
    with pytest.raises(UserError, match="5 of 6 cannot be had"):
        texts.sdists(path, str(folder))
    assert [file.name for file in folder.iterdir()] == ["last-1.0.tar.gz"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" cannot be had: ")[0] for line in said[1:]] == [
        "absent==1.0",
        "changed==1.0",
        "older==1.0",
        "broken==1.0",
        "lost==1.0",
    ]
    assert "no source distribution" in said[1]
    assert "another file" in said[2]
    assert "its newest is 2.0" in said[3]
    assert "another hash" in said[4]
    assert "is not there" in said[5]


def test_a_folder_with_other_files_is_refused(index, listed, tmp_path):
    path = listed(("one", "2.0", b"x"))
    for other in ("one-1.0.tar.gz", "notes.tar.gz"):
        (tmp_path / other).write_bytes(b"x")
        with pytest.raises(UserError, match=f"{other} is not in"):
            texts.sdists(path, str(tmp_path))
        (tmp_path / other).unlink()
    assert index.read == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("one==1.0", "write name==version --hash"),
        ("one>=1.0 --hash=sha256:" + "0" * 64, "write name==version --hash"),
        ("one==1.0 --hash=sha256:abc", "write name==version --hash"),
        ("one==abc --hash=sha256:" + "0" * 64, "is no version"),
        ("", "has no packages"),
    ],
)
def test_a_wrong_list_is_refused(line, problem, tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(f"{line}\n")
    with pytest.raises(UserError, match=problem):
        texts.read_list(str(path))
    with pytest.raises(UserError, match="there is no file"):
        texts.read_list(str(tmp_path / "absent.txt"))


def test_a_package_stands_in_a_list_once(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("".join(f"{name}==1.0 --hash=sha256:{'0' * 64}\n" for name in ("a.b", "A_B")))
    with pytest.raises(UserError, match="line 2 has a-b again"):
        texts.read_list(str(path))


def test_an_index_that_does_not_answer_is_a_line(index, listed, tmp_path, monkeypatch):
    path = listed(("one", "1.0", b"x"))
    index.content["/simple/one/"] = ("text/html", b"\xff")
    with pytest.raises(UserError, match="one==1.0 was not downloaded"):
        texts.sdists(path, str(tmp_path / "sdists"))
    monkeypatch.setattr(texts, "pip_settings", lambda: {"index-url": "http://user:secret@127.0.0.1:1/simple"})
    with pytest.raises(UserError, match="one==1.0 was not downloaded") as error:
        texts.sdists(path, str(tmp_path / "sdists"))
    assert "secret" not in str(error.value)


def test_a_password_of_pip_is_given_to_its_host_alone(index, listed, tmp_path, monkeypatch):
    content = sdist("one", "1.0")
    index.add("one", ("one-1.0.tar.gz", content))
    index_url = f"{index.url}/simple".replace("//", "//user:p%40ss@")
    monkeypatch.setattr(texts, "pip_settings", lambda: {"index-url": index_url})
    texts.sdists(listed(("one", "1.0", content)), str(tmp_path / "sdists"))
    assert index.passwords == {"Basic dXNlcjpwQHNz"}
    monkeypatch.setattr(
        texts,
        "pip_settings",
        lambda: {"index-url": "file://user:secret@/nowhere", "extra-index-url": f"{index.url}/simple"},
    )
    index.passwords.clear()
    texts.sdists(listed(("one", "1.0", content)), str(tmp_path / "again"))
    assert index.passwords == {None}


def test_an_index_may_be_a_folder_and_pip_is_asked_for_it(listed, tmp_path, monkeypatch):
    content = sdist("one", "1.0")
    (tmp_path / "index" / "one").mkdir(parents=True)
    (tmp_path / "one-1.0.tar.gz").write_bytes(content)
    link = f'<a href="../../one-1.0.tar.gz#sha256={sha256(content)}">one-1.0.tar.gz</a>'
    (tmp_path / "index" / "one" / "index.html").write_text(link)
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = file:///nowhere\n[download]\nretries = 7\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file:///nowhere-else {(tmp_path / 'index').as_uri()}")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    settings = texts.pip_settings()
    assert settings["index-url"] == "file:///nowhere"
    assert settings["retries"] == "7"
    texts.sdists(listed(("one", "1.0", content)), str(tmp_path / "sdists"))
    assert (tmp_path / "sdists" / "one-1.0.tar.gz").read_bytes() == content
    monkeypatch.setenv("PIP_INDEX_URL", "file:///of-the-environment")
    assert texts.pip_settings()["index-url"] == "file:///of-the-environment"


HEADINGS = [
    "## 2.0 (2026-01-05)",
    "Package 2.0 (October 5, 2025)\n-----------------------------",
    "The package 2.0, of 5 Oct 2025\n==============================",
    ":released: October 21, 2026",
    "| Release Date: 2026-10-05",
    "Released 2026-11-09",
    "*(2025-10-05)*",
    "_12 October 2025_",
    "**0.48.0** (2026-08-12)",
]
SENTENCES = [
    "will be removed in version 13 (2026-10-15). It will be moved to",
    "(2027-10-15).",
    "(2025-10-15), when 2.9.1 will be the minimum that is supported",
    "- Drops support for a service that shuts down on June 1, 2026",
    "(all of it will be published seven days after the release, on 2026-04-14).",
    ":Date: $Date: 2026-05-27 19:20:40 +0200 (Mi, 27. Mai 2026) $",
]


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_section_begins_with_a_dated_heading(heading):
    section = f"{heading}\n\nnew\n\nnot after 2024-01-01, as was said"
    assert texts.later_part(f"# Changes\n\n{section}\n# 1.0 (2024-01-05)\nold") == section


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_date_in_a_sentence_begins_no_section(sentence):
    assert texts.later_part(f"1.0\n===\n\n{sentence}\nold\n\n0.9\n===\nolder") == ""


def test_slices_of_a_book_are_joined_in_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SHORTEST_JOINED", 5)
    lines = [
        {"url": "https://book#title-10", "text": "end"},
        {"url": "https://book#title-2", "text": "more"},
        {"url": "https://book#title-0", "text": "begin"},
        {"url": "p-1.tar.gz/b/1-9.md", "text": "as", "group": "package"},
        {"url": "p-1.tar.gz/b/1-2.md", "text": "before", "group": "package"},
        {"url": "https://short#x-0", "text": "no"},
    ]
    file = tmp_path / "slices.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts.joined(str(tmp_path / "out.jsonl"), str(file))
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {text["group"]: text["text"] for text in written} == {
        "https://book#title": "begin\n\nmore\n\nend",
        "package": "as\n\nbefore",
    }
