"""What users hand over as texts, from Python: read rightly, or refused in one line that says which and what to do."""

import errno
import io
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from analysis.open_texts import open_texts
from analysis.texts import TextReader
from tests.support.refusals import refused

READER = TextReader(lambda text: np.array([len(word) for word in text.split()], dtype=np.int64))
TEXTS, GROUPS = ["a bb", "ccc d", "ee"], ["x", "y", "x"]


def opened(texts):
    """Ids and group of every text."""
    texts = open_texts(texts, READER)
    groups = [None] * len(texts.lengths) if texts.groups is None else texts.groups.tolist()
    return [(texts.tokens(number).tolist(), group) for number, group in enumerate(groups)]


PLAIN = [([1, 2], None), ([3, 1], None), ([2], None)]
GROUPED = [(ids, group) for (ids, _), group in zip(PLAIN, GROUPS, strict=True)]
COLUMNS = {"text": TEXTS, "group": GROUPS, "year": [1, 2, 3]}
URLS = ["https://x/1", "https://y/", "https://www.x/2"]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (TEXTS, PLAIN),
        (tuple(TEXTS), PLAIN),
        (np.array(TEXTS), PLAIN),
        (pd.Series(TEXTS), PLAIN),
        (pd.Index(TEXTS), PLAIN),
        (pd.DataFrame({"text": TEXTS}, index=[5, 7, 9]), PLAIN),
        (pd.DataFrame(COLUMNS), GROUPED),
        (pd.DataFrame({"text": TEXTS, "url": URLS}), GROUPED),
        (pd.DataFrame(COLUMNS).assign(group=pd.Categorical(GROUPS)), GROUPED),
        (Dataset.from_dict(COLUMNS), GROUPED),
        (Dataset.from_dict(COLUMNS)["text"], PLAIN),
        (Dataset.from_dict(COLUMNS).to_iterable_dataset(), GROUPED),
        (Dataset.from_dict(COLUMNS).to_dict(), GROUPED),
        (pa.table(COLUMNS), GROUPED),
        (pa.array(TEXTS).to_pylist(), PLAIN),
        (pd.DataFrame(COLUMNS).to_dict("records"), GROUPED),
        (map(str, TEXTS), PLAIN),
        ({"x": [TEXTS[0], TEXTS[2]], "y": TEXTS[1]}, [GROUPED[0], GROUPED[2], GROUPED[1]]),
        ({"x": pd.Series([TEXTS[0]]), "y": (TEXTS[1],)}, GROUPED[:2]),
        ({"text": TEXTS[0], "other": TEXTS[1]}, [([1, 2], "text"), ([3, 1], "other")]),
        ({"text": TEXTS[:2], "other": TEXTS[2:]}, [([1, 2], "text"), ([3, 1], "text"), ([2], "other")]),
        ({"text": tuple(TEXTS), "group": np.array(GROUPS)}, GROUPED),
        ({"text": pd.Series(TEXTS), "url": URLS}, GROUPED),
        ({"z": pd.DataFrame(COLUMNS), "y": TEXTS[1]}, [*((ids, "z") for ids, _ in PLAIN), GROUPED[1]]),
        ({"z": Dataset.from_dict(COLUMNS)}, [(ids, "z") for ids, _ in PLAIN]),
        ({"z": {"text": TEXTS[0]}, "y": [{"text": TEXTS[1], "group": "x"}]}, [([1, 2], "z"), GROUPED[1]]),
        (pd.DataFrame(COLUMNS).iloc[1], GROUPED[1:2]),
        (Dataset.from_dict(COLUMNS)[1], GROUPED[1:2]),
        ({"text": TEXTS[0], "url": URLS[0]}, GROUPED[:1]),
        ({TEXTS[1], TEXTS[0], TEXTS[2]}, PLAIN),
        ({None: TEXTS[:1], "": TEXTS[1:2], float("nan"): TEXTS[2:]}, PLAIN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_texts_is_read(texts, expected):
    assert opened(texts) == expected


def test_numbers_of_groups_are_names_and_none_stands_by_itself():
    frame = pd.DataFrame({"text": TEXTS, "group": [1, 2, 1]})
    assert [group for _, group in opened(frame)] == ["1", "2", "1"]
    frame = pd.DataFrame({"text": TEXTS, "group": ["x", None, float("nan")]})
    assert [group for _, group in opened(frame)] == ["x", "text 1 by itself", "text 2 by itself"]
    for none in (None, "", float("nan"), np.float32("nan"), pd.NA):
        rows = [
            {"text": TEXTS[0], "group": none, "url": URLS[0]},
            {"text": TEXTS[1], "group": none, "url": none},
        ]
        assert [group for _, group in opened(rows)] == ["x", "text 1 by itself"]


def test_a_dict_of_columns_says_what_of_it_is_not_read(caplog):
    assert opened({"text": TEXTS, "speech": TEXTS[::-1]}) == PLAIN
    assert "read as a table, of which text is taken and not speech; where they are groups" in caplog.text
    caplog.clear()
    assert opened(COLUMNS) == GROUPED and not caplog.text


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([*TEXTS, None], "text 3 is missing"),
        (pd.Series([*TEXTS, float("nan")]), "text 3 is missing.*dropna"),
        (pd.Series([*TEXTS, pd.NA]), "text 3 is missing"),
        (pd.DataFrame({"text": [None, *TEXTS]}), "text 0 is missing"),
        ({"x": [TEXTS[0], None]}, "group 'x', text 1 is missing"),
        (pd.DataFrame({"content": TEXTS, "n": 1}), "DataFrame has no column text, only content, n; rename"),
        (Dataset.from_dict({"content": TEXTS}), "Dataset has no column text, only content"),
        (DatasetDict(train=Dataset.from_dict(COLUMNS)), "DatasetDict has the splits train; give one"),
        ([1, 2], r"text 0 is a int \(1\)"),
        ([[1, 2, 3]], r"text 0 is a list \(\[1, 2, 3\]\)"),
        ([b"bytes"], "text 0 is a bytes"),
        (b"bytes", "cannot be a bytes"),
        (3, "cannot be a int"),
        (None, "cannot be a NoneType"),
        (io.StringIO("a b"), "cannot be a StringIO"),
        ([], "there is no text"),
        ("just a text", "is no file and no prepared corpus; give the path of one, or a list of strings"),
        ([{"words": "a"}], "text 0 is a dict"),
        (np.array(TEXTS[0]), "texts cannot be a ndarray"),
        ({"x": TEXTS, "y": None}, "group 'y' cannot be a NoneType"),
        ({"x": {"words": "a"}}, "group 'x', text 0 is a dict"),
        ({"text": TEXTS, "group": GROUPS[:2]}, "has text and group, but not a list of one length for each"),
        ({"text": TEXTS, "group": "x"}, "has text and group, but not a list of one length for each"),
        ({"messages": [[]] * 2, "url": URLS}, "has messages and url, but not a list of one length"),
        (pd.DataFrame([TEXTS[:2]], columns=["text", "text"]), "has the column text twice; rename or drop"),
        (pd.DataFrame([TEXTS], columns=["text", "group", "group"]), "has the column group twice"),
        (pa.Table.from_arrays([pa.array(TEXTS)] * 2, names=["text"] * 2), "has the column text twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_text_is_refused_by_its_place(texts, message):
    with refused(message):
        open_texts(texts, READER)


@pytest.mark.parametrize(
    "name",
    [
        "typo.txt",
        "~/none/a.txt",
        "books/none.jsonl.gz",
        "a.CSV",
        "x y.md",
        "/none.parquet",
        "b.json.zst",
        "a.tsv",
    ],
)
def test_a_line_that_ends_as_a_path_does_is_one(name):
    for texts in ([name], [name, "a text"], {"group": [name]}, name):
        with refused("no file"):
            open_texts(texts, READER)
    assert opened([f"{name}\n", f"see {name} now"])[0][0] == [len(word) for word in name.split()]


def test_the_home_folder_and_paths_beside_strings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("a bb")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "ee", "group": "x"}))
    assert opened("~/a.txt") == opened(["~/a.txt"]) == [([1, 2], "a.txt")]
    mixed = ["ccc d", tmp_path / "a.txt", str(tmp_path / "b.jsonl")]
    assert opened(mixed) == [([3, 1], "text 0 by itself"), ([1, 2], "a.txt"), ([2], "x")]
    assert opened({"book": ["~/a.txt", "ccc d"]}) == [([1, 2], "book"), ([3, 1], "book")]
    with refused("no file"):
        open_texts([tmp_path / "none"], READER)


def test_paths_without_an_order_are_sorted_and_a_list_keeps_its_own(tmp_path):
    paths = [tmp_path / f"{name}.txt" for name in "bac"]
    for path in paths:
        path.write_text(path.stem * 3)
    for texts in (iter(paths), set(paths), tmp_path.glob("*.txt")):
        assert [group for _, group in opened(texts)] == ["a.txt", "b.txt", "c.txt"]
    assert [group for _, group in opened(paths)] == ["b.txt", "a.txt", "c.txt"]
    assert [ids for ids, _ in opened(iter(TEXTS[::-1]))] == [ids for ids, _ in PLAIN[::-1]]


def test_a_path_that_may_not_be_read_is_not_said_to_be_missing(monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)  # as of a user who may not enter the folder
    for texts in ("closed/a.txt", Path("closed/a"), ["closed/a.txt", "a text\n"]):
        with refused(r"'closed/a(.txt)?' cannot be read \(Permission denied\); fix the path or its rights"):
            open_texts(texts, READER)


def test_half_an_emoji_is_a_question_mark():
    seen = []
    open_texts(["a \ud83d b", "\U0001f642"], TextReader(lambda text: seen.append(text) or np.arange(2)))
    assert seen == ["a ? b", "\U0001f642"]
