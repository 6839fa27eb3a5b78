"""Files that are measured: `TextFiles`, folders, the options of the command line, and one text for an X-ray."""

from __future__ import annotations

import json

import numpy as np
import pytest

from analysis import TextFiles
from analysis.cli import measure_parser
from analysis.cli_options import files_of, texts_of
from analysis.open_texts import open_texts
from analysis.texts import TextReader
from analysis.xray import InfluenceMap
from tests.support import small_measurement, tiny
from tests.support.refusals import refused


def encode(text: str) -> np.ndarray:
    return np.array([int(word[1:]) for word in text.split()])


@pytest.fixture
def rows(tmp_path):
    """A file of two texts, and what is read of it."""
    texts = [
        {"text": "w1 w2 w3", "group": "a", "body": "w4"},
        {"text": "w5 w6", "group": "b", "body": "w7 w8"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return tmp_path / "rows.jsonl"


def read(texts):
    """Ids of every text, and the groups."""
    opened = open_texts(texts, TextReader(encode))
    groups = None if opened.groups is None else opened.groups.tolist()
    return [opened.tokens(number).tolist() for number in range(len(opened.lengths))], groups


def test_how_files_are_read_is_said_in_python_and_on_the_command_line(rows):
    assert read(rows) == ([[1, 2, 3], [5, 6]], ["a", "b"])
    files = TextFiles([rows], text_field="body", group_field="none")
    assert read(files) == ([[4], [7, 8]], None)
    words = ["m", "--out", "out", "--text", str(rows), "--text-field", "body", "--group-field", "none"]
    assert texts_of(measure_parser().parse_args(words), "m") == files
    words += ["--encoding", "utf-16"]
    assert files_of(measure_parser().parse_args(words)).encoding == "utf-16"
    without = ["m", "--out", "out", "--corpus", "c", "--text-field", "body"]
    with refused("--text-field is of files: name them with --text"):
        texts_of(measure_parser().parse_args(without), "m")


def test_a_folder_is_a_corpus_where_it_has_a_manifest(tmp_path, rows):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": tiny.random_documents(3, 20)})
    prepared = read(str(corpus))
    assert read(TextFiles([corpus])) == prepared  # as --text gives it
    assert read([corpus]) == prepared
    with refused("is a prepared corpus, which has neither fields nor an encoding; leave out --text-field"):
        read(TextFiles([corpus], text_field="body"))
    with refused("is a prepared corpus and no folder of text"):
        read([corpus, rows])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").write_text("w1")
    (tmp_path / "texts" / "a.txt").write_text("w2 w3")
    for folder in (tmp_path / "texts", str(tmp_path / "texts"), TextFiles([tmp_path / "texts"])):
        assert read(folder) == ([[2, 3], [1]], ["a.txt", "b.txt"])
        assert open_texts(folder, TextReader(encode)).name == str(tmp_path / "texts")


def test_one_text_of_a_file_is_x_rayed(tmp_path, call_main):
    model = small_measurement.saved(tmp_path / "model")
    texts = [" ".join(f"w{token}" for token in range(first, first + 12)) for first in (1, 20)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"body": text} for text in texts], indent=1))
    options = ["--text-field", "body", "--n-short", 4, "--device", "cpu", "--text", path]

    def pieces(*more: object) -> tuple[str, str, str]:
        """What was printed, which text it was, and its tokens."""
        _, printed = call_main("xray", model, *options, *more, "--out", tmp_path / "out")
        measured = InfluenceMap.load(tmp_path / "out")
        return printed, measured.about["text"], " ".join(measured.tokens["piece"].str.strip())

    printed, name, text = pieces()
    assert f"{path} has 2 texts; number 0 is read (another: --text-number)" in printed
    assert (name, text) == (f"{path}, text 0", texts[0])
    assert pieces("--text-number", 1)[1:] == (f"{path}, text 1", texts[1])
    with refused("--text-number 2: .* has 2, counted from 0"):
        pieces("--text-number", 2)
    (tmp_path / "one.txt").write_text(texts[0])
    printed, name, text = pieces("--text", tmp_path / "one.txt")
    assert "texts" not in printed and (name, text) == (str(tmp_path / "one.txt"), texts[0])
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
    with refused("has no field .body. .*messages"):
        pieces("--text", tmp_path / "chat.jsonl")
    with refused("text 0 is messages, which only `measure` reads"):
        pieces("--text", tmp_path / "chat.jsonl", "--text-field", "text")
