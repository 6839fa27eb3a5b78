"""Text to token files: nothing lost, nothing shared between splits, nothing half-written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.tokenizers import EOS_TOKEN, train_bpe
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles, Verified
from tests.support.corpora import (
    SCRIPT,
    arguments,
    assert_same_as_one_go,
    bpe_command,
    c4_folder,
    c4_texts,
    contents,
    cut,
    errors,
    needs_c4_sample,
    run_main,
    sharded_settings,
    some_files,
    some_texts,
    stop_before_third_file,
    text_settings,
    write_lines,
)
from tests.support.refusals import refused


def decoded(folder: Path, split: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = Verified(folder.parent / "verified").open_split(folder, split)
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


def test_workers_change_nothing(tmp_path):
    settings = text_settings(some_files(tmp_path / "text"))
    prepare(settings, tmp_path / "out", workers=2)
    assert_same_as_one_go(settings, tmp_path / "out")
    assert len(CorpusManifest.load(tmp_path / "out").splits["train"]) == 4


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
    prepared = prepare(text_settings(files, [write_lines(tmp_path / "h.jsonl", heldout)]), out, workers=2)
    in_train = {paragraph for text in train for paragraph in normal(text)}
    before = [normal(text) for text in heldout]
    after = [[p for p in paragraphs if p not in in_train] for paragraphs in before]
    assert [normal(text) for text in decoded(out, "heldout")] == [kept for kept in after if kept]
    lost = [len(old) - len(new) for old, new in zip(before, after, strict=True)]
    assert prepared.manifest.settings["decontamination"] == {
        "paragraphs": sum(map(len, before)),
        "removed_paragraphs": sum(lost),
        "changed_documents": sum(bool(new and number) for new, number in zip(after, lost, strict=True)),
        "dropped_documents": sum(not new for new in after),
    }
    assert not all(after) and any(after)


def test_short_paragraphs_can_be_left_alone(tmp_path):
    shared = "Notes\n\na long paragraph that is in both"
    files = two_files(tmp_path, [shared], [f"{shared}\n\nmine"])
    for limit, expected in ((0, "mine"), (10, "Notes\n\nmine")):
        prepare(text_settings(*files, decontaminate_min_characters=limit), tmp_path / f"out{limit}")
        assert decoded(tmp_path / f"out{limit}", "heldout") == [expected]


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
    manifest = prepare(
        text_settings(*files, tokenizer=str(tmp_path / "words.json")), tmp_path / "out"
    ).manifest
    assert (manifest.dtype, manifest.vocab_size) == (dtype, words)
    assert np.fromfile(tmp_path / "out" / "train-00000.npy", dtype=dtype).tolist() == [words - 1, 5, 0]


@needs_c4_sample
def test_c4_from_a_local_copy_of_its_folder(tmp_path):
    dataset = str(c4_folder(tmp_path / "c4"))
    manifest = prepare(PrepareSettings("c4", dataset=dataset), tmp_path / "out").manifest
    found = manifest.corpus, manifest.vocab_size, manifest.eos_token_id, manifest.dtype
    assert found == ("c4", 50280, 50279, "uint16")
    assert decoded(tmp_path / "out", "train") == c4_texts(0) + c4_texts(1)
    assert decoded(tmp_path / "out", "heldout") == c4_texts(2)
    limited = PrepareSettings("c4", dataset=dataset, limit_tokens=900, heldout_documents=2)
    prepare(limited, tmp_path / "limited")
    files = TokenFiles.of_split(tmp_path / "limited", "train")
    *lengths, last = (end + 1 - start for _, start, end in files.document_bounds.tolist())
    assert sum(lengths) < 900 <= sum(lengths) + last == files.num_tokens
    assert decoded(tmp_path / "limited", "heldout") == c4_texts(2)[:2]


def test_docs_of_a_few_packages(tmp_path):
    from rich.console import Console

    settings = PrepareSettings("docs", packages=("rich", "safetensors"), vocab_size=400)
    manifest = prepare(settings, tmp_path / "out").manifest
    assert sorted(manifest.settings["packages"]) == ["rich", "safetensors"]
    texts = "\n".join(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "heldout"))
    assert " ".join(str(Console.print.__doc__).split()) in " ".join(texts.split())


# --- runs that stop, and those that find something ---


def test_a_run_that_failed_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    stop_before_third_file(monkeypatch, out)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, out, workers=1)
    assert not list(out.glob(".*.tmp-*"))
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert sorted(path.name for path in finished) == ["train-00000.npy", "train-00001.npy"]
    with refused(r"other settings \(seed\)"):
        prepare(text_settings(settings.files, seed=5), out)
    monkeypatch.undo()
    prepared = prepare(settings, out, workers=1)
    assert_same_as_one_go(settings, out)
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    assert 0 < prepared.tokens_written < sum(file.tokens for file in prepared.manifest.splits["train"])


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path):
    files, out = some_files(tmp_path / "text", files=8, words=2000), tmp_path / "out"
    command = bpe_command(files, out, "--workers", "2", "--tokenizer-sample-mb", "0.1")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while not (out / ".partial" / "train-00000.json").is_file():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while _session_is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _session_is_alive(process.pid)
    assert (out / ".lock").is_file()  # which the next run takes over
    first = (out / "train-00000.npy").stat().st_mtime_ns
    assert not (out / "manifest.json").exists()
    settings = text_settings(files, tokenizer_sample_mb=0.1)
    prepare(settings, out, workers=2)
    assert_same_as_one_go(settings, out)
    assert (out / "train-00000.npy").stat().st_mtime_ns == first


def _session_is_alive(session: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, 0)
        return True
    return False


def test_a_finished_corpus_is_left_alone_and_not_read_again(tmp_path, monkeypatch):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    first = prepare(settings, out)
    assert not (out / ".partial").exists()
    (out / ".partial").mkdir()  # as a run leaves it that is killed at its very end
    prepare(settings, out)
    assert not (out / ".partial").exists()
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr("olmo_sparsity.data.sources.TextFiles.documents", None)
    again = prepare(settings, out)
    assert (again.manifest, again.tokens_written) == (first.manifest, 0)
    monkeypatch.undo()
    with refused(r"other settings \(vocab_size\).*--overwrite"):
        prepare(text_settings(settings.files, vocab_size=280), out)
    with refused(r"other settings \(near_copy_tokens\)"):
        prepare(text_settings(settings.files, near_copy_tokens=0), out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    prepare(text_settings(settings.files[:2], vocab_size=280), out, overwrite=True)
    assert sorted(contents(out, "*.npy")) == ["heldout-00000.npy", "train-00000.npy", "train-00001.npy"]


def test_a_corpus_with_groups_is_not_taken_for_one_without_finished_or_not(tmp_path, monkeypatch):
    lines = [{"text": text, "book": row % 8} for row, text in enumerate(some_texts(80, seed=1))]
    file = tmp_path / "books.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    grouped, out = text_settings([str(file)], heldout_fraction=0.2, group_field="book"), tmp_path / "out"
    without = replace(grouped, group_field=None)
    prepare(grouped, out)
    with refused(r"other settings \(group_field\)"):
        prepare(without, out)
    with monkeypatch.context() as patch:  # stopped once the held-out documents are chosen
        patch.setattr("olmo_sparsity.data.prepare.train_bpe", None)
        with pytest.raises(TypeError):
            prepare(grouped, tmp_path / "part")
    with refused(r"other settings \(group_field\)"):
        prepare(without, tmp_path / "part")
    prepare(grouped, tmp_path / "part")
    assert contents(tmp_path / "part") == contents(out)


def test_a_damaged_corpus_is_made_again_and_a_foreign_folder_refused(tmp_path):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    prepare(settings, out)
    whole = contents(out)
    (out / "train-00001.npy").write_bytes(whole["train-00001.npy"][:-2])
    prepare(settings, out)
    assert contents(out) == whole
    (out / "manifest.json").unlink()
    with refused("no record of how it was made"):
        prepare(settings, out)


@pytest.mark.parametrize("left", [[], [".request.json.tmp-0a1b2c"]])
def test_a_run_that_was_stopped_before_its_request_was_written_is_begun_anew(left, tmp_path):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    for name in left:
        (out / ".partial" / name).write_text("{")
    assert prepare(settings, out).tokens_written > 0


# --- the command ---


def bad_inputs(folder: Path) -> dict[str, list[str]]:
    """What is said, and the arguments that it is said of."""
    good = write_lines(folder / "good.jsonl", some_texts(30, seed=1))
    broken = write_lines(folder / "broken.jsonl", some_texts(30, seed=2))
    Path(broken).write_text(Path(broken).read_text() + "{oops\n")
    empty = write_lines(folder / "empty.jsonl", ["", " "])
    copy = write_lines(folder / "copy.jsonl", some_texts(3, seed=1))
    truncated = cut(write_lines(folder / "cut.jsonl.gz", some_texts(30, seed=1)))
    text = ["text", "--vocab-size", "300", "--workers", "1", "--files"]
    return {
        "unknown source 'tweets'; choose one of docs, text, c4": ["tweets"],
        "name them with --files": ["text"],
        "at most 1,000,000": ["text", "--vocab-size", str(10**12), "--files", good],
        "none.jsonl is missing": [*text, good, str(folder / "none.jsonl")],
        "unknown kind": [*text, str(SCRIPT)],
        "is named twice": [*text, good, "--heldout-files", good],
        "broken.jsonl:31 is not JSON": [*text, good, broken],
        "cut.jsonl.gz is truncated": [*text, good, truncated],
        "the input has no documents": [*text, empty],
        "no training documents": [*text, empty, "--heldout-files", good],
        "none of 30 documents": [*text, good, "--heldout-fraction", "1e-9"],
        "every held-out paragraph also stands in the training text": [*text, good, "--heldout-files", copy],
        "--files is not for source docs": ["docs", "--files", good],
        "--vocab-size 9 must be at least": ["text", "--vocab-size", "9", "--files", good],
        "unknown tokenizer 'gpt9'": [*text, good, "--tokenizer", "gpt9"],
        "no token <x>": [*text, good, "--tokenizer", "olmo", "--eos-token", "<x>"],
    }


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    settings = sharded_settings(tmp_path)
    cut(settings.files[3])
    in_a_worker = arguments(settings, tmp_path / "out", "--workers", "2")
    for message, given in {**bad_inputs(tmp_path), "3.jsonl.gz is truncated": in_a_worker}.items():
        assert run_main(*given, "--out", str(tmp_path / "out")) == 1, message
        [line] = errors(capsys.readouterr().err)
        assert line.startswith("error: ") and message in line
        assert not (tmp_path / "out").exists(), message


def test_the_script_makes_a_corpus_and_says_what_it_holds(tmp_path, capsys):
    given = bpe_command(some_files(tmp_path / "text"), tmp_path / "out")[2:]
    assert run_main(*given) == 0
    said = capsys.readouterr().out
    train = CorpusManifest.load(tmp_path / "out").splits["train"]
    assert f"train: {sum(file.documents for file in train)} documents" in said and "tokens/s" in said
    assert run_main(*given) == 0
    assert "ready already" in capsys.readouterr().out
