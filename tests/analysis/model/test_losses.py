"""The scorer against plain passes: shared prefixes, blocks, batches, memory that runs out, gradients and attention."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from scipy.special import roots_sh_legendre

from analysis.model import losses as losses_module
from analysis.model.adapter import TransformersAdapter
from analysis.model.attention_to_far import last_attention
from analysis.model.losses import Scorer
from analysis.model.token_losses import TokenLosses
from analysis.project import OlmoAdapter
from analysis.selectors import SelectorInput, find_selector
from olmo_sparsity.attention import ATTENTIONS
from tests.support import plain
from tests.support.families import FAMILIES, OURS, ROTARY, random_model, tiny_adapter
from tests.support.plain import plain_loss, random_blocks, random_contexts, single_target
from tests.support.refusals import refused
from tests.support.slow import slow_but

N, M, B = 24, 6, 6
FAR = N - M
NOT_FADING = [name for name, attention in ATTENTIONS.items() if not attention.supports_presence]
FADING = [name for name in OURS if name not in NOT_FADING]

EVERY = [*OURS, *FAMILIES]
QUICK = ("rope", "alibi", "learned", "windowed hybrid", "fox", "entmax", "grouped")
QUICK += ("llama", "gpt2", "gemma3", "xglm")

make_contexts = partial(random_contexts, N, M)
make_blocks = partial(random_blocks, N, M, B)


def without_each():
    """Every far token left out once, (F, F - 1)."""
    columns = np.arange(FAR - 1)
    return columns + (columns >= np.arange(FAR)[:, None])


def plain_losses(model, contexts, far):
    """One subset of one target at a time, from its first token on."""
    rows = zip(contexts.tokens, contexts.targets[:, 0], strict=True)
    subsets = [[*kept, *range(FAR, N)] for kept in far]
    return np.array([[plain_loss(model, text, kept, target) for kept in subsets] for text, target in rows])


def plain_log_p(model, contexts, block, place, far):
    """log p of every token at a target of a block, given the columns ``far``: one forward pass."""
    return plain.plain_log_p(model, contexts.tokens[block], [*far, *range(FAR, N + place)])


# --- subsets ---


@pytest.mark.parametrize("name", slow_but(EVERY, *QUICK))
def test_shared_prefixes_change_nothing(name):
    model, contexts, keep = tiny_adapter(name), make_contexts(), without_each()
    tokens_read = []
    logits_after = model.logits_after

    def spy(past, input_ids, *rest):
        tokens_read.append(input_ids.numel())
        return logits_after(past, input_ids, *rest)

    model.logits_after = spy
    expected, whole = plain_losses(model, contexts, keep), Scorer(model, share_prefixes=False)
    divergence = whole.measures(contexts, keep, ("kl",))[..., 0]
    for tokens_per_batch in (30, 200, 10_000):
        scorer = Scorer(model, tokens_per_batch=tokens_per_batch)
        np.testing.assert_allclose(scorer.losses(contexts, keep), expected, atol=2e-5)
        np.testing.assert_allclose(scorer.measures(contexts, keep, ("kl",))[..., 0], divergence, atol=2e-5)
    assert 0 < sum(tokens_read) < 6 * 0.9 * len(contexts) * FAR * (N - 1)  # prefixes were not read again


def test_subsets_with_and_without_a_prefix_keep_their_order():
    model, contexts = tiny_adapter("rope"), make_contexts()
    generator = np.random.default_rng(1)
    keep = np.stack([np.sort(generator.choice(FAR, 12, replace=False)) for _ in range(20)])
    keep[::3, :9] = np.arange(9)
    keep[::3, 9:] = np.sort([generator.choice(np.arange(9, FAR), 3, replace=False) for _ in range(7)], axis=1)
    keep[0] = np.arange(12)
    losses = Scorer(model, tokens_per_batch=50).losses(contexts, keep)
    np.testing.assert_allclose(losses, plain_losses(model, contexts, keep), atol=2e-5)


@pytest.mark.parametrize(
    ("name", "tokens_per_batch"),
    slow_but(
        product(EVERY, [30, 10_000]), *product(QUICK, [30]), *product(["rope", "llama", "gpt2"], [10_000])
    ),
)
def test_one_pass_predicts_every_target_of_a_block_from_a_subset(name, tokens_per_batch, monkeypatch):
    """Losses, hits and divergences from the long context: of all targets at once, some rows of logits at a time."""
    monkeypatch.setattr(losses_module, "LOGITS_PER_SLICE", 3 * B * 128)
    model, contexts, left_out = tiny_adapter(name), make_blocks(), without_each()
    scorer = Scorer(model, tokens_per_batch=tokens_per_batch)
    losses = scorer.losses(contexts, left_out)
    together = scorer.measures(contexts, left_out, ("kl", "tv", "correct"))
    assert losses.shape == together.shape[:2] == (2 * B, FAR)
    for row, (block, place) in enumerate(contexts.all_targets):
        token, long = contexts.targets[block, place], plain_log_p(model, contexts, block, place, range(FAR))
        for number in (0, 3, FAR - 1):
            log_p = plain_log_p(model, contexts, block, place, left_out[number])
            divergences = [plain.plain_divergence(kind, long, log_p) for kind in ("kl", "tv")]
            assert losses[row, number] == pytest.approx(-log_p[token], abs=5e-5)
            assert together[row, number, :2] == pytest.approx(divergences, abs=5e-5)
            assert together[row, number, 2] == (log_p.argmax() == token)


# --- attention ---


@pytest.mark.parametrize("name", EVERY)
def test_attention_of_a_block_is_that_of_each_target(name):
    scorer, contexts = Scorer(tiny_adapter(name)), make_blocks()
    together = last_attention(scorer, contexts, contexts.all_targets)
    for row, (block, place) in enumerate(contexts.all_targets):
        by_itself = last_attention(scorer, single_target(contexts, block, place), np.array([[0, 0]]))
        np.testing.assert_allclose(together[row], by_itself[0], atol=1e-5)


# --- gradients ---


@pytest.mark.parametrize("name", NOT_FADING)
def test_attention_that_a_token_does_not_fade_out_of_is_refused(name):
    with refused("the selector gradient does not apply"):
        Scorer(tiny_adapter(name)).presence_gradient(make_contexts(), make_contexts().all_targets)


def test_an_attention_that_takes_no_bias_is_refused_a_gradient():
    doge = TransformersAdapter(random_model("doge", **ROTARY, keep_window_size=64)).requires_grad_(False)
    with refused("doge takes no bias, so that the selector gradient does not apply"):
        Scorer(doge).presence_gradient(make_contexts(), make_contexts().all_targets)


@pytest.mark.parametrize("name", slow_but([*FADING, *FAMILIES], *list(FADING)[::2], "gpt_neox", "llama"))
def test_gradient_of_every_family_is_a_finite_difference(name):
    """The slope of the loss as a token fades from attention, and the bias at its end against dropping the token."""
    model, contexts = tiny_adapter(name), make_contexts()
    slopes = find_selector("gradient")(SelectorInput(Scorer(model), contexts, 0, FAR)).scores
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

    for column in range(FAR) if name in OURS else (7,):
        # extrapolated to no step at all: the error goes with its square, or beside a kink of entmax's slope with itself
        order = 1 if "entmax" in name else 2
        slope = (2**order * slope_over(column, 0.01) - slope_over(column, 0.02)) / (2**order - 1)
        near = {"atol": 2e-4, "rtol": 5e-3 if "entmax" in name else 1e-7}
        np.testing.assert_allclose(slopes[:, column], -slope, **(near if name in OURS else {"atol": 1e-3}))
        without = plain_losses(model, contexts, [[j for j in range(FAR) if j != column]])[:, 0]
        np.testing.assert_allclose(losses(column, 1e-30), without, atol=2e-5, rtol=1e-5)


def plain_gradient(model, contexts, row, change=lambda embeddings: embeddings):
    """Loss of a target, its gradient by the changed embeddings, and these: a plain pass with a hook."""
    ours = isinstance(model, OlmoAdapter)
    layer = model.model.transformer["wte"] if ours else model.model.get_input_embeddings()
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


def attributions(model, contexts):
    """What the three selectors by gradients of embeddings choose, by name."""
    names = ("saliency", "input-x-gradient", "integrated-gradients")
    return {name: find_selector(name)(SelectorInput(Scorer(model), contexts, 0, FAR)) for name in names}


@pytest.mark.parametrize("name", slow_but(EVERY, "rope", "alibi", "fox", "gpt_neox"))
def test_input_gradients_of_every_family_are_those_of_a_plain_pass(name):
    """Norms by autograd, and as the slope of the loss in the gradient's own direction."""
    model, contexts = tiny_adapter(name), make_contexts(2)
    points, weights = roots_sh_legendre(50)
    baseline = model.embed(torch.tensor(0))  # the end of text
    selections = attributions(model, contexts)
    for row in range(2):
        _, gradient, embeddings = plain_gradient(model, contexts, row)
        mean = torch.zeros_like(embeddings)
        for point, weight in zip(points.tolist(), weights.tolist(), strict=True):
            loss, slope, _ = plain_gradient(
                model, contexts, row, lambda x, a=point: baseline + a * (x - baseline)
            )
            mean -= weight * np.exp(-loss) * slope
        expected = {
            "saliency": gradient,
            "input-x-gradient": embeddings * gradient,
            "integrated-gradients": (embeddings - baseline) * mean,
        }
        for selector, values in expected.items():
            norms, selection = values.norm(dim=-1)[:FAR].double().numpy(), selections[selector]
            close = {"rtol": 1e-3, "atol": 1e-5}
            np.testing.assert_allclose(selection.influence[row], np.sort(norms)[::-1], **close)
            np.testing.assert_allclose(norms[selection.columns[row]], selection.influence[row], **close)
        column = int(selections["saliency"].columns[row, 0])
        step = torch.zeros_like(embeddings)
        step[column] = 1e-2 * gradient[column] / gradient[column].norm()
        more, less = (
            plain_gradient(model, contexts, row, lambda x, by=by: x + by)[0] for by in (step, -step)
        )
        assert selections["saliency"].influence[row, 0] == pytest.approx((more - less) / 2e-2, rel=0.05)


# --- memory and precision ---


def test_a_batch_that_does_not_fit_is_halved(monkeypatch):
    model, contexts = tiny_adapter("rope"), make_contexts()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    forward, sizes = model.forward, []
    errors = [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: …")]

    def small_forward(input_ids, position_ids=None, **options):
        sizes.append(input_ids.numel())
        if input_ids.numel() > 60:
            raise errors[len(sizes) % 2]
        return forward(input_ids, position_ids, **options)

    model.forward = small_forward
    scorer, keep = Scorer(model, tokens_per_batch=400, share_prefixes=False), without_each()
    expected = plain_losses(tiny_adapter("rope"), contexts, keep)
    np.testing.assert_allclose(scorer.losses(contexts, keep), expected, atol=2e-5)
    assert scorer.tokens_per_batch == 50
    tries = len(sizes)
    scorer.losses(contexts, keep)
    assert max(sizes[tries:]) <= 50
    model.forward = lambda *args, **kwargs: (_ for _ in ()).throw(torch.OutOfMemoryError("no"))
    with pytest.raises(torch.OutOfMemoryError):  # not even a single context fits
        scorer.losses(contexts, keep)
    model.forward = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("a wrong shape"))
    with pytest.raises(RuntimeError, match="a wrong shape"):
        scorer.losses(contexts, keep)


def test_rows_of_probes_that_do_not_fit_are_halved_too(monkeypatch):
    model, tokens = tiny_adapter("rope"), np.random.default_rng(0).integers(1, 50, (8, 21))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    expected, likeliest = TokenLosses(model).last_losses_and_likeliest(tokens, 5)
    losses = TokenLosses(model, tokens_per_batch=160)
    forward, sizes = model.forward, []

    def small_forward(input_ids, position_ids=None, **options):
        sizes.append(len(input_ids))
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError("no")
        return forward(input_ids, position_ids, **options)

    model.forward = small_forward
    np.testing.assert_allclose(losses.last_losses(tokens, 5), expected, atol=2e-5)
    assert sizes == [8, 4, 4] and losses.tokens_per_batch == 80
    again, likeliest_again = losses.last_losses_and_likeliest(tokens, 5)
    np.testing.assert_allclose(again, expected, atol=2e-5)
    assert np.array_equal(likeliest_again, likeliest) and sizes == [8, 4, 4, 4, 4]


# --- the last tokens of rows ---


@pytest.mark.parametrize("name", ["rope", "learned", "llama", "gpt2"])
def test_losses_of_last_tokens_are_those_of_plain_passes(name):
    model = tiny_adapter(name)
    rows, first_ids = np.random.default_rng(0).integers(1, 50, (3, 13)), np.array([0, 5, 2])
    losses = TokenLosses(model)
    for values, start in (
        (losses.last_losses(rows, 4), np.zeros(3, dtype=int)),
        (losses.last_losses(rows, 4, first_ids), first_ids),
        (losses.last_losses_and_likeliest(rows, 4)[0], np.zeros(3, dtype=int)),
    ):
        for row, place in np.ndindex(values.shape):
            text, end = [0] * start[row] + rows[row].tolist(), start[row] + 9 + place
            log_p = plain.plain_log_p(model, text, range(start[row], end))
            assert values[row, place] == pytest.approx(-log_p[text[end]], abs=2e-5)
    likeliest = losses.last_losses_and_likeliest(rows, 1)[1][:, 0]
    assert likeliest.tolist() == [plain.plain_log_p(model, row, range(12)).argmax() for row in rows]


def test_losses_that_are_not_finite_are_refused():
    model = tiny_adapter("llama")
    losses = TokenLosses(model)
    model.model.lm_head.weight.data[3] = torch.nan
    with refused("losses that are not finite"):
        losses.last_losses(np.ones((1, 5), dtype=int), 2)
