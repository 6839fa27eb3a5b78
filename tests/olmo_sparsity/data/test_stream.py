"""Training on streamed text: the windows of the prepared corpus, shared and resumed exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from olmo_sparsity.checkpoint import WEIGHTS, checkpoints
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.data import stream
from olmo_sparsity.data.batches import Batch, open_training_data
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.sources import PrepareSettings, TextFiles
from olmo_sparsity.data.stream import MARKS_NAME, StreamedData
from olmo_sparsity.positions import SchemeOptions, position_ids
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.support.corpora import c4_folder, needs_c4_sample, some_files, some_texts, write_lines
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.tiny import write_yaml

OLMO = "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
LENGTH = 32


def write_stream_yaml(folder: Path, section: dict, **changes) -> Path:
    path = write_yaml(folder, folder, **changes)
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(values | {"corpus": {"stream": section}}))
    return path


def stream_config(folder: Path, *overrides: str, **stream_changes) -> Config:
    """A tiny model over seven files of text, some long enough for many windows; BPE of 300 ids."""
    if not (folder / "prepared").exists():
        files = some_files(folder / "text", files=7, words=30)
        heldout = write_lines(folder / "h.jsonl", some_texts(3, seed=80))
        prepare(PrepareSettings("text", files, [heldout], vocab_size=300), folder / "prepared", workers=1)
    section = {"source": "text", "files": sorted(map(str, (folder / "text").iterdir())), "readers": 4}
    path = write_stream_yaml(
        folder,
        section | stream_changes,
        model={"vocab_size": 300, "embedding_size": 384},
        tokenizer={"identifier": str(folder / "prepared" / "tokenizer.json")},
    )
    return load_config(path, overrides)


@pytest.fixture
def many_marks(monkeypatch):
    monkeypatch.setattr(stream, "MARK_TOKENS", 500)


def take(config: Config, first_step: int, steps: int, **share) -> list[Batch]:
    return list(islice(open_training_data(config, **share).batches(first_step), steps))


def same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, vars(b)[name]) for name, x in vars(a).items() if x is not None)


def windows_of(file: Path, dtype: str = "uint16") -> list[tuple[int, ...]]:
    ids = np.fromfile(file, dtype=dtype)
    return [tuple(row) for row in ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH).tolist()]


def test_an_epoch_has_the_windows_of_the_prepared_corpus(tmp_path):
    """One reader reads every window once, file by file in order, before it reads one again."""
    config = stream_config(tmp_path, "--global_train_batch_size=1", readers=1)
    files = [windows_of(path) for path in sorted((tmp_path / "prepared").glob("train-*.npy"))]
    number = sum(map(len, files))
    for epoch in range(2):
        read = [tuple(batch.input_ids[0].tolist()) for batch in take(config, epoch * number, number)]
        order = sorted(range(len(files)), key=lambda i: read.index(files[i][0]))
        assert read == [window for i in order for window in files[i]]
        assert order != list(range(len(files)))


def test_windows_come_from_each_reader_in_turn_with_ids_of_their_number(tmp_path):
    config = stream_config(tmp_path)
    files = [set(windows_of(path)) for path in sorted((tmp_path / "prepared").glob("train-*.npy"))]
    rows = [
        row for batch in take(config, 0, 5) for row in zip(batch.input_ids, batch.position_ids, strict=True)
    ]
    sources = [[i for i, file in enumerate(files) if tuple(ids.tolist()) in file] for ids, _ in rows]
    assert all(len({*map(tuple, sources[first::4])}) == 1 for first in range(4))
    assert len({*map(tuple, sources[:4])}) == 4
    for index, (_, ids) in enumerate(rows):
        expected = position_ids("pose", LENGTH, SchemeOptions(64), seed=config.seed, epoch=0, index=index)
        assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("readers", [3, 4, 16])
def test_processes_share_each_global_batch(tmp_path, world_size, readers):
    config = stream_config(tmp_path, readers=readers)
    whole = take(config, 0, 40)
    shares = [take(config, 0, 40, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, batch in enumerate(whole):
        for rank in range(world_size):
            part = shares[rank][step]
            assert torch.equal(part.input_ids, batch.input_ids[rank::world_size])
            assert torch.equal(part.position_ids, batch.position_ids[rank::world_size])


def test_any_step_is_resumed_on_any_number_of_processes(tmp_path, many_marks):
    """Past the end of files and of a whole pass over the text, with the marks of the run and without any."""
    config = stream_config(tmp_path)
    whole = take(config, 0, 230)
    marks = list((tmp_path / "run" / MARKS_NAME).iterdir())
    assert sum(len(path.read_text().splitlines()) for path in marks) > 30
    bare = replace(config, save_folder=str(tmp_path / "bare"))
    for step in (1, 17, 100, 163, 228):
        for settings in (config, bare):
            assert all(map(same, take(settings, step, 2), whole[step:]))
    parts = [take(config, 201, 2, rank=rank, world_size=2) for rank in range(2)]
    assert torch.equal(parts[1][1].input_ids, whole[202].input_ids[1::2])


def test_a_resumed_run_does_not_tokenize_from_the_start(tmp_path, many_marks, monkeypatch):
    config = stream_config(tmp_path)
    whole = take(config, 0, 200)
    encoded: list[int] = []
    original = stream.encode_documents

    def counting(texts, encoding):
        for text, ids in original(texts, encoding):
            encoded.append(len(ids))
            yield text, ids

    monkeypatch.setattr(stream, "encode_documents", counting)
    monkeypatch.setattr("olmo_sparsity.data.encode.BATCH_CHARACTERS", 1000)
    assert same(take(config, 199, 1)[0], whole[199])
    assert sum(encoded) < 4 * 4 * 500 < 199 * 4 * LENGTH


ODD_MARKS = [b"\xff\xfe", b"[" * 100_000, b"3", b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}']


def test_damaged_marks_and_those_of_other_text_are_passed_over(tmp_path, many_marks):
    config = stream_config(tmp_path)
    whole = take(config, 0, 60)
    [path] = (tmp_path / "run" / MARKS_NAME).iterdir()
    lines = path.read_bytes().strip().splitlines()
    marks = [json.loads(line) for line in lines]
    wrong = [json.dumps([unit, documents, 7, *rest]).encode() for unit, documents, _, *rest in marks]
    of_other_text = [json.dumps([*mark[:2], 7, False, "0" * 16]).encode() for mark in marks]
    torn = [*lines[:10], *wrong, *of_other_text, lines[10][:-5]]
    changed = [line.replace(b"1", b"2") for line in lines]
    for damaged in (torn, [*ODD_MARKS, *lines], ODD_MARKS, changed):
        path.write_bytes(b"\n".join(damaged))
        assert all(map(same, take(config, 50, 10), whole[50:]))
        assert damaged is not torn or path.read_bytes().splitlines()[-1] in lines


@pytest.mark.parametrize("workers", slow_but([0, 2], 0))
def test_text_that_vanishes_is_one_line(tmp_path, workers):
    config = stream_config(tmp_path)
    config = replace(config, data=replace(config.data, num_workers=workers))
    batches = open_training_data(config).batches(0)
    for path in config.corpus.stream.files:
        Path(path).unlink()
    with refused("cannot be read .*put it back"):
        next(batches)


@pytest.mark.parametrize("workers", slow_but([1, 2], 1))
def test_loader_workers_change_nothing(tmp_path, workers):
    config = stream_config(tmp_path)
    with_workers = replace(config, data=replace(config.data, num_workers=workers, prefetch_factor=2))
    whole = take(config, 0, 9)
    assert all(map(same, take(with_workers, 0, 6), whole))
    assert all(map(same, take(with_workers, 7, 2), whole[7:]))


def test_content_skips_as_in_the_prepared_corpus(tmp_path):
    """With one reader and one file, window k of both is the same text; here it skips with the ids."""
    text = write_lines(tmp_path / "long.jsonl", some_texts(3, seed=4, words=800))
    overrides = ("--global_train_batch_size=1", "--positions.content=skip", "--positions.target_length=128")
    config = stream_config(tmp_path, *overrides, files=[text], readers=1)
    heldout = str(tmp_path / "h.jsonl")
    tokenizer = str(tmp_path / "prepared" / "tokenizer.json")
    prepare(PrepareSettings("text", [text], [heldout], tokenizer=tokenizer), tmp_path / "one", workers=1)
    ids = np.fromfile(tmp_path / "one" / "train-00000.npy", dtype=np.uint16).astype(np.int64)
    skipped = 0
    for index, batch in enumerate(take(config, 0, len(ids) // LENGTH)):
        start = index * LENGTH
        stretch = ids[start : start + 128]
        fits = len(stretch) == 128 and not (stretch == 0).any()
        offsets = batch.position_ids[0].numpy() if fits else np.arange(LENGTH)
        assert np.array_equal(batch.input_ids[0].numpy(), ids[start + offsets])
        skipped += fits
    assert skipped > 20


@needs_c4_sample
def test_c4_streams_from_a_local_copy(tmp_path):
    dataset = str(c4_folder(tmp_path / "c4"))
    prepare(PrepareSettings("c4", dataset=dataset), tmp_path / "prepared", workers=1)
    path = write_stream_yaml(
        tmp_path,
        {"dataset": dataset},
        model={"vocab_size": 50280, "embedding_size": 50304, "eos_token_id": 50279, "pad_token_id": 1},
        tokenizer={"identifier": OLMO},
        global_train_batch_size=2,
    )
    config = load_config(path)
    files = [windows_of(path) for path in sorted((tmp_path / "prepared").glob("train-*.npy"))]
    steps = min(map(len, files))
    batches = take(config, 0, steps)
    readers = [[tuple(batch.input_ids[row].tolist()) for batch in batches] for row in range(2)]
    assert sorted(readers) == sorted(file[:steps] for file in files)
    assert same(take(config, steps - 2, 1)[0], batches[steps - 2])


def test_a_streamed_run_resumed_equals_one_never_stopped(tmp_path, many_marks):
    torch.set_num_threads(1)
    config = stream_config(tmp_path, "--max_duration=12", "--save_interval=5")
    train(replace(config, save_folder=str(tmp_path / "whole")))
    for stop in (4, 7, None):
        train(replace(config, save_folder=str(tmp_path / "parts"), stop_at=stop), resume=True)
    ends = [load_file(checkpoints(tmp_path / run)[-1] / WEIGHTS) for run in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_tokenizer_whose_end_token_has_an_unusual_name(tmp_path):
    stream_config(tmp_path)
    tokenizer = tmp_path / "prepared" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "<END>"))
    config = stream_config(tmp_path)
    assert len(take(config, 0, 2)) == 2
    with refused("has no token 299999; set --model.eos_token_id"):
        take(replace(config, model=replace(config.model, eos_token_id=299_999)), 0, 1)


def test_other_text_under_the_same_name_is_refused_on_resume(tmp_path):
    config = stream_config(tmp_path, "--max_duration=4")
    train(replace(config, stop_at=2))
    write_lines(tmp_path / "text" / "3.jsonl.gz", some_texts(40, seed=33))
    with refused("the text it is trained on was"):
        train(config, resume=True)
    train(replace(config, save_overwrite=True))  # a fresh start is free to


def test_a_streamed_run_goes_on_where_its_text_was_moved(tmp_path):
    config = stream_config(tmp_path, "--max_duration=4")
    train(replace(config, stop_at=2))
    moved = (tmp_path / "text").rename(tmp_path / "moved")
    stream = replace(config.corpus.stream, files=sorted(map(str, moved.iterdir())))
    train(replace(config, corpus=replace(config.corpus, stream=stream)), resume=True)


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        (["--data.paths=[a.npy]"], {}, "corpus.stream: excludes data.paths"),
        (["--corpus.path=x"], {}, "corpus.stream: excludes corpus.path"),
        ([], {"source": "web"}, "corpus.stream.source: 'web' is unknown; choose c4, text"),
        ([], {"source": "c4"}, "corpus.stream.files: 7 files with source: c4; remove them"),
        ([], {"files": []}, "corpus.stream.files: 0 files with source: text; name them"),
        ([], {"readers": 0}, "corpus.stream.readers: 0 is not above 0"),
        ([], {"reader": 4}, "did you mean corpus.stream.readers"),
        (["--tokenizer.identifier=null"], {}, "tokenizer.identifier: is missing"),
        (["--max_duration=2ep"], {}, "a stream has no epochs of known length"),
    ],
)
def test_configs_that_make_no_sense_are_refused(tmp_path, overrides, changes, message):
    with pytest.raises(UserError) as error:
        stream_config(tmp_path, *overrides, **changes)
    assert message in str(error.value)


def test_bad_text_is_refused_in_one_line(tmp_path):
    config = stream_config(tmp_path)
    wrong = replace(config, model=replace(config.model, vocab_size=299))
    with refused("has vocab_size 300, the model has 299"):
        open_training_data(wrong)
    with refused("multiple of 3"):
        open_training_data(config, world_size=3)
    Path(config.corpus.stream.files[2]).write_bytes(b"no gzip")
    for workers in (0, 1):
        data = replace(config.data, num_workers=workers, prefetch_factor=2)
        with refused(r"2\.jsonl\.gz is truncated or damaged"):
            take(replace(config, data=data), 0, 300)
    Path(config.corpus.stream.files[2]).unlink()
    with refused(r"2\.jsonl\.gz is missing"):
        open_training_data(config)
    short = write_lines(tmp_path / "short.jsonl", ["word"])
    with refused("has no window of 32 tokens"):
        take(stream_config(tmp_path, files=[short]), 0, 1)


def test_work_done_twice_is_warned_of(tmp_path, caplog):
    config = stream_config(tmp_path, readers=4)
    open_training_data(config, world_size=4)
    assert not caplog.records
    StreamedData(config, world_size=4, rank=1)
    open_training_data(replace(config, data=replace(config.data, num_workers=2)), world_size=4)
    assert "tokenized by 2 processes or workers" in caplog.text


def test_documents_are_read_once_a_pass(tmp_path, monkeypatch):
    """No reader opens a file that is not its own."""
    opened: list[str] = []
    original = TextFiles.documents
    monkeypatch.setattr(TextFiles, "documents", lambda self: opened.append(self.paths[0]) or original(self))
    config = stream_config(tmp_path)
    opened.clear()
    take(config, 0, 3, rank=1, world_size=4)
    assert len(opened) == 1


def test_a_stream_may_begin_with_a_later_epoch(tmp_path):
    config = stream_config(tmp_path)
    assert not any(map(same, take(config, 0, 4), take(replace(config, epoch=1), 0, 4)))
