"""Losses in other contexts (docs/method.md, 2.1b): lengths, the placebo, tokens before, a gap; against plain passes."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import engine
from analysis.api import Result, load
from analysis.cli import checked_measure
from analysis.contexts import NO_FAR
from analysis.figures.figure2 import describe
from analysis.model import check, far_cache
from analysis.model.losses import Scorer
from analysis.open_texts import open_texts
from analysis.policies import find_policy
from analysis.policies.seen import Seen
from analysis.sampling import sample_targets
from analysis.texts import TextReader, Texts
from analysis.verify import verify
from olmo_sparsity.model.rope import alibi_causal_bias, alibi_slopes
from tests.support import tiny
from tests.support.families import FAMILIES, WINDOWED, directory, random_model, tiny_adapter
from tests.support.plain import random_blocks
from tests.support.refusals import refused
from tests.support.small_measurement import (
    LENGTHS,
    SMALL,
    TEXTS,
    F,
    M,
    N,
    assert_same,
    interrupted_losses,
    model,
    small,
    small_tokens,
)

ALONE = {"selectors": (), "targets": 30}
D, GAP = 20, 7
OURS_BY_NAME = {
    "alibi": {"rope": False, "alibi": True},
    "nope": {"rope": False, "nope": True},
    "rope": {},
    "window": {"rope_window": 9},
}


def losses_by_pass(inner, read, ids, token, prefix=()):
    """-log p of a token behind tokens at these position ids, and behind a prefix: one pass."""
    tokens = torch.tensor([[*prefix, *map(int, read)]])
    with torch.no_grad():
        all_ids = torch.tensor([[*range(len(prefix)), *(len(prefix) + np.asarray(ids))]])
        logits = inner(tokens, position_ids=all_ids, attention_mask=torch.ones_like(tokens)).logits
    return -float(logits[0, -1].double().log_softmax(-1)[token])


def own_text(result, target, n_tokens):
    """The last n + b tokens before a target."""
    b = int(target.target_id) % result.settings.contexts.targets_per_block
    return small_tokens()[target.text][target.position - n_tokens - b : target.position]


def stretch(target, name, length):
    """What stands at the place of a target's placebo, or of what stands before."""
    start = getattr(target, f"{name}_start")
    return small_tokens()[getattr(target, f"{name}_text")][start : start + length]


def some(result):
    """A few targets, from the beginning, the middle and the end."""
    rows = np.unique(np.linspace(0, len(result.targets) - 1, 7).astype(int))
    return result.targets.iloc[rows].itertuples()


# --- lengths ---


@pytest.mark.parametrize("block", [1, 3])
def test_lengths_are_plain_passes_over_the_last_tokens(block):
    """Up to N at the ids of the long context, beyond N from id 0; L_short at the ids of either."""
    lengths = (50, 3, 20, M, N)
    result = small(**ALONE, targets_per_block=block, lengths=lengths, prefix="7")
    assert result.settings.contexts.lengths == tuple(sorted(lengths))
    inner = model()[0]
    for target in some(result):
        for length in (3, M, 20, N, 50):
            read = own_text(result, target, length)
            last_id = max(N, length) + len(read) - length
            ids = np.arange(last_id - len(read), last_id)
            expected = losses_by_pass(inner, read, ids, target.token, prefix=(7,))
            assert getattr(target, f"loss_of_{length}_nats") == pytest.approx(expected, abs=1e-4)
        short = own_text(result, target, M)
        ids = np.arange(50 - M, 50 - M + len(short))
        expected = losses_by_pass(inner, short, ids, target.token, prefix=(7,))
        assert target.loss_short_at_50_nats == pytest.approx(expected, abs=1e-4)
    assert not any(f"loss_short_at_{length}_nats" in result.targets for length in (3, M, 20, N))
    np.testing.assert_array_equal(result.targets[f"loss_of_{N}_nats"], result.targets["loss_long_nats"])
    np.testing.assert_array_equal(result.targets[f"loss_of_{M}_nats"], result.targets["loss_short_nats"])


def test_of_a_model_with_learned_positions_short_contexts_have_the_ids_of_the_longer_one():
    inner = random_model("gpt2")
    result = small((inner, model()[1]), **ALONE, targets_per_block=2, lengths=(10, 55))
    for target in some(result):
        read = own_text(result, target, 10)
        ids = np.arange(N - 10, N - 10 + len(read))
        expected = losses_by_pass(inner, read, ids, target.token)
        assert target.loss_of_10_nats == pytest.approx(expected, abs=1e-4)
        assert target.loss_short_at_55_nats != pytest.approx(target.loss_short_nats, abs=1e-3)
    with refused(
        "the longest length = 64 with 1 more tokens of block and prefix is beyond the 64 positions .*; "
        "lower the longest length or B"
    ):
        small((inner, model()[1]), **ALONE, targets_per_block=2, lengths=(64,))


def test_a_length_beyond_n_needs_its_tokens_in_the_text():
    result = small(**ALONE, targets_per_block=3, lengths=(100,))
    assert set(result.targets["text"]) == {4} and LENGTHS["site"][0] == 130
    assert result.targets["position"].min() >= 100
    with refused("no text offers B = 3 targets in a row with 200 tokens before: .* lower lengths or B"):
        small(**ALONE, targets_per_block=3, lengths=(200,))


def test_faithfulness_adds_its_lengths_to_those_that_are_set():
    both = small(**ALONE, targets_per_block=3, lengths=(8, 32), faithfulness=True)
    alone = small(**ALONE, targets_per_block=3, faithfulness=True)
    assert both.settings.contexts.lengths == (8, 32) and alone.settings.contexts.lengths == ()
    for name in ("loss_of_32_nats", "loss_short_from_0_nats"):
        np.testing.assert_array_equal(both.targets[name], alone.targets[name])
    assert "loss_of_8_nats" not in alone.targets


def test_context_length_probing_gives_the_same():
    """Cífka and Liutkus 2023: the windows that begin at every token of a text, read from id 0; by their definition.

    ``xent[c, t]`` is the loss of token t + 1 given the c tokens before it. RoPE sees differences of ids alone, so that
    the ids of a window do not matter.
    """
    window = 12
    result = small(**{**ALONE, "targets": 60}, targets_per_block=1, n_long=window, lengths=(6, 8, 10))
    inner, tokens = model()[0], small_tokens()
    for target in some(result):
        text = tokens[target.text]
        xent = np.full((window + 1, len(text)), np.nan)
        for start in range(target.position - window, target.position):
            read = torch.tensor(text[start : start + window][None])
            with torch.no_grad():
                log_p = inner(read).logits[0].log_softmax(-1)
            for place in range(min(window, len(text) - 1 - start)):
                xent[place + 1, start + place] = -log_p[place, text[start + place + 1]]
        losses = [getattr(target, f"loss_of_{length}_nats") for length in (6, 8, 10)]
        expected = xent[[6, 8, 10, window], target.position - 1]
        np.testing.assert_allclose([*losses, target.loss_long_nats], expected, atol=1e-4)


# --- before ---


@pytest.mark.parametrize("block", [1, 3])
def test_tokens_before_stand_before_the_long_context_and_the_placebo(block):
    lengths = (3, 20, N, N + 6, N + D)
    result = small(**ALONE, targets_per_block=block, before=D, lengths=lengths, gap=2)
    inner = model()[0]
    for target in some(result):
        own = own_text(result, target, N)
        read = np.concatenate([stretch(target, "before", D), own])
        placebo = np.concatenate([read[:D], stretch(target, "placebo", F), own[F:]])
        ids = np.arange(len(read))
        ids[D + F :] += 2
        for name, tokens, ids_of in (
            ("long", read, ids),
            ("placebo", placebo, ids),
            ("short", own[F:], ids[D + F :]),
            *((f"of_{n}", read[N + D - n :], ids[N + D - n :]) for n in lengths),
        ):
            expected = losses_by_pass(inner, tokens, ids_of, target.token)
            assert getattr(target, f"loss_{name}_nats") == pytest.approx(expected, abs=1e-4), name
    np.testing.assert_array_equal(result.targets[f"loss_of_{N + D}_nats"], result.targets["loss_long_nats"])


def test_what_is_added_to_the_context_leaves_targets_and_placebos_as_they_are():
    bare = small(**ALONE, targets_per_block=3)
    for changes in ({"before": D}, {"gap": GAP}, {"lengths": (3, 20)}):
        other = small(**ALONE, targets_per_block=3, **changes)
        names = ["target_id", "text", "position", "placebo_text", "placebo_start", "kind"]
        pd.testing.assert_frame_equal(bare.targets[names], other.targets[names])


def numbered_texts(lengths, groups=None):
    """Texts of so many tokens each."""
    reader = TextReader(lambda text: np.array(text.split(), dtype=np.int64))
    strings = [" ".join(["1"] * length) for length in lengths]
    if groups is None:
        return open_texts(strings, reader)
    return Texts(reader, list(zip(groups, strings, strict=True)), "texts")


@pytest.mark.parametrize("groups", [None, ["a", "a", "b", "c", "c"]])
def test_tokens_before_are_of_a_text_that_is_neither_the_targets_nor_the_placebos(groups):
    lengths = [40, 30, 25, 60, 22]
    texts = numbered_texts(lengths, groups)
    drawn = sample_targets(
        texts, 60, n_long=20, n_short=5, seed=0, targets_per_block=2, before=22, same_group=True
    )
    assert (drawn["before_text"] != drawn["text"]).all()
    assert (drawn["before_text"] != drawn["placebo_text"]).all()
    if groups is not None:
        group = np.array(groups)
        assert (group[drawn["before_text"]] != group[drawn["text"]]).all()
    assert (drawn["before_start"] >= 0).all()
    assert (drawn["before_start"] + 22 <= np.array(lengths)[drawn["before_text"]]).all()
    assert len(set(drawn["before_text"])) > 2 and len(set(drawn["before_start"])) > 5
    of_block = drawn.groupby(drawn["target_id"] // 2)[["before_text", "before_start"]].nunique()
    assert (of_block == 1).all(axis=None)


@pytest.mark.parametrize(("lengths", "before"), [([40, 30], 5), ([40, 30, 8], 9), ([60], 5)])
def test_without_a_third_text_nothing_can_stand_before(lengths, before):
    with refused(rf"before = {before} needs a text of so many tokens that is not the placebo's; give more"):
        texts = numbered_texts([length if len(lengths) > 1 else 4 * length for length in lengths])
        sample_targets(texts, 4, n_long=20, n_short=5, seed=0, before=before)


# --- gap ---


@pytest.mark.parametrize("block", [1, 3])
def test_a_gap_is_position_ids_without_tokens(block):
    """The long and the short context, the placebo, lengths on either side of M and beyond N, and what is chosen."""
    selectors = ("leave-one-out", "leave-one-in", "random")
    result = small(
        **{**ALONE, "selectors": selectors},
        targets_per_block=block,
        gap=GAP,
        lengths=(3, 20, 50),
        tau_nats=1.0,
        faithfulness=True,
        keep_as=("text", "cache:2"),
    )
    inner = model()[0]
    for target in some(result):
        for length in (N, 50):
            own = own_text(result, target, length)
            ids = np.arange(len(own))
            ids[length - M :] += GAP
            name = "long" if length == N else "of_50"
            expected = losses_by_pass(inner, own, ids, target.token)
            assert getattr(target, f"loss_{name}_nats") == pytest.approx(expected, abs=1e-4)
            name = "short" if length == N else "short_at_50"
            expected = losses_by_pass(inner, own[length - M :], ids[length - M :], target.token)
            assert getattr(target, f"loss_{name}_nats") == pytest.approx(expected, abs=1e-4)
            for n in (3, 20) if length == N else ():
                expected = losses_by_pass(inner, own[N - n :], ids[N - n :], target.token)
                assert getattr(target, f"loss_of_{n}_nats") == pytest.approx(expected, abs=1e-4)
    assert len(result.over) > 3
    for row in (0, len(result.over) // 2, len(result.over) - 1):
        target = result.targets.iloc[result.over[row]]
        own = own_text(result, target, N)
        ids = np.arange(len(own))
        ids[F:] += GAP

        def loss(columns, own=own, ids=ids, target=target):
            return losses_by_pass(inner, own[columns], ids[columns], target.token)

        near = list(range(F, len(own)))
        everything = loss(np.arange(len(own)))
        influence = [loss([j for j in range(len(own)) if j != i]) - everything for i in range(F)]
        chosen = result.selected("leave-one-out")[row]
        np.testing.assert_allclose(
            result.influence("leave-one-out")[row], np.sort(influence)[::-1][: len(chosen)], atol=2e-4
        )
        for selector in selectors:
            chosen = result.selected(selector)[row]
            kept = [loss([*sorted(chosen[:k].tolist()), *near]) for k in result.ks]
            np.testing.assert_allclose(result.loss_nats(selector)[row], kept, atol=1e-4)
        drops = result.of_choices("comprehensiveness_nats", "random")[row]
        chosen = result.selected("random")[row]
        without = [loss([j for j in range(len(own)) if j not in chosen[:k]]) - everything for k in result.ks]
        np.testing.assert_allclose(drops, without, atol=2e-4)


def test_a_model_is_tried_on_as_many_tokens_as_without_a_gap(monkeypatch):
    """A wide gap takes no more memory than none."""
    tried = []
    random_tokens = check._random_tokens

    def counted(model, count):
        tried.append(count)
        return random_tokens(model, count)

    monkeypatch.setattr(check, "_random_tokens", counted)
    for gap in (0, 1000):
        small(**ALONE, targets_per_block=3, gap=gap, effects=True)
    assert tried[: len(tried) // 2] == tried[len(tried) // 2 :]


def our_model(name):
    """One of this project's models with a tokenizer of the same words."""
    torch.manual_seed(0)
    return tiny.model(max_sequence_length=256, **OURS_BY_NAME[name]), model()[1]


def test_known_answers_of_a_gap():
    """Without positions nothing changes; with a window that is narrower than the gap all far context is lost."""
    measured = {}
    for name in OURS_BY_NAME:
        measured[name] = [small(our_model(name), **ALONE, targets_per_block=3, gap=gap) for gap in (0, 30)]
    losses = ["loss_long_nats", "loss_short_nats", "loss_placebo_nats"]
    without, with_gap = measured["nope"]
    pd.testing.assert_frame_equal(without.targets[losses], with_gap.targets[losses])
    without, with_gap = measured["window"]
    assert np.abs(without.gain_nats).max() > 0.1
    np.testing.assert_allclose(with_gap.gain_nats, 0, atol=1e-5)
    np.testing.assert_allclose(with_gap.net_gain_nats, 0, atol=1e-5)
    for name in ("rope", "alibi"):
        without, with_gap = measured[name]
        assert np.abs(with_gap.gain_nats - without.gain_nats).max() > 0.01
        np.testing.assert_allclose(
            with_gap.targets["loss_short_nats"], without.targets["loss_short_nats"], atol=1e-4
        )


def test_alibi_lowers_the_scores_of_far_keys_by_its_slopes_times_the_gap():
    inner, tokenizer = our_model("alibi")
    result = small((inner, tokenizer), **ALONE, targets_per_block=3, gap=GAP)
    slopes = alibi_slopes(inner.config, torch.device("cpu"))
    for target in some(result):
        tokens = torch.tensor(own_text(result, target, N)[None])
        bias = alibi_causal_bias(inner.config, torch.arange(tokens.shape[1])[None])
        bias[:, :, F:, :F] -= GAP * slopes[None, :, None, None]
        with torch.no_grad():
            logits = inner(
                tokens, position_ids=torch.arange(tokens.shape[1])[None], attention_bias=bias
            ).logits
        expected = -float(logits[0, -1].double().log_softmax(-1)[target.token])
        assert target.loss_long_nats == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["rope", "alibi", "nope", "windowed hybrid", "entmax", "llama", "gpt2", "gemma3"]
)
def test_the_cache_reads_near_tokens_behind_the_gap(name):
    """With all far keys as the whole text, with none as the near tokens alone, without one as a pass that hides it."""
    adapter = tiny_adapter(name)
    if name in FAMILIES:
        adapter.shares_far_keys = False
    contexts = random_blocks(20, 6, 3).with_gap(5)
    n_far = contexts.n_far
    scorer = Scorer(adapter)
    visible = np.ones((3, n_far), dtype=bool)
    visible[1] = False
    visible[2, 4] = False
    targets = contexts.all_targets
    losses = far_cache.measures(scorer, contexts, visible, ("loss",), targets)[..., 0]
    np.testing.assert_allclose(losses[:, :1], scorer.losses(contexts, contexts.all_far), atol=2e-5)
    np.testing.assert_allclose(losses[:, 1:2], scorer.losses(contexts, NO_FAR), atol=2e-5)
    if name == "entmax":
        return
    hidden = torch.zeros(1, contexts.tokens.shape[1], contexts.tokens.shape[1])
    hidden[:, n_far:, 4] = torch.finfo(torch.float32).min / 4
    for block, place in targets.tolist():
        length = contexts.n_long + place
        ids = torch.tensor(contexts.position_ids[None, :length])
        tokens = torch.tensor(contexts.tokens[block : block + 1, :length])
        with torch.no_grad():
            logits = adapter.biased_logits(tokens, ids, hidden[:, :length, :length], 1)
        expected = -float(logits[0, -1].log_softmax(-1)[contexts.targets[block, place]])
        row = block * contexts.targets_per_block + place
        assert losses[row, 2] == pytest.approx(expected, abs=5e-5)


def test_attention_and_gradients_see_the_gap():
    """Of one target: attention of the last position by the model, and the gradient by differences."""
    inner = random_model("llama", attn_implementation="eager")
    result = small(
        (inner, model()[1]), **{**ALONE, "selectors": ("attention",)}, gap=GAP, scores=True, tau_nats=-90.0
    )
    for row in (0, 5):
        target = result.targets.iloc[row]
        own = own_text(result, target, N)
        ids = np.arange(N)
        ids[F:] += GAP
        with torch.no_grad():
            attentions = inner(
                torch.tensor(own[None]),
                position_ids=torch.tensor(ids[None]),
                attention_mask=torch.ones(1, N, dtype=torch.long),
                output_attentions=True,
            ).attentions
        expected = torch.stack([layer[0, :, -1, :F].mean(dim=0) for layer in attentions]).mean(dim=0)
        scores = result.scores.query("target_id == @target.target_id and far_context == 'true'")
        np.testing.assert_allclose(scores["influence"].iloc[0], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "expected-attention", "kvzip", "knorm"])
def test_policies_see_queries_at_the_ids_behind_the_gap(name):
    """A model that only sees differences of ids scores as with a gap in which masked tokens stand."""
    adapter = tiny_adapter("rope")
    scorer = Scorer(adapter)
    contexts = random_blocks(20, 6, 2)
    policy = find_policy(f"{name}:future=8" if name == "expected-attention" else name)
    encode = {"encode": lambda text: np.array([1, 2, 3])}
    without = policy.scores(Seen.of(scorer, contexts, contexts.all_targets, **encode))
    behind = policy.scores(Seen.of(scorer, contexts.with_gap(11), contexts.all_targets, **encode))
    zero = policy.scores(Seen.of(scorer, contexts.with_gap(0), contexts.all_targets, **encode))
    np.testing.assert_array_equal(without, zero)
    moves = name in ("snapkv", "h2o", "expected-attention")
    assert (np.abs(behind - without).max() > 1e-4) == moves


# --- what does not go together ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (0,)}, "lengths takes whole numbers from 1 on, not 0"),
        ({"lengths": ("a",)}, "lengths takes whole numbers from 1 on, not 'a'"),
        ({"before": -1}, "before takes whole numbers from 0 on, not -1"),
        ({"gap": 1.5}, "gap takes whole numbers from 0 on, not 1.5"),
        (
            {"ks": ()},
            "ks takes one number of tokens at least; without selectors it counts nothing: leave it out",
        ),
        (
            {"before": 20, "lengths": (61,)},
            "lengths has 61, and N with .* is 60 tokens: raise before, or lower",
        ),
        (
            {"before": 20, "selectors": ("random",)},
            r"before = 20: no tokens are chosen .* \(--selectors none",
        ),
        (
            {"before": 20, "effects": True},
            "before = 20: no tokens are chosen .* leave out effects, or before",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_opened(changes, message):
    with refused(message):
        small(("no model", None), **{**ALONE, **changes})


def test_models_whose_ids_or_windows_end_are_refused_by_name():
    learned = random_model("gpt2"), model()[1]
    with refused(
        "N = 40 with 2 more tokens of block and prefix and a gap of 30 is beyond the 64 positions of .*lower N, B"
    ):
        small(learned, **ALONE, targets_per_block=3, gap=30)
    with refused(
        r"N \+ before = 70 with 2 more tokens of block and prefix is beyond the 64 positions .*; lower N \+ before or B"
    ):
        small(learned, **ALONE, targets_per_block=3, before=30)
    windowed = random_model("gemma3_text", **{**WINDOWED["gemma3_text"], "sliding_window": 50}), model()[1]
    small(windowed, **ALONE, targets_per_block=3, before=5)
    small(
        windowed, **ALONE, targets_per_block=3, before=30
    )  # nothing is dropped: windows may end within the context
    with refused(
        "N = 40 with 2 more tokens of block and prefix and a gap of 30 is beyond the 50 tokens of a sliding"
    ):
        small(windowed, **ALONE, targets_per_block=3, gap=30)


# --- losses alone ---


def test_without_selectors_losses_are_the_same_and_nothing_is_searched(monkeypatch, tmp_path):
    settings = {
        "targets": 60,
        "targets_per_block": 3,
        "placebos": ("placebo", "same-group", "shuffled", "other-target"),
    }
    with_selectors = small(**settings, selectors=("random",))
    monkeypatch.setattr(engine.Engine, "_select", None)
    monkeypatch.setattr(engine.Engine, "_choice_rows", None)
    alone = small(**settings, selectors=(), out=tmp_path, ks=(1, 99), keep_as=("text",))
    pd.testing.assert_frame_equal(alone.targets, with_selectors.targets)
    assert alone.choices.empty and alone.texts is None and not alone.has_xray and len(alone.over)
    assert_same(load(tmp_path), alone)
    assert_same(small(**settings, selectors="none", ks=(1, 99), keep_as=("text",)), alone)
    tokens = small_tokens()
    for target in some(alone):
        own = own_text(alone, target, N)
        far = stretch(target, "placebo", F)
        expected = losses_by_pass(model()[0], [*far, *own[F:]], np.arange(len(own)), target.token)
        assert target.loss_placebo_nats == pytest.approx(expected, abs=1e-4)
        assert np.isnan(target.loss_same_group_nats) == (target.same_group_start < 0)
        if target.same_group_start >= 0:
            far = tokens[target.same_group_text][target.same_group_start : target.same_group_start + F]
            expected = losses_by_pass(model()[0], [*far, *own[F:]], np.arange(len(own)), target.token)
            assert target.loss_same_group_nats == pytest.approx(expected, abs=1e-4)
    net = alone.targets["loss_placebo_nats"] - alone.targets["loss_long_nats"]
    shares = alone.shares(resamples=50).set_index("name")["value"]
    assert shares["net_gain_nats"] == pytest.approx(net.mean()) == pytest.approx(alone.net_gain_nats.mean())
    with refused("the result has no losses in the placebo; measure again"):
        _ = small(**ALONE, placebos=()).net_gain_nats


def test_it_says_that_nothing_was_chosen(tmp_path):
    result = small(**ALONE, targets_per_block=3, before=D, gap=GAP, lengths=(3,), out=tmp_path)
    text = str(result)
    assert f"N {N}, M {M}, B 3, before {D}, gap {GAP}; 30 targets" in text
    assert "texts by what their far context is worth:" in text and ".recovery" not in text
    caption = describe({"": result})
    assert f"before = {D}, gap = {GAP}" in caption and "measured so far" not in caption and len(result.over)
    assert "share_within_tau" in result.summary(resamples=50)
    assert len(result.figure2().axes) == 1
    for number in (result.recovery, result.kinds, result.faithfulness):
        with refused("no tokens were chosen, as the result was measured without selectors; measure again"):
            number()
    for of_choices in (result.chosen, result.xray):
        with refused(
            "no tokens were chosen, as the result was measured without selectors; measure again with"
        ):
            of_choices()
    again = load(tmp_path)
    assert again.settings == result.settings and str(again) == text


def test_under_cross_fitting_it_says_which_gains_are_over_tau():
    """Targets are over tau under the model that selects, while losses and gains are of the one that evaluates."""
    result = small(**ALONE, targets_per_block=3, select_with=model(1))
    still_over = (result.gain_nats[result.over] > SMALL["tau_nats"]).mean()
    assert 0 < still_over < 1
    assert f"under the model that evaluates {100 * still_over:.1f} % of them do" in str(result)


def test_a_record_knows_its_contexts(tmp_path):
    """Another one is not gone on with, joined or verified; another tau takes the losses from the folder."""
    settings = {**ALONE, "targets_per_block": 3, "before": D, "gap": GAP, "lengths": (3, N + 5)}
    result = small(**settings, out=tmp_path)
    for changes, named in (
        ({"before": D + 1}, f"before {D} -> {D + 1}"),
        ({"gap": 0}, f"gap {GAP} -> 0"),
        ({"lengths": (3,)}, rf"lengths \[3, {N + 5}\] -> \[3\]"),
    ):
        with refused(f"was measured with other settings: {named}; give another folder"):
            small(**{**settings, **changes}, out=tmp_path)
    lower = small(**settings, tau_nats=0.25, out=tmp_path)
    assert (lower.targets["over_tau"] == (lower.gain_nats > 0.25)).all()
    losses = [name for name in result.targets if name.endswith("_nats")]
    pd.testing.assert_frame_equal(lower.targets[losses], result.targets[losses])

    options = {"device": "cpu", "tokens_per_batch": 2048, "progress": False}
    comparison = verify(result, model(), TEXTS, targets=9, **options)
    assert comparison.holds and comparison.largest_difference_nats["other_contexts"] < 1e-4
    wrong = replace(
        result, targets=result.targets.assign(loss_of_3_nats=result.targets["loss_of_3_nats"] + 0.1)
    )
    assert not verify(wrong, model(), TEXTS, targets=9, **options).holds
    missing = replace(result, targets=result.targets.assign(loss_placebo_nats=np.nan))
    assert not verify(missing, model(), TEXTS, targets=9, **options).holds

    other_seed = small(model(1), **settings)
    joined = Result.join([result, other_seed])
    both = [one.targets["loss_of_3_nats"].mean() for one in (result, other_seed)]
    frame = joined.contexts(resamples=50)
    [row] = frame[(frame["name"] == "loss_nats") & (frame["length"] == 3)].to_dict("records")
    assert row["value"] == pytest.approx(np.mean(both))
    with refused(f"the same settings: gap {GAP} -> 0"):
        Result.join([result, small(model(1), **{**settings, "gap": 0})])


@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_measurement_of_losses_goes_on(tmp_path, monkeypatch):
    settings = {"selectors": (), "targets": 40, "targets_per_block": 3, "lengths": (3, 50), "gap": GAP}
    whole = small(**settings)
    interrupted_losses(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        small(**settings, out=tmp_path)
    assert_same(small(**settings, out=tmp_path), whole)


@pytest.mark.usefixtures("small_batches")
def test_parts_of_an_earlier_version_become_a_result_without_what_they_lack(tmp_path):
    """Losses in the placebo are measured since; what was begun before goes on, and its numbers are of all targets."""
    settings = {"selectors": (), "targets": 40, "targets_per_block": 3}
    whole = small(**settings)
    small(**settings, out=tmp_path, shard="1/2")
    added = ["loss_placebo_nats", "text_tokens"]
    for head in (tmp_path / "parts").rglob("result.json"):
        part = Result.load(head.parent)
        replace(part, targets=part.targets.drop(columns=added)).save(head.parent)
    result = small(**settings, out=tmp_path)
    pd.testing.assert_frame_equal(result.targets, whole.targets.drop(columns=added))
    assert "beyond that of another text" in str(whole) and "beyond that of another text" not in str(result)


def test_retention_is_a_ratio_of_gains():
    """What is left of the gain in longer contexts of the text."""
    settings = {**ALONE, "targets_per_block": 3}
    longer = small(**settings, lengths=(60,))
    targets = longer.targets
    frame = longer.contexts(resamples=50)
    [whole] = frame[(frame["name"] == "share_of_gain") & (frame["length"] == 60)]["value"]
    everything = (targets["loss_short_at_60_nats"] - targets["loss_of_60_nats"]).sum()
    assert whole == pytest.approx(everything / longer.gain_nats.sum())


def test_the_command_ranks_texts(tmp_path, call_main):
    folder = directory(tmp_path / "model", "llama")
    out = tmp_path / "out"
    options = (
        "--selectors",
        "none",
        "--n-long",
        20,
        "--n-short",
        5,
        "--targets",
        24,
        "--targets-per-block",
        4,
    )
    further = ("--lengths", "8,30", "--before", 10, "--gap", 3)
    code, printed = call_main(
        "measure", folder, "--corpus", folder / "corpus", "--out", out, *options, *further
    )
    result = load(out)
    contexts = result.settings.contexts
    assert not code and (contexts.lengths, contexts.before, contexts.gap) == ((8, 30), 10, 3)
    assert result.settings.choices.selectors == ()
    assert printed.startswith(str(result)) and f"wrote {out / 'documents.csv'}: all texts" in printed
    written = pd.read_csv(out / "documents.csv")
    pd.testing.assert_frame_equal(written, result.documents())
    assert len(written) == 3 and written["tokens"].tolist() == [60, 60, 60]
    arguments = [*map(str, (folder, "--out", out, *options)), "--before", "10"]
    checked_measure(arguments)  # neither is refused
    checked_measure([*arguments, "--placebos", "none"])
    code, printed = call_main(
        "measure",
        folder,
        "--corpus",
        folder / "corpus",
        "--out",
        out.with_name("bare"),
        *options,
        "--placebos",
        "none",
    )
    bare = load(out.with_name("bare"))
    assert not code and bare.far_contexts == ["true"] and "loss_placebo_nats" not in bare.targets
    assert printed.startswith(str(bare))
    for further in ([], ["--selectors", "none", "--effects"]):
        with refused("before = 10: no tokens are chosen"):
            checked_measure([str(folder), "--out", str(out), "--before", "10", *further])
