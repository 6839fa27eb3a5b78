"""Text to token files: nothing lost, nothing shared between splits, nothing half-written."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.data import prepare as prepare_module
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.text import EOS_TOKEN, train_bpe
from olmo_sparsity.data.tokens import CorpusManifest, open_verified
from tests.support.corpora import (
    ENVIRONMENT,
    SCRIPT,
    assert_same_as_one_go,
    bpe_command,
    errors,
    sharded_settings,
    some_files,
    some_texts,
    text_settings,
    write_lines,
)
from tests.support.processes import SECONDS, started
from tests.support.refusals import refused
from tests.support.slow import slow_but


def decoded(folder: Path, split: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = open_verified(folder, split)
    numbers = range(len(files.document_bounds))
    return [tokenizer.decode(files.document(number).tolist()) for number in numbers]


def two_files(folder: Path, train: list[str], heldout: list[str]) -> tuple[list[str], list[str]]:
    return [write_lines(folder / "t.jsonl", train)], [write_lines(folder / "h.jsonl", heldout)]


# --- what comes out ---


def test_every_document_comes_back_and_eos_only_ends_it(tmp_path):
    odd = [f"spelt {EOS_TOKEN} out", EOS_TOKEN * 2 + "x", "naïve \U0001f600\r\n  end "]
    texts, out = [*some_texts(20, seed=1), *odd], tmp_path / "out"
    prepare(text_settings(*two_files(tmp_path, texts, ["other text"])), out)
    assert decoded(out, "train") == [text.replace(EOS_TOKEN, "") for text in texts]
    assert decoded(out, "heldout") == ["other text"]
    manifest = CorpusManifest.load(out)
    [train] = manifest.splits["train"]
    ids = np.fromfile(out / "train-00000.npy", dtype=manifest.dtype)
    assert np.count_nonzero(ids == manifest.eos_token_id) == train.documents == len(texts)
    assert ids[-1] == manifest.eos_token_id
    assert train.tokens == len(ids)


def test_the_splits_share_no_document_and_lose_none(tmp_path):
    files = some_files(tmp_path / "text")
    files.append(write_lines(tmp_path / "again.jsonl", some_texts(30, seed=0)))  # file 0 once more
    texts = [text for seed in (0, 1, 2, 3, 0) for text in some_texts(30, seed)]
    heldout = {}
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        prepare(text_settings(files, seed=seed, heldout_fraction=0.3, decontaminate=False), out)
        train, heldout[seed] = decoded(out, "train"), decoded(out, "heldout")
        assert not set(train) & set(heldout[seed])
        assert sorted(train + heldout[seed]) == sorted(texts)
        assert 0.15 < len(heldout[seed]) / len(texts) < 0.45
    assert heldout[0] != heldout[1]


def normal(text: str) -> list[str]:
    """Paragraphs one by one, without our code and without hashes."""
    paragraphs, lines = [], []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            lines.append(line)
        elif lines:
            paragraphs.append(" ".join(" ".join(lines).split()))
            lines = []
    return paragraphs


def test_decontamination_equals_a_brute_force_comparison(tmp_path):
    draw, out = random.Random(5), tmp_path / "out"
    pool = some_texts(60, seed=7, paragraphs=1)
    train = ["\n\n".join(draw.sample(pool[:40], 4)) for _ in range(30)]
    heldout = ["\n \n".join(draw.sample(pool, 4)).replace(" ", "  ", 3) for _ in range(30)]
    heldout += [train[3], pool[59]]
    files = [write_lines(tmp_path / f"{i}.jsonl", train[i::3]) for i in range(3)]
    manifest = prepare(text_settings(files, [write_lines(tmp_path / "h.jsonl", heldout)]), out, workers=2)
    in_train = {paragraph for text in train for paragraph in normal(text)}
    before = [normal(text) for text in heldout]
    after = [[p for p in paragraphs if p not in in_train] for paragraphs in before]
    assert [normal(text) for text in decoded(out, "heldout")] == [kept for kept in after if kept]
    lost = [len(old) - len(new) for old, new in zip(before, after, strict=True)]
    assert manifest.settings["decontamination"] == {
        "paragraphs": sum(map(len, before)),
        "removed_paragraphs": sum(lost),
        "changed_documents": sum(bool(new and number) for new, number in zip(after, lost, strict=True)),
        "dropped_documents": sum(not new for new in after),
    }
    assert not all(after) and any(after)


def test_the_tokenizer_is_trained_on_the_training_split_only(tmp_path):
    made = []
    for number, secret in enumerate(["zyzzyva " * 50, "quokka " * 50]):
        out = tmp_path / f"out{number}"
        prepare(text_settings(*two_files(tmp_path, some_texts(20, seed=1), [secret])), out)
        made.append((out / "tokenizer.json").read_bytes())
    assert made[0] == made[1]
    texts = [f"{word} {word} {word}" for word in some_texts(40, seed=2, paragraphs=1)]
    mixed, out = write_lines(tmp_path / "mixed.jsonl", texts), tmp_path / "mixed"
    prepare(text_settings([mixed], heldout_fraction=0.5, decontaminate=False), out)
    in_train = decoded(out, "train")
    assert 0 < len(in_train) < len(texts)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).to_str() == train_bpe(in_train, 300).to_str()


@pytest.mark.parametrize(("words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_chooses_the_type(tmp_path, words, dtype):
    vocabulary = {EOS_TOKEN: 0} | {f"w{i}": i for i in range(1, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    files = two_files(tmp_path, [f"w{words - 1} w5"], ["w7"])
    manifest = prepare(text_settings(*files, tokenizer=str(tmp_path / "words.json")), tmp_path / "out")
    assert (manifest.dtype, manifest.vocab_size) == (dtype, words)
    assert np.fromfile(tmp_path / "out" / "train-00000.npy", dtype=dtype).tolist() == [words - 1, 5, 0]


def test_docs_of_a_few_packages(tmp_path):
    from rich.console import Console

    settings = PrepareSettings("docs", packages=("rich", "safetensors"), vocab_size=400)
    manifest = prepare(settings, tmp_path / "out")
    assert sorted(manifest.settings["packages"]) == ["rich", "safetensors"]
    texts = "\n".join(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "heldout"))
    assert " ".join(str(Console.print.__doc__).split()) in " ".join(texts.split())


# --- runs that stop, and those that find something ---


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_failed_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch, workers):
    """An input vanishes between two stages, while a worker has left a file half written."""
    urls, out = [f"https://{number % 9}.org" for number in range(30)], tmp_path / "out"
    files = [write_lines(tmp_path / f"{i}.jsonl.gz", some_texts(30, i), urls) for i in range(4)]
    settings = text_settings(files, heldout_fraction=0.2)
    real, gone = prepare_module.Encoder, Path(files[2])

    def vanish(*arguments):
        (out / ".train-00002.npy.tmp-here-1").touch()
        gone.rename(tmp_path / "away")
        return real(*arguments)

    with monkeypatch.context() as patch, refused(r"2\.jsonl\.gz cannot be read.*put the file back"):
        patch.setattr(prepare_module, "Encoder", vanish)
        prepare(settings, out, workers=workers)
    assert not [*out.glob(".*.tmp-*"), *out.glob("manifest.json")]
    (tmp_path / "away").rename(gone)
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.npy") if workers == 1}
    assert workers == 2 or sorted(path.name for path in finished) == ["train-00000.npy", "train-00001.npy"]
    with refused(r"other settings \(seed\)"):
        prepare(replace(settings, seed=5), out)
    prepare(settings, out, workers=1)
    assert_same_as_one_go(settings, out)
    assert finished == {path: path.stat().st_mtime_ns for path in finished}


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_its_lock_is_taken_over(tmp_path):
    files, out = some_files(tmp_path / "text", files=8, words=2000), tmp_path / "out"
    command = bpe_command(files, out, "--workers", "2", "--tokenizer-sample-mb", "0.1")
    with started(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + SECONDS
        while not (out / ".partial" / "train-00000.json").is_file():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "no file is finished"
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(SECONDS) == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while _session_is_alive(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _session_is_alive(process.pid)
    assert (out / ".lock").is_file() and not (out / "manifest.json").exists()
    prepare(text_settings(files, tokenizer_sample_mb=0.1), out, workers=2)


def _session_is_alive(session: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, 0)
        return True
    return False


def test_a_finished_corpus_is_left_alone_and_not_read_again(tmp_path, monkeypatch):
    """The manifest of one of before has no entries of what was not there yet."""
    settings, out = text_settings(some_files(tmp_path / "text"), near_copy_tokens=0), tmp_path / "out"
    first = prepare(settings, out)
    assert "near_cop" not in (out / "manifest.json").read_text() and not (out / ".partial").exists()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("olmo_sparsity.data.sources.read_rows", None)
        patch.setattr(prepare_module, "folder_lock", None)  # it may be on a disk that cannot be written to
        again = prepare(settings, out)
    assert again == first
    for changed in ({"vocab_size": 280}, {"near_copy_tokens": 20}):
        with refused(rf"other settings \({next(iter(changed))}\).*remove it"):
            prepare(replace(settings, **changed), out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    path = out / "train-00001.npy"
    path.write_bytes(path.read_bytes()[:-2])
    with refused("is truncated or was changed"):
        prepare(settings, out)
    (out / "manifest.json").unlink()
    with refused("no record of how it was made"):
        prepare(settings, out)


def test_two_processes_at_once_make_one_corpus(tmp_path):
    files, out = some_files(tmp_path / "text", words=300), tmp_path / "out"
    pipes = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with started(bpe_command(files, out), **pipes) as one, started(bpe_command(files, out), **pipes) as other:
        said = [errors(process.communicate(timeout=SECONDS)[1]) for process in (one, other)]
    codes = [one.returncode, other.returncode]
    assert 0 in codes
    for code, lines in zip(codes, said, strict=True):
        assert (code, lines) == (0, []) or (code == 1 and len(lines) == 1 and "is in use" in lines[0])
    assert_same_as_one_go(text_settings(files), out)


# --- shards ---


@pytest.mark.parametrize("count", slow_but([2, 3, 7], 3))
def test_merged_shards_have_the_bytes_of_one_go(tmp_path, count):
    """The last command makes what is missing, here the first shard, too."""
    settings, out = sharded_settings(tmp_path, files=5), tmp_path / "out"
    for i in range(count, 1, -1):
        assert prepare(settings, out, workers=1, shard=(i, count)) is None
    made = {path: path.stat().st_mtime_ns for path in out.glob("train-*.npy")}
    assert sorted(path.name for path in made) == [f"train-0000{i}.npy" for i in range(5) if i % count]
    prepare(settings, out, workers=1, shard=(count, count))
    with refused(r"other settings \(seed\)"):
        prepare(replace(settings, seed=1), out, workers=1, shard=(1, count))
    merged = prepare(settings, out, workers=1)
    assert_same_as_one_go(settings, out)
    assert made == {path: path.stat().st_mtime_ns for path in made}
    assert len(merged.splits["train"]) == 5 and merged.settings["decontamination"]["changed_documents"] == 5


def test_shards_at_the_same_time(tmp_path):
    """Separate processes that start together in a folder that is not there yet."""
    settings = sharded_settings(tmp_path, files=5)
    command = [sys.executable, str(SCRIPT), "text", "--files", *settings.files, "--workers", "1"]
    command += ["--heldout-files", *settings.heldout_files, "--tokenizer", "olmo", "--out", tmp_path / "out"]
    shards = [[*command, "--shard", f"{i}/3"] for i in (1, 2, 3)]
    with contextlib.ExitStack() as stack:
        options = {"env": ENVIRONMENT, "stdout": subprocess.DEVNULL}
        tasks = [stack.enter_context(started(command, **options)) for command in shards]
        assert [task.wait(SECONDS) for task in tasks] == [0, 0, 0]
    prepare(settings, tmp_path / "out", workers=1)
    assert_same_as_one_go(settings, tmp_path / "out")


def test_what_shards_cannot_do_is_refused(tmp_path):
    settings, out = sharded_settings(tmp_path, files=1), tmp_path / "out"
    for changes in ({"heldout_files": ()}, {"tokenizer": "bpe"}):
        with refused("pass --tokenizer olmo, .*and name --heldout-files"):
            prepare(replace(settings, **changes), out, shard=(1, 2))
        assert not out.exists()


# --- bad input ---


def test_bad_input_leaves_nothing_that_looks_whole(tmp_path):
    settings, out = sharded_settings(tmp_path), tmp_path / "out"
    Path(settings.files[3]).write_bytes(Path(settings.files[3]).read_bytes()[:-30])
    good, empty, copy = (
        [write_lines(tmp_path / f"{name}.jsonl", texts)]
        for name, texts in (("good", some_texts(30, 1)), ("empty", ["", " "]), ("copy", some_texts(3, 1)))
    )
    cases = {
        "a file is named twice": text_settings(good, good),
        "no training documents": text_settings(empty, good),
        "no document is held out": text_settings(good, heldout_fraction=1e-9),
        "every held-out paragraph also stands in the training text": text_settings(good, copy),
        r"3\.jsonl\.gz:\d+ cannot be read": settings,
    }
    for message, bad in cases.items():
        with refused(message):
            prepare(bad, out, workers=2)
        assert not (out / "manifest.json").exists(), message
        shutil.rmtree(out, ignore_errors=True)  # files before the bad one are finished
