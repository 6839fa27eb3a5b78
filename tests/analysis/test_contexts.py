"""Texts from strings and files, and the targets, contexts and placebos that are drawn in them."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from analysis.contexts import long_contexts, placebo_contexts, shuffled_contexts
from analysis.open_texts import open_texts
from analysis.project import PreparedTexts
from analysis.sampling import same_group_elsewhere, sample_targets
from analysis.texts import TextReader, Texts
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.rng import Stream
from tests.support import tiny
from tests.support.refusals import refused

LENGTHS = [30, 12, 50, 21, 200, 5]
DOCUMENTS = [[1 + (7 * text + place) % 49 for place in range(n)] for text, n in enumerate(LENGTHS)]
N, M = 20, 6


def encode(text):
    """Token ids of a string of numbers."""
    return np.array([int(word) for word in text.split()], dtype=np.int64)


READER = TextReader(encode)


def spelled(document):
    return " ".join(map(str, document))


def texts_in(groups=None):
    """The documents as texts, in these groups."""
    strings = [spelled(document) for document in DOCUMENTS]
    if groups is None:
        return open_texts(strings, READER)
    return Texts(READER, list(zip(groups, strings, strict=True)), "texts")


@pytest.fixture
def texts():
    return texts_in()


def sample(texts, count=40, seed=0, n_long=N, n_short=M, **options):
    return sample_targets(texts, count, n_long=n_long, n_short=n_short, seed=seed, **options)


def contexts_of(texts, sampled):
    """Of targets that are blocks by themselves."""
    columns = (sampled[name].to_numpy() for name in ("text", "position", "target_id"))
    return long_contexts(texts, *columns, n_long=N, n_short=M)


# --- texts ---


def rows_of(texts):
    """Ids and group of every text."""
    groups = [None] * len(texts.lengths) if texts.groups is None else texts.groups.tolist()
    tokens = [texts.tokens(number).tolist() for number in range(len(texts.lengths))]
    assert [len(ids) for ids in tokens] == texts.lengths.tolist()
    return list(zip(tokens, groups, strict=True))


def test_strings_and_groups_of_strings():
    plain = open_texts(["1 2 3", "4 5"], READER)
    assert rows_of(plain) == [([1, 2, 3], None), ([4, 5], None)]
    assert plain.in_near_copy(np.array([0]), np.array([1])) is None
    grouped = open_texts({"book": ["1 2 3", "4"], "site": ["5 6"]}, READER)
    assert rows_of(grouped) == [([1, 2, 3], "book"), ([4], "book"), ([5, 6], "site")]
    assert open_texts(plain, READER) is plain
    assert rows_of(open_texts(np.array(["1 2 3", "4 5"]), READER)) == rows_of(plain)
    checksums = [open_texts(texts, READER).sha256 for texts in (["1"], ["2"], {"1": ["1"]}, ["1"])]
    assert checksums[0] == checksums[3] and len(set(checksums)) == 3


def test_files(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n3")
    (tmp_path / "b.txt").write_text("4 5")
    rows = [
        {"text": "6 7", "url": "https://www.x.example.org/1"},
        {"text": "8", "group": "mine", "url": "https://y.example.org"},
        {"text": "9 10"},
    ]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "c.jsonl").write_text(lines)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(lines.encode()))
    of_lines = [([6, 7], "x.example.org"), ([8], "mine")]
    both = open_texts([tmp_path / "a.txt", str(tmp_path / "b.txt")], READER)
    assert rows_of(both) == [([1, 2, 3], "a.txt"), ([4, 5], "b.txt")]
    assert both.name == f"{tmp_path / 'a.txt'} and 1 more"
    for name in ("c.jsonl", "d.json.gz"):
        expected = [*of_lines, ([9, 10], "text 2 by itself")]
        assert rows_of(open_texts(str(tmp_path / name), READER)) == expected


def test_a_prepared_corpus_has_the_draws_of_its_texts(texts, tmp_path):
    corpus = tiny.write_corpus(tmp_path / "corpus", {"heldout": DOCUMENTS})
    prepared = open_texts(str(corpus), READER)
    files = TokenFiles.of_split(corpus, "heldout")
    assert rows_of(prepared) == rows_of(texts) == [(files.document(n).tolist(), None) for n in range(6)]
    drawn = [sample(source, 60, targets_per_block=3, same_group=True) for source in (prepared, texts)]
    pd.testing.assert_frame_equal(*drawn)
    tiny.add_groups(corpus, ["a", None, "b", "b", "a", "a"])
    assert PreparedTexts(corpus).groups.tolist() == ["a", "document 1 by itself", "b", "b", "a", "a"]


# --- targets ---


@pytest.mark.parametrize("block", [1, 4])
def test_blocks_do_not_overlap_and_share_their_placebo(texts, block):
    sampled = sample(texts, 39, targets_per_block=block)
    assert len(sampled.text) == -(-39 // block) * block
    for name in ("text", "placebo_text", "placebo_start"):
        by_block = sampled[name].to_numpy().reshape(-1, block)
        assert (by_block == by_block[:, :1]).all()
    assert (np.diff(sampled.position.to_numpy().reshape(-1, block), axis=1) == 1).all()
    assert len(sampled[["text", "position"]].drop_duplicates()) == len(sampled)


def test_texts_share_the_targets_equally_as_far_as_they_offer(texts):
    counts = np.bincount(sample(texts, 60).text, minlength=len(LENGTHS))
    assert counts[[1, 5]].tolist() == [0, 0]  # too short
    assert counts[3] == 1  # 21 tokens offer one
    assert counts[0] == 10  # 30 tokens offer ten
    assert {counts[2], counts[4]} <= {24, 25}  # the rest is shared
    assert len(sample(texts, 10_000).text) == 10 + 30 + 1 + 180


def test_sampling_is_a_function_of_the_seed(texts):
    first, again, other = sample(texts), sample(texts), sample(texts, seed=1)
    pd.testing.assert_frame_equal(first, again)
    assert not np.array_equal(first.position, other.position)
    assert not np.array_equal(first.placebo_start, other.placebo_start)


def test_contexts_hold_the_tokens_before_the_target(texts):
    sampled = sample(texts, 5)
    contexts = contexts_of(texts, sampled)
    placebo = placebo_contexts(texts, contexts, sampled.placebo_text, sampled.placebo_start)
    for row, (text, position) in enumerate(zip(sampled.text, sampled.position, strict=True)):
        document, other = DOCUMENTS[text], DOCUMENTS[sampled.placebo_text[row]]
        start = sampled.placebo_start[row]
        assert contexts.tokens[row].tolist() == document[position - N : position]
        far = other[start : start + N - M]
        assert placebo.tokens[row].tolist() == far + document[position - M : position]
        assert contexts.targets[row] == placebo.targets[row] == document[position]


def test_contexts_that_no_text_offers_are_refused(texts):
    with refused("B = 1 .* N = 200 .* the longest has 200 tokens; lower N or B"):
        sample(texts, n_long=200)
    assert set(sample(texts, n_long=199, n_short=188).text) == {4}
    with refused("B = 190 .* the longest has 200 tokens"):
        sample(texts, 1, targets_per_block=190)


# --- placebos ---

GROUPS = ["a", "b", "b", "c", "b", "a"]


def test_placebos_come_from_other_texts_that_are_long_enough(texts):
    sampled = sample(texts, 221)
    assert (sampled.placebo_text != sampled.text).all()
    assert set(sampled.placebo_text) == {text for text, n in enumerate(LENGTHS) if n >= N - M}
    assert (sampled.placebo_start >= 0).all()
    assert (sampled.placebo_start + N - M <= np.array(LENGTHS)[sampled.placebo_text]).all()


def test_draws_never_change():
    """Else a recorded result could not be verified. Without groups they are as if each text were its own."""
    alone = [f"text {number} by itself" for number in range(len(LENGTHS))]
    for texts in (texts_in(), texts_in(alone)):
        drawn = sample(texts, 6, seed=3)[["text", "position", "placebo_text", "placebo_start"]]
        assert drawn.to_numpy().tolist() == [
            [0, 20, 4, 9], [0, 24, 3, 1], [2, 21, 0, 8], [3, 20, 2, 2], [4, 58, 2, 31], [4, 164, 2, 21],
        ]  # fmt: skip


def test_placebos_come_from_other_groups(texts):
    sampled = sample(texts_in(GROUPS), 221)
    assert np.array_equal(sampled.group, np.array(GROUPS)[sampled.text])
    assert np.array_equal(sampled.placebo_group, np.array(GROUPS)[sampled.placebo_text])
    assert not (sampled.group == sampled.placebo_group).any()
    assert np.array_equal(sampled.position, sample(texts, 221).position)
    assert set(sampled.placebo_text[sampled.group == "a"]) == {2, 3, 4}  # whatever is long enough
    from_b = np.bincount(sampled.placebo_text[sampled.group == "b"], minlength=6)
    assert from_b[[1, 2, 4, 5]].tolist() == [0] * 4
    assert abs(from_b[0] - from_b[3]) < 50  # as likely as each other
    with refused("second text of at least 14 tokens of another group than a"):
        sample(texts_in(["a", "b", "a", "a", "a", "a"]))  # b is too short


@pytest.mark.parametrize("block", [1, 4])
def test_a_text_by_itself_has_placebos_from_far_away_in_it(block):
    length, n_far = 150, N - M
    text = open_texts([spelled(range(length))], READER)
    sampled = sample(text, 200, targets_per_block=block)
    assert (sampled.placebo_text == 0).all()
    starts = dict(
        zip(sampled.position.tolist()[::block], sampled.placebo_start.tolist()[::block], strict=True)
    )
    for first, start in starts.items():
        near = range(first - 2 * N, first + block + N)  # what it reads, and N tokens around
        away = [s for s in range(length - n_far + 1) if not {*near} & {*range(s, s + n_far)}]
        drawn = np.random.default_rng([Stream.PASSAGE_PLACEBOS, 0, first]).choice(away)
        assert start == drawn
    with refused("too few for placebos from it; give a second text of 14, or one of at least 8"):
        sample(open_texts([spelled(range(60))], READER), 40)


def places_of_the_same_group(groups, text, first, block):
    """Every (text, start) that a block may have, one by one: of another text, else away from what it reads."""
    n_far = N - M
    places = {
        (number, start)
        for number, length in enumerate(LENGTHS)
        if groups[number] == groups[text]
        for start in range(length - n_far + 1)
    }
    reads = {*range(first - N, first + block)}
    away = {(d, start) for d, start in places if d == text and not reads & {*range(start, start + n_far)}}
    return {(d, start) for d, start in places if d != text} or away or {(-1, -1)}


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("groups", [None, ["c", "b", "b", "c", "c", "b"]])
def test_the_same_group_elsewhere_is_uniform_over_what_there_is(groups, block):
    texts = texts_in(groups)
    options = {"n_long": N, "n_short": M, "targets_per_block": block}
    sampled = sample_targets(texts, 40, seed=0, **options)
    first = sample_targets(texts, 40, seed=0, same_group=True, **options)
    pd.testing.assert_frame_equal(first.drop(columns=["same_group_text", "same_group_start"]), sampled)
    firsts = sampled[["text", "position"]].to_numpy()[::block]
    sizes = {"n_long": N, "n_far": N - M, "targets_per_block": block}
    drawn = [same_group_elsewhere(texts, *firsts.T, seed=seed, **sizes) for seed in range(400)]
    assert np.array_equal(np.repeat(drawn[0], block, axis=0), first[["same_group_text", "same_group_start"]])
    kinds = set()
    for row, (text, first) in enumerate(firsts.tolist()):
        expected = places_of_the_same_group(groups or [*range(len(LENGTHS))], text, first, block)
        places = [tuple(one[row].tolist()) for one in drawn]
        assert set(places) <= expected
        if len(expected) < 50:
            assert set(places) == expected
        numbers = {number for number, _ in expected}
        for number in numbers:
            starts, offered = ([s for d, s in some if d == number] for some in (places, expected))
            assert len(starts) / len(places) == pytest.approx(1 / len(numbers), abs=0.12)
            assert np.mean(starts) == pytest.approx(np.mean(offered), abs=0.2 * np.ptp(offered))
        kind = "own" if (text, places[0][1]) in expected else "other"
        kinds.add("none" if (-1, -1) in expected else kind)
    assert kinds >= ({"own", "other"} if groups else {"none", "own"})


def test_shuffled_far_contexts_are_the_true_ones_in_the_block_s_own_order(texts):
    sampled = sample(texts, 12)
    contexts = contexts_of(texts, sampled)
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


def words(text):
    return np.arange(len(text.split()))


def test_files_of_one_name_in_two_folders_are_two_groups(tmp_path):
    paths = [tmp_path / name / "a.txt" for name in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("w1 w2")
    assert list(open_texts(paths, TextReader(words)).groups) == [str(path) for path in paths]
