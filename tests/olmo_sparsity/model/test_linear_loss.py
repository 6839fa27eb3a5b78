"""The loss in chunks, and its gradients, against the losses of all logits."""

import pytest
import torch
import torch.nn.functional as F

import olmo_sparsity.model.linear_loss as linear_loss
from olmo_sparsity.model.linear_loss import Head, linear_cross_entropy
from tests.support import tiny


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_loss, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(linear_loss, "_LOGITS_PER_CHUNK", {"cpu": 1})


def of_logits(logits, labels, z_weight):
    """Cross-entropy and z-loss of all logits, as OLMo's `cross_entropy_loss` with `reduction="sum"`."""
    z_loss = z_weight * (logits.logsumexp(-1).square() * (labels != -100)).sum()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100), z_loss


def drawn():
    """Hidden states (20, 8), weights (30, 8) and labels (20,)."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (20, 30))
    return hidden, weight, torch.randint(0, 30, (20,), generator=generator)


def test_without_gradients_none_are_computed(monkeypatch):
    hidden, weight, labels = drawn()
    expected, wants_gradient = linear_cross_entropy(hidden, Head(weight.requires_grad_()), labels), []
    inner = linear_loss._loss_and_gradients
    monkeypatch.setattr(
        linear_loss, "_loss_and_gradients", lambda *all_: wants_gradient.append(all_[-1]) or inner(*all_)
    )
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, Head(weight), labels), expected)
    assert wants_gradient == [False]


def test_bf16_is_that_of_autocast():
    hidden, weight, labels = drawn()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = linear_cross_entropy(hidden, Head(weight), labels, 0.1)
        loss, z_loss = of_logits((hidden @ weight.T).float(), labels, 0.1)
    torch.testing.assert_close(losses, (loss + z_loss, z_loss), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("z_weight", [0.0, 1e-2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_tying": True}, {"include_bias": True}, {"scale_logits": True}, {"family": "gpt_neox"}],
)
def test_the_loss_of_a_model_is_that_of_its_logits(changes, z_weight):
    """In 20 rows, chunks of three; with the gradient of a multiple of it, and token by token."""
    losses, gradients = [], []
    tokens = torch.randint(0, 50, (2, 10), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([9]), -100)
    ids = torch.arange(0, 20, 2).expand(2, -1)
    for whole in (True, False):
        model = (tiny.neox() if changes.get("family") else tiny.model(**changes)).train()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they begin as zeros
                parameter.data = torch.linspace(-1, 1, len(parameter))
        if whole:
            logits = model(tokens, position_ids=ids).logits.flatten(0, 1)
            parts = of_logits(logits, labels.flatten(), z_weight)
            sums = {"loss_nats": sum(parts)}
            if z_weight:
                sums |= dict(zip(("ce_loss_nats", "z_loss_nats"), parts, strict=True))
        else:
            sums = model(tokens, position_ids=ids, labels=labels, z_weight=z_weight)
        (0.7 * sums["loss_nats"]).backward()
        losses.append({name: value.item() for name, value in sums.items()})
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        assert model(tokens).logits.shape[1] == 10  # the head is there again
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)
