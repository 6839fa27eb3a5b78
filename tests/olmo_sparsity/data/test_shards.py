"""Shares of a corpus made by tasks of their own: the same bytes as in one go, whatever happens to the tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.data.prepare import prepare, prepare_shard
from olmo_sparsity.data.sources import PrepareSettings, hub_units
from olmo_sparsity.util.shard import Shard
from tests.support.corpora import (
    ENVIRONMENT,
    SCRIPT,
    arguments,
    assert_same_as_one_go,
    c4_folder,
    contents,
    cut,
    errors,
    needs_c4_sample,
    run_main,
    sharded_settings,
    stop_before_third_file,
)
from tests.support.refusals import refused
from tests.support.slow import slow_but


@pytest.fixture
def settings(tmp_path: Path) -> PrepareSettings:
    return sharded_settings(tmp_path, files=5)


def test_a_share_is_read_from_text():
    assert Shard.parse("2/3") == Shard(2, 3)
    assert [Shard(2, 3).has(index) for index in range(6)] == [False, True, False, False, True, False]
    for text in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2"):
        with refused("i/n with i from 1 to n"):
            Shard.parse(text)


@pytest.mark.parametrize("count", slow_but([1, 3, 7], 3))
def test_merged_shards_have_the_bytes_of_one_go(tmp_path, settings, count):
    out = tmp_path / "out"
    done = [prepare_shard(settings, out, Shard(i, count), workers=1) for i in range(count, 0, -1)]
    merged = prepare(settings, out, workers=1, merge=True)
    assert_same_as_one_go(settings, out)
    assert sum(len(shard.files) for shard in done) == 5
    files = sorted((file for shard in done for file in shard.files), key=lambda file: file.name)
    assert files == merged.manifest.splits["train"]
    assert merged.manifest.settings["decontamination"]["changed_documents"] == 5
    assert prepare_shard(settings, out, Shard(1, count)).corpus_is_ready


@needs_c4_sample
def test_shards_of_c4_and_of_a_copy_that_lacks_one(tmp_path, caplog):
    folder = c4_folder(tmp_path / "c4")
    settings = PrepareSettings("c4", dataset=str(folder))
    for number in (1, 2):
        prepare_shard(settings, tmp_path / "out", Shard(number, 2), workers=1)
    prepare(settings, tmp_path / "out", workers=1, merge=True)
    assert_same_as_one_go(settings, tmp_path / "out")
    assert not caplog.records
    other = c4_folder(tmp_path / "other")
    (other / "en" / "c4-train.00000-of-00002.json.gz").unlink()
    units, _ = hub_units(str(other), "en", "train")
    assert len(units) == 1
    assert "lacks 1 shards of train (00000-of-00002)" in caplog.text


def test_shards_at_the_same_time(tmp_path, settings):
    """Separate processes that start together in a folder that is not there yet."""
    command = [sys.executable, str(SCRIPT), *arguments(settings, tmp_path / "out")]
    tasks = [
        subprocess.Popen([*command, "--shard", f"{i}/3"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        for i in (1, 2, 3)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0]
    assert all("documents" in text and "tokens/s" in text for text in said)
    subprocess.run([*command, "--merge"], check=True, capture_output=True)
    assert_same_as_one_go(settings, tmp_path / "out")


def test_missing_shards_are_named_in_one_line_and_the_rest_is_kept(tmp_path, settings, capsys):
    out = tmp_path / "out"
    for number in (1, 4):
        prepare_shard(settings, out, Shard(number, 4), workers=1)
    before = contents(out, "*.npy")
    assert run_main(*arguments(settings, out, "--merge")) == 1
    [line] = errors(capsys.readouterr().err)
    assert "2 of 5 units are not finished" in line and "shards 2, 3 of 4" in line
    assert contents(out, "*.npy") == before
    prepare(settings, out, workers=1)  # without --merge it does what is missing itself
    assert_same_as_one_go(settings, out)


def test_a_shard_that_failed_goes_on(tmp_path, settings, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".train-00001.npy.tmp-other-7").touch()  # what another shard is writing now
    stop_before_third_file(monkeypatch, out)
    with pytest.raises(KeyboardInterrupt):
        prepare_shard(settings, out, Shard(1, 2), workers=1)
    monkeypatch.undo()
    assert [path.name for path in out.glob(".*.tmp-*")] == [".train-00001.npy.tmp-other-7"]
    first = (out / "train-00000.npy").stat().st_mtime_ns
    again = prepare_shard(settings, out, Shard(1, 2), workers=1)
    assert (out / "train-00000.npy").stat().st_mtime_ns == first
    assert 0 < again.tokens_written < sum(file.tokens for file in again.files)
    prepare_shard(settings, out, Shard(2, 2), workers=1)
    prepare(settings, out, workers=1, merge=True)
    assert_same_as_one_go(settings, out)


def test_bad_input_in_one_shard_leaves_the_others_alone(tmp_path, settings):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    prepare_shard(settings, out, Shard(1, 2), workers=1)
    before = contents(out, "*.npy")
    cut(settings.files[1])
    with refused(r"other settings \(files\)"):
        prepare_shard(settings, out, Shard(2, 2), workers=1)
    prepare_shard(settings, fresh, Shard(1, 2), workers=1)
    with refused(r"1\.jsonl\.gz is truncated"):
        prepare_shard(settings, fresh, Shard(2, 2), workers=1)
    assert contents(fresh, "*.npy") == contents(out, "*.npy") == before


def test_what_shards_cannot_do_is_refused_with_the_remedy(tmp_path, settings, capsys):
    out = tmp_path / "out"
    files = ["text", "--files", *settings.files, "--out", str(out)]
    cases = {
        "name --heldout-files": [*files, "--tokenizer", "olmo", "--shard", "1/2"],
        "pass --tokenizer olmo": [*files, "--heldout-files", *settings.heldout_files, "--shard", "1/2"],
        "docs would be searched": ["docs", "--out", str(out), "--tokenizer", "olmo", "--shard", "1/2"],
        "i/n with i from 1 to n": arguments(settings, out, "--shard", "3/2"),
        "has nothing to merge": arguments(settings, out, "--merge"),
        "without --shard": arguments(settings, out, "--merge", "--shard", "1/2"),
        "--overwrite would remove": arguments(settings, out, "--overwrite", "--shard", "1/2"),
    }
    for message, command in cases.items():
        assert run_main(*command) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
        assert not out.exists()
    prepare_shard(settings, out, Shard(1, 4), workers=1)
    with refused("begun with 4 shards"):
        prepare_shard(settings, out, Shard(1, 2), workers=1)
