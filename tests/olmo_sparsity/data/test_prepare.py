"""Text to token files: nothing lost, nothing shared between splits, nothing half-written."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from olmo_sparsity.data import encode
from olmo_sparsity.data import prepare as prepare_module
from olmo_sparsity.data import text as text_module
from olmo_sparsity.data.encode import Encoding, encode_documents
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings
from olmo_sparsity.data.tokenizers import EOS_TOKEN, train_bpe
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles
from olmo_sparsity.data.tokens import Verified
from olmo_sparsity.util.errors import UserError, run_script
from tests.olmo_sparsity.data.test_corpora import c4_folder, c4_texts, needs_c4_sample, write_lines

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
WORDS = [f"{a}{b}" for a in ("ba", "do", "ki", "mu", "ra", "sel") for b in ("n", "rt", "st", "l", "mp", "")]


def some_texts(count: int, seed: int, paragraphs: int = 3, words: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [
        "\n\n".join(" ".join(draw.choices(WORDS, k=words)) for _ in range(paragraphs)) for _ in range(count)
    ]


def some_files(folder: Path, files: int = 4, **options) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [write_lines(folder / f"{i}.jsonl.gz", some_texts(30, i, **options)) for i in range(files)]


def text_settings(files, heldout_files=(), **changes) -> PrepareSettings:
    return PrepareSettings("text", files, heldout_files, **({"vocab_size": 300} | changes))


def decoded(folder: Path, split: str) -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    files = Verified(folder.parent / "verified").open_split(folder, split)
    return [tokenizer.decode(ids.tolist()) for ids in files.documents()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_comes_back_and_eos_only_ends_it(tmp_path):
    texts = [
        *some_texts(20, seed=1),
        f"spelt {EOS_TOKEN} out",
        EOS_TOKEN * 2 + "x",
        "naïve \U0001f600\r\n  end ",
    ]
    train, heldout = (
        write_lines(tmp_path / "t.jsonl", texts),
        write_lines(tmp_path / "h.jsonl", ["other text"]),
    )
    prepare(text_settings([train], [heldout]), tmp_path / "out")
    manifest = CorpusManifest.load(tmp_path / "out")
    assert decoded(tmp_path / "out", "train") == [text.replace(EOS_TOKEN, "") for text in texts]
    assert decoded(tmp_path / "out", "heldout") == ["other text"]
    ids = np.fromfile(tmp_path / "out" / "train-00000.npy", dtype=manifest.dtype)
    assert (
        np.count_nonzero(ids == manifest.eos_token_id) == manifest.splits["train"][0].documents == len(texts)
    )
    assert ids[-1] == manifest.eos_token_id
    assert sum(file.tokens for file in manifest.splits["train"]) == len(ids)


def test_documents_that_are_tokenized_in_pieces_have_the_same_ids(tmp_path, monkeypatch):
    texts = [" \n ".join(some_texts(1, seed, words=60)) + "\n\nfoo  bar" for seed in range(5)] + ["x" * 500]
    train_bpe(texts, 400).save(str(tmp_path / "tokenizer.json"))
    encoding = Encoding(str(tmp_path / "tokenizer.json"), 0, "uint16")
    whole = [ids.tolist() for _, ids in encode_documents(texts, encoding)]
    monkeypatch.setattr(text_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 170)
    assert len(list(encode._pieces(texts))) > 20
    assert [ids.tolist() for _, ids in encode_documents(texts, encoding)] == whole


def test_workers_change_nothing(tmp_path):
    files = some_files(tmp_path / "text")
    for workers in (1, 2):
        prepare(text_settings(files), tmp_path / f"out{workers}", workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    assert len(CorpusManifest.load(tmp_path / "out1").splits["train"]) == 4


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


def test_decontamination_equals_a_brute_force_comparison(tmp_path):
    draw = random.Random(5)
    pool = some_texts(60, seed=7, paragraphs=1)
    train = ["\n\n".join(draw.sample(pool[:40], 4)) for _ in range(30)]
    heldout = ["\n \n".join(draw.sample(pool, 4)).replace(" ", "  ", 3) for _ in range(30)] + [
        train[3],
        pool[59],
    ]
    files = [write_lines(tmp_path / f"{i}.jsonl", train[i::3]) for i in range(3)]
    out = tmp_path / "out"
    prepared = prepare(text_settings(files, [write_lines(tmp_path / "h.jsonl", heldout)]), out, workers=2)

    def normal(text):  # paragraphs one by one, without our code and without hashes
        paragraphs, lines = [], []
        for line in [*text.split("\n"), ""]:
            if line.strip():
                lines.append(line)
            elif lines:
                paragraphs.append(" ".join(" ".join(lines).split()))
                lines = []
        return paragraphs

    in_train = {paragraph for text in train for paragraph in normal(text)}
    expected = [[p for p in normal(text) if p not in in_train] for text in heldout]
    assert [normal(text) for text in decoded(out, "heldout")] == [kept for kept in expected if kept]
    assert prepared.manifest.settings["decontamination"] == {
        "paragraphs": sum(len(normal(text)) for text in heldout),
        "removed_paragraphs": sum(
            len(normal(t)) - len(kept) for t, kept in zip(heldout, expected, strict=True)
        ),
        "changed_documents": sum(
            0 < len(kept) < len(normal(t)) for t, kept in zip(heldout, expected, strict=True)
        ),
        "dropped_documents": sum(not kept for kept in expected),
    }
    assert not all(expected) and any(expected)


def test_short_paragraphs_can_be_left_alone(tmp_path):
    train = write_lines(tmp_path / "t.jsonl", ["Notes\n\na long paragraph that is in both"])
    heldout = write_lines(tmp_path / "h.jsonl", ["Notes\n\na long paragraph that is in both\n\nmine"])
    for limit, expected in ((0, "mine"), (10, "Notes\n\nmine")):
        out = tmp_path / f"out{limit}"
        prepare(text_settings([train], [heldout], decontaminate_min_characters=limit), out)
        assert decoded(out, "heldout") == [expected]


def test_a_run_that_failed_goes_on_and_ends_with_the_same_bytes(tmp_path, monkeypatch):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    prepare(settings, tmp_path / "whole", workers=1)

    def failing(job):
        if job.output.name == "train-00002.npy":
            (out / ".train-00002.npy.tmp-1").touch()  # what a worker leaves that is stopped in the middle
            raise KeyboardInterrupt
        return encode.encode_unit(job)

    monkeypatch.setattr(prepare_module, "encode_unit", failing)
    with pytest.raises(KeyboardInterrupt):
        prepare(settings, out, workers=1)
    assert not list(out.glob(".*.tmp-*"))
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert sorted(path.name for path in finished) == ["train-00000.npy", "train-00001.npy"]
    with pytest.raises(UserError, match=r"other settings \(seed\)"):
        prepare(text_settings(settings.files, seed=5), out)
    monkeypatch.undo()
    prepared = prepare(settings, out, workers=1)
    assert contents(out) == contents(tmp_path / "whole")
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    assert 0 < prepared.tokens_written < sum(file.tokens for file in prepared.manifest.splits["train"])


def test_a_killed_run_leaves_no_process_and_goes_on(tmp_path):
    files = some_files(tmp_path / "text", files=8, words=2000)
    out = tmp_path / "out"
    options = ["--vocab-size", "300", "--workers", "2", "--tokenizer-sample-mb", "0.1"]
    command = [sys.executable, str(SCRIPT), "text", "--files", *files, "--out", str(out), *options]
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
    first = (out / "train-00000.npy").stat().st_mtime_ns
    assert not (out / "manifest.json").exists()
    settings = text_settings(files, tokenizer_sample_mb=0.1)
    prepare(settings, out, workers=2)
    prepare(settings, tmp_path / "whole", workers=2)
    assert contents(out) == contents(tmp_path / "whole")
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
    with pytest.raises(UserError, match=r"other settings \(vocab_size\).*--overwrite"):
        prepare(text_settings(settings.files, vocab_size=280), out)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    prepare(text_settings(settings.files[:2], vocab_size=280), out, overwrite=True)
    assert sorted(path.name for path in out.glob("*.npy")) == [
        "heldout-00000.npy", "train-00000.npy", "train-00001.npy"
    ]  # fmt: skip


def test_a_damaged_corpus_is_made_again_and_a_foreign_folder_refused(tmp_path):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    prepare(settings, out)
    whole = contents(out)
    (out / "train-00001.npy").write_bytes(whole["train-00001.npy"][:-2])
    prepare(settings, out)
    assert contents(out) == whole
    (out / "manifest.json").unlink()
    with pytest.raises(UserError, match="no record of how it was made"):
        prepare(settings, out)


@pytest.mark.parametrize("left", [[], [".request.json.tmp-0a1b2c"]])
def test_a_run_that_was_stopped_before_its_request_was_written_is_begun_anew(left, tmp_path):
    settings, out = text_settings(some_files(tmp_path / "text")), tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    for name in left:
        (out / ".partial" / name).write_text("{")
    assert prepare(settings, out).tokens_written > 0


def test_the_tokenizer_is_trained_on_the_training_split_only(tmp_path):
    train = write_lines(tmp_path / "t.jsonl", some_texts(20, seed=1))
    made = []
    for number, secret in enumerate(["zyzzyva " * 50, "quokka " * 50]):
        out = tmp_path / f"out{number}"
        prepare(text_settings([train], [write_lines(tmp_path / f"h{number}.jsonl", [secret])]), out)
        made.append((out / "tokenizer.json").read_bytes())
    assert made[0] == made[1]
    texts = [f"{word} {word} {word}" for word in some_texts(40, seed=2, paragraphs=1)]
    mixed = write_lines(tmp_path / "mixed.jsonl", texts)
    prepare(text_settings([mixed], heldout_fraction=0.5, decontaminate=False), tmp_path / "mixed")
    in_train = decoded(tmp_path / "mixed", "train")
    assert 0 < len(in_train) < len(texts)
    assert (
        Tokenizer.from_file(str(tmp_path / "mixed" / "tokenizer.json")).to_str()
        == train_bpe(in_train, 300).to_str()
    )


@pytest.mark.parametrize(("words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_vocabulary_chooses_the_type(tmp_path, words, dtype):
    vocabulary = {EOS_TOKEN: 0} | {f"w{i}": i for i in range(1, words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    train = write_lines(tmp_path / "t.jsonl", [f"w{words - 1} w5"])
    heldout = write_lines(tmp_path / "h.jsonl", ["w7"])
    settings = text_settings([train], [heldout], tokenizer=str(tmp_path / "words.json"))
    manifest = prepare(settings, tmp_path / "out").manifest
    assert (manifest.dtype, manifest.vocab_size) == (dtype, words)
    assert np.fromfile(tmp_path / "out" / "train-00000.npy", dtype=dtype).tolist() == [words - 1, 5, 0]


@needs_c4_sample
def test_c4_from_a_local_copy_of_its_folder(tmp_path):
    dataset = str(c4_folder(tmp_path / "c4"))
    manifest = prepare(PrepareSettings("c4", dataset=dataset), tmp_path / "out").manifest
    assert (manifest.corpus, manifest.vocab_size, manifest.eos_token_id, manifest.dtype) == (
        "c4",
        50280,
        50279,
        "uint16",
    )
    assert decoded(tmp_path / "out", "train") == c4_texts(0) + c4_texts(1)
    assert decoded(tmp_path / "out", "heldout") == c4_texts(2)
    limited = PrepareSettings("c4", dataset=dataset, limit_tokens=900, heldout_documents=2)
    prepare(limited, tmp_path / "limited")
    files = TokenFiles.of_split(tmp_path / "limited", "train")
    *lengths, last = (len(ids) + 1 for ids in files.documents())
    assert sum(lengths) < 900 <= sum(lengths) + last == files.num_tokens
    assert decoded(tmp_path / "limited", "heldout") == c4_texts(2)[:2]


def test_docs_of_a_few_packages(tmp_path):
    settings = PrepareSettings("docs", packages=("rich", "safetensors"), vocab_size=400)
    manifest = prepare(settings, tmp_path / "out").manifest
    assert sorted(manifest.settings["packages"]) == ["rich", "safetensors"]
    train = "\n".join(decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "heldout"))
    from rich.console import Console

    assert " ".join(str(Console.print.__doc__).split()) in " ".join(train.split())


def run_main(*arguments: str) -> int:
    """The script's exit code, in this process."""
    script = importlib.import_module("analysis.cli.prepare_data")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_info:
        patch.setattr(sys, "argv", ["prepare_data.py", *arguments])
        run_script(script.main)
    return int(exit_info.value.code or 0)


def bad_inputs(folder: Path) -> dict[str, tuple[list[str], str]]:
    good = write_lines(folder / "good.jsonl", some_texts(30, seed=1))
    broken = write_lines(folder / "broken.jsonl", some_texts(30, seed=2))
    with open(broken, "a") as file:
        file.write("{oops\n")
    empty = write_lines(folder / "empty.jsonl", ["", " "])
    cut = folder / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(Path(good).read_bytes())[:-30])
    text = ["text", "--vocab-size", "300", "--workers", "1"]
    return {
        "unknown source": (["tweets"], "unknown source 'tweets'; choose one of docs, text, c4"),
        "no files": (["text"], "name them with --files"),
        "missing file": ([*text, "--files", good, str(folder / "none.jsonl")], "none.jsonl is missing"),
        "unknown kind": ([*text, "--files", str(SCRIPT)], "unknown kind"),
        "twice": ([*text, "--files", good, "--heldout-files", good], "is named twice"),
        "bad line": ([*text, "--files", good, broken], "broken.jsonl:31 is not JSON"),
        "truncated": ([*text, "--files", good, str(cut)], "cut.jsonl.gz is truncated"),
        "empty": ([*text, "--files", empty], "the input has no documents"),
        "empty training": ([*text, "--files", empty, "--heldout-files", good], "no training documents"),
        "nothing held out": ([*text, "--files", good, "--heldout-fraction", "1e-9"], "none of 30 documents"),
        "all contaminated": (
            [*text, "--files", good, "--heldout-files", write_lines(folder / "copy.jsonl", some_texts(3, seed=1))],
            "every held-out paragraph also stands in the training text",
        ),
        "wrong option": (["docs", "--files", good], "--files is not for source docs"),
        "bad numbers": ([*text[:2], "9", "--files", good], "--vocab-size 9 must be at least"),
        "bad tokenizer": ([*text, "--files", good, "--tokenizer", "gpt9"], "unknown tokenizer 'gpt9'"),
        "no eos": ([*text, "--files", good, "--tokenizer", "olmo", "--eos-token", "<x>"], "no token <x>"),
    }  # fmt: skip


def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys):
    for name, (arguments, message) in bad_inputs(tmp_path).items():
        code = run_main(*arguments, "--out", str(tmp_path / "out"))
        lines = [line for line in capsys.readouterr().err.splitlines() if " s left" not in line]
        assert (name, code, len(lines)) == (name, 1, 1), lines
        assert lines[0].startswith("error: ") and message in lines[0]
        assert not (tmp_path / "out").exists(), name


def test_an_error_in_a_worker_process_reaches_the_user(tmp_path, capsys):
    files = some_files(tmp_path / "text")
    cut = Path(files[3])
    cut.write_bytes(cut.read_bytes()[:-30])
    heldout = write_lines(tmp_path / "h.jsonl", ["some other text"])
    out = tmp_path / "out"
    arguments = [
        "text",
        "--files",
        *files,
        "--heldout-files",
        heldout,
        "--tokenizer",
        "olmo",
        "--workers",
        "2",
    ]
    assert run_main(*arguments, "--out", str(out)) == 1
    assert "3.jsonl.gz is truncated" in capsys.readouterr().err
    assert not out.exists()


def test_the_script_makes_a_corpus_and_says_what_it_holds(tmp_path, capsys):
    files = some_files(tmp_path / "text")
    arguments = ["text", "--files", *files, "--vocab-size", "300", "--out", str(tmp_path / "out")]
    assert run_main(*arguments) == 0
    said = capsys.readouterr().out
    train = CorpusManifest.load(tmp_path / "out").splits["train"]
    assert f"train: {sum(file.documents for file in train)} documents" in said
    assert "tokens/s" in said
    assert run_main(*arguments) == 0
    assert "ready already" in capsys.readouterr().out
