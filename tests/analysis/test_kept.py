"""Chosen tokens kept as text and as cache, as tokens and as words, against passes of the whole context."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from analysis.api import load
from analysis.kept import READ, WINDOWS, KeptAs, drawn_orders, word_numbers
from analysis.model import far_cache
from analysis.model.adapter import TransformersAdapter, with_prefix
from analysis.model.attention_to_far import accumulated_attention
from analysis.model.losses import Scorer
from analysis.selectors import Selection, SelectorInput, find_selector
from analysis.verify import verify
from olmo_sparsity.util.rng import Stream
from tests.support.families import layers_of_other_heads, random_model, tiny_adapter
from tests.support.plain import plain_loss, random_blocks, whole_pass_by_head
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.small_measurement import TEXTS, F, M, model, small, small_tokens

N_LONG, N_SHORT, B = 24, 6, 3
FAR = N_LONG - N_SHORT
LOWEST = torch.finfo(torch.float32).min

make_blocks = partial(random_blocks, N_LONG, N_SHORT, B)


def losses_of_cache(scorer, contexts, columns, targets):
    """Losses with these columns (m, j) in the cache, or others in every head, (m, heads, j)."""
    if columns.ndim > 2:
        return far_cache.losses_by_head(scorer, contexts, [columns], targets)[:, 0]
    visible = far_cache.subset_masks(columns, FAR)[:, None]
    return far_cache.measures(scorer, contexts, visible, ("loss",), targets)[:, 0, 0]


def random_subsets(count, seed=0):
    """Four columns for each target, (m, 4), ascending."""
    generator = np.random.default_rng(seed)
    return np.sort(generator.permuted(np.tile(np.arange(FAR), (count, 1)), axis=1)[:, :4], axis=1)


def hides(kept):
    """(FAR,) 0 where a column is among ``kept``, else the lowest number."""
    return torch.full((FAR,), LOWEST).index_fill(0, torch.as_tensor(kept), 0.0)


def masked_pass(model, contexts, block, place, kept):
    """Loss with the whole context read, in which all behind the far context see only the far columns ``kept``."""
    tokens = torch.from_numpy(contexts.tokens[block, : N_LONG + place])[None]
    length = tokens.shape[1]
    bias = torch.zeros(1, length, length)
    bias[:, FAR:, :FAR] = hides(kept)
    logits = model.biased_logits(tokens, torch.arange(length)[None], bias, 1)[0, -1].double()
    return -logits.log_softmax(-1)[contexts.targets[block, place]].item()


@pytest.mark.parametrize(
    ("model", "heads", "shares"),
    [
        (random_model, 2 * [2], True),
        (random_model, 2 * [2], False),
        (layers_of_other_heads, [*5 * [2], 1], True),
    ],
    ids=["llama", "llama, copied", "gemma 4"],
)
def test_every_layer_and_head_may_keep_tokens_of_its_own(model, heads, shares):
    inner, contexts = model(), make_blocks()
    adapter = TransformersAdapter(inner).requires_grad_(False)
    adapter.shares_far_keys = shares
    scorer, targets = Scorer(adapter), contexts.all_targets
    assert scorer.key_heads(contexts) == heads
    kept = random_subsets(len(targets) * sum(heads)).reshape(len(targets), sum(heads), 4)
    losses = losses_of_cache(scorer, contexts, kept, targets)
    for row, (block, place) in enumerate(targets):
        tokens = contexts.tokens[block, : N_LONG + place]
        log_p = whole_pass_by_head(inner, tokens, FAR, kept[row])
        assert losses[row] == pytest.approx(-log_p[contexts.targets[block, place]], abs=5e-5)


# --- windows ---


def ranked_choice(contexts, seed=1):
    """A made-up ranking of all far tokens for every target."""
    count = len(contexts.all_targets)
    columns = np.random.default_rng(seed).permuted(np.tile(np.arange(FAR), (count, 1)), axis=1)
    return Selection(columns, np.zeros(columns.shape))


def beside_chosen(window, width, ranked, sinks, k, target_id, seed=0):
    """The far tokens that are read with the first k of ``ranked``, and those alone, with sinks: sets, one by one."""
    chosen = [token for token in ranked if token >= sinks][:k]
    alone = {*range(sinks), *chosen}
    step = 1 if window == "behind" else -1
    in_windows = {token + step * distance for token in chosen for distance in range(width + 1)}
    in_windows = alone | {token for token in in_windows if 0 <= token < FAR}
    if window in ("before", "behind"):
        return in_windows, alone
    order = ranked
    if window == "drawn":
        order = np.random.default_rng([Stream.DRAWN_TOKENS, seed, target_id]).permutation(FAR)
    others = [token for token in order if token not in alone]
    return alone | set(others[: len(in_windows) - len(alone)]), alone


def partly_read_pass(model, contexts, block, place, read, kept):
    """Loss in one pass over everything: nobody sees far tokens that are not read, and none behind them the not kept."""
    tokens = torch.from_numpy(contexts.tokens[block, : N_LONG + place])[None]
    length = tokens.shape[1]
    bias = torch.zeros(1, length, length)
    for column in range(FAR):
        if column not in read:
            bias[:, column + 1 :, column] = LOWEST
        elif column not in kept:
            bias[:, FAR:, column] = LOWEST
    logits = model.biased_logits(tokens, torch.arange(length)[None], bias, 1)[0, -1].double()
    return -logits.log_softmax(-1)[contexts.targets[block, place]].item()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2", "gemma3", "rope", "alibi"])
@pytest.mark.parametrize(
    ("prefix", "sinks"), slow_but([((), 0), ((), 4), ((3, 1), 0), ((3, 1), 4)], ((), 0), ((3, 1), 4))
)
@torch.no_grad()
def test_what_has_read_its_windows_lies_between_text_and_cache(name, prefix, sinks):
    """With w = 0 it is the text, with w = F the cache; between them and for the controls, one masked pass each."""
    adapter, contexts = with_prefix(tiny_adapter(name), prefix), make_blocks()
    scorer, targets = Scorer(adapter, tokens_per_batch=60), contexts.all_targets
    choice, words, ks = ranked_choice(contexts), np.zeros((len(targets), FAR), dtype=int), (1, 4)

    def losses(level, unit):
        return KeptAs(level, unit, sinks).losses(scorer, contexts, targets, choice, words, ks, 3)

    np.testing.assert_allclose(losses("cache", "read:0"), losses("text", "token"), atol=1e-5)
    np.testing.assert_allclose(losses("cache", f"read:{FAR}"), losses("cache", "token"), atol=1e-5)
    for unit, window in READ.items():
        of_unit = losses("cache", f"{unit}:2")
        for row, (block, place) in enumerate(targets):
            target_id = contexts.target_id[block, place]
            for column, k in enumerate(ks):
                read, kept = beside_chosen(window, 2, choice.columns[row], sinks, k, target_id, seed=3)
                expected = partly_read_pass(adapter, contexts, block, place, read, kept)
                assert of_unit[row, column] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("sinks", [0, 4])
@torch.no_grad()
def test_windows_are_kept_as_text_and_as_cache(window, sinks):
    adapter, contexts = tiny_adapter("llama"), make_blocks()
    scorer, targets = Scorer(adapter, tokens_per_batch=60), contexts.all_targets
    choice, words, ks = ranked_choice(contexts), np.zeros((len(targets), FAR), dtype=int), (1, 4)
    for width in (0, 2, FAR):
        ways = {level: KeptAs(level, f"{window}:{width}", sinks) for level in ("text", "cache")}
        losses = {
            level: way.losses(scorer, contexts, targets, choice, words, ks) for level, way in ways.items()
        }
        for row, (block, place) in enumerate(targets):
            near = range(FAR, N_LONG + place)
            for column, k in enumerate(ks):
                kept, _ = beside_chosen(
                    window, width, choice.columns[row], sinks, k, contexts.target_id[block, place]
                )
                text = contexts.tokens[block]
                as_text = plain_loss(adapter, text, [*sorted(kept), *near], contexts.targets[block, place])
                in_cache = masked_pass(adapter, contexts, block, place, sorted(kept))
                assert losses["text"][row, column] == pytest.approx(as_text, abs=2e-5)
                assert losses["cache"][row, column] == pytest.approx(in_cache, abs=2e-5)


@pytest.mark.parametrize("level", ["text", "cache"])
def test_controls_read_and_keep_as_many_tokens_as_the_windows(level):
    contexts = make_blocks()
    targets, choice = contexts.all_targets, ranked_choice(contexts)
    words, ks = np.zeros((len(targets), FAR), dtype=int), (1, 2, 4)

    def counts(unit, level=level):
        return KeptAs(level, unit, 2).token_counts(contexts, targets, choice, words, ks, 0)

    read, kept = counts("before:3")
    for row, ranked in enumerate(choice.columns):
        sets = [beside_chosen("before", 3, ranked, 2, k, 0) for k in ks]
        assert kept[row].tolist() == [len(in_windows) for in_windows, _ in sets]
    assert (read == (kept if level == "text" else FAR)).all()
    for window in ("ranked", "drawn"):
        assert np.array_equal(counts(f"{window}:3"), (read, kept))
        assert np.array_equal(counts(f"read-{window}:3", "cache"), counts("read:3", "cache"))
    partly_read, chosen = counts("read:3", "cache")
    assert np.array_equal(partly_read, kept) and (chosen == 2 + np.array(ks)).all()


def test_what_is_drawn_is_a_function_of_the_seed_and_the_target():
    contexts = make_blocks()
    all_orders = drawn_orders(contexts, contexts.all_targets, 5)
    some = contexts.all_targets[[4, 1]]
    assert drawn_orders(contexts, some, 5).tolist() == all_orders[[4, 1]].tolist()
    assert drawn_orders(contexts, some, 6).tolist() != all_orders[[4, 1]].tolist()
    assert np.sort(all_orders, axis=1).tolist() == [list(range(FAR))] * len(all_orders)


@pytest.mark.parametrize("name", ["llama", "rope"])
@pytest.mark.parametrize("way", [KeptAs("text", "token", 3), KeptAs("cache", "token", 3), KeptAs("cache")])
@torch.no_grad()
def test_the_base_of_a_way_is_its_loss_with_the_sinks_alone(name, way):
    adapter, contexts = tiny_adapter(name), make_blocks()
    targets = contexts.all_targets
    bases = way.base_losses(Scorer(adapter, tokens_per_batch=60), contexts, targets)
    for base, (block, place) in zip(bases, targets, strict=True):
        columns = [*range(way.sinks), *range(FAR, N_LONG + place)]
        expected = plain_loss(adapter, contexts.tokens[block], columns, contexts.targets[block, place])
        assert base == pytest.approx(expected, abs=2e-5)


def test_a_model_that_rotates_cached_keys_when_it_reads_them_refuses_policies_by_head():
    contexts = make_blocks()
    kept = random_subsets(4 * len(contexts.all_targets)).reshape(-1, 4, 4)
    with refused("convert it with olmo-sparsity export_hf"):
        losses_of_cache(Scorer(tiny_adapter("ssmax")), contexts, kept, contexts.all_targets)


# --- eviction policies ---


def plain_attention(inner, contexts, block, place, prefix):
    """Attention (layers, H, L, L) of a target's long context behind a prefix."""
    tokens = torch.tensor([[*prefix, *contexts.tokens[block, : N_LONG + place]]])
    inner.set_attn_implementation("eager")
    with torch.no_grad():
        layers = torch.cat(inner(tokens, output_attentions=True).attentions)
    inner.set_attn_implementation("sdpa")
    return layers[:, :, len(prefix) :, len(prefix) :].double().numpy()


@pytest.mark.parametrize("prefix", [(), (3, 1)])
def test_policies_score_each_head_as_their_authors_do(prefix):
    """H2O: the sum over all queries. SnapKV: over the last ones, mean over five neighbours, ends padded by zeros.

    The selector by attention: that of the last query, mean over heads and layers.
    """
    inner, contexts = random_model("llama"), make_blocks()
    adapter = TransformersAdapter(inner).requires_grad_(False)
    given = SelectorInput(Scorer(with_prefix(adapter, prefix)), contexts, 0, 5)
    names = ("h2o", "snapkv", "snapkv:window=2:pool=3")
    h2o, snapkv, narrow = (find_selector(name)(given).by_head for name in names)
    last = find_selector("attention")(given).scores
    for row, (block, place) in enumerate(contexts.all_targets):
        attention = plain_attention(inner, contexts, block, place, prefix)
        np.testing.assert_allclose(last[row], attention[:, :, -1, :FAR].mean(axis=(0, 1)), atol=1e-5)
        of_keys = (attention[:, 0::2] + attention[:, 1::2]) / 2  # two heads of queries share one of keys
        far = of_keys[..., :FAR]
        far = far.reshape(4, N_LONG + place, FAR)  # two heads of keys in each of the two layers
        np.testing.assert_allclose(h2o[row], far.sum(axis=1), atol=1e-5)
        observed = np.pad(far[:, FAR:].sum(axis=1), [(0, 0), (2, 2)])
        pooled = [observed[..., column : column + 5].mean(axis=-1) for column in range(FAR)]
        np.testing.assert_allclose(snapkv[row], np.stack(pooled, axis=-1), atol=1e-5)
        observed = np.pad(far[:, -2:].sum(axis=1), [(0, 0), (1, 1)])
        pooled = [observed[..., column : column + 3].mean(axis=-1) for column in range(FAR)]
        np.testing.assert_allclose(narrow[row], np.stack(pooled, axis=-1), atol=1e-5)


def test_a_policy_keeps_its_sinks_and_the_first_tokens_of_each_head_beyond_them():
    contexts = make_blocks()
    scorer = Scorer(TransformersAdapter(random_model("llama")).requires_grad_(False))
    targets = contexts.all_targets
    choice = find_selector("h2o")(SelectorInput(scorer, contexts, 0, 6))
    words = np.zeros((len(targets), FAR), dtype=int)
    losses = KeptAs("cache", "token", 2).losses(scorer, contexts, targets, choice, words, (1, 3))
    scores = accumulated_attention(scorer, contexts, targets)
    for column, k in enumerate((1, 3)):
        kept = np.empty((len(targets), 4, 2 + k), dtype=int)
        for place in np.ndindex(kept.shape[:-1]):
            beyond = 2 + np.argsort(-scores[place][2:], kind="stable")[:k]
            kept[place] = [0, 1, *sorted(beyond)]
        expected = losses_of_cache(scorer, contexts, kept, targets)
        np.testing.assert_allclose(losses[:, column], expected, atol=1e-6)


# --- units, sinks and how they are written ---


def test_ways_are_written_in_one_form():
    assert KeptAs.parse("text") == KeptAs()
    assert KeptAs.parse("cache:4/word") == KeptAs("cache", "word", 4)
    assert KeptAs.parse("text/before:2") == KeptAs("text", "before:2")
    assert KeptAs.parse("cache:04/read-drawn:016") == KeptAs("cache", "read-drawn:16", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache:x", "is no way to keep tokens; write LEVEL"),
        ("text:4/bevore:2", "is no way to keep tokens; write LEVEL.*before, behind, ranked, drawn, read"),
        ("text/before:-1", "is no way to keep tokens"),
        ("text/before:2:3", "is no way to keep tokens"),
        ("", "is no way to keep tokens"),
        ("text/word:2", "the unit word has no number behind it; leave it out"),
        ("cache:4/read", "say how many tokens its windows have, such as read:2"),
        ("text:4/read:2", "as text all tokens that are read are kept; write before in place of read"),
    ],
)
def test_a_way_that_there_is_not_is_refused(text, message):
    with refused(message):
        KeptAs.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_as": ("text:4", "text:04")}, "name at least one way to keep tokens, and each once"),
        ({"keep_as": ("text/before:2", "text/before:02")}, "each once"),
        ({"keep_as": ("cache:34",)}, "cache:34: k = 4 and 34 sinks are more than the 35 far tokens"),
        (
            {"keep_as": ("text", "text/ranked:2"), "selectors": ("random", "greedy-kl")},
            "greedy-kl chooses step by step and ranks no tokens beyond k, which the unit ranked needs",
        ),
        (
            {"keep_as": ("text/ranked:2",), "selectors": ("leave-one-out@gradient:8",)},
            "m = 8 must be at least k = 12",
        ),
        (
            {"keep_as": ("text", "cache:2/word"), "selectors": ("halving/cache:2",)},
            "halving/cache:2 scores only the k tokens that it chooses, which may be of fewer than k words",
        ),
        ({"placebos": ("other-target",)}, "other-target takes the tokens of another target of the block"),
    ],
)
def test_ways_that_do_not_go_with_the_rest_are_refused_before_a_model_is_opened(changes, message):
    with refused(message):
        small("no/such/model", **changes)


def test_words_are_runs_of_letters_and_digits():
    pieces = ["The", " cat", "alog", "ue", " (", "v", "2", ")", "\n", "x", "", "y"]
    assert word_numbers(pieces).tolist() == [1, 2, 2, 2, 3, 4, 4, 5, 6, 7, 7, 7]


def test_of_each_word_the_first_token_counts_and_the_whole_is_kept():
    words = np.array([[0, 0, 1, 2, 2, 2, 3]])
    choice = Selection(np.array([[4, 3, 0, 6]]), np.zeros((1, 4)), np.array([[3.0, 0, 0, 4, 5, np.nan, 1]]))
    way = KeptAs("text", "word")
    first = way.first(choice, words, 3)
    assert first.tolist() == [[4, 0, 6]]
    assert np.flatnonzero(way.kept(first[:, :2], words)[0]).tolist() == [0, 1, 3, 4, 5]
    beyond = KeptAs("cache", "word", 1)
    assert beyond.first(choice, words, 2).tolist() == [[4, 6]]
    assert np.flatnonzero(beyond.kept(np.array([[6]]), words)[0]).tolist() == [0, 6]
    neighbors = KeptAs("text", "neighbors")
    assert np.flatnonzero(neighbors.kept(np.array([[0, 4]]), words)[0]).tolist() == [0, 1, 3, 4, 5]
    with refused("has no 5 words to choose"):
        way.first(choice, words, 5)


def test_words_are_those_of_scored_tokens_alone():
    """As of a screened selector, which scores what was proposed."""
    words = np.array([[0, 0, 1, 2, 2, 3, 3]])
    scores = np.array([[np.nan, np.nan, np.nan, 4, 5, np.nan, 1]])
    choice = Selection(np.array([[4, 3]]), np.zeros((1, 2)), scores)
    assert KeptAs("text", "word").first(choice, words, 2).tolist() == [[4, 6]]
    with refused("has no 3 words to choose, or the selector does not score so many"):
        KeptAs("text", "word").first(choice, words, 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5])
def test_a_measurement_keeps_tokens_in_several_ways(tmp_path, size):
    """Rows beside those of text, which stay as they are; losses again by plain passes; the same after loading."""
    settings = {"targets_per_block": size, "targets": 60, "selectors": ("leave-one-out", "snapkv", "random")}
    ways = ("text", "text:2", "text/neighbors", "cache", "cache:2")
    result = small(**settings, keep_as=ways, out=tmp_path)
    assert small(**settings).loss_nats("random").tolist() == result.loss_nats("random").tolist()
    assert load(tmp_path).loss_nats("snapkv", level="cache", sinks=2).shape == (len(result.over), 3)
    inner, tokens = model()[0], small_tokens()
    for row in range(3):
        target = result.targets.iloc[result.over[row]]
        read = F + M + target.target_id % size
        text = tokens[target.text][target.position - read : target.position]
        ranked = result.selected("leave-one-out")[row]
        with_neighbors = sorted({column + step for column in ranked for step in (-1, 0, 1)} & set(range(F)))
        loss = plain_loss(inner, text, [*with_neighbors, *range(F, read)], target.token)
        assert result.loss_nats("leave-one-out", unit="neighbors")[row, -1] == pytest.approx(loss, abs=1e-4)
        beyond = result.selected("leave-one-out", sinks=2)[row]
        assert (beyond >= 2).all() and [token for token in ranked if token >= 2] == beyond[
            : (ranked >= 2).sum()
        ].tolist()
        loss = plain_loss(inner, text, [0, 1, *sorted(beyond), *range(F, read)], target.token)
        assert result.loss_nats("leave-one-out", sinks=2)[row, -1] == pytest.approx(loss, abs=1e-4)


@pytest.mark.slow
def test_what_was_kept_in_several_ways_is_verified_and_older_results_kept_text(tmp_path):
    settings = {"targets_per_block": 5, "selectors": ("leave-one-out", "h2o")}
    result = small(**settings, keep_as=("text", "cache:2"))
    comparison = verify(result, model(), TEXTS, targets=10, device="cpu")
    assert comparison.holds and comparison.same == 1.0
    assert comparison.choices % (2 * 2 * 2 * 3) == 0  # selectors, far contexts, ways and ks
    small(**settings).save(tmp_path)
    written = json.loads((tmp_path / "result.json").read_text())
    del written["cells"][""]["settings"]["keep_as"]
    (tmp_path / "result.json").write_text(json.dumps(written))
    assert verify(load(tmp_path), model(), TEXTS, targets=10, device="cpu").holds
