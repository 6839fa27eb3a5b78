"""A result measured again: texts are read and grouped as they were, or the other grouping is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import TextFiles, open_model
from analysis.api import load
from analysis.measuring import measure
from analysis.model.huggingface import open_transformers
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


def test_the_command_opens_the_model_as_it_was_opened(
    tmp_path: Path, call_main: Callable[..., tuple[int | None, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model without a tokenizer of its own, whose result could not be verified from the command line."""
    inner, tokenizer = model()
    inner.save_pretrained(tmp_path / "model")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" ".join(TEXTS["book"]))
    opened = {"tokenizer": tmp_path / "tokenizer.json", "prefix": "3", "attn_implementation": "eager"}
    measure(tmp_path / "model", [tmp_path / "a.txt"], out=tmp_path / "out", **SMALL, **opened)
    attentions = []

    def open_noted(path: Any, name: str, dtype: str, attention: str | None) -> Any:
        attentions.append(attention)
        return open_transformers(path, name, dtype, attention)

    monkeypatch.setattr(open_model, "open_transformers", open_noted)
    arguments = ("verify", tmp_path / "out", "--device", "cpu", "--targets", 20)
    named = ("--tokenizer", tmp_path / "tokenizer.json", "--attn-implementation", "eager")
    code, printed = call_main(*arguments, *named)
    assert not code and ": verified" in printed
    assert attentions == ["eager"]


@pytest.mark.parametrize("option", ["--prefix=none", "--dtype=bf16", "--split=train"])
def test_what_the_result_says_is_no_option(
    option: str,
    folder: Path,
    call_main: Callable[..., tuple[int | None, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would have no effect."""
    with pytest.raises(SystemExit) as ended:
        call_main("verify", folder, option)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err
