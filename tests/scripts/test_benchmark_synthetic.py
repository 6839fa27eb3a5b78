"""The synthetic benchmark: both sides train the same, its numbers follow from its times; fast batches are the same."""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from olmo_sparsity import positions
from olmo_sparsity.config.checks import find_problems
from olmo_sparsity.data import task_batches as task_data
from olmo_sparsity.data.task_batches import TaskData, TaskPositions, task_of
from olmo_sparsity.model.build import build_model
from olmo_sparsity.tasks import TASKS
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.streams import Stream
from tests.support import tiny, tiny_task

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import synthetic  # noqa: E402


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    """Batches of 8 samples are made two at once; the benchmark's setting of DeepSpeed ends with the test."""
    monkeypatch.setattr(task_data, "_SAMPLES_AT_ONCE", 16)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@torch.no_grad()
def first_loss(config):
    """The loss of the first batch per response token, one sample at a time, by transformers' model itself."""
    model, task, indices = build_model(config).model, task_of(config), np.arange(8)
    samples = task.sample("train", config.seed, indices)
    ids = TaskPositions(config).ids(samples, split="train", seed=config.seed, indices=indices)
    total, count = 0.0, 0
    for row in range(8):
        first, end = int(samples.response_start[row]), int(samples.lengths[row])
        tokens = torch.tensor(samples.tokens[row, :end])
        logits = model(
            tokens[None], position_ids=torch.tensor(ids[row, :end])[None], attention_mask=torch.ones(1, end)
        ).logits[0]
        total += float(F.cross_entropy(logits[first - 1 : end - 1], tokens[first:], reduction="sum"))
        count += end - first
    return total / count


def test_a_whole_run(tmp_path, run_here):
    path = tiny_task.write(tmp_path)
    command = ["scripts/benchmark.py", "synthetic", "--config", path, "--rounds", 2, "--steps", 1]
    done = run_here(*command, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["tasks"]) == set(TASKS)
    for name, row in result["tasks"].items():
        made, step = row["seconds"]["generate"], row["seconds"]["step"]
        shares = [one / other for one, other in zip(made, step, strict=True)]
        assert len(shares) == 2 and row["share"] == pytest.approx(statistics.median(shares))
        assert (row["share_low"], row["share_high"]) == pytest.approx((min(shares), max(shares)))
        assert row["steps_per_timing"] == 2, "what is made at once is made in one timing"
        assert row["samples_per_second"] == pytest.approx(16 / statistics.median(made))
        assert row["scheme"] == ("pose" if name in ("planted", "sparse_parity") else "predicted")
    steps = result["steps"]
    assert steps["scheme"] == "pose", "the Trainer knows no joint loss"
    losses = steps["losses_nats"]
    assert losses["loop"] == pytest.approx(losses["transformers Trainer"], rel=1e-5)
    assert len(losses["loop"]) == 2 and losses["loop"][0] != losses["loop"][1]
    config = synthetic.plain_config(tiny_task.config(tmp_path))
    assert losses["loop"][0] == pytest.approx(first_loss(config), rel=1e-5)
    theirs = steps["seconds"]["transformers Trainer"]
    for name, seconds in steps["seconds"].items():
        ratios = [one / other for one, other in zip(theirs, seconds, strict=True)]
        assert steps["results"][name]["ratio"] == pytest.approx(statistics.median(ratios))
        assert steps["results"][name]["rate"] == pytest.approx(2 / statistics.median(seconds))


def test_the_result_is_printed(capsys):
    rates = {"rate": 10.4, "ratio": 1.25, "ratio_low": 1.0, "ratio_high": 1.5}
    task = {"scheme": "pose", "batch": 64, "samples_per_second": 51190, "steps_per_second": 7.72}
    task |= {"share": 0.0123, "share_low": 0.01, "share_high": 0.02}
    result = dict.fromkeys(("config", "device", "precision", "threads", "clock", "commit"), "x")
    result |= {"load_average_before": 0.5, "rounds": 3, "largest_share": 0.05, "tasks": {"copy": task}}
    result["steps"] = {
        "task": "copy",
        "scheme": "pose",
        "unit": "steps/s",
        "baseline": "B",
        "results": {"loop": rates},
    }
    import benchmark  # type: ignore[import-not-found]

    benchmark.print_synthetic(result)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["copy", "pose", "64", "51,190", "7.72", "1.2", "[1.0,", "2.0]"] in printed
    assert ["loop", "10.4", "1.250", "[1.000,", "1.500]"] in printed


def comparison(folder, **changes):
    config = tiny_task.config(folder, **changes)
    return synthetic.StepComparison(config, steps=1, rounds=1, folder=folder)


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

    trainer = compared.trainer
    theirs = settings(trainer.optimizer, trainer.model)
    ours = settings(compared.engine.optimizer, compared.engine.raw_model.model)
    assert ours == theirs and len(ours) > 20
    assert theirs["gpt_neox.embed_in.weight"][0] == 0 and theirs["lm_head.weight"][0] == 0.1
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {synthetic.LEARNING_RATE}
    assert trainer.args.max_grad_norm == compared.config.max_grad_norm == 1.0
    assert trainer.args.gradient_accumulation_steps == 2 and not trainer.args.bf16


def test_another_loss_is_found_before_anything_is_timed(tmp_path):
    compared = comparison(tmp_path)
    with torch.no_grad():
        next(compared.engine.raw_model.parameters()).mul_(1.5)
    with pytest.raises(UserError, match="the losses differ: .* in the loop, .* in the Trainer"):
        compared.measure()
    assert not any(compared.seconds.values())


def test_every_task_has_a_config_of_its_own_or_the_same_shape(tmp_path):
    given = tmp_path / "scratchpad_parity-x.yaml"
    tiny_task.write(tmp_path).rename(given)
    (tmp_path / "copy-x.yaml").write_text(
        "base: scratchpad_parity-x.yaml\ntask: {name: copy, parameters: {num_symbols: 7}}\n"
        "model: {vocab_size: 11, d_model: 32}\npositions: {table_size: 17}\n"
    )
    config = synthetic.load_config(given)
    found = synthetic.task_configs(config, str(given), ["--model.n_layers=1"])
    assert set(found) == set(TASKS) and found["scratchpad_parity"] is config
    assert (found["copy"].model.d_model, found["copy"].model.n_layers) == (32, 1)
    for name, own in found.items():
        assert own.task.name == name and not list(find_problems(own))
        assert own.model.d_model == (32 if name == "copy" else 16)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"rounds": 0}, "--rounds and --steps take 1 or more"),
        ({"optimizer": {"name": "lionw"}}, {}, r"optimizer\.name: the Trainer has AdamW; set it to adamw"),
        ({"model": tiny_task.OLMO}, {}, r"model\.family: the Trainer has GPT-NeoX; set it to gpt_neox"),
        ({"device_train_microbatch_size": 3}, {}, "3 does not divide 8; give one that does"),
        (
            {"model": dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.1)},
            {},
            r"model\.residual_dropout: .* set every dropout to 0",
        ),
    ],
)
def test_what_the_trainer_cannot_be_given_is_refused(tmp_path, changes, options, message):
    path = tiny_task.write(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        synthetic.run_synthetic_benchmark(str(path), [], **{"rounds": 1, "steps": 1, **options})


def test_a_config_of_text_is_refused(tmp_path):
    path = tiny.write_yaml(tmp_path, tmp_path / "no-corpus")
    with pytest.raises(UserError, match=r"task\.name: is missing; give a config of configs/synthetic"):
        synthetic.run_synthetic_benchmark(str(path), [], rounds=1, steps=1)


# --- what makes batches fast changes nothing about them ---


def test_batches_that_are_made_at_once_equal_those_made_one_by_one(tmp_path, monkeypatch):
    config = tiny_task.config(tmp_path)
    for rank, world_size, at_once in ((0, 1, 2), (1, 2, 4)):
        data = TaskData(config, rank=rank, world_size=world_size)
        assert data.steps_at_once == at_once
        for step, batch in zip(range(3, 8), data.batches(3), strict=False):
            alone = data.steps[step]
            assert all(
                torch.equal(value, getattr(alone, name))
                for name, value in vars(batch).items()
                if value is not None
            )


@pytest.mark.parametrize("seed", [0, 3, (1 << 40) + 5, (1 << 70) + 1])
@pytest.mark.parametrize("first", [0, (1 << 32) - 2])
def test_generators_seeded_at_once_draw_what_numpys_own_draw(seed, first):
    indices = np.arange(first, first + 4)  # the second range has two that no longer fit into a word
    for index, generator in zip(indices.tolist(), positions.draws_of_all(seed, 1, indices), strict=True):
        own = np.random.default_rng([Stream.POSITIONS, seed, 1, index])
        assert generator.bit_generator.state == own.bit_generator.state
        assert generator.integers(0, 1000, 50).tolist() == own.integers(0, 1000, 50).tolist()
    inside = indices[indices < 1 << 32]
    for index, generator in zip(inside.tolist(), positions.draws_of_all(seed, 1, inside), strict=True):
        assert generator.bit_generator.state == positions.draws(seed, 1, index).bit_generator.state
    assert positions.draws_of_all(seed, 1, np.arange(0)) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_coupled_ids_of_a_batch_are_those_of_its_samples(tmp_path, split):
    config = tiny_task.config(tmp_path)
    indices = np.arange(100, 160)
    samples = task_of(config).sample(split, 5, indices)
    ids = TaskPositions(config).ids(samples, split=split, seed=5, indices=indices)
    for row, index in enumerate(indices.tolist()):
        generator = positions.draws(5, 0 if split == "train" else 1, index)
        skip = 0.5 if split == "train" else 0.0
        coupled = samples.coupled_ids[row]
        of_prompt = coupled[: samples.response_start[row]]
        shift = positions.draw_shift(coupled.max(), of_prompt.max(), 24, generator, skip_probability=skip)
        alone = positions.apply_shift(coupled, *shift)
        assert ids[row].tolist() == alone.tolist()
