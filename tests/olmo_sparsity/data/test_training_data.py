"""Prepared token files at the start of training: verified, and OLMo's own taken as they are."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from olmo_sparsity.config.load import Config
from olmo_sparsity.data import tokens
from olmo_sparsity.data.build import open_training_data, verify_token_files
from olmo_sparsity.data.tokens import CorpusManifest, open_verified
from olmo_sparsity.data.windows import TextData
from olmo_sparsity.util.files import sha256_file
from tests.support import tiny
from tests.support.refusals import refused


def bare(config: Config, paths: list, dtype: str = "uint16") -> Config:
    """``config`` on token files without a manifest."""
    data = replace(config.data, paths=list(map(str, paths)), memmap_dtype=dtype)
    return replace(config, corpus=replace(config.corpus, path=None), data=data)


def test_a_changed_file_is_named_with_both_checksums(tmp_path):
    config = tiny.train_config(tmp_path)
    path = tmp_path / "corpus" / "train-00000.npy"
    before = sha256_file(path)
    verify_token_files(config)
    content = path.read_bytes()
    path.write_bytes(content[2:4] + content[:2] + content[4:])
    with refused(f"mismatch in {path}: its manifest says sha256 {before}.* the file has {sha256_file(path)}"):
        verify_token_files(config)
    verify_token_files(bare(config, [path]))
    with refused("checksum mismatch"):
        open_verified(tmp_path / "corpus", "train")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A corpus of four files that were written a while ago."""
    documents = tiny.random_documents(4, 90)
    folder = tiny.write_corpus(tmp_path / "corpus", {f"split-{i}": [documents[i]] for i in range(4)})
    manifest = CorpusManifest.load(folder)
    files = [file for files in manifest.splits.values() for file in files]
    replace(manifest, splits={"train": files}).save(folder)
    monkeypatch.setattr(tokens, "_TICK_NS", 10**7)
    time.sleep(0.03)
    return folder


@pytest.fixture
def hashed(monkeypatch):
    """The names of files, as they are hashed."""
    names = []

    def noted(path):
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(tokens, "sha256_file", noted)
    return names


def test_a_file_is_hashed_once_until_it_is_written(corpus, hashed):
    names = [file.name for file in CorpusManifest.load(corpus).splits["train"]]
    for again in (names, []):
        hashed.clear()
        open_verified(corpus, "train")
        assert sorted(hashed) == again
    path = corpus / names[1]
    path.write_bytes(path.read_bytes())
    hashed.clear()
    open_verified(corpus, "train")
    assert hashed == names[1:2]


def test_a_change_that_keeps_size_and_time_is_noticed(corpus):
    """As by a copy that keeps the time of the original."""
    path = corpus / "split-1-00000.npy"
    open_verified(corpus, "train")
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    for _ in range(2):  # what is wrong is not noted
        with refused(f"mismatch in {path}"):
            open_verified(corpus, "train")


def test_another_manifest_and_a_copied_corpus_are_verified_anew(corpus, hashed, tmp_path):
    open_verified(corpus, "train")
    shutil.copytree(corpus, tmp_path / "copy")  # keeps times of modification, and takes the notes along
    hashed.clear()
    open_verified(tmp_path / "copy", "train")
    assert len(hashed) == 4
    manifest = CorpusManifest.load(corpus)
    first, *others = manifest.splits["train"]
    replace(manifest, splits={"train": [replace(first, sha256="0" * 64), *others]}).save(corpus)
    with refused("its manifest says sha256 0000"):
        open_verified(corpus, "train")


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"split-0-00000.npy": 3}', b"\xff\xfe", b"{"])
def test_damaged_notes_are_made_anew(corpus, hashed, content):
    (corpus / tokens.VERIFIED_NAME).write_bytes(content)
    open_verified(corpus, "train")
    assert len(hashed) == 4
    hashed.clear()
    open_verified(corpus, "train")
    assert hashed == []


def test_a_corpus_that_may_only_be_read_is_verified_each_time(corpus, hashed, monkeypatch):
    monkeypatch.setattr(tokens, "write_json", Mock(side_effect=PermissionError))
    for _ in range(2):
        hashed.clear()
        open_verified(corpus, "train")
        assert len(hashed) == 4


def test_a_file_that_was_just_written_is_not_noted(corpus, hashed, monkeypatch):
    """Written again in the same moment it would have the same times."""
    monkeypatch.setattr(tokens, "_TICK_NS", 10**12)
    open_verified(corpus, "train")
    assert not (corpus / tokens.VERIFIED_NAME).exists()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_olmos_token_files_are_taken_as_they_are(tmp_path, dtype):
    """Several of them, cut anywhere: the windows of each file, none across two."""
    config = tiny.train_config(tmp_path)
    ids = np.random.default_rng(0).integers(0, 50, 1000).astype(dtype)
    paths = [tmp_path / f"part-{i}.npy" for i in range(3)]
    for path, part in zip(paths, np.split(ids, [333, 700]), strict=True):
        part.tofile(path)
    data = open_training_data(bare(config, paths, dtype))
    assert isinstance(data, TextData)
    files = [(0, 333), (333, 700), (700, 1000)]
    starts = [start for first, last in files for start in range(first, last - 31, 32)]
    expected = [ids[start : start + 32].tolist() for start in starts]
    assert [data.dataset[i]["input_ids"].tolist() for i in range(len(data.dataset))] == expected
    batch = next(data.batches(0))
    assert batch.input_ids.dtype == torch.int64
    with pytest.raises(IndexError):
        data.dataset[len(expected)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_file_with_the_header_of_numpy_is_refused(tmp_path, dtype):
    np.save(tmp_path / "saved.npy", np.arange(1000, dtype=np.uint32) % 50)
    with refused(r"was written by numpy\.save"):
        open_training_data(bare(tiny.train_config(tmp_path), [tmp_path / "saved.npy"], dtype))


def wide_ids(share: float, number: int = 20_000) -> np.ndarray:
    """Ids of a tokenizer of 100,278, a ``share`` of them above 65,535, none among the first 5,000."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 65_536, number)
    ids[5000:] = np.where(
        draw.random(number - 5000) < share, draw.integers(65_536, 100_278, number - 5000), ids[5000:]
    )
    return ids


@pytest.mark.parametrize(
    ("ids", "written", "read", "vocab_size", "message"),
    [
        (wide_ids(0.037), "uint32", "uint16", 65_536, "4 bytes, read as 2; set data.memmap_dtype: uint32"),
        (wide_ids(0.0) % 50, "uint32", "uint16", 50, "4 bytes, read as 2"),
        (wide_ids(0.037), "int64", "uint16", 65_536, "8 bytes, read as 2; .*write them anew"),
        (wide_ids(0.037), "int64", "uint32", 100_278, "8 bytes, read as 4; .*write them anew"),
        (wide_ids(0.0) % 10, "int64", "uint16", 10, "8 bytes, read as 2; .*write them anew"),
        (wide_ids(0.0) % 50_000, "uint16", "uint32", 50_000, "beyond the vocabulary of 50000"),
        (np.append(wide_ids(0.0), -1), "int64", "uint32", 65_536, "id 4294967295, beyond the vocabulary"),
        (np.append(wide_ids(0.0, 300_000) % 50, [50, *[7] * 999]), "uint16", "uint16", 50, "id 50, beyond"),
    ],
)
def test_ids_of_another_size_or_vocabulary_are_refused(tmp_path, ids, written, read, vocab_size, message):
    config = tiny.train_config(tmp_path)
    config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    ids.astype(written).tofile(tmp_path / "a.npy")
    with refused(r"a\.npy holds .*" + message):
        verify_token_files(bare(config, [tmp_path / "a.npy"], read))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize(
    "ids",
    [
        wide_ids(0.0)[:19_999],
        wide_ids(0.0) % 256 * (wide_ids(0.0) % 7 == 0),  # six of seven are 0
        wide_ids(0.0) % 2,
        np.zeros(1000, int),
        np.append(np.zeros(1000, int), 7),
        np.array([*[5, 0] * 9, 3]),  # of few ids nobody can tell
        np.arange(1000) % 2 * 9 + np.arange(1000) // 2 % 2,
        np.tile([40_000, 17], 1000),
        np.tile([20, 7], 1000),
    ],
)
def test_ids_of_the_right_size_are_taken(tmp_path, ids, dtype):
    config = tiny.train_config(tmp_path)
    config = replace(config, model=replace(config.model, vocab_size=65_536))
    ids.astype(dtype).tofile(tmp_path / "a.npy")
    verify_token_files(bare(config, [tmp_path / "a.npy"], dtype))


def test_a_prepared_corpus_has_the_ids_that_its_manifest_says(tmp_path):
    """A document of one token each: nobody could tell it from ids of 4 bytes."""
    tiny.write_corpus(tmp_path / "corpus", {"train": [[7]] * 200})
    verify_token_files(tiny.train_config(tmp_path))


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path):
    config = bare(tiny.train_config(tmp_path), [tmp_path / "corpus" / "train-00000.npy"])
    config = replace(
        config, tokenizer=replace(config.tokenizer, identifier=str(tmp_path / "corpus" / "tokenizer.json"))
    )
    open_training_data(config)
    with refused("has vocab_size 50, the model has 49; set --model.vocab_size=50 or name the model's"):
        open_training_data(replace(config, model=replace(config.model, vocab_size=49)))


@pytest.mark.parametrize("change", ["", "[]", {"version": 2}, {"extra": 1}, {"splits": []}, {"dtype": "int"}])
def test_a_manifest_that_is_none_is_refused_in_one_line(tmp_path, change):
    tiny.write_corpus(tmp_path, {"train": [[1, 2]], "heldout": [[3]]})
    path = tmp_path / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | change) if isinstance(change, dict) else change)
    with refused():
        tokens.TokenFiles.of_split(tmp_path, "train")


def test_a_corpus_of_more_files_than_may_be_open(tmp_path):
    """Of C4 there are 1,024, and a process may usually have as many open."""
    for number in range(60):
        np.full(3, number, np.uint16).tofile(tmp_path / str(number))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, before[1]))
    try:
        files = tokens.TokenFiles([tmp_path / str(number) for number in range(60)], "uint16", 0)
        assert files.read(59).tolist() == pickle.loads(pickle.dumps(files)).read(59).tolist() == [59] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("scheme", ["s3", "gs", "r2", "weka", "https"])
def test_files_on_another_machine_are_to_be_copied_and_not_to_be_prepared_again(tmp_path, scheme):
    remote = f"{scheme}://bucket/part-0.npy"
    config = tiny.train_config(tmp_path, "--corpus.path=null", f"--data.paths=['{remote}']")
    with refused(f"token file {remote} is not on this machine; copy the files to a local folder"):
        open_training_data(config)
    config = tiny.train_config(tmp_path, "--corpus.path=null", "--data.paths=[none.npy]")
    with refused("token file none.npy is missing or empty; correct its path"):
        open_training_data(config)
