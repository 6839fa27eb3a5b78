"""What a run writes and shows: metrics.jsonl, Weights & Biases; model FLOPs as PyTorch counts them."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from olmo_sparsity.config.load import Config
from olmo_sparsity.training import log as log_module
from olmo_sparsity.training.build import open_monitor
from olmo_sparsity.training.flops import flops_per_token, peak_flops
from olmo_sparsity.training.log import RUN_ID_NAME, WeightsAndBiases, read_metrics
from olmo_sparsity.util.background import WANDB_THREAD
from olmo_sparsity.util.errors import FAILED_EXIT_CODE
from tests.support import tiny
from tests.support.processes import SECONDS, started
from tests.support.slow import slow_but

ROOT = Path(__file__).parents[3]
HELDOUT = {"heldout_loss_nats": 3.0, "heldout_tokens": 10}


def monitor_of(config, first=0, last=6, *, is_rank_zero=True, world_size=1):
    """That of a run on a CPU."""
    engine = types.SimpleNamespace(
        is_rank_zero=is_rank_zero, device=torch.device("cpu"), world_size=world_size
    )
    return open_monitor(config, engine, first_step=first, last_step=last)


def run(config, first=0, last=6, evaluate_at=(), **options):
    """As the loop uses it, with losses that fall."""
    with monitor_of(config, first, last, **options) as monitor:
        for step in range(first + 1, last + 1):
            monitor.log(step, {"loss_nats": 5 - step / 10, "learning_rate": 1e-3, "grad_norm": 1.0})
            if step in evaluate_at:
                monitor.log_evaluation(step, HELDOUT)


def rows_of(config):
    return read_metrics(Path(config.save_folder) / "metrics.jsonl")


def test_rows_at_the_interval_and_at_the_end_by_one_process(tmp_path, capsys):
    config = tiny.train_config(tmp_path, "--console_log_interval=4")
    run(config, evaluate_at=(2,), is_rank_zero=False)  # another process
    assert not Path(config.save_folder).exists() and capsys.readouterr() == ("", "")
    run(config, evaluate_at=(3,))
    training = [row for row in rows_of(config) if "loss_nats" in row]
    steps = [(row["step"], row["tokens"], row["loss_nats"]) for row in training]
    assert steps == [(4, 512, 4.6), (6, 768, 4.4)]
    assert {"step": 3, "tokens": 384, **HELDOUT} in rows_of(config)
    assert all(row["tokens_per_second"] > 0 and 0.05 < row["peak_memory_gb"] < 100 for row in training)
    assert all("mfu" not in row for row in training)  # a processor's peak is not known


def test_tokens_per_second_over_the_last_steps_without_pauses_and_mfu_of_all_devices(tmp_path, monkeypatch):
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(log_module, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    config = tiny.train_config(
        tmp_path, "--console_log_interval=1", speed_monitor={"window_size": 2, "gpu_flops_available": 1e9}
    )
    with monitor_of(config, last=4, world_size=4) as monitor:
        for step, seconds in enumerate([8, 1, 1, 4], 1):
            now.seconds += seconds
            monitor.log(step, {"loss_nats": 1.0})
            with monitor.paused():
                now.seconds += 50
    rates = [row["tokens_per_second"] for row in rows_of(config)]
    assert rates == pytest.approx([128 / 8, 256 / 9, 256 / 2, 256 / 5])
    per_rate = flops_per_token(config) / 4e9
    assert [row["mfu"] for row in rows_of(config)] == pytest.approx([rate * per_rate for rate in rates])


class FakeWandb(types.ModuleType):
    """W&B as the run calls it; what fails, by its name, is ``broken``: raised, or, of seconds, waited for."""

    def __init__(self, **broken):
        super().__init__("wandb")
        self.broken, self.step = broken, 0
        self.opened, self.logged, self.finished = [], [], []
        self.is_over = threading.Event()

    def init(self, **options):
        self.opened.append(options)
        is_offline = options.get("mode") == "offline"
        self.fail("offline" if is_offline else "init")
        return types.SimpleNamespace(
            step=self.step,
            log=lambda row, step: self.log(row, step, is_offline),
            finish=lambda exit_code: (self.fail("finish"), self.finished.append(exit_code)),
        )

    def log(self, row, step, is_offline):
        if step >= 3 and not is_offline:
            self.fail("log")
        self.logged.append((step, row))

    def fail(self, name):
        match self.broken.get(name):
            case BaseException() as error:
                raise error
            case float() as seconds:
                self.is_over.wait(seconds)


@pytest.fixture
def wandb(monkeypatch):
    """Put a `FakeWandb` in the place of W&B; no thread of it outlives the test, for a command would end at once."""
    installed = []

    def install(**broken):
        module = FakeWandb(**broken)
        monkeypatch.setitem(sys.modules, "wandb", module)
        installed.append(module)
        return module

    yield install
    for module in installed:
        module.is_over.set()
    for thread in threading.enumerate():
        if thread.name == WANDB_THREAD:
            thread.join(SECONDS)


def test_a_resumed_run_goes_on_in_the_same_one_of_weights_and_biases(tmp_path, wandb):
    fake = wandb()
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    run(config, last=3)
    fake.step = 5  # it was killed after logging step 4, beyond its checkpoint at 3
    run(config, first=3, evaluate_at=(6,))
    assert [step for step, _ in fake.logged] == [1, 2, 3, 5, 6, 6]
    assert fake.logged[-1][1]["heldout_loss_nats"] == 3.0
    run(config, first=0)
    first, second, afresh = (options["id"] for options in fake.opened)
    assert first == second != afresh
    assert all(options["project"] == "p" and options["resume"] == "allow" for options in fake.opened)
    assert (Path(config.save_folder) / RUN_ID_NAME).read_text().strip() == afresh
    assert fake.finished == [0, 0, 0]


@pytest.mark.parametrize("broken", ["init", "log"])
@pytest.mark.parametrize(
    "error", [OSError("Network is unreachable\nat line 3"), SystemExit(1), TypeError("protobuf")], ids=repr
)
def test_where_weights_and_biases_fails_the_rest_is_written_offline(tmp_path, wandb, caplog, broken, error):
    fake = wandb(**{broken: error})
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    run(config)
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 6]
    online, offline = fake.opened
    assert "mode" not in online and offline["mode"] == "offline" and offline["id"] == online["id"]
    assert fake.finished == [0]
    (record,) = caplog.records
    assert type(error).__name__ in record.message and "wandb sync" in record.message
    assert "\n" not in record.message
    assert len(rows_of(config)) == 6


def test_without_any_weights_and_biases_the_run_goes_on(tmp_path, wandb, caplog):
    fake = wandb(init=ConnectionError("no"), offline=PermissionError("no"))
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    run(config)
    assert len(rows_of(config)) == 6 and fake.logged == []
    assert ["wandb sync" in record.message for record in caplog.records] == [True, False]


def test_a_run_that_weights_and_biases_cannot_finish_ends_well(tmp_path, wandb, caplog):
    fake = wandb(finish=ConnectionError("no"))
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    run(config)
    assert len(fake.logged) == 6 and len(fake.opened) == 1
    assert ["ConnectionError: no" in record.message for record in caplog.records] == [True]


def test_weights_and_biases_that_is_not_installed_is_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    run(config)
    assert len(rows_of(config)) == 6
    assert [".[wandb]'; the run goes on" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("waited_for", ["init", "log", "finish"])
def test_weights_and_biases_that_does_not_answer_delays_no_run(
    tmp_path, wandb, caplog, monkeypatch, waited_for
):
    """An operator whose cluster drops packets waits for no time-out, and can upload all rows afterwards."""
    monkeypatch.setattr(WeightsAndBiases, "START_SECONDS", 0.1)
    monkeypatch.setattr(WeightsAndBiases, "END_SECONDS", 0.2)
    fake = wandb(**{waited_for: 5.0})
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    start = time.monotonic()
    run(config)
    assert time.monotonic() - start < 3
    assert len(rows_of(config)) == 6
    assert ["wandb sync" in record.message for record in caplog.records] == [True]
    if waited_for == "init":
        assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 6]
        assert [options.get("mode") for options in fake.opened] == [None, "offline"]


@pytest.mark.parametrize("end", slow_but(["return 85", "1 / 0"], "return 85"))
def test_a_process_does_not_wait_at_its_end_for_weights_and_biases(tmp_path, end):
    """Its own hook there waits until all rows are taken, which it tries for seven days."""
    (tmp_path / "wandb.py").write_text("""
import atexit, time, types
def init(**options):
    atexit.register(time.sleep, 3600)
    return types.SimpleNamespace(step=0, log=print, finish=lambda exit_code: time.sleep(3600))
""")
    code = f"""
from pathlib import Path
from olmo_sparsity.cli import run_script
from olmo_sparsity.config.schema import WandbConfig
from olmo_sparsity.training.log import WeightsAndBiases
def main():
    WeightsAndBiases.END_SECONDS = 0.1
    WeightsAndBiases(WandbConfig(project="p"), Path({str(tmp_path)!r}), 0, run_config={{}}).close(failed=False)
    {end}
run_script(main)
"""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-c", code]
    with started(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == (85 if end == "return 85" else FAILED_EXIT_CODE), errors
    assert "wandb sync" in errors and ("ZeroDivisionError" in errors) == (end == "1 / 0")


def test_rows_wait_for_weights_and_biases_that_answers_late(tmp_path, wandb, caplog, monkeypatch):
    monkeypatch.setattr(WeightsAndBiases, "START_SECONDS", 0.05)
    fake = wandb(init=0.3)
    config = tiny.train_config(tmp_path, wandb={"project": "p"})
    with monitor_of(config, last=2) as monitor:
        monitor.log(1, {"loss_nats": 1.0})
        assert fake.logged == []
        time.sleep(0.6)
        monitor.log(2, {"loss_nats": 1.0})
    assert [step for step, _ in fake.logged] == [1, 2] and len(fake.opened) == 1
    assert caplog.records == []


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": True},
        {"n_kv_heads": 2, "n_layers": 3},
        {"block_type": "llama"},
        {"include_bias": True, "layer_norm_type": "default", "activation_type": "gelu"},
        {"rope": False},
        {"family": "gpt_neox", "weight_tying": True},  # OLMo's default, which GPT-NeoX does not read
    ],
    ids=str,
)
def test_flops_are_those_of_the_operations_that_run(changes):
    """Exactly so: plain attention is counted as the full T x T, and PyTorch counts matrix products only."""
    model = (tiny.neox if "family" in changes else tiny.model)(**changes).train()
    ids = torch.randint(1, 50, (3, model.config.max_sequence_length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
    assert counter.get_total_flops() == flops_per_token(Config(model=model.config)) * ids.numel()


TERAFLOPS = {
    "NVIDIA H200": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362, "NVIDIA L4": 121,
    "NVIDIA H200 NVL": 835.5, "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None, "NVIDIA A1000": None,
    "NVIDIA B200": 2250, "NVIDIA B300": 2250, "NVIDIA B300 SXM6 AC": 2250, "NVIDIA B300 MIG 1g.34gb": None,
}  # fmt: skip


def test_the_peak_of_known_devices_and_no_guess_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device.name)
    config = tiny.train_config(tmp_path)
    for name, teraflops in TERAFLOPS.items():
        peak = peak_flops(config, types.SimpleNamespace(type="cuda", name=name))
        assert peak == (teraflops and pytest.approx(teraflops * 1e12)), name
    assert peak_flops(config, torch.device("cpu")) is None
