"""Predictive Position Coupling: decoding against a slow loop without cache, losses by hand, a model built by hand."""

import pytest
import torch

from olmo_sparsity.config.schema import PositionsConfig
from olmo_sparsity.model.predictive import Decoded, PositionPredictor, compare, decode
from tests.support import tiny
from tests.support.tiny_task import answer_slowly

TABLE = 40
DECODERS = ["neox", "olmo", "olmo with groups", "alibi", "two levels"]


def decoder(kind):
    if kind in ("neox", "two levels"):
        return tiny.neox()
    changes = {"alibi": {"rope": False, "alibi": True}, "olmo with groups": {"block_group_size": 2}}
    return tiny.model(embedding_size=50, **changes.get(kind, {}))


def predictor(kind="neox", scheme="predicted", **options):
    """A random model whose weights are large enough for positions, ids and tokens to matter."""
    sizes = {"table_size": 8, "second_table_size": 5} if kind == "two levels" else {"table_size": TABLE}
    model = PositionPredictor(decoder(kind), PositionsConfig(scheme, **sizes, **options), seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6 if kind == "two levels" else 0.3, generator=generator)
    return model


def prompts(lengths, seed=3):
    """Tokens and ids (jumping, repeating) of prompts of these lengths, each a list of (1, length) tensors."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 40, (2, 1, length), generator=generator) for length in lengths]
    return [d[0] for d in draw], [d[1] for d in draw]


def padded(rows, filler):
    """One tensor (B, P) of rows (1, length), with ``filler`` behind them, and their lengths."""
    lengths = torch.tensor([row.shape[1] for row in rows])
    values = torch.full((len(rows), int(lengths.max())), filler)
    for number, row in enumerate(rows):
        values[number, : row.shape[1]] = row[0]
    return values, lengths


def assert_decoded(decoded, expected, end_token):
    """``expected``: (tokens, ids) of each row."""
    for row, (tokens, ids) in enumerate(expected):
        length = len(tokens)
        assert decoded.lengths[row] == length
        assert decoded.tokens[row, :length].tolist() == tokens
        assert decoded.ids[row, :length].tolist() == ids
        assert (decoded.tokens[row, length:] == end_token).all() and (decoded.ids[row, length:] == 0).all()


def end_token_of_one(expected):
    """A token that ends some responses in the middle and not all."""
    inside = [token for tokens, _ in expected for token in tokens[1:-1]]
    return next(
        token for token in inside if 0 < sum(token in tokens for tokens, _ in expected) < len(expected)
    )


@pytest.mark.parametrize("rotate", ["ids", "index", "none"])
@pytest.mark.parametrize("kind", DECODERS)
def test_batched_cached_decoding_equals_one_prompt_at_a_time_without_cache(kind, rotate):
    model = predictor(kind, rotate=rotate)
    tokens, ids = prompts([5, 9, 2, 9])
    free = [answer_slowly(model, t[0], i[0], [None] * 7, -1) for t, i in zip(tokens, ids, strict=True)]
    assert len({tuple(response) for response, _ in free}) > 2, "responses that do not depend on the prompt"
    end = end_token_of_one(free)
    expected = [answer_slowly(model, t[0], i[0], [None] * 7, end) for t, i in zip(tokens, ids, strict=True)]
    (batch, lengths), (batch_ids, _) = padded(tokens, 7), padded(ids, 11)
    decoded = decode(model, batch, batch_ids, end_token=end, max_tokens=7, prompt_lengths=lengths)
    assert_decoded(decoded, expected, end)
    alone = decode(model, tokens[0], ids[0], end_token=end, max_tokens=7)
    assert_decoded(alone, expected[:1], end)


@pytest.mark.parametrize("kind", ["neox", "olmo"])
def test_without_table_the_decoder_is_all_there_is(kind):
    """Rotated by nothing it is that of tokens which all stand at 0."""
    (tokens,), (ids,) = prompts([12])
    for rotate, seen in (("ids", ids), ("index", torch.arange(12)[None]), ("none", torch.zeros_like(ids))):
        model = predictor(kind, scheme="contiguous", rotate=rotate)
        torch.testing.assert_close(model(tokens, ids).logits, model.decoder(tokens, position_ids=seen).logits)


@pytest.mark.parametrize("kind", ["neox", "olmo", "two levels"])
def test_the_embedding_of_an_id_is_added_to_that_of_its_token(kind):
    """With one id for all tokens, it is as if that id's embedding were part of every token's."""
    (tokens,), _ = prompts([9])
    model = predictor(kind, scheme="coupled", rotate="index")
    second = 3 if kind == "two levels" else 0
    with_id = model(tokens, torch.full_like(tokens, 6 + 8 * second)).logits
    table = model.decoder.transformer["wte"] if kind == "olmo" else model.decoder.model.gpt_neox.embed_in
    with torch.no_grad():
        table.weight += model.id_embedding.weight[6]
        if second:
            table.weight += model.second_embedding.weight[second]
    torch.testing.assert_close(with_id, model.decoder(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", DECODERS)
def test_losses_are_those_of_the_logits(kind):
    model = predictor(kind, id_weight=0.25).train()
    generator = torch.Generator().manual_seed(3)
    tokens, ids = torch.randint(0, TABLE, (2, 2, 9), generator=generator)
    labels, id_labels = torch.randint(0, TABLE, (2, 2, 9), generator=generator)
    mask = torch.rand(2, 9, generator=generator) < 0.6
    output = model(tokens, ids)
    expected = [
        -logits.log_softmax(-1).gather(-1, values[..., None])[..., 0][mask].sum()
        for logits, values in ((output.logits, labels), (output.id_logits, id_labels))
    ]
    labels, id_labels = (values.masked_fill(~mask, -100) for values in (labels, id_labels))
    losses = model(tokens, ids, labels=labels, id_labels=id_labels)
    torch.testing.assert_close([losses["token_loss_nats"], losses["id_loss_nats"]], expected)
    total = expected[0] + 0.25 * expected[1]
    torch.testing.assert_close(losses["loss_nats"], total)
    weights = list(model.parameters())
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(loss, weights) for loss in (losses["loss_nats"], total)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-4)


def test_the_sort_of_the_first_error():
    """The truth is 1 2 3 and the end, 9, with ids 4 5 6 0."""
    cases = [
        ([1, 2, 3, 9], [4, 5, 6, 0], None),
        ([1, 7, 3, 9], [4, 5, 6, 0], "token"),
        ([1, 7, 3, 9], [4, 8, 6, 0], "token"),
        ([1, 2, 3, 9], [4, 8, 6, 0], "id"),
        ([1, 2, 7, 9], [4, 8, 6, 0], "id"),
        ([1, 2, 3, 9], [4, 5, 6, 1], "id"),
        ([1, 2, 9], [4, 5, 0], "stop"),
        ([1, 7, 9], [4, 5, 0], "token"),
        ([1, 2, 3, 7, 7, 7], [4, 5, 6, 7, 7, 7], "stop"),
        ([1, 2, 3], [4, 5, 6], "stop"),
    ]
    width = 6
    decoded = Decoded(
        tokens=torch.tensor([tokens + [9] * (width - len(tokens)) for tokens, _, _ in cases]),
        ids=torch.tensor([ids + [0] * (width - len(ids)) for _, ids, _ in cases]),
        lengths=torch.tensor([len(tokens) for tokens, _, _ in cases]),
    )
    truth = torch.tensor([[1, 2, 3, 9, 0]]).repeat(len(cases), 1)
    ids = torch.tensor([[4, 5, 6, 0, 0]]).repeat(len(cases), 1)
    lengths = torch.full((len(cases),), 4)
    expected = [sort for _, _, sort in cases]
    assert compare(decoded, truth, lengths, end_token=9, true_ids=ids) == expected
    without_ids = [None if sort == "id" else sort for sort in expected]
    without_ids[4] = "token"
    assert compare(decoded, truth, lengths, end_token=9) == without_ids


def test_a_seed_decides_the_new_weights():
    inner, before = decoder("neox"), torch.get_rng_state()
    models = [
        PositionPredictor(inner, PositionsConfig("predicted", table_size=TABLE), seed=seed)
        for seed in (4, 4, 5)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([m.id_embedding.weight, m.id_head.weight]) for m in models]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
