"""Attentions in the place of the softmax: against their papers' formulas, and as every analysis reads them."""

import math

import pytest
import torch
from olmo.optim import build_optimizer

from olmo_sparsity.attention import ATTENTIONS, AttentionMask, cpu_attention, sparse
from olmo_sparsity.attention.sparse import entmax15, sparsek
from olmo_sparsity.config.schema import Config
from olmo_sparsity.model.build import as_predictor
from olmo_sparsity.model.predictive import decode
from tests.support import tiny
from tests.support.tiny import tokens


def model(name, encoding="rope", **changes):
    made = tiny.model(attention=name, **tiny.ENCODINGS[encoding], **changes)
    for parameter_name, parameter in made.named_parameters():
        if "mixer" in parameter_name:  # large enough to matter, and different for each head
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return made


@pytest.mark.parametrize("encoding", ["rope", "nope", "alibi", "windowed hybrid"])
@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_a_dropped_token_is_a_masked_token(name, encoding):
    """Both by position id: neither the length of the context nor the gates on the way know the dropped ones."""
    tiny.assert_dropped_is_masked(model(name, encoding))


@pytest.mark.parametrize("name", sorted({"softmax", *ATTENTIONS} - {"dape-v2"}))  # it needs ids 1 apart
def test_a_dropped_token_of_a_random_float_id_is_a_masked_token(name):
    ids = torch.rand(24, generator=torch.Generator().manual_seed(1)).sort().values * 60
    tiny.assert_dropped_is_masked(model(name), ids)


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_the_optimizer_of_olmo_trains_every_parameter(name):
    ours = model(name)
    trained = [
        parameter for group in build_optimizer(Config(), ours).param_groups for parameter in group["params"]
    ]
    assert {*map(id, ours.parameters())} == {*map(id, trained)}


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": 2}, {"norm_after": True}], ids=["plain", "groups", "norm after"]
)
@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_a_cache_and_the_last_positions_alone_give_the_same_logits(name, changes):
    ours, ids = model(name, **changes), tokens(2, 24)
    position_ids = torch.arange(24).expand(2, -1) * 2 + 5
    whole = ours(ids, position_ids=position_ids).logits
    start = ours(ids[:, :12], position_ids=position_ids[:, :12], use_cache=True)
    rest = ours(
        ids[:, 12:], position_ids=position_ids, past_key_values=start.attn_key_values, logits_to_keep=5
    ).logits
    torch.testing.assert_close(rest, whole[:, -5:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(ATTENTIONS))
def test_a_prompt_is_continued_as_it_is_alone_whatever_stands_beside_it(name):
    """Prompts of a batch have padding behind them, which then stands before what is decoded."""
    ours = as_predictor(model(name)).eval()
    prompts, lengths, ids = tokens(4, 12), torch.tensor([4, 12, 7, 5]), torch.arange(12).expand(4, 12)
    together = decode(ours, prompts, ids, end_token=-1, max_tokens=8, prompt_lengths=lengths).tokens
    for row, length in enumerate(lengths.tolist()):
        unpadded = slice(row, row + 1), slice(length)
        further = {"response_ids": torch.arange(length, length + 8)[None]}  # as they go on without
        alone = decode(ours, prompts[unpadded], ids[unpadded], end_token=-1, max_tokens=8, **further).tokens
        assert torch.equal(together[row], alone[0])


def entmax_by_bisection(z):
    """p = max(z / 2 - threshold, 0)² over the last dimension, the threshold such that p sums to 1."""
    low, high = z.amax(-1) / 2 - 1, z.amax(-1) / 2
    for _ in range(80):
        middle = (low + high) / 2
        enough = ((z / 2 - middle[..., None]).clamp_min(0) ** 2).sum(-1) >= 1
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return (z / 2 - low[..., None]).clamp_min(0) ** 2


def by_hand(name, scores, distances, lengths, learned):
    """Weights of one query of one head, from the formula of the paper, number by number."""
    if name == "ssmax":
        scores = [learned["s"] * math.log(lengths) * s for s in scores]
    if name == "log-n":
        scores = [max(1, math.log(lengths) / math.log(32)) * s for s in scores]
    if name == "scale-invariant":
        a2 = [2 * math.log(d / 10 + 1) + 1 for d in distances]
        scores = [math.sqrt(a) * s + 1 - a for a, s in zip(a2, scores, strict=True)]
    if name == "fox":
        log_f = [math.log(1 / (1 + math.exp(-f))) for f in learned["f"]]
        scores = [s + sum(log_f[j + 1 :]) for j, s in enumerate(scores)]
    if name == "asentmax":
        beta, gamma = math.log(1 + math.exp(learned["b"])), 2 * math.tanh(learned["g"])
        scaled = torch.tensor([(1 + beta * math.log(lengths + 1) ** gamma) * s for s in scores])
        return entmax_by_bisection(scaled).tolist()
    chosen = [1.0] * len(scores)
    if name == "sparsek":  # of a window of 32: the nearest 4 ids, and 8 others, which a threshold chooses
        far = [j for j, d in enumerate(distances) if d >= 4]
        low, high = min(learned["u"]) - 1, max(learned["u"])
        for _ in range(80):
            middle = (low + high) / 2
            enough = sum(min(max(learned["u"][j] - middle, 0), 1) for j in far) >= 8
            low, high = (middle, high) if enough else (low, middle)
        for j in far:
            chosen[j] = min(max(learned["u"][j] - low, 0), 1)
    top = [math.exp(s) if m else 0.0 for s, m in zip(scores, chosen, strict=True)]
    return [m * weight / sum(top) for m, weight in zip(chosen, top, strict=True)]


@pytest.mark.parametrize("name", ["ssmax", "log-n", "scale-invariant", "fox", "asentmax", "sparsek"])
def test_weights_are_those_of_the_papers_formula(name):
    """From queries, keys and the layer's input, with the attention's own weights."""
    mixer = model(name).blocks()[0].mixer
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 4, 16, 8, generator=generator) for _ in "qk")
    inputs = torch.randn(1, 16, 32, generator=generator) / 4
    cached = mixer.per_token(inputs) if mixer.cached_dims else torch.empty(1, 4, 16, 0)
    ids = torch.tensor([[*range(0, 28, 2), 30, 110]])
    seen = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    weights = mixer.weights(q, k, cached, AttentionMask(ids, ids, seen, torch.zeros(())))
    for head in range(4):
        for query in (6, 13, 15):
            read = inputs[0, : query + 1]
            scores = (q[0, head, query] @ k[0, head, : query + 1].T / math.sqrt(8)).tolist()
            distances = (ids[0, query] - ids[0, : query + 1]).tolist()
            learned = {"s": 1 / math.log(32) + mixer.s_bias[head].item()} if name == "ssmax" else {}
            if name == "fox":
                learned = {"f": (read @ mixer.gate.weight[head] + mixer.gate.bias[head]).tolist()}
            if name == "asentmax":
                vectors = mixer.beta_gamma.weight[2 * head : 2 * head + 2]
                learned = dict(zip("bg", (vectors @ inputs[0, query]).tolist(), strict=True))
            if name == "sparsek":
                learned = {"u": (read @ mixer.score.weight[head]).tolist()}
            expected = by_hand(name, scores, distances, ids[0, query].item() + 1, learned)
            assert weights[0, head, query, : query + 1].tolist() == pytest.approx(expected, 1e-4, 1e-6)


@pytest.fixture(params=[1, 27, 2**16], ids=["a row", "three rows", "all"])
def at_a_time(request, monkeypatch):
    """So many numbers are searched at a time."""
    monkeypatch.setattr(sparse, "_BLOCK", request.param)


@pytest.mark.usefixtures("at_a_time")
def test_entmax_solves_its_own_equation_and_has_its_gradient():
    """The threshold found by bisection; the gradient by differences."""
    z = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
    seen = torch.ones(5, 9, dtype=torch.bool)
    seen[:, -2:] = False
    p = entmax15(z.masked_fill(~seen, -1e9))
    torch.testing.assert_close(p[:, :7], entmax_by_bisection(z[:, :7]))
    assert not p[:, 7:].any() and (p[:, :7] == 0).any()
    assert torch.autograd.gradcheck(lambda x: entmax15(x.masked_fill(~seen, -1e9)), z.requires_grad_())


@pytest.mark.usefixtures("at_a_time")
def test_sparsek_leaves_out_what_is_hidden_and_has_its_gradient():
    """By differences; its value is in the formula above."""
    u = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    seen = torch.ones(4, 9, dtype=torch.bool)
    seen[:, -2:] = False
    seen[3, 2:] = False
    m = sparsek(u, seen, 3)
    assert not m[~seen].any() and m[3, :2].tolist() == [1, 1]
    assert torch.autograd.gradcheck(lambda x: sparsek(x, seen, 3), u.clone().requires_grad_())


def test_dape_convolves_over_heads_and_neighbouring_ids():
    """Key by key and head by head; where an id is missing, or not seen, there is no neighbour."""
    mixer = model("dape-v2").blocks()[0].mixer
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 4, 6, 8, generator=generator), torch.randn(1, 4, 6, 8, generator=generator)
    ids = [0, 1, 2, 7, 8, 9]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    mask = AttentionMask(torch.tensor([ids]), torch.tensor([ids]), seen, torch.zeros(()))
    attended = mixer.weights(q, k, torch.empty(1, 4, 6, 0), mask)

    def convolve(layer, of):
        rows = {}
        for head, position in of:
            read = [of.get((g, at), 0.0) for at in (position - 1, position, position + 1) for g in range(4)]
            rows[head, position] = (layer.weight[head] @ torch.tensor(read) + layer.bias[head]).item()
        return rows

    for query in (1, 4, 5):
        read = ids[: query + 1]
        scores = (q @ k.transpose(-1, -2) / math.sqrt(8))[0, :, query]
        plain = {
            (head, position): scores[head, j].item() for head in range(4) for j, position in enumerate(read)
        }
        inner = {at: x if x > 0 else 0.01 * x for at, x in convolve(mixer.first, plain).items()}
        added = convolve(mixer.second, inner)
        for head in range(4):
            whole = torch.tensor([plain[head, position] + added[head, position] for position in read])
            weights = attended[0, head, query, : query + 1]
            torch.testing.assert_close(weights, whole.softmax(-1), atol=1e-5, rtol=1e-4)


# --- softmax by matrix products, where a CPU trains ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_causal_attention_with_its_gradients(dtype, monkeypatch):
    monkeypatch.setattr(cpu_attention, "QUERIES_OF_A_PRODUCT", 5)  # the last block of 12 has two queries
    q, k, v = (torch.randn(2, heads, 12, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
    attended = cpu_attention.causal_products(q, k, v, dropout=0.0)
    gradients = torch.autograd.grad(attended.sum(), (q, k, v))

    doubles = [values.detach().double().requires_grad_() for values in (q, k, v)]
    keys, values = (double.repeat_interleave(2, dim=1) for double in doubles[1:])
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    scores = (doubles[0] @ keys.transpose(-1, -2) / 8**0.5).masked_fill(later, -1e9)
    expected = scores.softmax(dim=-1) @ values
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), expected, **near)
    for one, other in zip(gradients, torch.autograd.grad(expected.sum(), doubles), strict=True):
        torch.testing.assert_close(one.double(), other, **near)


def test_a_cpu_takes_products_where_it_trains_in_bf16_or_compiled_and_nowhere_else():
    q = torch.zeros(1, 1, 8, 4)
    assert not cpu_attention.by_products(q, q, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_attention.by_products(q, q, None)
        assert not cpu_attention.by_products(q[:, :, -1:], q, None)  # keys that were kept
        assert not cpu_attention.by_products(q, q, torch.zeros(8, 8))
        with torch.no_grad():
            assert not cpu_attention.by_products(q, q, None)
    assert torch.compile(lambda q: q + cpu_attention.by_products(q, q, None), backend="eager")(
        q.requires_grad_()
    ).all()
