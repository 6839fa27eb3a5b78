"""The loop: resuming, normalisation, schedule, order of the data, and what a user does wrong."""

import gc
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from olmo.config import ActivationCheckpointingStrategy
from safetensors.torch import load_file

from olmo_sparsity.checkpoint import WEIGHTS, checkpoints, load_state
from olmo_sparsity.config.load import load_config
from olmo_sparsity.data.build import open_training_data
from olmo_sparsity.training import loop
from olmo_sparsity.training.build import build_schedule, warn_of_workers
from olmo_sparsity.training.engine import Engine, chosen_precision
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import forward_backward, train
from tests.support import tiny
from tests.support.engines import prepared_engine
from tests.support.refusals import refused
from tests.support.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row["loss_nats"] for row in rows if "loss_nats" in row}


DROPOUT = {f"{kind}_dropout": 0.1 for kind in ("residual", "attention", "embedding")}
RUNS = {
    "plain": {},
    "dropout": {"model": DROPOUT},
    "gpt_neox": {"model": {"family": "gpt_neox", **DROPOUT}},
    "compiled": {"model": DROPOUT, "compile": {"backend": "aot_eager", "from_steps": 0}},
}


@pytest.mark.parametrize("kind", slow_but(RUNS, "dropout", "gpt_neox"))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, kind):
    """Bit for bit on the CPU in fp32, over an epoch's end, evaluations, dropout, and layers that are computed again."""
    torch._dynamo.reset()
    changes = {"evaluation": {"interval": 4}, "console_log_interval": 1, **RUNS[kind]}
    whole = tiny.train_config(tmp_path, "--max_duration=12", **changes)
    expected = load_file(train(whole) / WEIGHTS)
    assert open_training_data(whole).steps_per_epoch < 12
    for name, again in (("parts", None), ("recomputed", ActivationCheckpointingStrategy.whole_layer)):
        parts = replace(whole, save_folder=str(tmp_path / name), activation_checkpointing=again)
        for stop in (3, 9, None):
            torch.manual_seed(stop or 99)  # whatever another process would have drawn
            last = train(replace(parts, stop_at=stop, save_interval=None), resume=True)
        assert losses(tmp_path / name) == losses(tmp_path / "run")
        weights = load_file(last / WEIGHTS)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    if kind == "compiled":
        train(replace(whole, save_folder=str(tmp_path / "eager"), compile=None))
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "eager"), abs=1e-5)


@pytest.mark.parametrize("z_weight", [0.0, 1e-2])
def test_losses_are_means_over_the_tokens_of_the_batch_that_count(tmp_path, z_weight):
    """Also where the filter masks some windows, and with the z-loss; gradients are those of a plain loop on tasks."""
    z_loss_changes = f"--softmax_auxiliary_loss={z_weight > 0}", f"--auxiliary_loss_multiplier={z_weight}"
    config = tiny.train_config(tmp_path, "--device_train_microbatch_size=1", *z_loss_changes)
    engine = prepared_engine(config)
    batch = next(open_training_data(config).batches(0))
    mask = batch.loss_mask.clone()
    mask[0] = False
    mask[1, 5:] = False
    parts = forward_backward(engine, replace(batch, loss_mask=mask), None)
    logits = engine.raw_model(batch.input_ids, position_ids=batch.position_ids).logits
    picked = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    ce_loss = -picked[mask].mean().item()
    z_loss = z_weight * logits.logsumexp(-1)[mask].square().mean().item()
    apart = {"ce_loss_nats": ce_loss, "z_loss_nats": z_loss} if z_weight else {}
    assert parts == pytest.approx({"loss_nats": ce_loss + z_loss, **apart}, abs=1e-5)


def test_an_epoch_reads_every_window_once_and_redraws_skips(tmp_path):
    """A run may begin with a later epoch, and lasts as many steps, tokens or epochs as it is asked for."""
    config = tiny.train_config(tmp_path, "--global_train_batch_size=1", "--device_train_microbatch_size=1")
    data = open_training_data(config)
    batches = data.batches(0)
    epochs = [[next(batches) for _ in range(data.steps_per_epoch)] for _ in range(2)]
    tokens = [sorted(tuple(b.input_ids[0].tolist()) for b in epoch) for epoch in epochs]
    windows = data.dataset.tokens.read(0)[: len(data.dataset) * 32].reshape(-1, 32)
    assert tokens[0] == tokens[1] == sorted(tuple(map(int, row)) for row in windows)
    orders = [[tuple(b.input_ids[0].tolist()) for b in epoch] for epoch in epochs]
    assert orders[0] != orders[1]
    for duration, steps in {"8": 8, "1024T": 1024 // 32, "2ep": 2 * (12 * 91 // 32)}.items():
        assert build_schedule(replace(config, max_duration=duration), data.steps_per_epoch).max_steps == steps
    batch = next(open_training_data(replace(config, epoch=1)).batches(0))
    assert torch.equal(batch.input_ids, epochs[1][0].input_ids)
    assert torch.equal(batch.position_ids, epochs[1][0].position_ids)
    positions = [{tuple(b.input_ids[0].tolist()): b.position_ids[0].tolist() for b in e} for e in epochs]
    assert sum(positions[0][key] != positions[1][key] for key in positions[0]) > len(positions[0]) // 2


def test_content_skips_with_the_ids_inside_one_document(tmp_path):
    """`content: skip`: the token at id j is the j-th after the window's start, where the document is long enough."""
    document = (np.arange(900) % 49 + 1).tolist()
    corpus = tiny.write_corpus(tmp_path / "corpus", {"train": [document, [7] * 40], "heldout": [[1, 2]]})
    config = load_config(tiny.write_yaml(tmp_path, corpus, positions={"content": "skip", "chunks": 3}))
    dataset = open_training_data(config).dataset
    stream = dataset.tokens.read(0)
    skipped = 0
    for index in range(len(dataset)):
        item = dataset[index]
        start = index * 32
        fits = start + 64 <= 900
        offsets = item["position_ids"] if fits else np.arange(32)
        assert np.array_equal(item["input_ids"], stream[start + offsets])
        skipped += fits and item["position_ids"][-1] > 31
    assert skipped > 10


def test_instance_filter_masks_windows_of_endless_repetition(tmp_path):
    documents = [(np.random.default_rng(1).integers(1, 50, 63)).tolist(), [9] * 64]
    corpus = tiny.write_corpus(tmp_path / "corpus", {"train": documents})
    repetition = {"max_period": 13, "min_period": 1, "max_count": 30}
    section = {"instance_filter": {f"repetition_{name}": value for name, value in repetition.items()}}
    config = load_config(tiny.write_yaml(tmp_path, corpus, data=section, global_train_batch_size=1))
    dataset = open_training_data(config).dataset
    assert [bool(dataset[i]["in_loss"]) for i in range(4)] == [True, True, False, False]
    train(replace(config, max_duration="1ep"))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sorted(row["loss_nats"] > 1 for row in rows) == [False, False, True, True]
    assert all((row["grad_norm"] == 0) == (row["loss_nats"] == 0) for row in rows)


@pytest.mark.parametrize("name", ["loss_nats", "grad_norm"])
def test_what_is_not_finite_reaches_neither_weights_nor_checkpoints(tmp_path, monkeypatch, name):
    config = tiny.train_config(tmp_path, "--max_duration=8", "--save_interval=2")
    original, step_weights, steps = loop.forward_backward, Engine.step, []

    def diverges(engine, *arguments):
        values = original(engine, *arguments)
        steps.append(1)
        if len(steps) == 6 and name == "grad_norm":
            next(engine.raw_model.parameters()).grad.view(-1)[0] = math.inf
        elif len(steps) == 6:
            values["loss_nats"] *= math.nan
        return values

    def counted(*arguments):
        assert len(steps) < 6
        return step_weights(*arguments)

    monkeypatch.setattr(loop, "forward_backward", diverges)
    monkeypatch.setattr(Engine, "step", counted)
    with refused(f"{name} is (nan|inf) at step 6; earlier checkpoints are whole"):
        train(config)
    assert [load_state(folder).step for folder in checkpoints(tmp_path / "run")][-1] == 4
    assert max(losses(tmp_path / "run")) == 5


def test_accelerates_environment_changes_nothing(tmp_path, monkeypatch):
    """It would divide gradients by the steps to accumulate, shard the model, or compile it once more."""
    config = tiny.train_config(tmp_path, "--device_train_microbatch_size=1")
    train(config)
    variables = {"GRADIENT_ACCUMULATION_STEPS": "4", "USE_FSDP": "true", "DYNAMO_BACKEND": "EAGER"}
    for name, value in variables.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    train(replace(config, save_folder=str(tmp_path / "again")))
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "again"))
    assert [row["grad_norm"] for row in first] == [row["grad_norm"] for row in second]


def test_bf16_that_is_emulated_is_not_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert chosen_precision(None) == "no"
    assert chosen_precision("fp32") == "no"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100-SXM2-16GB")
    with refused("precision: Tesla V100-SXM2-16GB has no bf16; set --precision=fp32"):
        chosen_precision("amp_bf16")


def test_an_existing_run_is_not_overwritten_by_mistake(tmp_path):
    config = tiny.train_config(tmp_path)
    train(config)
    with refused("--resume"):
        train(config)
    train(replace(config, save_overwrite=True, max_duration=4))
    assert [load_state(folder).step for folder in checkpoints(tmp_path / "run")] == [4]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--save_interval=2"], [6, 8]),
        (["--save_interval=1", "--checkpoints.keep_every=3"], [3, 6, 7, 8]),
    ],
)
def test_the_last_checkpoints_and_every_pth_are_kept(tmp_path, options, kept):
    train(tiny.train_config(tmp_path, "--save_num_checkpoints_to_keep=2", *options))
    assert [load_state(folder).step for folder in checkpoints(tmp_path / "run")] == kept


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path):
    config = tiny.train_config(tmp_path)
    for override in ("--model.vocab_size=49", "--model.eos_token_id=3"):
        with refused("was made with a tokenizer of"):
            train(tiny.train_config(tmp_path, override))
    other = tmp_path / "other.json"
    other.write_text((tmp_path / "corpus" / "tokenizer.json").read_text() + "\n")
    with refused("is not the one that"):
        train(replace(config, tokenizer=replace(config.tokenizer, identifier=str(other))))
    assert not (tmp_path / "run").exists()


def test_half_written_files_of_a_killed_run_are_removed(tmp_path):
    config = tiny.train_config(tmp_path)
    leftover = tmp_path / "run" / ".step00000004.tmp-elsewhere-1"
    leftover.mkdir(parents=True)
    (leftover / WEIGHTS).write_bytes(b"half")
    of_another = tmp_path / "run" / ".hf.tmp-here-1"  # what export_hf.py is writing now
    of_another.mkdir()
    train(config, resume=True)
    assert not leftover.exists() and of_another.exists()


class TestGarbage:
    @pytest.mark.parametrize(("interval", "expected"), [("1", [1, 2, 3, 4, 5, 6, 7]), ("3", [3, 6])])
    def test_it_is_collected_between_steps_alone(self, tmp_path, monkeypatch, interval, expected):
        collected = []
        enabled = []
        at_step = [0]
        train_step = loop.train_step

        def noted(engine, batch, plan, step):
            enabled.append(gc.isenabled())
            at_step[0] = step
            return train_step(engine, batch, plan, step)

        monkeypatch.setattr(loop, "train_step", noted)
        monkeypatch.setattr(gc, "collect", lambda generation: collected.append((generation, at_step[0])))
        train(tiny.train_config(tmp_path, "--max_duration=7", f"--gen1_gc_interval={interval}"))
        assert collected == [(1, step) for step in expected]
        assert enabled == [False] * 7 and gc.isenabled()

    def test_python_does_it_where_there_is_no_interval(self, tmp_path, monkeypatch):
        enabled = []
        train_step = loop.train_step

        def noted(*arguments):
            enabled.append(gc.isenabled())
            return train_step(*arguments)

        monkeypatch.setattr(loop, "train_step", noted)
        train(tiny.train_config(tmp_path, "--gen1_gc_interval=null"))
        assert enabled == [True] * 8

    def test_it_is_as_before_after_a_run_that_failed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(loop, "train_step", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny.train_config(tmp_path))
        assert gc.isenabled()


class TestWorkers:
    """Ranks of one machine that share their CPUs, have some each, and of two machines."""

    @pytest.mark.parametrize(
        ("ranks", "num_workers", "remedy"),
        [
            ([("a", {0, 1})], 2, None),
            ([("a", {0, 1})], 3, "num_workers=2"),
            ([("a", {0, 1, 2, 3})] * 4, 1, None),
            ([("a", {0, 1, 2, 3})] * 4, 2, "num_workers=1"),
            ([("a", {0, 1})] * 4, 1, "num_workers=0"),
            ([("a", {0, 1}), ("a", {2, 3})], 2, None),
            ([("a", {0, 1}), ("b", {0, 1})], 2, None),
            ([("a", {0, 1, 2}), ("b", {0}), ("b", {1})], 2, "on b.*num_workers=1"),
            ([("a", {0}), ("b", {0})], 2, "on a.*num_workers=1"),
            ([("a", {0})] * 8, 0, None),
        ],
    )
    def test_more_than_there_are_cpus_are_said_once(self, caplog, ranks, num_workers, remedy):
        for rank in range(len(ranks)):
            engine = SimpleNamespace(gather=lambda value: ranks, is_rank_zero=rank == 0)
            warn_of_workers(engine, num_workers)
        assert len(caplog.records) == (remedy is not None)
        assert remedy is None or re.search(remedy, caplog.text)

    def test_a_run_says_it_and_pytorch_does_not(self, tmp_path, caplog, monkeypatch, recwarn):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
        train(
            tiny.train_config(tmp_path, "--data.num_workers=2", "--max_duration=1", "--scheduler.t_warmup=0")
        )
        assert caplog.text.count("data.num_workers: 2 for each of 1 processes") == 1
        assert not [warning for warning in recwarn if "DataLoader" in str(warning.message)]
