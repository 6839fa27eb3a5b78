"""The profile of a run's steps: what counts as what, at which steps, and that it changes no number."""

import gzip
import json
import re
import signal
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType

from olmo_sparsity.training import loop
from olmo_sparsity.training.log import read_metrics
from olmo_sparsity.training.loop import train
from olmo_sparsity.training.profile import (
    DATA,
    ROWS,
    STEP,
    StepProfiler,
    covered,
    profiled_steps,
    time_by_kind,
)
from olmo_sparsity.util.signals import StoppedBySignal
from tests.support import tiny
from tests.support.refusals import refused

CPU, CUDA = DeviceType.CPU, DeviceType.CUDA


def event(name, start, end, device=CPU, thread=1, annotation=False):
    """As PyTorch's, in microseconds."""
    times = types.SimpleNamespace(start=start, end=end)
    return types.SimpleNamespace(
        name=name, time_range=times, device_type=device, thread=thread, is_user_annotation=annotation
    )


ON_CPU = {"aten::mm": 0, "aten::_scaled_dot_product_flash_attention_for_cpu": 1, "aten::add": 2}
ON_GPU = {
    "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": 0,
    "sm90_xmma_gemm_bf16bf16_bf16f32": 0,
    "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": 1,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": 1,
    "triton_poi_fused_mul_silu_3": 2,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 3,
}
"""Which of `ROWS` they belong to."""


@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_moment_counts_once(on_gpu):
    """Against a plain loop over microseconds, with events that overlap and begin or end outside of the steps."""
    generator = np.random.default_rng(0)
    events = [event(STEP, 100, 400, annotation=True), event(STEP, 500, 900, annotation=True)]
    events += [event("ProfilerStep#1", 90, 950, annotation=True)]
    names = ON_GPU if on_gpu else {**ON_CPU, "c10d::allreduce_": 3}
    rows = np.full((6, 1000), fill_value=False)
    for _ in range(60):
        start, length = generator.integers(0, 900), generator.integers(1, 15)
        name = generator.choice([*names, DATA])
        row = 4 if name == DATA else names[name]
        device = CUDA if on_gpu and name != DATA else CPU
        events.append(event(name, start, start + length, device, annotation=name == DATA))
        rows[row, start : start + length] = True
    events.append(event("gloo:all_reduce", 600, 700, thread=2))  # its own thread: counts on a CPU
    rows[3, 600:700] |= not on_gpu
    events.append(event("aten::mm", 700, 800, thread=3))  # of a worker, or launched for a GPU: does not
    events.append(event("aten::mm", 100, 110, thread=3 if not on_gpu else 1))
    order = [1, 0, 2, 3, 4] if on_gpu else [4, 1, 0, 2, 3]
    expected = np.zeros(6)
    for moment in [*range(100, 400), *range(500, 900)]:
        expected[next((row for row in order if rows[row, moment]), 5)] += 1e-6
    seconds = time_by_kind(events, on_gpu=on_gpu)
    assert list(seconds) == list(ROWS)
    np.testing.assert_allclose(list(seconds.values()), expected, atol=1e-12)
    assert sum(seconds.values()) == pytest.approx(700e-6)


def test_events_of_other_steps_are_not_gone_through_for_each_step():
    """A hundred steps of a large model have a million kernels, and all ranks wait for the table."""
    visits = 0

    class Interval(tuple):
        def __iter__(self):
            nonlocal visits
            visits += 1
            return super().__iter__()

    intervals = [Interval((number, number + 1)) for number in range(0, 5000, 2)]
    windows = [(start, start + 40) for start in range(0, 5000, 50)]
    assert covered(intervals, windows) == 20 * len(windows)
    assert visits <= 2 * len(intervals)


@pytest.mark.parametrize(
    ("trained", "count", "expected"),
    [
        (range(1, 100), 3, [10, 11, 12, 13]),  # the first of them does not count
        (range(41, 100), 1, [50, 51]),
        (range(1, 6), 2, [3, 4, 5]),
        (range(1, 4), 3, [1, 2, 3]),  # two count
        (range(1, 3), 5, [1, 2]),
        (range(0), 5, []),
    ],
)
def test_the_steps_come_after_ten_others_or_are_the_last(trained, count, expected):
    assert profiled_steps(iter(trained), count) == expected


def table_of(folder):
    """Percent by row."""
    text = (folder / "table.txt").read_text()
    return {row: float(re.search(rf"^{row} +([\d.]+) %", text, re.MULTILINE)[1]) for row in ROWS}


def test_a_profiled_run_has_the_losses_of_one_that_is_not(tmp_path):
    options = "--max_duration=16", "--data.skip_steps=2:4"
    train(tiny.train_config(tmp_path, *options))
    expected = (tmp_path / "run" / "metrics.jsonl").read_text()
    train(tiny.train_config(tmp_path, *options, "--profile=2", f"--save_folder={tmp_path / 'profiled'}"))
    rows, same = read_metrics(tmp_path / "profiled" / "metrics.jsonl"), map(json.loads, expected.splitlines())
    assert [row.get("loss_nats") for row in rows] == [row.get("loss_nats") for row in same]
    [folder] = (tmp_path / "profiled" / "profile").iterdir()
    assert folder.name == "steps-13-14"  # after ten that were trained
    shares = table_of(folder)
    assert sum(shares.values()) == pytest.approx(100, abs=0.4)
    assert min(shares["matrix products"], shares["attention"], shares["data"], shares["gaps"]) > 0
    assert shares["communication"] == 0
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert sum(event.get("name") == STEP for event in trace["traceEvents"]) == 2
    assert not list(tmp_path.rglob(".*.tmp-*"))


def test_a_run_that_ends_within_its_profile_leaves_none_and_the_next_one_can_have_one(tmp_path, monkeypatch):
    config = tiny.train_config(tmp_path, "--profile=4", "--max_duration=16")
    step_of_loop = loop.train_step

    def stopped(engine, batch, plan, step):
        if step == 12:
            signal.raise_signal(signal.SIGTERM)
        return step_of_loop(engine, batch, plan, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopped)
        with pytest.raises(StoppedBySignal):
            train(config)
    assert not (Path(config.save_folder) / "profile").exists()
    train(config, resume=True)
    assert [path.name for path in (Path(config.save_folder) / "profile").iterdir()] == ["steps-14-16"]


def test_a_single_step_is_not_profiled(tmp_path, caplog):
    config = tiny.train_config(tmp_path, "--profile=3", "--max_duration=1", "--scheduler.t_warmup=0")
    train(config)
    assert "nothing is profiled" in caplog.text
    assert not (Path(config.save_folder) / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    config = tiny.train_config(tmp_path, "--profile=2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file in the place of the folder")
    assert train(config).name == "step00000008"
    assert "steps-7-8 cannot be written" in caplog.text


def test_a_run_without_a_step_left_profiles_nothing(tmp_path, caplog):
    train(tiny.train_config(tmp_path, "--stop_at=4"))
    train(tiny.train_config(tmp_path, "--stop_at=4", "--profile=2"), resume=True)
    assert "fewer than two steps are left" in caplog.text


def test_other_ranks_watch_nothing(tmp_path):
    profiler = StepProfiler(tmp_path, [], torch.device("cpu"))
    with profiler, profiler.step(1):
        assert profiler.running is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", ["0", "-3", "1000000", "1.5", "5:10", "many"])
def test_what_is_no_number_of_steps_is_refused(tmp_path, steps):
    with refused("profile"):
        tiny.train_config(tmp_path, f"--profile={steps}")
