"""What a record says of where it was measured, once it is shown."""

from dataclasses import replace
from typing import Any

import pytest

from analysis.saved import without_folders
from analysis.settings import OtherModel
from tests.analysis.cache_eviction.made_up import made_up
from tests.support.results import made_result

MODEL = "/home/me/models/model-Q4_1.gguf"


def named(texts: str, command: str) -> Any:
    record = made_up()
    settings = record.settings.but(model=MODEL, texts=texts)
    return replace(record, settings=settings, provenance={"command": command, "seconds": 1.0})


@pytest.mark.parametrize(
    ("texts", "command", "expected"),
    [
        (
            "/data/code.jsonl",
            f"measure {MODEL} --text /data/code.jsonl --selectors leave-one-out-kl/cache:4,snapkv --out /tmp/out/cell",
            "measure model-Q4_1.gguf --text code.jsonl --selectors leave-one-out-kl/cache:4,snapkv --out cell",
        ),
        (
            "/data/a.jsonl and 1 more",
            f"eviction {MODEL} --text /data/a.jsonl ~/b.jsonl --effects runs/cell --out runs/out",
            "eviction model-Q4_1.gguf --text a.jsonl b.jsonl --effects cell --out out",
        ),
        (
            "texts",
            "eviction HuggingFaceTB/SmolLM2-135M --out out",
            "eviction HuggingFaceTB/SmolLM2-135M --out out",
        ),
    ],
)
def test_a_record_without_folders_names_none(texts: str, command: str, expected: str) -> None:
    shown = without_folders(named(texts, command))
    assert shown.settings.model.name == "model-Q4_1.gguf"
    assert "/" not in shown.settings.texts.name
    assert shown.provenance == {"command": expected, "seconds": 1.0}


def test_a_model_that_took_part_is_named_without_its_folders() -> None:
    result = made_result(n=40)
    other = OtherModel("/home/me/runs/other", "2" * 64, training_seed=1)
    shown = without_folders(replace(result, settings=replace(result.settings, selected_by=other)))
    assert shown.settings.selected_by == other and shown.settings.selected_by.name == "other"
    assert (
        without_folders(replace(result, settings=result.settings.but(model="."))).settings.model.name == "."
    )
