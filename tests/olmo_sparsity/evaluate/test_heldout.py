"""Held-out loss against a plain loop over the same windows, one at a time."""

import numpy as np
import pytest
import torch

from olmo_sparsity.config.load import load_config
from olmo_sparsity.evaluate.build import open_evaluation
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from tests.support import tiny
from tests.support.refusals import refused

DOCUMENTS = [doc for n in (5, 64, 30, 150, 63, 90) for doc in tiny.random_documents(1, n, seed=n)]
"""Held out, of many lengths."""


@pytest.fixture
def make(tmp_path):
    """A config over these held-out documents, with windows of 32."""
    splits = {"train": tiny.random_documents(12, 90), "heldout": DOCUMENTS}
    corpus = tiny.write_corpus(tmp_path / "corpus", splits)

    def config(*overrides, **changes):
        path = tiny.write_yaml(tmp_path, corpus, **changes)
        return load_config(path, ["--evaluation.interval=4", *overrides])

    return config


def model_of(config):
    """A model whose predictions are far from uniform."""
    model = build_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


def losses_of(model, window):
    """Loss [nats] of each token of a window but the first, given all before it, from the model itself."""
    ids = torch.tensor(np.asarray(window, dtype=np.int64))[None]
    with torch.no_grad():
        logits = model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0]
    picked = logits.double().log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return -picked.numpy()


def test_loss_in_windows_of_the_training_length(make):
    config = make()
    model = model_of(config)
    row = open_evaluation(config).run(model, lambda tensor: tensor)
    stream = [token for document in DOCUMENTS for token in [*document, tiny.EOS]]
    windows = [stream[i : i + 32] for i in range(0, len(stream) - 31, 32)]
    expected = np.concatenate([losses_of(model, window) for window in windows])
    assert row["heldout_tokens"] == len(expected) == len(windows) * 31
    assert row["heldout_loss_nats"] == pytest.approx(expected.mean(), abs=1e-5)
    assert row["heldout_loss_nats"] > 5  # hence not that of a uniform prediction


@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_gives_the_same(make, processes):
    config = make("--device_train_microbatch_size=3")
    model = model_of(config)
    alone = open_evaluation(config).run(model, lambda tensor: tensor)
    calls, collected = [[] for _ in range(processes)], [[] for _ in range(processes)]
    shares = [open_evaluation(config, rank=rank, world_size=processes) for rank in range(processes)]
    for share, seen, sums in zip(shares, calls, collected, strict=True):
        share.run(
            lambda seen=seen, **inputs: seen.append(1) or model(**inputs),
            lambda tensor, sums=sums: sums.append(tensor) or torch.ones_like(tensor),
        )
    assert len({*map(len, calls)}) == 1  # ZeRO 3 gathers weights in every forward pass: no rank may do more
    sums = iter([sum(parts) for parts in zip(*collected, strict=True)])
    together = shares[0].run(model, lambda tensor: next(sums))
    assert together["heldout_tokens"] == alone["heldout_tokens"]
    assert together["heldout_loss_nats"] == pytest.approx(alone["heldout_loss_nats"], abs=1e-6)


def test_windows_are_a_function_of_the_seed_alone(make):
    def chosen(*overrides, **share):
        evaluation = open_evaluation(make("--evaluation.windows=3", *overrides), **share)
        return evaluation.windows.tolist()

    assert len(chosen()) == 3
    assert chosen() == chosen("--seed=99") == chosen(rank=1, world_size=2)
    assert chosen() != chosen("--evaluation.seed=1")


FILES = ("train", "heldout")


def test_token_files_of_ones_own_have_the_loss_of_the_corpus_they_are_from(make, tmp_path):
    """While training too, and their ids are looked at before it."""
    train_file, heldout_file = (f"{tmp_path}/corpus/{split}-00000.npy" for split in FILES)
    bare = "--corpus.path=null", f"--data.paths=[{train_file}]"
    with refused("evaluation.interval: data.paths are for training; set evaluation.paths"):
        make(*bare)
    rows = {}
    for name, options in {"corpus": (), "files": (*bare, f"--evaluation.paths=[{heldout_file}]")}.items():
        train(make(*options, f"--save_folder={tmp_path / name}"))
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        rows[name] = [row["heldout_loss_nats"] for row in metrics if "heldout_loss_nats" in row]
    assert len(rows["files"]) == 2 and rows["files"] == rows["corpus"]
    np.full(99, 50, dtype=np.uint16).tofile(tmp_path / "other.npy")
    with refused("other.npy holds id 50, beyond the vocabulary"):
        train(make(*bare, f"--evaluation.paths=[{tmp_path}/other.npy]", f"--save_folder={tmp_path}/x"))
    with refused("none.npy is missing or empty"):
        train(make(*bare, "--evaluation.paths=[none.npy]", f"--save_folder={tmp_path}/x"))
    assert not list((tmp_path / "x").glob("step*"))


def test_held_out_files_come_before_the_corpus_held_out_split(make, tmp_path):
    config = make(f"--evaluation.paths=[{tmp_path}/corpus/train-00000.npy]")
    assert open_evaluation(config).tokens.lengths == [12 * 91]


def test_training_goes_on_as_if_nothing_had_been_measured(make, tmp_path):
    """Bit for bit, dropout included; measured at the interval and at the last step."""
    rows = {}
    for interval in ("null", "3"):
        options = f"--evaluation.interval={interval}", f"--save_folder={tmp_path / interval}"
        config = make(*options, model={"residual_dropout": 0.1})
        train(config)
        rows[interval] = read_metrics(tmp_path / interval / "metrics.jsonl")
    losses = [
        [row["loss_nats"] for row in rows_of_run if "loss_nats" in row] for rows_of_run in rows.values()
    ]
    assert losses[0] == losses[1]
    measured = [row for row in rows["3"] if "heldout_loss_nats" in row]
    assert [row["step"] for row in measured] == [3, 6, 8]
    assert measured[-1]["heldout_loss_nats"] < measured[0]["heldout_loss_nats"]
    assert not any("heldout_loss_nats" in row for row in rows["null"])
