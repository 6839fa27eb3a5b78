"""The engine against plain passes: shared prefixes, batches, memory that runs out, and attention, for every family."""

import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import roots_sh_legendre

from analysis.measure.selectors import Question, find_selector
from analysis.model.adapters import OlmoForAnalysis, PositionedCausalLM
from analysis.model.device import TOKENS_PER_BATCH, MemoryGrowth, OnDevice, tokens_that_fit
from analysis.model.load import load_for_analysis
from analysis.model.scorer import Scorer
from olmo_sparsity.attention import ATTENTIONS
from olmo_sparsity.export import export_checkpoint
from tests.support import tiny
from tests.support.families import FAMILIES, ROTARY, random_model
from tests.support.measured import plain_loss, random_contexts
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.tiny import checkpoint

N, M = 24, 6
FAR = N - M
OWN = {**tiny.ENCODINGS, "grouped": {"n_kv_heads": 2}}
NOT_FADING = [name for name, attention in ATTENTIONS.items() if not attention.fades]
FADING = [name for name in OWN if name not in NOT_FADING]


def build(name):
    if name in OWN:
        return OlmoForAnalysis(tiny.model(**OWN[name])).requires_grad_(False)
    return PositionedCausalLM(random_model(name)).requires_grad_(False)


make_contexts = partial(random_contexts, N, M)


def without_each():
    """Every far token left out once, (F, F - 1)."""
    columns = np.arange(FAR - 1)
    return columns + (columns >= np.arange(FAR)[:, None])


def plain_losses(model, contexts, far):
    """One subset of one target at a time, from its first token on."""
    rows = zip(contexts.tokens, contexts.targets[:, 0], strict=True)
    subsets = [[*kept, *range(FAR, N)] for kept in far]
    return np.array([[plain_loss(model, text, kept, target) for kept in subsets] for text, target in rows])


@pytest.mark.parametrize("name", [*OWN, *FAMILIES])
def test_shared_prefixes_change_nothing(name):
    model, contexts, keep = build(name), make_contexts(), without_each()
    read = []
    inner = model.logits_after

    def spy(past, input_ids, *rest):
        read.append(input_ids.numel())
        return inner(past, input_ids, *rest)

    model.logits_after = spy
    whole = Scorer(model, share_prefixes=False).measures(contexts, keep, ("kl",))[..., 0]
    for tokens_per_batch in (30, 200, 10_000):
        scorer = Scorer(model, tokens_per_batch=tokens_per_batch)
        losses = scorer.losses(contexts, keep)
        np.testing.assert_allclose(losses, plain_losses(model, contexts, keep), atol=2e-5)
        np.testing.assert_allclose(scorer.measures(contexts, keep, ("kl",))[..., 0], whole, atol=2e-5)
    assert 0 < sum(read) < 6 * 0.9 * len(contexts) * FAR * (N - 1)  # prefixes were not read again


def test_subsets_with_and_without_a_prefix_keep_their_order():
    model, contexts = build("rope"), make_contexts()
    generator = np.random.default_rng(1)
    keep = np.stack([np.sort(generator.choice(FAR, 12, replace=False)) for _ in range(20)])
    keep[::3, :9] = np.arange(9)
    keep[::3, 9:] = np.sort([generator.choice(np.arange(9, FAR), 3, replace=False) for _ in range(7)], axis=1)
    keep[0] = np.arange(12)
    losses = Scorer(model, tokens_per_batch=50).losses(contexts, keep)
    np.testing.assert_allclose(losses, plain_losses(model, contexts, keep), atol=2e-5)


def test_attention_of_the_last_position_equals_that_of_transformers_on_the_same_weights(tmp_path):
    source, _ = checkpoint(tmp_path / "own")
    export_checkpoint(source.parent, tmp_path / "hf")
    own, exported = (Scorer(load_for_analysis(path).model) for path in (source.parent, tmp_path / "hf"))
    asked = make_contexts(), make_contexts().all_targets
    np.testing.assert_allclose(own.last_attention(*asked), exported.last_attention(*asked), atol=1e-6)
    np.testing.assert_allclose(own.presence_gradient(*asked), exported.presence_gradient(*asked), atol=1e-5)


@pytest.mark.parametrize("name", ["rope", "alibi", "gpt2"])
def test_recorded_attention_is_a_distribution(name):
    """It sums to one over the whole context, and recording it leaves the model as it was."""
    model, contexts = build(name), make_contexts()
    ids = torch.arange(N).expand(len(contexts), -1)
    whole = model.last_attention(torch.from_numpy(contexts.tokens), ids, 3)
    torch.testing.assert_close(whole.sum(dim=2), torch.ones(len(contexts), 3))
    biased = torch.zeros(len(contexts), N, N)
    before = model.biased_logits(torch.from_numpy(contexts.tokens), ids, biased, 1)
    again = model(torch.from_numpy(contexts.tokens), position_ids=ids, logits_to_keep=1).logits
    torch.testing.assert_close(before, again, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NOT_FADING)
def test_attention_that_a_token_does_not_fade_out_of_is_refused(name):
    with refused("the selector gradient does not apply"):
        Scorer(build(name)).presence_gradient(make_contexts(), make_contexts().all_targets)


def test_an_attention_that_takes_no_bias_is_refused_a_gradient():
    model = PositionedCausalLM(random_model("doge", **ROTARY, keep_window_size=64)).requires_grad_(False)
    with refused("doge takes no bias, so that the selector gradient does not apply"):
        Scorer(model).presence_gradient(make_contexts(), make_contexts().all_targets)


@pytest.mark.parametrize("name", slow_but([*FADING, *FAMILIES], *list(FADING)[::2], "gpt_neox", "llama"))
def test_gradient_of_every_family_is_a_finite_difference(name):
    """The slope of the loss as a token fades from attention, and the bias at its end against dropping the token."""
    model, contexts = build(name), make_contexts()
    slopes = Scorer(model).presence_gradient(contexts, contexts.all_targets)
    tokens, ids = torch.from_numpy(contexts.tokens), torch.arange(N).expand(len(contexts), -1)

    @torch.no_grad()
    def losses(column, presence):
        bias = torch.zeros(len(contexts), N, N)
        bias[:, :, column] = np.log(presence)
        bias[:, column, column] = 0
        logits = model.biased_logits(tokens, ids, bias, 1)[:, 0].double()
        return -logits.log_softmax(-1)[range(len(contexts)), contexts.targets[:, 0]].numpy()

    def slope_over(column, step):
        return (losses(column, 1 + step) - losses(column, 1 - step)) / (2 * step)

    for column in range(FAR) if name in OWN else (7,):
        # extrapolated to no step at all: the error goes with its square, or beside a kink of entmax's slope with itself
        order = 1 if "entmax" in name else 2
        slope = (2**order * slope_over(column, 0.01) - slope_over(column, 0.02)) / (2**order - 1)
        near = {"atol": 2e-4, "rtol": 5e-3 if "entmax" in name else 1e-7}
        np.testing.assert_allclose(slopes[:, column], -slope, **(near if name in OWN else {"atol": 1e-3}))
        without = plain_losses(model, contexts, [[j for j in range(FAR) if j != column]])[:, 0]
        np.testing.assert_allclose(losses(column, 1e-30), without, atol=2e-5, rtol=1e-5)


def plain_gradient(model, contexts, row, change=lambda embeddings: embeddings):
    """Loss of a target, its gradient by the changed embeddings, and these: a plain pass with a hook."""
    own = model.model.transformer["wte"] if isinstance(model, OlmoForAnalysis) else None
    layer = own or model.model.get_input_embeddings()
    inputs = []

    def hook(_, arguments, embeddings):
        inputs.append(change(embeddings.detach()).requires_grad_())
        return inputs[0]

    handle = layer.register_forward_hook(hook)
    ids = torch.arange(N)[None]
    tokens = torch.from_numpy(contexts.tokens[row])[None]
    logits = model(tokens, position_ids=ids, attention_mask=torch.ones_like(ids)).logits
    handle.remove()
    loss = -logits[0, -1].log_softmax(-1)[contexts.targets[row, 0]]
    (gradient,) = torch.autograd.grad(loss, inputs[0])
    return loss.item(), gradient[0], inputs[0][0].detach()


@pytest.mark.parametrize("name", slow_but([*OWN, *FAMILIES], "rope", "alibi", "fox", "gpt_neox"))
def test_input_gradients_of_every_family_are_those_of_a_plain_pass(name):
    """Norms by autograd, and as the slope of the loss in the gradient's own direction."""
    model, contexts = build(name), make_contexts(2)
    points, weights = roots_sh_legendre(50)
    blank = model.embed(torch.tensor(0))  # the end of text
    found = {
        each: find_selector(each)(Question(Scorer(model), contexts, 0, FAR))
        for each in ("saliency", "input-x-gradient", "integrated-gradients")
    }
    for row in range(2):
        _, gradient, embeddings = plain_gradient(model, contexts, row)
        mean = torch.zeros_like(embeddings)
        for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
            loss, slope, _ = plain_gradient(model, contexts, row, lambda x, a=point: blank + a * (x - blank))
            mean -= weight * np.exp(-loss) * slope
        expected = {
            "saliency": gradient,
            "input-x-gradient": embeddings * gradient,
            "integrated-gradients": (embeddings - blank) * mean,
        }
        for each, values in expected.items():
            norms = values.norm(dim=-1)[:FAR].double().numpy()
            selection = found[each]
            np.testing.assert_allclose(selection.influence[row], np.sort(norms)[::-1], rtol=1e-3, atol=1e-5)
            np.testing.assert_allclose(
                norms[selection.columns[row]], selection.influence[row], rtol=1e-3, atol=1e-5
            )
        column = int(found["saliency"].columns[row, 0])
        step = torch.zeros_like(embeddings)
        step[column] = 1e-2 * gradient[column] / gradient[column].norm()
        more, less = (
            plain_gradient(model, contexts, row, lambda x, by=by: x + by)[0] for by in (step, -step)
        )
        assert found["saliency"].influence[row, 0] == pytest.approx((more - less) / 2e-2, rel=0.05)


@pytest.mark.parametrize("name", ["rope", "gpt_neox"])
def test_attributions_are_those_of_captum(name):
    attr = pytest.importorskip("captum.attr")
    model, contexts = build(name), make_contexts(2)
    ids = torch.arange(N)

    def log_p(embeddings, targets):
        logits = model.embedded_logits(embeddings, ids.expand(len(embeddings), -1), 1)[:, 0]
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def p(embeddings, targets):
        return log_p(embeddings, targets).exp()

    embeddings = model.embed(torch.from_numpy(contexts.tokens)).requires_grad_()
    targets = torch.from_numpy(contexts.targets[:, 0])
    ends = {"baselines": model.embed(torch.zeros_like(torch.from_numpy(contexts.tokens)))}  # as inseq's
    for each, method, options in (
        ("saliency", attr.Saliency(log_p), {}),
        ("input-x-gradient", attr.InputXGradient(log_p), {}),
        ("integrated-gradients", attr.IntegratedGradients(p), ends),
    ):
        theirs = method.attribute(embeddings, additional_forward_args=targets, **options)
        norms = theirs.detach().norm(dim=-1)[:, :FAR].double().numpy()  # as inseq aggregates
        ours = find_selector(each)(Question(Scorer(model), contexts, 0, FAR))
        np.testing.assert_allclose(
            ours.influence, np.take_along_axis(norms, ours.columns, axis=1), rtol=1e-3, atol=1e-5
        )


def test_a_batch_that_does_not_fit_is_halved_for_a_while(monkeypatch):
    model, contexts = build("rope"), make_contexts()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    inner, sizes = model.forward, []

    def forward(input_ids, position_ids=None, **options):
        sizes.append(input_ids.numel())
        if input_ids.numel() > 60:
            raise torch.OutOfMemoryError("no")
        return inner(input_ids, position_ids, **options)

    model.forward = forward
    scorer = Scorer(model, tokens_per_batch=400, share_prefixes=False)
    keep = without_each()
    expected = plain_losses(build("rope"), contexts, keep)
    np.testing.assert_allclose(scorer.losses(contexts, keep), expected, atol=2e-5)
    assert scorer.tokens_per_batch == 50
    tries = len(sizes)
    scorer.losses(contexts, keep)
    assert max(sizes[tries:]) <= 50
    model.forward = inner  # what took the memory has gone
    for _ in range(60):
        scorer.losses(contexts, keep[:1])
    assert scorer.tokens_per_batch == 400
    model.forward = lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    with refused("no memory for a single context"):
        scorer.losses(contexts, keep)


@pytest.mark.parametrize(
    ("limit", "tokens"), [(1e9, 1000), (1600, 400), (1599, 200), (399, 50), (200, 50), (199, 0)]
)
def test_the_batch_that_fits_is_found_by_trying(monkeypatch, limit, tokens):
    """A made-up model whose forward pass takes 4 bytes a token; a single context that does not fit is refused."""
    monkeypatch.setattr(
        "analysis.model.device._peak_bytes", lambda model, device, rows, n_long, asked: 4.0 * rows * n_long
    )
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", 1000)
    if tokens:
        assert tokens_that_fit(None, torch.device("cpu"), 50, limit) == tokens
        return
    with refused("one context of N = 50 tokens takes 2e-07 GB, more than the limit of"):
        tokens_that_fit(None, torch.device("cpu"), 50, limit)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_is_the_growth_to_the_peak_from_where_it_is_asked():
    megabyte = 1 << 20
    np.ones(200 * megabyte, dtype=np.uint8)  # an earlier, higher peak
    meter = MemoryGrowth(torch.device("cpu"))
    np.ones(64 * megabyte, dtype=np.uint8)  # freed at once: only the peak knows of it
    assert 60 * megabyte < meter.growth_bytes() < 100 * megabyte


@pytest.mark.parametrize("name", ["llama", "gpt2", "xglm", "gemma3"])
def test_of_attention_no_more_is_kept_than_what_is_read(name):
    model, contexts = build(name), make_contexts()
    kept = []

    def read(attention):
        kept.append(attention.untyped_storage().nbytes())
        return attention.mean(dim=1)

    for _ in range(2):  # after the first call transformers keeps a hook of its own
        model.last_attention(torch.from_numpy(contexts.tokens), torch.arange(N).expand(3, -1), 2, read)
    assert kept == [3 * 4 * 2 * N * 4] * 4


@pytest.mark.parametrize("what", ["presence_gradient", "input_gradients", "last_attention"])
def test_passes_that_keep_what_they_compute_stay_within_the_limit(monkeypatch, what):
    """A made-up meter, of 100 bytes for each row; a limit of 500 allows 4 rows, and one of 99 none."""
    rows = []
    meter = SimpleNamespace(growth_bytes=lambda: 100 * rows[-1])
    monkeypatch.setattr("analysis.model.scorer.MemoryGrowth", lambda device: meter)
    model, contexts = build("rope"), make_contexts(9)
    inner = Scorer._first_ids
    monkeypatch.setattr(
        Scorer, "_first_ids", lambda self, n, length: rows.append(n) or inner(self, n, length)
    )
    found = getattr(Scorer(model, limit_bytes=500), what)(contexts, contexts.all_targets)
    assert rows == [1, 2, 4, 2]
    whole = getattr(Scorer(model), what)(contexts, contexts.all_targets)
    np.testing.assert_allclose(found, whole, atol=1e-6)
    with refused("of one context of 24 tokens take 1e-07 GB, .* raise --memory-limit"):
        getattr(Scorer(model, limit_bytes=99), what)(contexts, contexts.all_targets)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_counts_the_logits_of_all_targets_of_a_block():
    """The logits of 200 positions are 160 MB, those of one less than 1 MB."""
    wide = OlmoForAnalysis(tiny.model(embedding_size=200_000, vocab_size=200_000))
    assert tokens_that_fit(wide, torch.device("cpu"), 400, 1e8) >= 400
    with refused("one context of N = 400 tokens .* raise --memory-limit or lower --n-long"):
        tokens_that_fit(wide, torch.device("cpu"), 400, 1e8, asked=200)


@pytest.mark.parametrize("name", ["leave-one-out", "leave-one-out-kl", "greedy", "gradient", "attention"])
def test_bf16_is_close(name):
    contexts = make_contexts()
    exact, coarse = (
        find_selector(name)(Question(Scorer(build("rope"), bf16=bf16), contexts, 0, 3)).influence
        for bf16 in (False, True)
    )
    np.testing.assert_allclose(coarse, exact, atol=0.1)
    assert not np.array_equal(coarse, exact)


def test_tokens_of_a_file_become_tensors_without_a_warning():
    tokens = np.arange(4)
    tokens.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OnDevice(torch.device("cpu"), False, None).tensor(tokens).tolist() == [0, 1, 2, 3]
