"""Shares of a corpus made by tasks of their own: the same bytes as in one go, whatever happens to the tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_sparsity.data import encode
from olmo_sparsity.data import prepare as prepare_module
from olmo_sparsity.data.sources import hub_units
from olmo_sparsity.data.prepare import prepare, prepare_shard
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.shard import Shard
from tests.olmo_sparsity.data.test_corpora import c4_folder, needs_c4_sample, write_lines
from tests.olmo_sparsity.data.test_prepare import SCRIPT, contents, run_main, some_files, some_texts


@pytest.fixture
def settings(tmp_path: Path) -> PrepareSettings:
    """Five training files, of which some paragraphs stand in the held-out file too."""
    files = some_files(tmp_path / "text", files=5)
    heldout = [
        *some_texts(5, seed=90),
        *(a + "\n\n" + b for a, b in zip(some_texts(5, 3), some_texts(5, 91), strict=True)),
    ]
    return PrepareSettings("text", files, [write_lines(tmp_path / "h.jsonl", heldout)], tokenizer="olmo")


def arguments(settings: PrepareSettings, out: Path) -> list[str]:
    files = ["--files", *settings.files, "--heldout-files", *settings.heldout_files]
    return ["text", *files, "--tokenizer", "olmo", "--workers", "1", "--out", str(out)]


def test_a_share_is_read_from_text():
    assert Shard.parse("2/3") == Shard(2, 3)
    assert [Shard(2, 3).has(index) for index in range(6)] == [False, True, False, False, True, False]
    for text in ("0/3", "4/3", "3", "a/b", "1/0", "-1/2"):
        with pytest.raises(UserError, match="i/n with i from 1 to n"):
            Shard.parse(text)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_merged_shards_have_the_bytes_of_one_go(tmp_path, settings, count):
    whole = prepare(settings, tmp_path / "whole", workers=1)
    done = [
        prepare_shard(settings, tmp_path / "out", Shard(i, count), workers=1) for i in range(count, 0, -1)
    ]
    assert sum(shard.units for shard in done) == 5
    assert sum(shard.tokens for shard in done) == sum(file.tokens for file in whole.manifest.splits["train"])
    merged = prepare(settings, tmp_path / "out", workers=1, merge=True)
    assert merged.manifest == whole.manifest
    assert merged.manifest.settings["decontamination"]["changed_documents"] == 5
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert prepare_shard(settings, tmp_path / "out", Shard(1, count)).corpus_is_ready


@needs_c4_sample
def test_shards_of_c4(tmp_path):
    settings = PrepareSettings("c4", dataset=str(c4_folder(tmp_path / "c4")))
    prepare(settings, tmp_path / "whole", workers=1)
    for number in (1, 2):
        prepare_shard(settings, tmp_path / "out", Shard(number, 2), workers=1)
    prepare(settings, tmp_path / "out", workers=1, merge=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@needs_c4_sample
def test_a_shard_that_a_copy_of_c4_lacks_is_named(tmp_path, caplog):
    folder = c4_folder(tmp_path / "c4")
    hub_units(str(folder), "en", "train")
    assert not caplog.records
    other = c4_folder(tmp_path / "other")
    (other / "en" / "c4-train.00000-of-00002.json.gz").unlink()
    units, _ = hub_units(str(other), "en", "train")
    assert len(units) == 1
    [record] = caplog.records
    assert "lacks 1 shards of train (00000-of-00002)" in record.getMessage()


def test_shards_at_the_same_time(tmp_path, settings):
    """Separate processes that start together in a folder that is not there yet."""
    prepare(settings, tmp_path / "whole", workers=1)
    command = [sys.executable, str(SCRIPT), *arguments(settings, tmp_path / "out")]
    environment = os.environ | {"RAYON_NUM_THREADS": "1"}
    tasks = [
        subprocess.Popen([*command, "--shard", f"{i}/3"], env=environment, stdout=subprocess.PIPE, text=True)
        for i in (1, 2, 3)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0]
    assert all("documents" in text and "tokens/s" in text for text in said)
    subprocess.run([*command, "--merge"], check=True, capture_output=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_missing_shards_are_named_in_one_line_and_the_rest_is_kept(tmp_path, settings, capsys):
    out = tmp_path / "out"
    for number in (1, 4):
        prepare_shard(settings, out, Shard(number, 4), workers=1)
    before = contents_of_npy(out)
    assert run_main(*arguments(settings, out), "--merge") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if " s left" not in line]
    assert len(lines) == 1
    assert "2 of 5 units are not finished" in lines[0] and "shards 2, 3 of 4" in lines[0]
    assert contents_of_npy(out) == before
    prepare(settings, tmp_path / "whole", workers=1)
    prepare(settings, out, workers=1)  # without --merge it does what is missing itself
    assert contents(out) == contents(tmp_path / "whole")


def contents_of_npy(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_a_shard_that_failed_goes_on(tmp_path, settings, monkeypatch):
    out = tmp_path / "out"
    whole = prepare(settings, tmp_path / "whole", workers=1)
    (out / ".train-00001.npy.tmp-other-7").parent.mkdir()
    (out / ".train-00001.npy.tmp-other-7").touch()  # what another shard is writing now

    def failing(job):
        if job.output.name == "train-00002.npy":
            (
                out / ".train-00002.npy.tmp-here-1"
            ).touch()  # what a worker leaves that is stopped in the middle
            raise KeyboardInterrupt
        return encode.encode_unit(job)

    monkeypatch.setattr(prepare_module, "encode_unit", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare_shard(settings, out, Shard(1, 2), workers=1)
    monkeypatch.undo()
    assert [path.name for path in out.glob(".*.tmp-*")] == [".train-00001.npy.tmp-other-7"]
    first = (out / "train-00000.npy").stat().st_mtime_ns
    again = prepare_shard(settings, out, Shard(1, 2), workers=1)
    assert (out / "train-00000.npy").stat().st_mtime_ns == first
    assert 0 < again.tokens_written < again.tokens
    prepare_shard(settings, out, Shard(2, 2), workers=1)
    assert prepare(settings, out, workers=1, merge=True).manifest == whole.manifest
    assert contents(out) == contents(tmp_path / "whole")


def test_bad_input_in_one_shard_leaves_the_others_alone(tmp_path, settings):
    out = tmp_path / "out"
    prepare_shard(settings, out, Shard(1, 2), workers=1)
    before = contents_of_npy(out)
    cut = Path(settings.files[1])
    cut.write_bytes(cut.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"other settings \(files\)"):
        prepare_shard(settings, out, Shard(2, 2), workers=1)
    fresh = tmp_path / "fresh"
    prepare_shard(settings, fresh, Shard(1, 2), workers=1)
    with pytest.raises(UserError, match=r"1\.jsonl\.gz is truncated"):
        prepare_shard(settings, fresh, Shard(2, 2), workers=1)
    assert contents_of_npy(fresh) == contents_of_npy(out) == before


def test_what_shards_cannot_do_is_refused_with_the_remedy(tmp_path, settings, capsys):
    out = tmp_path / "out"
    files = ["text", "--files", *settings.files, "--out", str(out)]
    cases = {
        "name --heldout-files": [*files, "--tokenizer", "olmo", "--shard", "1/2"],
        "pass --tokenizer olmo": [*files, "--heldout-files", *settings.heldout_files, "--shard", "1/2"],
        "docs would be searched": ["docs", "--out", str(out), "--tokenizer", "olmo", "--shard", "1/2"],
        "i/n with i from 1 to n": [*arguments(settings, out), "--shard", "3/2"],
        "has nothing to merge": [*arguments(settings, out), "--merge"],
        "without --shard": [*arguments(settings, out), "--merge", "--shard", "1/2"],
        "--overwrite would remove": [*arguments(settings, out), "--overwrite", "--shard", "1/2"],
    }
    for message, command in cases.items():
        assert run_main(*command) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
        assert not out.exists()
    prepare_shard(settings, out, Shard(1, 4), workers=1)
    with pytest.raises(UserError, match="begun with 4 shards"):
        prepare_shard(settings, out, Shard(1, 2), workers=1)
