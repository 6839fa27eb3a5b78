"""The loss in chunks against the cross-entropy of all logits, with its gradients; and as OLMo's own loss."""

import pytest
import torch
import torch.nn.functional as F

import olmo_sparsity.model.linear_loss as linear_loss
from olmo_sparsity.model.linear_loss import linear_cross_entropy
from tests.support import tiny


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(linear_loss, "_FEWEST_ROWS", 3)
    monkeypatch.setattr(linear_loss, "_LOGITS_PER_CHUNK", {"cpu": 1})


def made(rows=20, width=8, vocabulary=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_loss_and_gradients_are_those_of_cross_entropy(scale, rows):
    hidden, weight, labels = made(rows)
    loss = linear_cross_entropy(hidden, weight, labels, scale)
    (loss * 0.7).backward()
    found = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    expected = F.cross_entropy(hidden @ weight.T * scale, labels, reduction="sum", ignore_index=-100)
    (expected * 0.7).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for own, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


def test_bf16_is_that_of_autocast():
    hidden, weight, labels = (each.float() if each.is_floating_point() else each for each in made())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
        expected = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_without_gradients_there_is_only_a_loss():
    hidden, weight, labels = made()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_tying": True},
        {"include_bias": True},
        {"scale_logits": True},
        {"rope": False, "alibi": True},
    ],
)
def test_the_loss_of_a_model_is_that_of_its_logits(changes):
    losses, gradients = [], []
    tokens = torch.randint(0, 50, (3, 10), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([9]), -100)
    ids = torch.arange(0, 20, 2).expand(3, -1)
    for whole in (True, False):
        model = tiny.model(**changes).train()
        if whole:
            logits = model(tokens, position_ids=ids).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        else:
            loss = model(tokens, position_ids=ids, labels=labels)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        assert model(tokens).logits.shape[1] == 10  # the head is there again
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)
