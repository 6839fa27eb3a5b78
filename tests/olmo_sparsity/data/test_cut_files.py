"""Token files that are cut or removed while they are in use."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.evaluate.heldout import HeldoutEvaluation
from olmo_sparsity.model.build import build_model
from tests.support import tiny
from tests.support.corpora import ENVIRONMENT, ROOT
from tests.support.refusals import refused

CUT = r"token file .*-00000\.npy was cut while it was in use: .*; put it back whole and run"


def test_what_is_left_of_a_cut_file_is_read_and_no_more(tmp_path):
    documents = tiny.random_documents(3, 2000)
    tokens = TokenFiles.of_split(tiny.write_corpus(tmp_path, {"train": documents}), "train")
    path = tmp_path / "train-00000.npy"
    expected = np.fromfile(path, np.uint16)
    os.truncate(path, 5000)
    assert np.array_equal(tokens.read(0, 0, 2500), expected[:2500])
    with refused(CUT):
        tokens.read(0, 2000, 2501)
    with refused(CUT):
        tokens.document(1)
    with refused(CUT):
        _ = TokenFiles.document_bounds.func(tokens)
    assert len(tokens.read(0, 6003, 7000)) == 0


def test_a_corpus_of_more_files_than_may_be_open(tmp_path):
    """Of C4 there are 1,024, and a process may usually have as many open."""
    for number in range(60):
        np.full(3, number, np.uint16).tofile(tmp_path / str(number))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, before[1]))
    try:
        files = TokenFiles([tmp_path / str(number) for number in range(60)], "uint16", 0)
        assert files.read(59).tolist() == pickle.loads(pickle.dumps(files)).read(59).tolist() == [59] * 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_removed_file_is_read_on(tmp_path):
    documents = tiny.random_documents(3, 2000)
    tokens = TokenFiles.of_split(tiny.write_corpus(tmp_path, {"train": documents}), "train")
    (tmp_path / "train-00000.npy").unlink()
    assert [tokens.document(number).tolist() for number in range(3)] == documents


def test_held_out_text_that_is_cut_is_named(tmp_path):
    config = tiny.train_config(tmp_path, "--evaluation.interval=4")
    evaluation, model = HeldoutEvaluation(config), build_model(config)
    os.truncate(tmp_path / "corpus" / "heldout-00000.npy", 100)
    with refused(CUT):
        evaluation.run(lambda batch: model(**batch.model_inputs).logits, lambda tensor: tensor)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_training_whose_text_is_cut_ends_with_one_line(tmp_path, workers):
    tiny.train_config(tmp_path)
    options = [f"--data.num_workers={workers}", "--max_duration=100000", "--save_interval=100000"]
    command = [sys.executable, "scripts/train.py", tmp_path / "config.yaml", *options]
    training = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics, deadline = Path(tmp_path, "run", "metrics.jsonl"), time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.truncate(tmp_path / "corpus" / "train-00000.npy", 0)
    _, said = training.communicate(timeout=120)
    assert (training.returncode, said.count("error: ")) == (1, 1), said
    assert "train-00000.npy was cut while it was in use" in said and "Traceback" not in said
