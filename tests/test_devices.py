"""Devices and types as a GPU would meet them, found without one; and how often the processor waits for it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from olmo_sparsity.data.training_batches import Batch
from olmo_sparsity.data.windows import collate
from olmo_sparsity.model.build import build_model
from olmo_sparsity.model.linear_loss import _loss_and_gradients
from olmo_sparsity.training.loop import forward_backward
from tests.support import tiny, tiny_task
from tests.support.engines import prepared_engine
from tests.support.fake_cuda import DEVICE, HostReads, fake_cuda, on_fake_cuda
from tests.support.slow import slow_but

T = 16
TIED = {"weight_tying": True, "scale_logits": True, "include_bias": True}
PRECISIONS = ("fp32", "bf16")
MODELS = {"gpt_neox": {}, "olmo": tiny_task.OLMO}
SCHEMES = ("predicted", "coupled", "pose")


def autocast(precision):
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16")


def batch(ids=False):
    """Two examples of T tokens, which a data loader gave on the CPU."""
    numbers = {name: torch.zeros(2, T, dtype=torch.long) for name in ("input_ids", "position_ids", "labels")}
    return Batch(
        **numbers,
        loss_mask=torch.ones(2, T, dtype=torch.bool),
        id_labels=torch.zeros(2, T, dtype=torch.long) if ids else None,
    ).to(DEVICE)


@pytest.mark.parametrize(
    ("encoding", "weights", "precision"),
    slow_but(
        product(tiny.ENCODINGS, ["plain", "tied"], PRECISIONS),
        *product(tiny.ENCODINGS, ["plain"], PRECISIONS),
        ("rope", "tied", "bf16"),
    ),
)
def test_training_of_olmo_stays_on_the_device(encoding, weights, precision):
    model = tiny.model(**tiny.ENCODINGS[encoding], **(TIED if weights == "tied" else {}))
    with fake_cuda(), HostReads() as reads, autocast(precision):
        on_fake_cuda(model)
        one = batch()
        sums = model(**one.model_inputs, **one.targets, z_weight=1e-4)
        assert {(total.device.type, total.dtype) for total in sums.values()} == {("cuda", torch.float32)}
    assert reads.seen == []


@pytest.mark.parametrize(
    ("model", "scheme", "rotate", "precision"),
    slow_but(
        product(MODELS, SCHEMES, ["ids", "index", "none"], PRECISIONS),
        *product(MODELS, SCHEMES, ["ids", "index", "none"], ["fp32"]),
        *product(MODELS, SCHEMES, ["ids"], ["bf16"]),
    ),
)
def test_training_on_tasks_stays_on_the_device(tmp_path, model, scheme, rotate, precision):
    config = tiny_task.config(tmp_path, model=MODELS[model], positions={"scheme": scheme, "rotate": rotate})
    built = build_model(config)
    with fake_cuda(), HostReads() as reads, autocast(precision):
        one = batch(ids=scheme == "predicted")
        sums = on_fake_cuda(built)(**one.model_inputs, **one.targets)
        assert {total.device.type for total in sums.values()} == {"cuda"}
    assert reads.seen == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_the_loss_stay_on_the_device(dtype):
    with fake_cuda(), HostReads() as reads:
        hidden, weight = torch.empty(200, 8, device=DEVICE), torch.empty(50, 8, device=DEVICE)
        labels = torch.zeros(200, dtype=torch.long, device=DEVICE)
        computed = _loss_and_gradients(hidden, weight, labels, 0.5, 1e-4, dtype, True)
        assert [(tensor.device.type, tensor.dtype) for tensor in computed] == 4 * [("cuda", torch.float32)]
    assert reads.seen == []


def test_a_tensor_left_on_the_cpu_is_found():
    """The check itself: a mask that was made on the CPU, and a number that is read."""
    model = tiny.model()
    with fake_cuda():
        on_fake_cuda(model)
        bias = torch.zeros(1, 1, T, T)
        with pytest.raises(RuntimeError, match="same device|two different devices"):
            model(batch().input_ids, attention_bias=bias)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            model(batch().input_ids).logits.sum().item()


@pytest.mark.parametrize("family", ["text", "task"])
def test_no_number_is_read_before_the_step(tmp_path, family):
    """On a GPU each would make the processor wait until all that it has asked for is computed."""
    make = tiny.train_config if family == "text" else tiny_task.config
    engine = prepared_engine(make(tmp_path, "--device_train_microbatch_size=2"))
    item = {"input_ids": np.arange(13) % 6, "position_ids": np.arange(13), "in_loss": True}
    together = collate([item] * 12)
    ids = {"id_labels": together.position_ids} if family == "task" else {}
    with HostReads() as counted:
        losses = forward_backward(engine, replace(together, **ids), None)
        assert counted.seen == []
        assert float(losses["loss_nats"]) > 0
    assert counted.seen == ["_local_scalar_dense"]
