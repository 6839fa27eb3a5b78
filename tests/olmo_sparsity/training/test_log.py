"""What a run writes and shows: metrics.jsonl, Weights & Biases, TensorBoard; model FLOPs as PyTorch counts them."""

import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from olmo_sparsity.config.load import Config
from olmo_sparsity.model.build import build_model, decoder_of
from olmo_sparsity.training import log as log_module
from olmo_sparsity.training.log import (
    RUN_ID_NAME,
    TENSORBOARD_FOLDER,
    Monitor,
    flops_per_token,
    peak_flops,
    read_metrics,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.signals import StoppedBySignal
from tests.support import tiny, tiny_task
from tests.support.refusals import refused

HELDOUT = {
    "heldout_loss_nats": 3.0,
    "heldout_tokens": 10,
    "heldout_loss_by_position": [
        {"from": 0, "to": 16, "loss_nats": 3.5, "tokens": 4},
        {"from": 16, "to": 128, "loss_nats": 2.5, "tokens": 6},
    ],
}


def run(config, first=0, last=6, evaluate_at=(), **options):
    """As the loop uses it, with losses that fall."""
    with Monitor(config, first_step=first, last_step=last, **options) as monitor:
        for step in range(first + 1, last + 1):
            monitor.log(step, {"loss_nats": 5 - step / 10, "learning_rate": 1e-3, "grad_norm": 1.0})
            if step in evaluate_at:
                monitor.log_evaluation(step, HELDOUT)


def rows_of(config):
    return read_metrics(Path(config.save_folder) / "metrics.jsonl")


# --- metrics.jsonl ---


def test_rows_at_the_interval_and_at_the_end(tmp_path):
    config = tiny.train_config(tmp_path, "--console_log_interval=4")
    run(config, evaluate_at=(3,))
    training = [row for row in rows_of(config) if "loss_nats" in row]
    steps = [(row["step"], row["tokens"], row["loss_nats"]) for row in training]
    assert steps == [(4, 512, 4.6), (6, 768, 4.4)]
    assert {"step": 3, "tokens": 384, **HELDOUT} in rows_of(config)
    assert all(row["tokens_per_second"] > 0 and 0.05 < row["peak_memory_gb"] < 100 for row in training)
    assert all("mfu" not in row for row in training)  # a processor's peak is not known


def test_other_processes_write_and_show_nothing(tmp_path, capsys):
    config = tiny.train_config(tmp_path, "--tensorboard")
    run(config, evaluate_at=(2,), enabled=False)
    assert not Path(config.save_folder).exists()
    assert capsys.readouterr() == ("", "")


def test_tokens_per_second_over_the_last_steps_without_pauses_and_mfu_of_all_devices(tmp_path, monkeypatch):
    now = types.SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(log_module, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    config = tiny.train_config(
        tmp_path, "--console_log_interval=1", speed_monitor={"window_size": 2, "gpu_flops_available": 1e9}
    )
    with Monitor(config, first_step=0, last_step=4, processes=4) as monitor:
        for step, seconds in enumerate([8, 1, 1, 4], 1):
            now.seconds += seconds
            monitor.log(step, {"loss_nats": 1.0})
            with monitor.paused():
                now.seconds += 50
    rates = [row["tokens_per_second"] for row in rows_of(config)]
    assert rates == pytest.approx([128 / 8, 256 / 9, 256 / 2, 256 / 5])
    per_rate = flops_per_token(config) / 4e9
    assert [row["mfu"] for row in rows_of(config)] == pytest.approx([rate * per_rate for rate in rates])


# --- Weights & Biases, TensorBoard ---


class FakeWandb(types.ModuleType):
    """Stands for the package: keeps what it is given."""

    def __init__(self):
        super().__init__("wandb")
        self.opened, self.logged, self.exits, self.step = [], [], [], 0

    def init(self, **options):
        self.opened.append(options)
        return types.SimpleNamespace(
            step=self.step,
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda exit_code: self.exits.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def wandb_config(folder, **section):
    return tiny.train_config(folder, wandb={"project": "p", "entity": "e", "name": "n", **section})


def test_olmos_section_is_passed_on(tmp_path, wandb):
    config = wandb_config(tmp_path, tags=["a"], group="g", log_interval=2)
    run(config, evaluate_at=(3,))
    (options,) = wandb.opened
    section = {"project": "p", "entity": "e", "name": "n", "group": "g", "tags": ["a"]}
    assert options.items() >= {**section, "dir": config.save_folder}.items()
    assert options["config"]["optimizer"]["learning_rate"] == 3e-3 and "wandb" not in options["config"]
    assert [step for step, _ in wandb.logged] == [2, 3, 4, 6]
    assert wandb.logged[0][1]["loss_nats"] == 4.8
    assert wandb.logged[1][1] == {
        "tokens": 384,
        "heldout_loss_nats": 3.0,
        "heldout_tokens": 10,
        "heldout_loss_nats_by_position/000-016": 3.5,
        "heldout_loss_nats_by_position/016-128": 2.5,
    }
    assert wandb.exits == [0]


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path, wandb):
    config = wandb_config(tmp_path)
    run(config, last=3)
    wandb.step = 5  # it was killed after logging step 4, beyond its checkpoint at 3
    run(config, first=3)
    assert [step for step, _ in wandb.logged] == [1, 2, 3, 5, 6]
    run(config, first=0)
    first, second, afresh = (options["id"] for options in wandb.opened)
    assert first == second != afresh
    assert all(options["resume"] == "allow" for options in wandb.opened)
    assert (Path(config.save_folder) / RUN_ID_NAME).read_text().strip() == afresh


@pytest.mark.parametrize(("error", "code"), [(UserError, 1), (StoppedBySignal, 0), (KeyboardInterrupt, 1)])
def test_a_run_that_fails_is_marked_so(tmp_path, wandb, error, code):
    with pytest.raises(error), Monitor(wandb_config(tmp_path), first_step=0, last_step=3):
        raise error("x")
    assert wandb.exits == [code]


def test_a_run_whose_metrics_are_damaged_is_marked_so_and_they_stay_as_they_are(tmp_path, wandb):
    config = wandb_config(tmp_path)
    path = Path(config.save_folder) / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text("[]\n")
    with refused("line 1 is damaged"), Monitor(config, first_step=1, last_step=3):
        pass
    assert wandb.exits == [1] and path.read_text() == "[]\n"


def test_a_resumed_run_has_every_step_once_in_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = tiny.train_config(tmp_path, "--tensorboard")
    run(config, last=5)
    time.sleep(1.1)  # event files are ordered by their second
    run(config, first=3, last=6, evaluate_at=(6,))
    events = accumulator.EventAccumulator(str(Path(config.save_folder) / TENSORBOARD_FOLDER)).Reload()
    curves = {
        tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }
    assert curves["loss_nats"] == pytest.approx({step: 5 - step / 10 for step in range(1, 7)})
    assert curves["heldout_loss_nats_by_position/016-128"] == {6: 2.5}
    assert curves.keys() >= {"tokens_per_second", "peak_memory_gb", "heldout_loss_nats"}


# --- model FLOPs ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": True},
        {"n_kv_heads": 2, "n_layers": 3},
        {"block_type": "llama"},
        {"include_bias": True, "layer_norm_type": "default", "activation_type": "gelu"},
        {"rope": False},
    ],
    ids=str,
)
def test_flops_are_those_of_the_operations_that_run(changes):
    """Exactly so: plain attention is counted as the full T x T, and PyTorch counts matrix products only."""
    model = tiny.model(**changes).train()
    ids = torch.randint(1, 50, (3, model.config.max_sequence_length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()).backward()
    assert counter.get_total_flops() == flops_per_token(Config(model=model.config)) * ids.numel()


def test_the_head_of_gpt_neox_is_no_second_one(tmp_path):
    config = tiny_task.config(tmp_path, "positions.scheme=contiguous")
    model, length = build_model(config).train(), config.model.max_sequence_length
    ids = torch.randint(config.model.vocab_size, (3, length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        F.cross_entropy(decoder_of(model)(ids).logits.flatten(0, 1), ids.flatten()).backward()
    assert config.model.weight_tying, "OLMo's default, which GPT-NeoX does not read"
    assert counter.get_total_flops() == flops_per_token(config) * ids.numel()


TERAFLOPS = {
    "NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA GH200 480GB": 989.4, "NVIDIA L40S": 362, "NVIDIA L40": 181, "NVIDIA L4": 121,
    "NVIDIA H200 NVL": 835.5, "NVIDIA GeForce GT 710": None, "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA A1000": None,
}  # fmt: skip


def test_the_peak_of_known_devices_and_no_guess_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device.name)
    config = tiny.train_config(tmp_path)
    for name, teraflops in TERAFLOPS.items():
        peak = peak_flops(config, types.SimpleNamespace(type="cuda", name=name))
        assert peak == (teraflops and pytest.approx(teraflops * 1e12)), name
    assert peak_flops(config, torch.device("cpu")) is None
