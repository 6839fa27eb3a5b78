"""The benchmark of a GPU: its parts on the CPU with tiny shapes, and what becomes of them when something goes wrong."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from olmo_sparsity.util.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))  # as scripts/benchmark.py finds its modules

from benchmarks import gpu  # noqa: E402
from benchmarks.settings import GpuSettings  # noqa: E402

PARTS = [
    name for name in gpu.PARTS if "60m" not in name and name != "train-1b-compiled"
]  # the others do the same
SHAPES = ("rope", "alibi", "nope", "learned", "gpt_neox, predicted", "olmo, coupled")


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """What --tiny sets for the parts ends with the test."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


# What the parts measure.


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Every part, in this process but for ZeRO, whose process group would outlive its test."""
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("DS_ACCELERATOR", "cpu")
        for name in PARTS:
            settings = GpuSettings(out=out, tiny=True, minutes=1.0, part=name)
            if name == "zero2":
                gpu.run_part(settings, name, 300, {})  # DeepSpeed may compile first
            else:
                AcceleratorState._reset_state()
                gpu.run(settings)
    AcceleratorState._reset_state()
    return {name: json.loads((out / f"{name}.json").read_text()) for name in PARTS} | {"out": out}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_done_and_says_what_it_found(measured, name):
    part = measured[name]
    assert not part["failed"], part["found"]
    assert part["part"] == name and part["found"] and part["seconds"] > 0
    assert gpu.PART.load(measured["out"] / f"{name}.json") == part


@pytest.mark.slow
def test_the_cpu_agrees_with_itself(measured):
    rows = measured["agreement"]["rows"]
    assert {f"{shape}, {precision}" for shape in SHAPES for precision in ("fp32", "bf16")} < set(rows)
    assert all(row["loss_difference_nats"] == row["gradient_difference"] == 0 for row in rows.values())
    assert all(row["loss_nats"] > 0 for row in rows.values())
    assert rows["rope, fp32"]["loss_nats"] != rows["rope, document mask, fp32"]["loss_nats"]
    assert measured["resume"]["largest_loss_difference_nats"] == 0
    assert measured["resume"]["largest_weight_difference"] == 0
    losses = measured["checkpoint"]["loss_nats"]
    assert losses[-1] < losses[0] - 0.5
    influence = measured["influence"]
    assert influence["targets"] > 0 and influence["same"] == 1
    assert max(influence["largest_difference_nats"].values()) == 0


@pytest.mark.slow
def test_speeds_are_those_of_the_shapes(measured):
    eager, compiled, large = (
        measured[f"train-{name}"] for name in ("150m-eager", "150m-compiled", "1b-eager")
    )
    assert (eager["mfu_goal"], compiled["mfu_goal"], large["mfu_goal"]) == (0.4, 0.4, 0.45)
    for part in (eager, compiled, large):
        assert part["mfu"] is None  # nobody knows a processor's peak
        assert part["tokens_per_second_low"] <= part["tokens_per_second"] <= part["tokens_per_second_high"]
        assert part["share_of_matrix_product"] > 0
    for part in (compiled, measured["zero2"]):
        assert part["losses_nats"] == pytest.approx(eager["losses_nats"], abs=1e-4)
    assert measured["targets"]["blocks"]["targets_per_block"] == 4


@pytest.mark.slow
def test_the_model_is_trained_and_drawn(measured):
    model, out = measured["model"], measured["out"]
    assert model["step"] == model["steps"] and model["tokens"] == model["step"] * 4 * 32
    assert (out / "figure2" / "figure2.png").stat().st_size > 1000
    assert "targets" in measured["figure2"]["found"]


# What becomes of them.

CODES = {
    "first": "open(sys.argv[1], 'w').write(sys.argv[2])",
    "second": "print('a page of text'); raise ValueError('no such thing')",
    "third": "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)",
    "last": "open(sys.argv[1], 'w').write(sys.argv[2])",
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs parts that are small programs: the first and the last write their files, one fails, one takes too long."""
    parts = {name: gpu.Part(lambda settings: {}, 0.02 if name == "third" else 1) for name in CODES}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "FEWEST_SECONDS", 0.5)
    started = []

    def command(settings, name, seconds):
        started.append(name)
        row = {"part": name, "seconds": 1.0, "found": "something", "failed": False}
        file, text = tmp_path / f"{name}.json", json.dumps(gpu.PART.stamped(row))
        return [sys.executable, "-c", f"import sys; {CODES[name]}", str(file), text]

    monkeypatch.setattr(gpu, "part_command", command)

    def once(**changes):
        started.clear()
        result = gpu.run(GpuSettings(out=tmp_path, tiny=True, **changes))
        return {name: row["found"] for name, row in result["parts"].items()}, list(started), result

    return once


def test_a_part_that_fails_or_takes_too_long_is_recorded_and_the_next_one_runs(run, tmp_path, run_here):
    before = time.monotonic()
    found, started, result = run()
    assert time.monotonic() - before < 30
    assert started == list(CODES) and found["first"] == found["last"] == "something"
    assert found["second"].startswith("failed: exit code 1: ValueError: no such thing; see ")
    assert found["third"].startswith("failed: not done after 1 s, its limit; see ")
    assert [row["failed"] for row in result["parts"].values()] == [False, True, True, False]
    assert "a page of text" in (tmp_path / "logs" / "second.log").read_text()
    again = run_here("scripts/benchmark.py", "gpu", "--tiny", "--out", tmp_path)
    assert again.returncode == 1 and "second" in again.stdout and "failed" in again.stdout


def test_a_second_start_goes_on_with_what_is_missing(run, tmp_path, capsys):
    run()
    (tmp_path / "last.json").write_text((tmp_path / "last.json").read_text().replace("something", "another"))
    capsys.readouterr()
    found, started, _ = run()
    assert started == ["second", "third", "last"] and found["last"] == "something"
    assert f"first: {tmp_path / 'first.json'} is there and whole, skipped" in capsys.readouterr().err


def test_parts_of_another_corpus_are_not_taken_for_these(monkeypatch, tmp_path):
    part = replace(gpu.PARTS["data"], measure=lambda settings: {"found": "something"})
    monkeypatch.setattr(gpu, "PARTS", {"data": part})
    gpu.run(GpuSettings(out=tmp_path, tiny=True, part="data"))
    with pytest.raises(UserError, match="other --tiny or --data; give another --out"):
        gpu.run(GpuSettings(out=tmp_path, tiny=True, data="runs/other"))
    assert gpu.run(GpuSettings(out=tmp_path, tiny=True))["parts"]["data"]["found"] == "something"


def test_without_time_a_part_is_not_started(run):
    found, started, _ = run(minutes=0.001)
    assert started == [] and set(found.values()) == {"failed: no time was left; run the same command again"}


def test_a_part_asked_for_alone_has_the_variables_of_a_whole_run(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "chosen_device", lambda: "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "0")
    seen = []

    def measure(settings):
        seen.append((os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"]))
        return {"found": "something"}

    for name in ("agreement", "checkpoint", "influence"):
        monkeypatch.setitem(gpu.PARTS, name, replace(gpu.PARTS[name], measure=measure))
    gpu.run(GpuSettings(out=tmp_path, part="agreement"))
    gpu.run(GpuSettings(out=tmp_path, part="influence"))
    gpu.run(GpuSettings(out=tmp_path, part="checkpoint"))
    assert seen == [("0", "0"), ("0", "1"), ("", "1")]


def test_the_model_has_what_the_parts_behind_it_leave():
    assert gpu.seconds_for("agreement", 1000) == 180 and gpu.seconds_for("agreement", 50) == 50
    assert gpu.seconds_for("model", 1000) == 1000 - 60 * gpu.PARTS["figure2"].minutes
    assert gpu.seconds_for("model", 100) == 50


def test_without_cuda_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "chosen_device", lambda: "cpu")
    with pytest.raises(UserError, match="finds no CUDA device here; .* or add --tiny"):
        gpu.run(GpuSettings(out=tmp_path))
    with pytest.raises(UserError, match="--part has no 'modle'; choose among data, agreement"):
        gpu.run(GpuSettings(out=tmp_path, tiny=True, part="modle"))


@pytest.mark.slow
def test_the_cases_of_several_processes_run_on_a_cpu(tmp_path):
    command = [sys.executable, "scripts/benchmarks/gpu_processes.py", "--out", str(tmp_path), "--tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    rows = json.loads((tmp_path / "cases.json").read_text())
    assert done.returncode == 0 and len(rows) == len(done.stdout.splitlines()) == 12
    for name, row in rows.items():
        size, _, how, precision = name.split()
        assert row["is_compiled"] == (how == "compiled")
        plain = rows[f"{size} plain eager {precision}"]["losses_nats"]
        assert row["losses_nats"] == pytest.approx(plain, abs=1e-5 if precision == "fp32" else 1e-3)
