"""Attention over tuples against a plain sum over them, and what the theory's assumptions change."""

import math
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from olmo_sparsity.config.schema import TuplesConfig
from olmo_sparsity.model import tuples
from olmo_sparsity.model.tuples import TupleAttention
from tests.support import tiny

VOCABULARY, NUM_IDS = 5, 40


def random_model(**options) -> TupleAttention:
    config = tiny.model_config(
        family="tuples", vocab_size=VOCABULARY, embedding_size=None, tuples=TuplesConfig(**options)
    )
    torch.manual_seed(3)
    model = TupleAttention(config, num_ids=NUM_IDS).eval()
    for table in (model.content, model.positions, model.values):
        torch.nn.init.normal_(table.weight, std=1.5)
    return model


@torch.no_grad()
def plain_sum(model: TupleAttention, tokens: list[int], ids: list[int]) -> list[float]:
    """The distribution after the last token, by the definition, one tuple after the other."""
    k, far = model.size, model.farthest
    last = len(tokens) - 1
    sums, total = [0.0] * VOCABULARY, 0.0
    for columns in combinations(range(len(tokens)), k):
        of_ids = [ids[column] for column in columns]
        if model.anchored and columns[-1] != last:
            continue
        if model.locality is not None and max(of_ids) - min(of_ids) > model.locality:
            continue
        code = sum(tokens[column] * VOCABULARY**number for number, column in enumerate(columns))
        place = 0
        for id_before in of_ids[:-1]:
            place = place * (2 * far + 1) + of_ids[-1] - id_before + far
        if not model.relative:
            place = place * NUM_IDS + of_ids[-1]
        weight = math.exp(float(model.content.weight[code, 0] + model.positions.weight[place, 0]))
        total += weight
        probabilities = model.values.weight[code].softmax(dim=0)
        sums = [before + weight * float(p) for before, p in zip(sums, probabilities, strict=True)]
    return [of_symbol / total for of_symbol in sums] if total else [1 / VOCABULARY] * VOCABULARY


def samples(length=8, coupled=False):
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, VOCABULARY, (2, length), generator=generator)
    if coupled:
        return tokens, torch.randint(0, NUM_IDS, (2, length), generator=generator)
    return tokens, torch.cumsum(torch.randint(1, 5, (2, length), generator=generator), dim=1)


CHANGES = {}, {"locality": 6}, {"anchored": True}, {"locality": 6, "relative": False, "anchored": True}
OPTIONS = [{"size": size, **changes} for size in (1, 2, 3) for changes in CHANGES]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, {"size": 3, "locality": 1}])
def test_every_column_has_the_plain_sum_over_the_tuples_before_it(monkeypatch, options, coupled):
    monkeypatch.setattr(tuples, "_TUPLES_AT_ONCE", 50)  # several rounds
    model = random_model(**options)
    tokens, ids = samples(coupled=coupled)
    probabilities = model(tokens, ids).logits.exp()
    for row in range(2):
        for end in range(1, tokens.shape[1] + 1):
            expected = plain_sum(model, tokens[row, :end].tolist(), ids[row, :end].tolist())
            assert probabilities[row, end - 1].tolist() == pytest.approx(expected, abs=1e-6), (row, end)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sample_of_fewer_tokens_than_a_tuple_is_read_and_trained_on(options):
    model = random_model(**options)
    tokens, ids = samples(2)
    expected = [plain_sum(model, *row) for row in zip(tokens.tolist(), ids.tolist(), strict=True)]
    torch.testing.assert_close(model(tokens, ids).logits[:, -1].exp(), torch.tensor(expected))
    model(tokens, ids, labels=tokens)["loss_nats"].backward()
    assert all(table.weight.grad.isfinite().all() for table in (model.content, model.values))


@pytest.mark.parametrize("options", OPTIONS)
def test_padding_and_a_cache_change_nothing(options):
    model = random_model(**options)
    tokens, ids = samples()
    whole = model(tokens, ids).logits
    start = model(tokens[:, :5], ids[:, :5], use_cache=True)
    rest = model(tokens[:, 5:], ids, past_key_values=start.attn_key_values).logits
    torch.testing.assert_close(rest, whole[:, 5:])
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[:, 3:6] = 0  # padding in the middle, as between a prompt and what follows it
    padded = torch.cat([tokens[:, :3], torch.zeros_like(tokens[:, :3]), tokens[:, 3:]], dim=1)
    padded_ids = torch.cat([ids[:, :3], torch.zeros_like(ids[:, :3]), ids[:, 3:]], dim=1)
    torch.testing.assert_close(model(padded, padded_ids, attention_mask=mask).logits[:, 6:], whole[:, 3:])


def test_bf16_does_not_round_a_small_loss_to_none():
    model = random_model(size=1)
    torch.nn.init.constant_(model.values.weight, 0)
    model.values.weight.data[:, 1] = 9
    tokens, ids = samples()
    exact = model(tokens, ids, labels=torch.ones_like(tokens))["loss_nats"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(tokens, ids, labels=torch.ones_like(tokens))["loss_nats"]
    assert rounded == exact and 0 < exact < 1


def test_labels_give_the_sum_of_the_losses_and_its_gradient():
    """Padding behind the last label changes nothing; ids fall to 0 there."""
    model = random_model(size=2, locality=6)
    tokens, ids = samples()
    labels = tokens.roll(-1, dims=1)
    labels[:, :3] = labels[0, 5:] = -100
    padded, padded_ids = (F.pad(values, (0, 12)) for values in (tokens, ids))
    loss = model(padded, padded_ids, labels=F.pad(labels, (0, 12), value=-100))["loss_nats"]
    logits = model(tokens, ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)  # log probabilities are logits, too
    for parameter in model.parameters():
        [gradient] = torch.autograd.grad(loss, parameter, retain_graph=True)
        [wanted] = torch.autograd.grad(expected, parameter, retain_graph=True)
        torch.testing.assert_close(gradient, wanted, atol=1e-6, rtol=1e-4)
