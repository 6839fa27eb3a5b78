"""What a run folder survives: damaged checkpoints, other settings, other text, a second process, damaged files."""

import json
import logging
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from olmo_sparsity.checkpoint import (
    checkpoints,
    load_model,
    load_state,
    weights_sha256,
)
from olmo_sparsity.data.batches import open_training_data
from olmo_sparsity.model.build import build_model
from olmo_sparsity.training import engine as engines
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.files import folder_lock
from tests.support import tiny
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("one_thread")


def files_of(run):
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def half(tmp_path, *overrides):
    """A run of 8 steps that stopped after 4, and its config."""
    config = tiny.train_config(tmp_path, *overrides)
    train(replace(config, stop_at=4))
    return config


# --- damaged checkpoints ---


DAMAGED = {
    **{f"step00000004/{name}.safetensors": None for name in ("model", "optimizer")},
    **{f"step00000004/{name}": None for name in ("state.json", "config.yaml")},
    **{"provenance.json": b"{}", "metrics.jsonl": b"[]\n"},
}
"""Files of a run, and what is in them; None: their end is cut off."""


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_and_the_run_goes_on_from_the_checkpoint_before_it(tmp_path, name):
    config = half(tmp_path, "--save_interval=2")
    path = tmp_path / "run" / name
    path.write_bytes(path.read_bytes()[:-100] if DAMAGED[name] is None else DAMAGED[name])
    before = files_of(tmp_path / "run")
    with refused(name):
        train(config, resume=True)
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed <= {"provenance.json"} - {name}  # which may say that it was tried
    if name.startswith("step"):
        shutil.rmtree(path.parent)
        assert load_state(train(config, resume=True)).finished


def test_nothing_is_removed_before_the_new_run_is_known_to_start(tmp_path):
    config = half(tmp_path)
    (tmp_path / "corpus" / "train-00000.npy").unlink()
    with refused("is missing"):
        train(replace(config, save_overwrite=True))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step00000004"]


# --- what may change on resume ---

VALUES = {
    "scheduler.t_warmup": 5, "max_grad_norm": 0.5, "epoch": 1, "data.seed": 4, "seed": 9, "optimizer.eps": 1e-4,
    "positions.chunks": 3, "model.residual_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_decides_the_losses_may_not_change(tmp_path, name):
    half(tmp_path)
    with refused(f"cannot resume .*: {name} was .* and is now {VALUES[name]}; set it back"):
        train(tiny.train_config(tmp_path, f"--{name}={VALUES[name]}"), resume=True)


def test_the_precision_is_compared_as_it_was_chosen(tmp_path, monkeypatch):
    half(tmp_path)
    with refused("precision was fp32 and is now amp_bf16; set it back"):
        train(tiny.train_config(tmp_path, "--precision=amp_bf16"), resume=True)
    config = tiny.train_config(tmp_path, "--precision=null")
    monkeypatch.setattr(engines, "cpu_has_fast_bf16", lambda: True)
    with refused("precision was fp32"):
        train(config, resume=True)
    monkeypatch.setattr(engines, "cpu_has_fast_bf16", lambda: False)
    train(config, resume=True)


def test_another_text_of_equal_size_is_refused_and_a_moved_one_is_not(tmp_path):
    config = half(tmp_path)
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    other = {"train": tiny.random_documents(12, 90, seed=7), "heldout": [[1, 2, 3]]}
    tiny.write_corpus(tmp_path / "corpus", other)
    with refused("the text it is trained on, .* was"):
        train(config, resume=True)
    folder = train(replace(config, corpus=replace(config.corpus, path=str(moved))), resume=True)
    assert load_state(folder).finished


def test_other_raw_token_files_are_refused(tmp_path):
    config = tiny.train_config(tmp_path)
    raw = tmp_path / "corpus" / "train-00000.npy"
    corpus, data = replace(config.corpus, path=None), replace(config.data, paths=[str(raw)])
    config = replace(config, corpus=corpus, data=data)
    train(replace(config, stop_at=4))
    content = bytearray(raw.read_bytes())
    content[10:12] = content[12:14]
    raw.write_bytes(content)
    with refused("the text it is trained on, .* was"):
        train(config, resume=True)


def test_a_longer_duration_is_said_and_followed(tmp_path, caplog):
    config = tiny.train_config(tmp_path)
    assert load_state(train(config)).finished
    with caplog.at_level(logging.WARNING):
        folder = train(replace(config, max_duration=12), resume=True)
    assert load_state(folder).step == 12
    assert "max_duration was 8 and is now 12" in caplog.text


# --- a second process, and damaged files beside the checkpoints ---


def test_a_second_process_on_a_run_gets_one_line(tmp_path):
    config = half(tmp_path)
    before = files_of(tmp_path / "run")
    with folder_lock(tmp_path / "run"):
        for resume in (True, False):
            with refused("run is in use by another process"):
                train(replace(config, save_overwrite=not resume), resume=resume)
        assert {path: path.read_bytes() for path in before} == before
    train(config, resume=True)


def test_a_checkpoint_that_appears_meanwhile_is_noticed(tmp_path, monkeypatch):
    config = half(tmp_path)
    last = checkpoints(tmp_path / "run")[-1]
    real = engines.Engine.prepare

    def slow(self, *arguments):
        real(self, *arguments)
        worker = threading.Thread(target=shutil.copytree, args=(last, last.with_name("step00000006")))
        worker.start()
        worker.join()

    monkeypatch.setattr(engines.Engine, "prepare", slow)
    with refused("was changed by another process"):
        train(config, resume=True)


def test_rows_beyond_the_checkpoint_which_a_kill_left_are_dropped(tmp_path):
    config = tiny.train_config(tmp_path, "--console_log_interval=1")
    train(replace(config, stop_at=4))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(metrics, "ab") as file:
        file.write(b'{"step": 5, "loss_nats": 99.0}\n{"step": 6, "tok')
    train(config, resume=True)
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(row["loss_nats"] < 99 for row in rows)


# --- weights of another run ---


@pytest.mark.parametrize(
    "changes",
    [
        ["--model.max_sequence_length=64", "--positions.target_length=128"],
        ["--model.attention=ssmax"],
        ["--model.rope=false", "--model.nope=true"],
    ],
    ids=["longer window", "ssmax", "drope"],
)
def test_training_starts_from_the_weights_of_another_run_and_from_nothing_else_of_it(tmp_path, changes):
    """Its first loss is that of those weights; SSMax begins with its own as they are drawn. It resumes without them."""
    first = train(tiny.train_config(tmp_path))
    options = f"--initial_weights={first}", f"--save_folder={tmp_path / 'late'}", *changes
    late = tiny.train_config(tmp_path, *options)
    train(replace(late, stop_at=4))
    model = build_model(late)
    missing, unexpected = model.load_state_dict(load_model(first)[0].state_dict(), strict=False)
    assert all(".mixer." in name for name in missing) and not unexpected
    assert bool(missing) == (late.model.attention != "softmax")
    batch = next(open_training_data(late).batches(0))
    with torch.no_grad():
        logits = model(batch.input_ids, position_ids=batch.position_ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten())
    begun = read_metrics(tmp_path / "late" / "metrics.jsonl")[0]
    assert begun["step"] == 1 and begun["loss_nats"] == pytest.approx(expected.item(), abs=1e-5)
    (start,) = json.loads((tmp_path / "late" / "provenance.json").read_text())
    assert start["initial_weights_sha256"] == weights_sha256(first)
    shutil.rmtree(tmp_path / "run")
    assert load_state(train(late, resume=True)).step == 8


def test_weights_of_another_tokenizer_or_shape_or_that_would_be_overwritten_are_refused(tmp_path):
    last = train(tiny.train_config(tmp_path))
    elsewhere = f"--initial_weights={last}", f"--save_folder={tmp_path / 'elsewhere'}"
    with refused("is of another model: .*blocks.2"):
        train(tiny.train_config(tmp_path, *elsewhere, "--model.n_layers=3"))
    other = tmp_path / "tokenizer.json"
    other.write_text((tmp_path / "corpus" / "tokenizer.json").read_text() + " ")
    with refused("initial_weights: .* has another tokenizer than the text"):
        train(tiny.train_config(tmp_path, *elsewhere, f"--tokenizer.identifier={other}"))
    assert not (tmp_path / "elsewhere" / "metrics.jsonl").exists()
    for name in ("run", "run/step00000008"):
        with refused("initial_weights: .*step00000008 is in the folder that would be overwritten"):
            train(tiny.train_config(tmp_path, f"--initial_weights={tmp_path / name}", "--save_overwrite"))
    assert weights_sha256(last)


def test_others_may_read_a_checkpoint_as_far_as_its_folder_lets_them(tmp_path):
    folder = train(replace(tiny.train_config(tmp_path), stop_at=1))
    readable = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(readable.values()) == {folder.stat().st_mode & 0o666}, readable
