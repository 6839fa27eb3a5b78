"""The benchmarks: tiny runs of each, the plain ways they compare with, and what their numbers follow from."""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from olmo_sparsity.config.load import load_config
from olmo_sparsity.data import task_batches
from olmo_sparsity.tasks import TASKS
from olmo_sparsity.training.loop import train
from olmo_sparsity.util.errors import UserError
from tests.support import tiny, tiny_task
from tests.support.adapters import tiny_adapter
from tests.support.corpora import some_files
from tests.support.plain import masked_loss, random_contexts
from tests.support.refusals import refused

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import encodings, influence, loss_memory, synthetic, tables  # noqa: E402
from benchmarks.settings import EncodingsSettings, SyntheticSettings  # noqa: E402
from benchmarks.timing import chosen_device, summarise, time_in_turn  # noqa: E402
from benchmarks.trainer import LEARNING_RATE  # noqa: E402

N, M = 24, 6
FAR = N - M


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Batches of 8 samples are made two at once; the benchmark's setting of DeepSpeed ends with the test."""
    monkeypatch.setattr(task_batches, "_SAMPLES_AT_ONCE", 16)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that learned a little to copy, and its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    train(tiny.train_config(folder, "--max_duration=150", "--optimizer.learning_rate=1e-2"))
    return folder


@pytest.fixture
def benchmark(run_here, capsys):
    """Runs scripts/benchmark.py in this process; its JSON, after its tables were printed too."""

    def run(*arguments):
        done = run_here("scripts/benchmark.py", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert "torch" in result["machine"] and " ".join(map(str, arguments)) in result["command"]
        tables.print_tables(result)
        assert result["benchmark"] in capsys.readouterr().out
        for row in result.get("results", {}).values():
            assert row["rate"] > 0 and row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        if "results" in result:
            assert result["results"][result["baseline"]]["ratio"] == 1
        return result

    return run


# Timing.


def test_rounds_are_timed_in_turn_and_paired():
    now = [0.0]
    calls = []

    def runner(name, seconds):
        upcoming = iter(seconds)

        def run():
            calls.append(name)
            now[0] += next(upcoming)

        return run

    runners = {"plain": runner("plain", [9, 8, 6, 20]), "engine": runner("engine", [9, 2, 1, 10])}
    seconds = time_in_turn(runners, 3, warm_up=1, clock=lambda: now[0])
    assert seconds == {"plain": [8, 6, 20], "engine": [2, 1, 10]}  # without the warm-up
    assert sorted(calls[:2]) == sorted(calls[2:4]) == ["engine", "plain"]
    row = summarise(seconds, baseline="plain", amount=16, unit="targets/s")["results"]["engine"]
    assert row == {"rate": 8, "ratio": 4, "ratio_low": 2, "ratio_high": 6}


# train and data.


@pytest.mark.slow
def test_everything_is_timed_on_the_same_shape(benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_memory, "VOCABULARIES", (256,))
    tiny.train_config(tmp_path, compile={"backend": "eager"})
    found = benchmark("train", "--config", tmp_path / "config.yaml", "--rounds", 2, "--steps", 1)
    assert (found["baseline"], found["window"]) == ("olmo", 32)
    sides = {"loop", "loop, compiled", "transformers Trainer", "transformers Trainer, compiled"}
    assert set(found["results"]) == {"olmo", "position_ids", *sides}
    loop = found["results"]["loop"]
    share = loop["rate"] * found["flops_per_token"] / 1e12 / found["matrix_product_tflops"]
    assert loop["share_of_matrix_product"] == pytest.approx(share)
    ratios = [
        x / y for x, y in zip(found["seconds"]["transformers Trainer"], found["seconds"]["loop"], strict=True)
    ]
    assert loop["to transformers Trainer"]["ratio"] == pytest.approx(statistics.median(ratios))
    assert set(found["loss_memory"]) == {"256"}


@pytest.mark.slow
def test_preparation_is_timed_beside_datasets_map(benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    found = benchmark("data", "--rounds", 1, "--files", *some_files(tmp_path / "text", files=2))
    assert found["baseline"] == "datasets.map" and found["tokens"] > 1000
    assert set(found["results"]) >= {"datasets.map", "prepare_data"}


# influence.


@pytest.mark.parametrize("name", influence.SELECTORS)
def test_the_plain_loop_ranks_by_one_masked_loss_per_candidate(name):
    model, contexts = tiny_adapter("rope"), random_contexts(N, M, count=1)
    chosen = influence.plain_selection(name, model, "cpu", contexts)
    whole, short = list(range(N)), list(range(FAR, N))
    given = {
        i: ([j for j in whole if j != i] if name == "leave-one-out" else [i, *short]) for i in range(FAR)
    }
    base = masked_loss(model, contexts, 0, whole if name == "leave-one-out" else short)
    sign = 1 if name == "leave-one-out" else -1
    expected = {i: sign * (masked_loss(model, contexts, 0, kept) - base) for i, kept in given.items()}
    assert sorted(chosen.columns[0].tolist()) == list(range(FAR))
    for i, nats in zip(chosen.columns[0].tolist(), chosen.influence[0], strict=True):
        assert nats == pytest.approx(expected[i], abs=1e-4)
    assert (np.diff(chosen.influence[0]) <= 0).all()


def test_a_block_is_timed_beside_the_plain_loop_and_chooses_the_same(benchmark, trained, tmp_path):
    sizes = ["--n-long", 20, "--n-short", M, "--targets", 2, "--targets-per-block", 5, "--repeats", 2]
    options = ["--sampled-targets", 60, "--tau", 0.05, "--device", "cpu", "--out", tmp_path]
    result = benchmark("influence", trained / "run", "--text", trained / "corpus", *sizes, *options)
    for name in influence.SELECTORS:
        timed = result["blocks"][name]
        assert timed["same_set"] == 1 and timed["largest_influence_difference_nats"] < 1e-4
        assert timed["results"]["plain loop"]["ratio"] == 1
        assert timed["share_of_matrix_product"] > 0
    assert result["measurement"]["targets"] == 60 and result["measurement"]["over_tau"] > 0
    assert json.loads((tmp_path / "influence.json").read_text()) == result


# synthetic.


def write_configs(folder):
    """A config of a task, and one of another task beside it."""
    tiny_task.write(folder).rename(folder / "scratchpad_parity-x.yaml")
    (folder / "copy-x.yaml").write_text(
        "base: scratchpad_parity-x.yaml\ntask: {name: copy, parameters: {num_symbols: 7}}\n"
        "model: {vocab_size: 11, d_model: 32}\npositions: {table_size: 17}\n"
    )


def test_tasks_and_steps_are_timed(benchmark, tmp_path):
    path = tmp_path / "scratchpad_parity-x.yaml"
    write_configs(tmp_path)
    result = benchmark("synthetic", "--config", path, "--rounds", 2, "--steps", 1)
    assert set(result["tasks"]) == {"scratchpad_parity", "copy"} < set(TASKS)
    for row in result["tasks"].values():
        made, step = row["seconds"]["generate"], row["seconds"]["step"]
        shares = [one / other for one, other in zip(made, step, strict=True)]
        assert (row["share_low"], row["share_high"]) == pytest.approx((min(shares), max(shares)))
        assert row["steps_per_timing"] == 2, "what is made at once is made in one timing"
        assert row["samples_per_second"] == pytest.approx(16 / statistics.median(made))
        assert row["scheme"] == "predicted"
    steps = result["steps"]
    assert steps["scheme"] == "pose", "the Trainer knows no joint loss"
    losses = steps["losses_nats"]
    assert losses["loop"] == pytest.approx(losses["transformers Trainer"], rel=1e-5)
    assert len(losses["loop"]) == 3 and losses["loop"][0] != losses["loop"][1]
    assert steps["results"]["loop"]["rate"] == pytest.approx(2 / statistics.median(steps["seconds"]["loop"]))


def comparison(folder, **changes):
    config = tiny_task.config(folder, **changes)
    return synthetic.StepComparison(config, steps=1, folder=folder)


def test_both_sides_have_the_same_optimizer_and_precision(tmp_path):
    compared = comparison(tmp_path, optimizer={"betas": [0.8, 0.9], "eps": 1e-7})

    def settings(optimizer, model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        kept = ("weight_decay", "betas", "eps", "fused", "amsgrad")
        return {
            names[id(parameter)]: [group[key] for key in kept]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    trainer = compared.trainer.trainer
    theirs = settings(trainer.optimizer, trainer.model)
    ours = settings(compared.engine.optimizer, compared.engine.raw_model.model)
    assert ours == theirs and len(ours) > 20
    assert theirs["gpt_neox.embed_in.weight"][0] == 0 and theirs["lm_head.weight"][0] == 0.1
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {LEARNING_RATE}
    assert trainer.args.max_grad_norm == compared.config.max_grad_norm == 1.0
    assert trainer.args.gradient_accumulation_steps == 2 and not trainer.args.bf16


def test_another_loss_is_found_before_anything_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "time_in_turn", None)
    compared = comparison(tmp_path)
    with torch.no_grad():
        next(compared.engine.raw_model.parameters()).mul_(1.5)
    with pytest.raises(UserError, match="the losses differ: .* in the loop, .* in the Trainer"):
        compared.measure(rounds=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"name": "lionw"}}, r"optimizer\.name: the Trainer has AdamW; set it to adamw"),
        ({"model": tiny_task.OLMO}, r"model\.family: the Trainer has GPT-NeoX; set it to gpt_neox"),
        ({"device_train_microbatch_size": 3}, "3 does not divide 8; give one that does"),
        (
            {"model": dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.1)},
            r"model\.residual_dropout: .* set every dropout to 0",
        ),
        (None, r"task\.name: is missing; give a config of configs/synthetic"),
    ],
)
def test_what_the_trainer_cannot_be_given_is_refused(tmp_path, changes, message):
    if changes is None:
        path = tiny.write_yaml(tmp_path, tmp_path / "no-corpus")
    else:
        path = tiny_task.write(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        synthetic.run(SyntheticSettings(config=str(path), rounds=1, steps=1))


# --- profile ---


def test_a_profile_counts_what_a_step_does(benchmark, tmp_path):
    write_configs(tmp_path)
    path = tmp_path / "scratchpad_parity-x.yaml"
    config = load_config(path)
    parts = config.global_train_batch_size // config.device_train_microbatch_size
    found = benchmark("profile", "--config", path, "--compile=null", "--steps", 2, "--longest", 1000)
    calls = {name: row["calls"] for name, row in found["operations"].items()}
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls[attention] == calls[f"{attention}_backward"] == parts * config.model.n_layers
    assert calls["Optimizer.step#AdamW.step"] == 1
    times = [row["ms"] for row in found["operations"].values()]
    assert times == sorted(times, reverse=True) and sum(times) == pytest.approx(found["operations_ms"])
    assert not found["compiled"] and found["step_ms_low"] <= found["step_ms"] <= found["step_ms_high"]


# --- encodings ---


SMALL = tuple(
    f"--model.{each}"
    for each in ("d_model=32", "max_sequence_length=512", "vocab_size=128", "embedding_size=128")
)


@pytest.mark.slow
def test_encodings_are_timed_in_turn_and_attention_that_is_written_out_takes_more_memory():
    configs = tuple(str(ROOT / f"configs/length/{name}.yaml") for name in ("rope", "fox"))
    batch = ("--global_train_batch_size=4", "--device_train_microbatch_size=4")
    overrides = (*SMALL, *batch, "--precision=fp32")  # a process has one, and other tests have chosen it
    found = encodings.run(EncodingsSettings(configs=configs, rounds=2, steps=1, overrides=overrides))
    rope, fox = (found["results"][name] for name in configs)
    assert (rope["ratio"], rope["ratio_low"], rope["ratio_high"]) == (1, 1, 1)
    assert fox["ratio"] == statistics.median(
        a / b for a, b in zip(*(found["seconds"][name] for name in configs), strict=True)
    )
    scores = 4 * 2 * 512 * 512 * 4
    assert fox["step_bytes"] > rope["step_bytes"] + scores, "of one layer at least"
    assert found["baseline"] == configs[0] and (found["window"], found["batch"]) == (512, 4)


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert chosen_device() == "cpu"
    with refused("device 'cuda' cannot be used here"):
        chosen_device("cuda")


def test_encodings_of_different_windows_are_refused(tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(f"base: {ROOT / 'configs/length/rope.yaml'}\nglobal_train_batch_size: 8\n")
    configs = (str(ROOT / "configs/length/rope.yaml"), str(other))
    with refused("the configs have different windows and batches"):
        encodings.run(EncodingsSettings(configs=configs, overrides=SMALL))
