"""Measurements of several checkpoints: an interrupted one goes on where it was, with the same result."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from analysis.measure import length, measurement, needle
from analysis.measure.settings import LengthSettings, NeedleSettings
from olmo_sparsity.util.files import read_json
from tests.support.measured import write_models

MODELS = "one", "two"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("made"), (24, 30, 80, 100, 10), one={}, two={"d_model": 16})


@pytest.fixture(params=["length", "needle"])
def asked(request, made, tmp_path):
    """The function that measures, and its settings."""
    common = {
        "checkpoints": tuple(str(made / name / "run") for name in MODELS),
        "corpus": str(made / "corpus"),
        "out": str(tmp_path / "out"),
        "labels": MODELS,
        "device": "cpu",
        "resamples": 100,
        "lengths": (12, 24),
    }
    if request.param == "length":
        return length.measure_length, LengthSettings(**common, windows=6, attention=True)
    return needle.measure_needle, NeedleSettings(**common, ks=(1, 3), depths=(0.0, 1.0), samples=6)


@pytest.fixture
def loaded(monkeypatch):
    """The checkpoints that were opened to be measured, in turn; the one whose number is in ``at`` is interrupted."""
    names, at, load = [], set(), measurement.load_losses

    def load_or_stop(settings, text, checkpoint, check):
        names.append(Path(checkpoint).parent.name)
        if len(names) in at:
            raise KeyboardInterrupt
        return load(settings, text, checkpoint, check)

    monkeypatch.setattr(measurement, "load_losses", load_or_stop)
    return names, at


def numbers(path):
    """All that was measured."""
    found = read_json(path, "")
    return found["models"], found["settings"], pq.read_table(path.with_suffix(".parquet")).to_pylist()


def test_what_is_interrupted_goes_on_with_the_next_checkpoint_and_ends_the_same(asked, loaded, tmp_path):
    measure, settings = asked
    names, at = loaded
    whole = measure(replace(settings, out=str(tmp_path / "whole")))
    at.add(4)
    with pytest.raises(KeyboardInterrupt):
        measure(settings)
    assert not (Path(settings.out) / whole.name).exists()
    again = measure(settings)
    assert names == ["one", "two", "one", "two", "two"]
    assert numbers(again) == numbers(whole)
    assert sorted(each.name for each in Path(settings.out).iterdir() if each.is_dir()) == []


def test_what_was_found_is_taken_up_by_the_same_measurement_only(asked, loaded):
    measure, settings = asked
    names, at = loaded
    at.add(2)
    with pytest.raises(KeyboardInterrupt):
        measure(settings)
    measure(replace(settings, seed=1))
    assert names == ["one", "two", "one", "two"]


def test_what_another_commit_found_is_told(asked, loaded, monkeypatch, caplog):
    measure, settings = asked
    names, at = loaded
    at.add(2)
    with pytest.raises(KeyboardInterrupt):
        measure(settings)
    monkeypatch.setattr(measurement, "current_commit", lambda: "another")
    measure(settings)
    assert names == ["one", "two", "two"]
    assert "was measured with another commit" in caplog.text
