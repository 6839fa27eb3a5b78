"""The benchmark: its ratios are what they are called, and a part of a GPU's that fails is recorded."""

import json
import os
import sys
from pathlib import Path

import pytest

from olmo_sparsity.cli.submit import SAVED_BYTES_PER_SECOND
from olmo_sparsity.config.schema import Config
from tests.support.refusals import refused

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as scripts/benchmark.py finds its modules

import benchmark
from benchmarks import gpu, save, sizes, start, train
from benchmarks.timing import rates, time_in_turn


def test_rounds_are_timed_in_turn_and_paired():
    now, calls = [0.0], []

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
    rows = rates(seconds, 16, ["plain"])
    assert rows == {"plain": {"rate": 2, "to plain": [1, 1, 1]}, "engine": {"rate": 8, "to plain": [4, 2, 6]}}


@pytest.mark.parametrize(("precision", "is_bf16"), [("amp_bf16", True), ("fp32", False)])
def test_all_sides_compute_in_the_precision_of_the_run(monkeypatch, precision, is_bf16):
    """Ours once computed in bf16 beside others in fp32."""
    sides = []
    for steps in ("plain_steps", "trainer_steps"):
        monkeypatch.setattr(train, steps, lambda config, device, bf16, *_, **options: sides.append(bf16))
    monkeypatch.setattr(
        train, "time_in_turn", lambda runners, *_, **options: {name: [1.0] for name in runners}
    )
    tiny = ["--model.d_model=32", "--model.n_heads=2", "--model.n_layers=1", f"--precision={precision}"]
    row = train.run("configs/demo.yaml", tiny, rounds=1, steps=1)
    assert sides == 3 * [is_bf16] and row["precision"] == ("bf16" if is_bf16 else "fp32")


def test_a_save_is_timed_in_all_ways_and_beside_steps():
    shape = [
        "--model.d_model=32",
        "--model.n_heads=2",
        "--model.n_layers=1",
        "--model.max_sequence_length=32",
    ]
    record = save.run("configs/demo.yaml", shape, rounds=1)
    ways = (save.BY_RANK_ZERO, save.BY_ALL, save.IN_BACKGROUND, save.STEP_BESIDE)
    assert all(record["results"][way]["seconds"][0] > 0 for way in ways)
    assert record["processes"] == 1


@pytest.mark.slow
def test_a_start_is_timed_in_all_ways(capsys, monkeypatch):
    """Of one process, through the launcher."""
    tiny = ["--model.d_model=32", "--model.n_heads=2", "--model.n_layers=1"]
    words = ["benchmark.py", "start", "--config", "configs/demo.yaml", "--processes=1", "--json", *tiny]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert benchmark.main() == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    who = start.EVERY_RANK, start.RANK_ZERO
    assert list(rows) == [f"{what} by {whom}, 1 processes" for what in ("drawn", "read") for whom in who]
    assert all(
        0 < row["seconds"] < 60 and row["ready_gb_rank_0"] >= row["built_gb_rank_0"] for row in rows.values()
    )


def test_what_sizes_ask_is_the_sum_of_their_tensors():
    """Against tensors and messages that are listed one by one, of four GPUs."""
    weights = gradients = moment = master = 4.0
    per_gpu = {
        "DDP": weights + gradients + 2 * moment,
        "ZeRO 2": weights + (master + gradients + 2 * moment) / 4,
        "ZeRO 3": (weights + gradients + 2 * moment) / 4,
    }
    for way, expected in per_gpu.items():
        assert sizes.bytes_per_parameter(way, 4) == expected
    ring = 3 / 4 * 4.0  # a reduce-scatter, or an all-gather, of fp32 around a ring of four
    sent = {"DDP": 2 * ring, "ZeRO 2": 5 * ring + ring, "ZeRO 3": 5 * (ring + ring + ring)}
    for way, expected in sent.items():
        assert sizes.sent_bytes_per_parameter(way, 4, micro_batches=5) == expected
        assert sizes.sent_bytes_per_parameter(way, 1, micro_batches=5) == 0
    assert sizes.save_seconds(1e9, 1) == sizes.save_seconds(8e9, 8) == 24
    assert sizes.SAVED_BYTES_PER_SECOND == SAVED_BYTES_PER_SECOND


def test_the_page_has_the_tables_of_sizes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "sizes"])
    assert benchmark.main() == 0
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf8")
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page


PARTS = {
    "first": gpu.Part("echo something"),
    "second": gpu.Part("false; echo not reached"),
    "third": gpu.Part("sleep 60 & sleep 60", minutes=0.02),
}


def test_a_part_that_fails_is_recorded_and_measured_again_and_the_others_stay(monkeypatch, tmp_path):
    """Hours of a GPU are not lost to one part."""
    monkeypatch.setattr(gpu, "PARTS", PARTS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = {"data": None, "minutes": 1.0, "tiny": True, "agreement": False}
    first = gpu.run(tmp_path, only=(), **options)["results"]
    assert [row["failed"] for row in first.values()] == [False, True, True]
    kept = (tmp_path / "first.json").read_text()
    monkeypatch.setitem(PARTS, "first", gpu.Part("echo another"))
    monkeypatch.setitem(PARTS, "second", gpu.Part("echo done"))
    again = gpu.run(tmp_path, only=("first", "second"), **options)["results"]
    assert not again["second"]["failed"] and (tmp_path / "first.json").read_text() == kept
    with refused("measured with other --tiny or --data; give another --out"):
        gpu.run(tmp_path, only=(), **{**options, "data": "runs/other"})


def test_nothing_of_a_part_goes_on_after_ctrl_c(monkeypatch, tmp_path):
    """It would keep the GPU busy, without a limit."""
    part = gpu.Part(f"echo $$ >{tmp_path}/process; sleep 0.5; kill -INT {os.getpid()}; sleep 60")
    monkeypatch.setattr(gpu, "PARTS", {"long": part})
    with pytest.raises(KeyboardInterrupt):
        gpu.measure_part(tmp_path, "long", 60.0, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_a_part_that_goes_on_from_a_run_cut_off_is_not_right(monkeypatch, tmp_path):
    losses = {"run": [3.0, 2.5], "near": [3.0, 2.5], "far": [3.0, 2.6], "short": [3.0], "none": []}
    losses["no number"] = [3.0, float("nan")]
    row = {"grad_norm": 1.0, "tokens_per_second": 9}
    rows = lambda path: [{"loss_nats": loss, **row} for loss in losses[path.parent.name]]  # noqa: E731
    monkeypatch.setattr(gpu, "read_metrics", rows)
    monkeypatch.setattr(gpu, "config_of", lambda _: Config())
    monkeypatch.setattr(gpu, "resolve_checkpoint", str)
    failed = {case: gpu.read_run("run", case, 1e-3, None, tmp_path, "")["failed"] for case in losses}
    assert failed == {case: case not in ("run", "near") for case in losses}
    assert not gpu.read_run("run", "none", 1e-3, 4, tmp_path, "")["failed"]  # compared with none


def test_the_records_of_the_page_of_benchmarks_are_shown(capsys, monkeypatch):
    """The numbers that the page names, from all of its records."""
    folder = Path(__file__).parents[2] / "results" / "benchmarks"
    paths = [path for path in folder.rglob("*.json*") if path.stem not in ("provenance", "result")]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "show", *map(str, paths)])
    assert benchmark.main() == 0
    printed = capsys.readouterr().out
    for number in (
        "2.38 [1.851, 2.427]",
        "408,850 [405,072, 410,373]",
        "198.9 [188.1, 245.8]",
        "88.91 [87.19, 93.15]",
    ):
        assert number in printed
