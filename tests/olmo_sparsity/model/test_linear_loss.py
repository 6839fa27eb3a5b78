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


def made(rows=20, width=8, vocabulary=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def of_logits(logits, labels, z_weight):
    """Cross-entropy and z-loss of all logits, as OLMo's `cross_entropy_loss` with `reduction="sum"`."""
    z_loss = z_weight * (logits.logsumexp(-1).square() * (labels != -100)).sum()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100), z_loss


def plain(hidden, head, labels, z_weight):
    logits = hidden @ head.weight.T
    logits = (logits if head.bias is None else logits + head.bias) * head.scale
    loss, z_loss = of_logits(logits.float() if logits.dtype == torch.bfloat16 else logits, labels, z_weight)
    return loss + z_loss, z_loss


@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize(("scale", "with_bias"), [(1.0, False), (0.25, True)])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_loss_and_gradients_are_those_of_all_logits(rows, scale, with_bias, z_weight):
    hidden, weight, labels = made(rows)
    bias = weight[:, 0].detach().clone().requires_grad_() if with_bias else None
    head, asked = Head(weight, bias, scale), [each for each in (hidden, weight, bias) if each is not None]
    both = [loss(hidden, head, labels, z_weight) for loss in (linear_cross_entropy, plain)]
    torch.testing.assert_close(*([each.double() for each in one] for one in both), rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(one[0] * 0.7, asked) for one in both]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_without_gradients_none_are_computed(monkeypatch):
    hidden, weight, labels = made()
    expected, asked = linear_cross_entropy(hidden, Head(weight), labels), []
    inner = linear_loss._loss_and_gradients
    monkeypatch.setattr(
        linear_loss, "_loss_and_gradients", lambda *all_: asked.append(all_[-1]) or inner(*all_)
    )
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, Head(weight), labels), expected)
    assert asked == [False]


def test_bf16_is_that_of_autocast():
    hidden, weight, labels = (each.float() if each.is_floating_point() else each for each in made())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = [loss(hidden, Head(weight), labels, 0.1) for loss in (linear_cross_entropy, plain)]
    torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("z_weight", [0.0, 1e-2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"weight_tying": True}, {"include_bias": True}, {"scale_logits": True}, {"family": "gpt_neox"}],
)
def test_the_loss_of_a_model_is_that_of_its_logits(changes, z_weight):
    losses, gradients = [], []
    tokens = torch.randint(0, 50, (3, 10), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1).index_fill(1, torch.tensor([9]), -100)
    ids = torch.arange(0, 20, 2).expand(3, -1)
    for whole in (True, False):
        model = (tiny.neox() if changes.get("family") else tiny.model(**changes)).train()
        if whole:
            logits = model(tokens, position_ids=ids).logits.flatten(0, 1)
            parts = of_logits(logits, labels.flatten(), z_weight)
            sums = {"loss_nats": sum(parts)}
            if z_weight:
                sums |= dict(zip(("ce_loss_nats", "z_loss_nats"), parts, strict=True))
        else:
            sums = model(tokens, position_ids=ids, labels=labels, z_weight=z_weight)
        sums["loss_nats"].backward()
        losses.append({name: value.item() for name, value in sums.items()})
        gradients.append({name: each.grad for name, each in model.named_parameters()})
        assert model(tokens).logits.shape[1] == 10  # the head is there again
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)
