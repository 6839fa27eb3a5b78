import numpy as np
import pytest

from analysis.text.contexts import (
    long_contexts,
    placebo_contexts,
    sample_targets,
    shuffled_contexts,
    with_same_group,
)
from olmo_sparsity.corpus.tokens import TokenFiles
from tests.support import tiny
from tests.support.refusals import refused

LENGTHS = [30, 12, 50, 21, 200, 5]
N, M = 20, 6


@pytest.fixture
def tokens(tmp_path):
    documents = [[1 + (7 * d + j) % 49 for j in range(n)] for d, n in enumerate(LENGTHS)]
    tiny.write_corpus(tmp_path / "corpus", {"heldout": documents})
    return TokenFiles.of_split(tmp_path / "corpus", "heldout")


def sample(tokens, count=40, seed=0, n_long=N, n_short=M):
    return sample_targets(tokens, count, n_long=n_long, n_short=n_short, seed=seed)


def test_every_target_has_its_long_context_in_its_own_document(tokens):
    sampled = sample(tokens)
    assert len(sampled.document) == 40
    lengths = np.array(LENGTHS)[sampled.document]
    assert (sampled.position >= N).all()
    assert (sampled.position < lengths).all()
    assert len({*zip(sampled.document, sampled.position, strict=True)}) == 40


def test_documents_share_the_targets_equally_as_far_as_they_offer(tokens):
    counts = np.bincount(sample(tokens, 60).document, minlength=len(LENGTHS))
    assert counts[[1, 5]].tolist() == [0, 0]  # too short
    assert counts[3] == 1  # 21 tokens offer one
    assert counts[0] == 10  # 30 tokens offer ten
    assert {counts[2], counts[4]} <= {24, 25}  # the rest is shared
    assert len(sample(tokens, 10_000).document) == 10 + 30 + 1 + 180


def test_sampling_is_a_function_of_the_seed(tokens):
    first, again, other = sample(tokens), sample(tokens), sample(tokens, seed=1)
    for name in vars(first):
        assert np.array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.position, other.position)
    assert not np.array_equal(first.placebo_start, other.placebo_start)


def test_placebos_come_from_other_documents_that_are_long_enough(tokens):
    sampled = sample(tokens, 221)
    assert (sampled.placebo_document != sampled.document).all()
    able = {d for d, n in enumerate(LENGTHS) if n >= N - M}
    assert set(sampled.placebo_document) == able
    ends = sampled.placebo_start + N - M
    assert (ends <= np.array(LENGTHS)[sampled.placebo_document]).all()
    assert (sampled.placebo_start >= 0).all()


def test_contexts_hold_the_tokens_before_the_target(tokens):
    sampled = sample(tokens, 5)
    contexts = long_contexts(tokens, sampled.document, sampled.position, np.arange(5), n_long=N, n_short=M)
    placebo = placebo_contexts(tokens, contexts, sampled.placebo_document, sampled.placebo_start)
    for i, (d, t) in enumerate(zip(sampled.document, sampled.position, strict=True)):
        document, other = tokens.document(d).tolist(), tokens.document(sampled.placebo_document[i]).tolist()
        start = sampled.placebo_start[i]
        assert contexts.tokens[i].tolist() == document[t - N : t]
        assert placebo.tokens[i].tolist() == other[start : start + N - M] + document[t - M : t]
        assert contexts.targets[i] == placebo.targets[i] == document[t]


def test_contexts_that_no_document_offers_are_refused(tokens, tmp_path):
    with refused("must be larger"):
        sample(tokens, n_long=6)
    with refused("the longest has 200 tokens; lower --n-long to at most 199"):
        sample(tokens, n_long=200)
    assert set(sample(tokens, n_long=199, n_short=188).document) == {4}
    block = {"n_long": N, "n_short": M, "seed": 0}
    with refused("offers 190 targets .* the longest has 200 tokens; lower --n-long to at most 10"):
        sample_targets(tokens, 1, **block, targets_per_block=190)
    with refused("offers 194 targets .* the longest has 200 tokens; lower --targets-per-block"):
        sample_targets(tokens, 1, **block, targets_per_block=194)
    with refused("the longest has 200 tokens; hold out longer documents"):
        sample(tokens, n_long=300, n_short=199)
    single = tiny.write_corpus(tmp_path / "single", {"heldout": [list(range(1, 40))]})
    with refused("placebo needs a second"):
        sample(TokenFiles.of_split(single, "heldout"))


# --- groups ---

GROUPS = ["a", "b", "b", None, "b", "a"]


def of_other_documents(document, lengths, n_far, seed):
    """Placebos as they were drawn before there were groups: among the documents but the target's own."""
    able = np.flatnonzero(lengths >= n_far)
    generator = np.random.default_rng([2, seed])
    place = {each: at for at, each in enumerate(able.tolist())}
    own = [place.get(each) for each in document.tolist()]
    drawn = generator.integers(0, [len(able) - (at is not None) for at in own])
    drawn = [each + (at is not None and each >= at) for each, at in zip(drawn.tolist(), own, strict=True)]
    chosen = able[drawn]
    return chosen, generator.integers(0, lengths[chosen] - n_far, endpoint=True)


def test_without_groups_the_placebos_are_those_of_before(tokens, tmp_path):
    documents = [tokens.document(number).tolist() for number in range(len(LENGTHS))]
    corpus = tiny.write_corpus(tmp_path / "alone", {"heldout": documents})
    tiny.add_groups(corpus, [None, "0", None, None, None, None])  # every document is a group by itself
    for each in (tokens, TokenFiles.of_split(corpus, "heldout")):
        sampled = sample(each, 221, seed=3)
        document, start = of_other_documents(sampled.document, np.array(LENGTHS), N - M, 3)
        assert np.array_equal(sampled.placebo_document, document)
        assert np.array_equal(sampled.placebo_start, start)
    assert sample(tokens).document_group is None and sample(tokens).placebo_group is None


def test_placebos_come_from_other_groups(tokens, tmp_path):
    tiny.add_groups(tmp_path / "corpus", GROUPS)
    grouped = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    sampled = sample(grouped, 221)
    of = np.array(["a", "b", "b", "document 3 by itself", "b", "a"])
    assert np.array_equal(sampled.document_group, of[sampled.document])
    assert np.array_equal(sampled.placebo_group, of[sampled.placebo_document])
    assert not (sampled.document_group == sampled.placebo_group).any()
    assert np.array_equal(sampled.position, sample(tokens, 221).position)
    from_a = sampled.placebo_document[sampled.document_group == "a"]
    assert set(from_a) == {2, 3, 4}  # whatever is long enough
    from_b = np.bincount(sampled.placebo_document[sampled.document_group == "b"], minlength=6)
    assert (
        from_b[[1, 2, 4, 5]].tolist() == [0] * 4 and abs(from_b[0] - from_b[3]) < 50
    )  # as likely as each other


def test_one_group_has_no_placebo_and_the_remedy_is_named(tokens, tmp_path):
    tiny.add_groups(tmp_path / "corpus", ["a", "b", "a", "a", "a", "a"])  # b is too short
    with refused("of another group than a, .*--group-field none"):
        sample(TokenFiles.of_split(tmp_path / "corpus", "heldout"))


def places_of_the_same_group(groups, document, first, block):
    """Every (document, start) that a block may have, one by one: of another document, else away from what it reads."""
    n_far = N - M
    places = {
        (d, s)
        for d, length in enumerate(LENGTHS)
        if groups[d] == groups[document]
        for s in range(length - n_far + 1)
    }
    reads = {*range(first - N, first + block)}
    away = {(d, s) for d, s in places if d == document and not reads & {*range(s, s + n_far)}}
    return {(d, s) for d, s in places if d != document} or away or {(-1, -1)}


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("groups", [None, ["c", "b", "b", "c", "c", "b"]])
def test_the_same_group_elsewhere_is_uniform_over_what_there_is(tokens, tmp_path, groups, block):
    if groups:
        tiny.add_groups(tmp_path / "corpus", groups)
        tokens = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    options = {"n_long": N, "n_short": M, "targets_per_block": block}
    sampled = sample_targets(tokens, 40, seed=0, **options)
    drawn = [with_same_group(sampled, tokens, seed=seed, **options) for seed in range(400)]
    assert all(getattr(drawn[0], name) is each for name, each in vars(sampled).items() if "same" not in name)
    again = with_same_group(sampled, tokens, seed=0, **options)
    assert np.array_equal(again.same_group_start, drawn[0].same_group_start)
    kinds = set()
    for row in range(0, len(sampled.document), block):
        document, first = int(sampled.document[row]), int(sampled.position[row])
        expected = places_of_the_same_group(groups or [*range(len(LENGTHS))], document, first, block)
        rows = slice(row, row + block)
        found = [(each.same_group_document[rows], each.same_group_start[rows]) for each in drawn]
        assert all((d == d[0]).all() and (s == s[0]).all() for d, s in found)
        places = [(int(d[0]), int(s[0])) for d, s in found]
        assert set(places) <= expected
        if len(expected) < 50:
            assert set(places) == expected
        documents = {d for d, _ in expected}
        for d in documents:
            mine, offered = ([s for each, s in some if each == d] for some in (places, expected))
            assert len(mine) / len(places) == pytest.approx(1 / len(documents), abs=0.12)
            assert np.mean(mine) == pytest.approx(np.mean(offered), abs=0.2 * np.ptp(offered))
        kinds.add(
            "none" if (-1, -1) in expected else "own" if (document, places[0][1]) in expected else "other"
        )
    assert kinds >= ({"own", "other"} if groups else {"none", "own"})


def test_shuffled_far_contexts_are_the_true_ones_in_the_block_s_own_order(tokens):
    sampled = sample(tokens, 12)
    contexts = long_contexts(tokens, sampled.document, sampled.position, np.arange(12), n_long=N, n_short=M)
    first, again, other = (shuffled_contexts(contexts, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.tokens, again.tokens) and not np.array_equal(first.tokens, other.tokens)
    assert np.array_equal(first.tokens[:, N - M :], contexts.tokens[:, N - M :])
    orders = set()
    for true, shuffled in zip(contexts.tokens, first.tokens, strict=True):
        assert sorted(true[: N - M]) == sorted(shuffled[: N - M])
        orders.add(tuple(shuffled[: N - M] - true[: N - M]))
    assert len(orders) == 12
    one = shuffled_contexts(contexts.take(slice(3, 4)), 0)  # whatever is measured beside it
    assert np.array_equal(one.tokens[0], first.tokens[3])
