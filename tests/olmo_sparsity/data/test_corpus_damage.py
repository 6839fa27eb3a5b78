"""Corpora that two processes want, whose files are damaged or gone, or that the disk has no room for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.data import prepare as prepare_module
from olmo_sparsity.data import workspace
from olmo_sparsity.data.prepare import prepare, prepare_shard
from olmo_sparsity.data.tokens import CorpusManifest
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.shard import Shard
from olmo_sparsity.util.workers import StoppedEarly
from tests.support import tiny
from tests.support.corpora import (
    ENVIRONMENT,
    ROOT,
    arguments,
    assert_same_as_one_go,
    bpe_command,
    contents,
    errors,
    run_main,
    sharded_settings,
    some_files,
    stop_before_third_file,
    text_settings,
    write_lines,
)
from tests.support.refusals import refused
from tests.support.slow import slow_but

NESTED = '{"text": ' + "[" * 100_000


# --- two at once ---


@pytest.mark.slow
def test_a_folder_in_use_is_left_alone(tmp_path):
    settings, out = sharded_settings(tmp_path), tmp_path / "out"
    prepare_shard(settings, out, Shard(1, 2), workers=1)
    (out / ".train-00001.npy.tmp-here-1").touch()  # what the other process is writing
    before = sorted(out.rglob("*"))
    with folder_lock(out):
        for work in (
            lambda: prepare(settings, out, workers=1),
            lambda: prepare(settings, out, workers=1, merge=True),
            lambda: prepare(settings, out, workers=1, overwrite=True),
            lambda: prepare_shard(settings, out, Shard(2, 2), workers=1),
        ):
            with refused("out is in use by process"):
                work()
    assert sorted(out.rglob("*")) == before
    with folder_lock(out, part="1-of-2"):
        with refused("in use"):
            prepare_shard(settings, out, Shard(1, 2), workers=1)
        prepare_shard(settings, out, Shard(2, 2), workers=1)
        with refused("in use"):
            prepare(settings, out, workers=1, merge=True)
    prepare(settings, out, workers=1, merge=True)
    assert_same_as_one_go(settings, out)


def test_two_processes_at_once_make_one_corpus(tmp_path):
    files, out = some_files(tmp_path / "text", words=300), tmp_path / "out"
    pipes = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(bpe_command(files, out), **pipes) for _ in range(2)]
    said = [errors(process.communicate(timeout=120)[1]) for process in both]
    codes = [process.returncode for process in both]
    assert 0 in codes
    for code, lines in zip(codes, said, strict=True):
        assert (code, lines) == (0, []) or (code == 1 and len(lines) == 1 and "is in use by" in lines[0])
    assert_same_as_one_go(text_settings(files), out)


def test_a_finished_corpus_needs_no_lock(tmp_path, monkeypatch):
    """It may be on a disk that cannot be written to."""
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    made = prepare(settings, out, workers=1)

    def read_only(folder, part=None):
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr(workspace, "folder_lock", read_only)
    (out / ".partial").mkdir()
    again = prepare(settings, out, workers=1)
    assert (again.manifest, again.tokens_written) == (made.manifest, 0)
    with refused("cannot write to .*Read-only file system.*choose another --out"):
        prepare(text_settings(settings.files, seed=1), tmp_path / "other", workers=1)


def test_a_corpus_that_another_process_has_just_finished_is_taken(tmp_path, monkeypatch):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    real = prepare_module.finished_corpus

    def faster(folder, request):
        monkeypatch.setattr(prepare_module, "finished_corpus", real)
        prepare(settings, out, workers=1)
        return None

    monkeypatch.setattr(prepare_module, "finished_corpus", faster)
    assert prepare(settings, out, workers=1).tokens_written == 0


# --- damage inside ---


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def lose_last_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def count_otherwise(path: Path) -> None:
    """Another number in a record that is well-formed."""
    record = json.loads(path.read_text())
    record["file"]["documents"] += 1
    path.write_text(json.dumps(record))


def rename_a_token(path: Path) -> None:
    """Another tokenizer, as whole as the right one."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[1:3]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))


def say(value) -> object:
    return lambda path: path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (".partial/train-00000.json", shorten),
        (".partial/train-00000.json", say(NESTED)),
        (".partial/train-00000.json", say([])),
        (".partial/train-00000.json", count_otherwise),
        (".partial/train-00000.json", say({"file": {"name": "train-00000.npy"}, "contaminated": []})),
        (".partial/train-00000.json", say({"file": None, "contaminated": ["x"]})),
        (".partial/paragraphs.npy", shorten),
        (".partial/paragraphs.npy", say("")),
        (".partial/heldout-00001.npy", shorten),
        (".partial/heldout-00001.jsonl", shorten),
        (".partial/heldout-00001.jsonl", lose_last_line),
        (".partial/heldout-00001.json", say("{torn")),
        ("tokenizer.json", shorten),
        ("tokenizer.json", rename_a_token),
    ],
)
def test_damaged_unfinished_work_is_made_again(tmp_path, monkeypatch, name, damage):
    settings, out = text_settings(some_files(tmp_path / "text"), heldout_fraction=0.3), tmp_path / "out"
    stop_before_third_file(monkeypatch, out)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, out, workers=1)
    monkeypatch.undo()
    kept = (out / "train-00001.npy").stat().st_mtime_ns
    damage(out / name)
    prepare(settings, out, workers=1)
    assert (out / "train-00001.npy").stat().st_mtime_ns == kept
    assert_same_as_one_go(settings, out)


@pytest.mark.parametrize("value", slow_but(["", "{torn", "[]", NESTED], "{torn"))
def test_a_damaged_request_is_one_line_and_loses_nothing(tmp_path, value, capsys):
    settings, out = sharded_settings(tmp_path), tmp_path / "out"
    prepare_shard(settings, out, Shard(1, 2), workers=1)
    (out / ".partial" / "request.json").write_text(value)
    before = sorted(out.rglob("*"))
    given = arguments(settings, out)
    for more in ([], ["--shard", "2/2"], ["--merge"]):
        assert run_main(*given, *more) == 1
        [line] = errors(capsys.readouterr().err)
        assert "request.json is damaged" in line and "choose another --out" in line
    assert sorted(out.rglob("*")) == before
    assert run_main(*given, "--overwrite") == 0


@pytest.mark.parametrize(
    "value",
    slow_but(["", "{torn", "[]", "{}", '{"count": "2"}', '{"count": 0}', NESTED], "{torn", '{"count": 0}'),
)
def test_a_damaged_number_of_shards_is_one_line(tmp_path, value):
    settings, out = sharded_settings(tmp_path), tmp_path / "out"
    prepare_shard(settings, out, Shard(1, 2), workers=1)
    (out / ".partial" / "shards.json").write_text(value)
    for work in (
        lambda: prepare_shard(settings, out, Shard(2, 2), workers=1),
        lambda: prepare(settings, out, workers=1, merge=True),
    ):
        with refused(r"shards\.json is damaged .*; remove it and run the same"):
            work()
    (out / ".partial" / "shards.json").unlink()
    assert prepare_shard(settings, out, Shard(1, 2), workers=1).tokens_written == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("", "is damaged"),
        ("[]", "holds no dict"),
        (NESTED, "is damaged"),
        ({"version": 2}, "format version 2"),
        ({"extra": 1}, "extra"),
        ({"corpus": 1}, "corpus is 1"),
        ({"vocab_size": 50.0}, "vocab_size is 50.0"),
        ({"eos_token_id": 50}, "eos_token_id 50 is not below vocab_size 50"),
        ({"dtype": "int8"}, "dtype 'int8' is none of uint16, uint32"),
        ({"settings": []}, "settings is []"),
        ({"splits": []}, "splits is []"),
        ({"splits": {"train": ["x"]}}, "an entry of train is 'x'"),
        ({"name": "../heldout-00000.npy"}, "no bare file name"),
        ({"name": "a\\b"}, "no bare file name"),
        ({"name": ""}, "no bare file name"),
        ({"name": ".."}, "no bare file name"),
        (
            {
                "splits": {
                    "train": [{"name": "a", "tokens": 1, "documents": 1, "sha256": "0", "groups_sha256": 1}]
                }
            },
            "a checksum is no text",
        ),
        ({"name": "a\nb"}, "no bare file name"),
        ({"name": 3}, "name is 3"),
        ({"tokens": -1}, "negative"),
    ],
)
def test_a_manifest_that_is_none_is_refused_in_one_line(tmp_path, changes, said):
    tiny.write_corpus(tmp_path, {"train": [[1, 2]], "heldout": [[3]]})
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text())
    if isinstance(changes, dict):
        of_file = raw["splits"]["train"][0]
        (of_file if changes.keys() <= of_file.keys() else raw).update(changes)
    path.write_text(json.dumps(raw) if isinstance(changes, dict) else changes)
    with refused() as error:
        CorpusManifest.load(tmp_path)
    message = str(error.value)
    assert said in message and "\n" not in message and message.endswith("with --overwrite")


# --- input that is gone or odd ---


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("replaced", [False, True])
def test_an_input_that_vanishes_between_two_stages_loses_nothing(tmp_path, monkeypatch, workers, replaced):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    real, gone = prepare_module._Stages._make_tokenizer, Path(settings.files[2])

    def vanish(*arguments):
        made = real(*arguments)
        gone.rename(tmp_path / "away")
        if replaced:
            gone.mkdir()
        return made

    monkeypatch.setattr(prepare_module._Stages, "_make_tokenizer", vanish)
    with refused(r"2\.jsonl\.gz cannot be read \(.*; put it back") as stopped:
        prepare(settings, out, workers=workers)
    assert isinstance(stopped.value, StoppedEarly)
    assert not list(out.glob(".*.tmp-*"))
    monkeypatch.undo()
    if replaced:
        gone.rmdir()
    (tmp_path / "away").rename(gone)
    tokenizer = (out / "tokenizer.json").stat().st_mtime_ns
    prepare(settings, out, workers=1)
    assert (out / "tokenizer.json").stat().st_mtime_ns == tokenizer
    assert_same_as_one_go(settings, out)


# --- no room, no time ---


@pytest.mark.parametrize("limit", slow_but([10, 300, 3000, 5000, 9000], 10, 3000))
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_full_disk_is_one_line_and_the_work_goes_on(tmp_path, limit, workers):
    files, out = some_files(tmp_path / "text", words=60), tmp_path / "out"
    options = ["--heldout-fraction", "0.3", "--workers", workers]

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    ran = subprocess.run(
        bpe_command(files, out, *options), env=ENVIRONMENT, preexec_fn=full, capture_output=True, text=True
    )
    lines = errors(ran.stderr)
    assert (ran.returncode, len(lines)) == (1, 1) and "the disk is full" in lines[0], ran.stderr
    settings = text_settings(files, heldout_fraction=0.3)
    whole = prepare(settings, tmp_path / "whole", workers=1)
    assert not out.exists() or (out / ".partial" / "request.json").is_file()
    assert not [*out.rglob(".*.tmp-*"), *out.rglob(".lock*"), *out.glob("manifest.json")]
    for path in out.glob("train-*.npy"):  # whole, or not there
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert prepare(settings, out, workers=1).manifest == whole.manifest
    assert contents(out) == contents(tmp_path / "whole")


def test_a_file_in_place_of_the_folder_is_left_alone(tmp_path, capsys):
    files, out = some_files(tmp_path / "text", files=1), tmp_path / "out"
    out.write_text("mine")
    for path in (out, out / "below"):
        assert run_main("text", "--files", *files, "--vocab-size", "300", "--out", str(path)) == 2
        [line] = errors(capsys.readouterr().err)
        assert f"{out} is a file; name a folder" in line
        with refused(f"cannot write to {path} .*; choose another --out"):
            prepare(text_settings(files), path, workers=1)
    assert out.read_text() == "mine"


# --- long lines ---


@pytest.mark.parametrize("kind", slow_but(["one character", "one paragraph"], "one paragraph"))
def test_a_long_line_takes_a_few_times_its_size(tmp_path, kind):
    """Without anything to read, 120 MB; it was a GB for a line of 20 MB."""
    text = "a" * 20_000_000 if kind == "one character" else "seven letters " * 1_500_000
    files = [write_lines(tmp_path / "long.jsonl", [text])]
    heldout = write_lines(tmp_path / "h.jsonl", ["other text"])
    run = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    given = bpe_command(files, tmp_path / "out", "--heldout-files", heldout, "--tokenizer-sample-mb", "5")
    measured = subprocess.run(
        [sys.executable, "-c", run, *given],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert measured.returncode == 0, measured.stderr
    assert int(measured.stdout.split()[-1]) < 400_000
    ids = np.fromfile(tmp_path / "out" / "train-00000.npy", dtype=np.uint16)
    assert ids[-1] == 0 and np.count_nonzero(ids == 0) == 1
