"""A result measured again: texts are read and grouped as they were, or the other grouping is named."""

import json

import pytest

from analysis import TextFiles
from analysis.api import load
from analysis.measuring import measure
from analysis.verify import verify
from tests.support.refusals import refused
from tests.support.small_measurement import SMALL, TEXTS, model

AGAIN = {"targets": 30, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "rows.jsonl"
    written = [{"body": text, "site": group} for group, texts in TEXTS.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-16")
    return path


@pytest.fixture(scope="module")
def folder(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("verified")
    files = TextFiles([rows], text_field="body", group_field="site", encoding="utf-16")
    measure(model(), files, **{**SMALL, "targets": 60}, out=path)
    return path


def test_files_are_read_with_the_fields_of_the_result(rows, folder):
    result = load(folder)
    assert result.settings.texts.read_with == {
        "text_field": "body",
        "group_field": "site",
        "encoding": "utf-16",
    }
    for texts in (result.settings.texts.name, [rows], TextFiles([rows]), TEXTS):
        assert verify(result, model(), texts, **AGAIN).holds
    assert measure(model(), TEXTS, **SMALL).settings.texts.read_with is None


def test_another_grouping_is_named(rows, folder):
    others = TextFiles([rows], text_field="body", group_field="none", encoding="utf-16")
    with refused("has other placebos .* it was grouped otherwise; .* --group-field"):
        verify(load(folder), model(), others, **AGAIN)
