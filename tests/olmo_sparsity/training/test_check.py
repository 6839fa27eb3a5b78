"""What would end a run before its first step is refused before it starts: in one line, by whoever knows it."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from olmo_sparsity.config.load import load_config
from olmo_sparsity.training.check import check_run
from tests.support import tiny, tiny_task
from tests.support.refusals import refused

ROOT = Path(__file__).parents[3]

REFUSED = {
    "model.block_group_size=5": "model: n layers must be divisible by block group size",
    "model.mlp_hidden_size=7": "model: assert .*hidden_size.*AssertionError",
    "model.multi_query_attention=true model.n_kv_heads=2": "model: You can't set `multi_query_attention` and",
    "model.d_model=4000000000000": "model: Storage size calculation overflowed",
    "optimizer.learning_rate=0": "scheduler: assert 0 <= warmup_min_lr < initial_lr",
    "scheduler.warmup_min_lr=1": "scheduler: assert 0 <= warmup_min_lr < initial_lr",
    "scheduler.alpha_f=1e308 optimizer.learning_rate=1e10": "scheduler: at step 4 the learning rate would be nan",
    "global_train_batch_size=3": "global_train_batch_size 3 cannot be shared by 2 processes",
}
COMPILERS = {
    "mode": "compile: Unrecognized mode=nonsense, should be one of: default",
    "backend": "compile: Invalid backend: 'nonsense'",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_in_the_words_of_the_library(tmp_path, overrides):
    config = tiny.train_config(tmp_path, *(f"--{override}" for override in overrides.split()))
    with refused(REFUSED[overrides]):
        check_run(config, world_size=2)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_that_is_none_is_refused_though_a_short_run_would_not_ask_for_it(tmp_path, name):
    with refused(COMPILERS[name]):
        check_run(tiny.train_config(tmp_path, compile={name: "nonsense"}), world_size=1)


def test_a_schedule_in_epochs_is_looked_at_to_its_end(tmp_path):
    """Which is known where the text is there; the rates overflow after a warm-up of 4 steps."""
    overflows = {"max_duration": "2ep", "scheduler": {"alpha_f": 1e308}, "optimizer": {"learning_rate": 1e10}}
    config = tiny.train_config(tmp_path, **overflows)
    check_run(config, world_size=1)
    with refused("scheduler: at step 4 the learning rate would be nan"):
        check_run(config, world_size=1, steps_per_epoch=8)


def test_a_warm_up_longer_than_the_epochs_is_refused_where_their_steps_are_known(tmp_path):
    """As one longer than steps or tokens is: the learning rate would never be reached."""
    config = tiny.train_config(tmp_path, max_duration="2ep", scheduler={"t_warmup": 17})
    check_run(config, world_size=1)
    check_run(config, world_size=1, steps_per_epoch=9)
    with refused("scheduler.t_warmup: 17 steps are longer than max_duration 2ep, 16 steps; try .*=4"):
        check_run(config, world_size=1, steps_per_epoch=8)


def test_groups_of_lengths_are_for_one_process(tmp_path):
    config = tiny_task.config(tmp_path, "--task.length_groups=3")
    check_run(config, world_size=1)
    with refused("task.length_groups sorts all samples of a step"):
        check_run(config, world_size=2)


@pytest.mark.parametrize("family", ["olmo", "gpt_neox"])
def test_the_model_has_the_shapes_of_the_real_one_and_nothing_is_drawn(tmp_path, family):
    config = tiny.train_config(tmp_path, model={"family": family})
    before = torch.get_rng_state()
    model = check_run(config, world_size=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert (
        isinstance(model, nn.Module) and sum(parameter.numel() for parameter in model.parameters()) > 10_000
    )


@pytest.mark.slow
def test_no_shipped_config_is_refused():
    paths = sorted((ROOT / "configs").rglob("*.yaml"))
    assert len(paths) > 50
    for path in paths:
        check_run(load_config(path, warn=False), world_size=1)


# --- DeepSpeed's JSON ---

OF_DEEPSPEED = [
    ({"zero_optimization": {"stage": 4}}, "stage: Input should be 0, 1, 2"),
    ({"zero_optimization": {"stag": 2}}, "stag: Extra inputs are not permitted"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "disk"}}},
        "offload_optimizer.device: Input should be",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        'add "zero_force_ds_cpu_optimizer": false',
    ),
    ({"zero_optimization": 7}, "must be a mapping, not int"),
    ({"zero_optimisation": {"stage": 2}}, "DeepSpeed has no zero_optimisation; correct"),
    (
        {"activation_checkpointing": {"partition": True}},
        "DeepSpeed has no activation_checkpointing.partition; ",
    ),
    ({"communication_data_type": "fp99"}, "Invalid communication_data_type"),
]
ACCEPTED = [
    {"comms_logger": {"enabled": False}, "wall_clock_breakdown": False, "steps_per_print": 10},
    {
        "tensorboard": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "aio": {"block_size": 4096},
    },
    {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
]


def zero_config(folder, values):
    (folder / "zero.json").write_text(json.dumps(values))
    return tiny.train_config(folder, f"--deepspeed.config={folder / 'zero.json'}")


@pytest.mark.parametrize(("values", "message"), OF_DEEPSPEED)
def test_what_deepspeed_does_not_know_is_refused(tmp_path, values, message):
    with refused(rf"zero\.json: .*{message}"):
        check_run(zero_config(tmp_path, values), world_size=2)


@pytest.mark.parametrize("values", ACCEPTED)
def test_what_deepspeed_knows_is_accepted(tmp_path, values):
    check_run(zero_config(tmp_path, values), world_size=2)


@pytest.mark.parametrize("stage", range(4))
def test_the_shipped_files_are_accepted_and_a_job_from_here_may_still_use_gpus(tmp_path, monkeypatch, stage):
    """sbatch hands the environment on to the job, where DS_ACCELERATOR=cpu would keep DeepSpeed off the GPU."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    path = ROOT / "configs" / "deepspeed" / f"zero{stage}.json"
    check_run(tiny.train_config(tmp_path, f"--deepspeed.config={path}"), world_size=2)
    assert "DS_ACCELERATOR" not in os.environ


@pytest.mark.parametrize("target_length", ["null", "33"])
def test_random_starts_without_room_are_warned_of(tmp_path, caplog, target_length):
    options = ("--positions.scheme=random_start", f"--positions.target_length={target_length}")
    check_run(tiny.train_config(tmp_path, *options), world_size=1)
    assert ("trains as contiguous does" in caplog.text) == (target_length == "null")


def test_a_dry_run_and_a_run_refuse_alike(tmp_path, call_main):
    tiny.train_config(tmp_path)
    for options in ((), ("--dry-run",)):
        with refused("model: n layers must be divisible"):
            call_main("train", tmp_path / "config.yaml", "--model.block_group_size=5", *options)
    assert not (tmp_path / "run").exists()
    _, printed = call_main("train", tmp_path / "config.yaml", "--dry-run")
    assert "tokens per step   4 windows x 32 tokens = 128" in printed
