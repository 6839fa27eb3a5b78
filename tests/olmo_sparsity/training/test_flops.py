"""Model FLOPs against PyTorch's own count of the operations that ran."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from olmo_sparsity.config.load import Config
from olmo_sparsity.model.build import build_model, decoder_of
from olmo_sparsity.training.log import flops_per_token, peak_flops
from tests.support import tiny, tiny_task


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": True},
        {"n_kv_heads": 2},
        {"block_type": "llama"},
        {"include_bias": True, "layer_norm_type": "default"},
        {"activation_type": "gelu", "n_layers": 3},
        {"rope": False},
        {"rope": False, "nope": True},
    ],
    ids=str,
)
def test_equal_to_the_operations_counted(changes):
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
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA L40S": 362, "NVIDIA L40": 181, "NVIDIA L4": 121, "NVIDIA GH200 480GB": 989.4,
}  # fmt: skip
UNKNOWN = ("NVIDIA GeForce GT 710", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A1000", "")


def test_known_devices_and_no_guess_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device.name)
    config = tiny.train_config(tmp_path)
    peaks = {
        name: peak_flops(config, SimpleNamespace(type="cuda", name=name)) for name in (*TERAFLOPS, *UNKNOWN)
    }
    known = {name: pytest.approx(teraflops * 1e12) for name, teraflops in TERAFLOPS.items()}
    assert peaks == known | dict.fromkeys(UNKNOWN)


def test_a_processor_has_no_peak_but_the_one_that_is_given(tmp_path):
    config = tiny.train_config(tmp_path)
    assert peak_flops(config, torch.device("cpu")) is None
    given = tiny.train_config(tmp_path, "--speed_monitor.gpu_flops_available=1e12")
    assert peak_flops(given, torch.device("cpu")) == 1e12
