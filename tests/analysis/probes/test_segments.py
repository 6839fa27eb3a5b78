"""Segments of texts: inside one text, apart, and evenly spread over texts and places."""

from types import SimpleNamespace

import numpy as np

from analysis.probes.segments import sample_segments
from tests.support.refusals import refused

LENGTHS = (39, 60, 200, 70, 20, 130, 128)


def texts_of(lengths, groups=None):
    """Texts whose tokens are all different."""
    ends = np.cumsum(lengths)
    tokens = np.split(np.arange(ends[-1]), ends[:-1])
    return SimpleNamespace(
        lengths=np.array(lengths),
        groups=None if groups is None else np.array(groups),
        tokens=lambda number: tokens[number],
        is_special=lambda tokens: tokens % 7 == 3,
    )


def test_segments_lie_in_one_text_apart_and_evenly():
    texts, starts_of_third = texts_of(LENGTHS), set()
    for seed in range(30):
        segments, again = (sample_segments(texts, 7, length=40, seed=seed) for _ in range(2))
        assert np.array_equal(segments.text, again.text) and np.array_equal(segments.start, again.start)
        assert (len(segments), segments.texts_too_short) == (7, 2)
        tokens = segments.tokens
        assert len(np.unique(tokens)) == 7 * 40  # no token is in two segments
        assert (np.diff(tokens, axis=1) == 1).all()
        assert np.array_equal(segments.is_target, tokens % 7 != 3)
        for text, start, row in zip(segments.text, segments.start, tokens, strict=True):
            assert row.tolist() == texts.tokens(text)[start : start + 40].tolist()
        counts = np.bincount(segments.text, minlength=len(LENGTHS))
        assert counts[[0, 4]].tolist() == [0, 0]
        assert counts[[1, 3]].tolist() == [1, 1]  # no room for more
        assert sorted(counts[[2, 5, 6]].tolist()) == [1, 2, 2]  # two rounds, the second not for all
        starts_of_third |= set(segments.start[segments.text == 3].tolist())
    assert min(starts_of_third) < 6 and 24 < max(starts_of_third) <= 30  # anywhere in the 70 tokens


def test_as_many_as_there_is_room_for():
    texts = texts_of(LENGTHS, groups=[f"group {number % 2}" for number in range(len(LENGTHS))])
    everything = sample_segments(texts, 1000, length=40, seed=0)
    assert np.bincount(everything.text).tolist() == [length // 40 for length in LENGTHS]
    assert everything.group.tolist() == [f"group {text % 2}" for text in everything.text]
    with refused("no text has 201 tokens, the longest has 200"):
        sample_segments(texts, 10, length=201, seed=0)


def test_every_arrangement_is_equally_likely():
    """Two segments of 3 in 8 tokens: 6 arrangements."""
    texts = texts_of([8])
    drawn = [tuple(sample_segments(texts, 2, length=3, seed=seed).start.tolist()) for seed in range(600)]
    counts = {starts: drawn.count(starts) for starts in drawn}
    assert set(counts) == {(0, 3), (0, 4), (0, 5), (1, 4), (1, 5), (2, 5)}
    assert min(counts.values()) > 60 and max(counts.values()) < 150  # 100 each; 4 standard deviations are 37
