"""Paths that a user gives: ``~`` is the home folder, and a colon is a part of a name, whatever is written or read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.api import Result, load
from analysis.probes.length import LossByPosition
from analysis.synthetic import exact_match
from analysis.xray import InfluenceMap
from olmo_sparsity.checkpoint import resolve_checkpoint
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.tokens import CorpusManifest
from olmo_sparsity.tasks import make_task
from tests.support import small_measurement, tiny
from tests.support.corpora import text_settings, write_lines
from tests.support.refusals import refused
from tests.support.results import made_result
from tests.support.slow import slow_but
from tests.support.xrays import made_map

QUICK_NAMES = ("~/runs/a", "file:x", "a b#c%20?d")
NAMES = ("~/a", "~/runs/a", "smol:1024", "s3:x/y", "file:x", "a b#c%20?d")
QUICK: dict[str, Any] = {"targets": 20, "ks": (1,), "selectors": "random", "placebos": ()}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder, which is not the current one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "home"
    assert not Path("~").exists()


def place(name: str, home: Path) -> Path:
    """Where a name leads to."""
    return home / name[2:] if name.startswith("~/") else Path(name)


def read_back(read: Callable[[Any], Any], name: str) -> Any:
    """What stands at a name, given as a string and as a path."""
    one, other = read(name), read(Path(name))
    assert type(one) is type(other)
    return one


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("name", slow_but(NAMES, *QUICK_NAMES))
def test_a_measurement_is_written_there_and_goes_on_there(name, home):
    settings = {**QUICK, "targets": 35, "tau_nats": 0.5, "targets_per_block": 5}
    first = small_measurement.small(out=name, shard="1/2", **settings)
    assert (place(name, home) / "parts").is_dir()
    whole = small_measurement.small(out=name, **settings)
    assert len(first.targets) < len(whole.targets)
    pd.testing.assert_frame_equal(read_back(load, name).targets, whole.targets)
    assert sorted(path.name for path in place(name, home).glob("*"))[0] == "choices.parquet"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_is_loaded(name, home):
    result, drawn = made_result(40), made_map(40)
    result.save(name)
    pd.testing.assert_frame_equal(read_back(load, name).targets[["text"]], result.targets[["text"]])
    drawn.save(name)
    pd.testing.assert_frame_equal(read_back(InfluenceMap.load, name).tokens, drawn.tokens, check_dtype=False)
    drawn.to_html(f"{name}/page.html")
    made = {path.name for path in place(name, home).iterdir()}
    assert made >= {"result.json", "choices.parquet", "xray.parquet", "page.html"}


@pytest.mark.parametrize("name", slow_but(NAMES, *QUICK_NAMES))
def test_a_figure_is_drawn_there(name, home):
    made_result(40).figure2(f"{name}/figure")
    assert [path.name for path in place(name, home).iterdir()] == ["figure.png"]


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_and_the_rows_of_figure_1_are_saved(name, home):
    rows = pd.DataFrame({"number": [0], "value": [1.0]})
    described = {"settings": {}, "models": [], "provenance": {}, "runs": pd.DataFrame()}
    LossByPosition(rows=rows, numbers=pd.DataFrame(), **described).save(name)
    pd.testing.assert_frame_equal(read_back(LossByPosition.load, name).rows, rows)
    exact_match.save(f"{name}/rows.parquet", pd.DataFrame(columns=exact_match.COLUMNS))
    assert (place(name, home) / "rows.parquet").is_file()


def test_a_corpus_a_run_and_a_config_are_at_home(home):
    write_lines(home / "a.jsonl", ["one two three " * 30] * 3)
    write_lines(home / "b.jsonl", ["one two three " * 30] * 3)
    settings = text_settings(["~/a.jsonl"], heldout_files=("~/b.jsonl",), decontaminate=False)
    made = prepare(settings, "~/corpus", workers=1)
    assert CorpusManifest.load("~/corpus") == made == CorpusManifest.load(home / "corpus")
    tiny.write_corpus(home / "text", dict.fromkeys(("train", "heldout"), tiny.random_documents(4, 90)))
    task = make_task("planted", {"text": "~/text", "test_length": [20, 50]})
    assert len(task.vocabulary) == 1 + 50 + task.num_planted
    step = home / "run" / "step00000001"
    step.mkdir(parents=True)
    (step / "model.safetensors").touch()
    assert resolve_checkpoint("~/run") == step
    options = ["--save_folder=~/run", "--corpus.path=~/corpus", "--evaluation.paths=[~/a.npy]"]
    config = load_config("configs/demo.yaml", options, warn=False)
    assert config.save_folder == str(home / "run") and config.corpus.path == str(home / "corpus")
    assert config.evaluation.paths == [str(home / "a.npy")]


def test_commands_expand_what_the_shell_does_not(home, call_main):
    small_measurement.saved(home / "model")
    texts = [text for of_group in small_measurement.TEXTS.values() for text in of_group]
    (home / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = ["--n-long", 40, "--n-short", 5, "--targets", 20, "--targets-per-block", 1]
    measured = [*sizes, "--tau", 0.5, "--k", 1, "--selectors", "random", "--device", "cpu"]
    call_main("measure", "~/model", "--text", "~/t.jsonl", "--out=~/out", *measured)
    assert isinstance(load(home / "out"), Result)
    call_main("figure2", "~/out", "--resamples", 1000)
    assert (home / "out" / "figure2.png").is_file() and (home / "out" / "numbers.csv").is_file()
    printed = call_main("verify", "~/out", "--text", "~/t.jsonl", "--device", "cpu")[1]
    assert printed.endswith("verified\n")


def test_an_empty_name_is_no_folder(home, call_main, capsys):
    for write in (made_result(40).save, made_map(40).save, made_map(40).to_html, load):
        with refused("a path is empty, as that of a variable which is not set; name a file or a folder"):
            write("")
    with refused("a path is empty"):
        small_measurement.small(("", small_measurement.model()[1]))
    for words in (["m", "--text", "", "--out", "o"], ["m", "--corpus", "", "--out", "o"], ["m", "--out", ""]):
        with pytest.raises(SystemExit):
            call_main("measure", *words)
        assert "a path is empty" in capsys.readouterr().err
    assert not list(Path().iterdir())
