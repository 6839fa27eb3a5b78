"""Needles in training windows: where they stand, what they hide, and what they are a function of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from olmo_sparsity.config.load import Config
from olmo_sparsity.data.build import needle_weaver, open_training_data
from olmo_sparsity.data.windows import is_held_out
from tests.support import tiny
from tests.support.refusals import refused

VOCABULARY, WINDOW, Q = 400, 64, 2
NEEDLES = {"share": 1.0, "per_window": 3, "key_tokens": Q, "value_tokens": [1, 3]}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    made = tiny.train_config(tmp_path_factory.mktemp("needles"))
    model = replace(made.model, vocab_size=VOCABULARY, embedding_size=VOCABULARY, max_sequence_length=WINDOW)
    return replace(made, model=model, needles=replace(made.needles, **NEEDLES))


def text(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(1, 50, WINDOW)


def test_a_window_has_each_needle_twice_and_its_text_besides(config: Config) -> None:
    weaver, lengths = needle_weaver(config), set()
    for index in range(60):
        window, of_window = text(index), set(text(index).tolist())
        woven = weaver.weave(window, epoch=0, index=index).tolist()
        assert len(woven) == WINDOW
        inside = [token for token in woven if token not in of_window]
        assert 0 not in inside and (np.unique(inside, return_counts=True)[1] == 2).all()
        rest = [token for token in woven if token in of_window]
        assert rest == window[: len(rest)].tolist()
        copies: dict[int, list[int]] = {}  # by the distance of the two copies: needles are one run of tokens
        for token in dict.fromkeys(inside):
            first = woven.index(token)
            copies.setdefault(woven.index(token, first + 1) - first, []).append(token)
        assert len(copies) <= 3
        for needle in copies.values():
            assert not is_held_out(np.array(needle[:Q]))
            if len(needle) in (Q + 1, Q + 3):
                place = woven.index(needle[0])
                assert woven[place : place + len(needle)] == needle
        lengths.add(len(inside) // 2)
    assert lengths == {3 * Q + values for values in (3, 5, 7, 9)}  # three values of 1 or 3 tokens


def test_gaps_are_log_uniform_and_places_uniform(config: Config) -> None:
    one = replace(config, needles=replace(config.needles, per_window=1, value_tokens=[1]))
    weaver, room = needle_weaver(one), WINDOW - 6
    gaps, places = [], []
    for index in range(3000):
        woven = weaver.weave(np.full(WINDOW, 5), epoch=0, index=index)
        start, again = np.flatnonzero(woven == woven[woven != 5][0])
        gaps.append(again - start - 3)
        places.append(start / max(room - gaps[-1], 1))
    expected = [np.log2((g + 2) / (g + 1)) / np.log2(room + 2) for g in (0, 1, 3)]
    assert np.allclose([np.mean(np.array(gaps) == g) for g in (0, 1, 3)], expected, atol=0.02)
    assert room - 3 <= max(gaps) <= room
    assert abs(np.mean(places) - 0.5) < 0.02


def test_they_are_a_function_of_seed_epoch_and_index_in_a_share_of_the_windows(config: Config) -> None:
    def woven(index: int = 7, epoch: int = 0, seed: int = config.seed, share: float = 1.0) -> list[int]:
        changed = replace(config, seed=seed, needles=replace(config.needles, share=share))
        return needle_weaver(changed).weave(text(index), epoch=epoch, index=index).tolist()

    assert woven() == woven()
    at = needle_weaver(config).weave(text(7), epoch=0, index=8).tolist()
    assert all(other != woven() for other in (woven(epoch=1), at, woven(seed=config.seed + 1)))
    share = np.mean([woven(index, share=0.3) != text(index).tolist() for index in range(1000)])
    assert 0.25 < share < 0.35 and woven(share=0.0) == text(7).tolist()


def test_a_window_that_has_nearly_the_whole_vocabulary_is_refused_with_the_remedy(config: Config) -> None:
    with refused(
        "a window leaves 1 tokens of the vocabulary for needles of [0-9]+ others; lower needles.per_window"
    ):
        needle_weaver(config).weave(np.arange(2, config.model.vocab_size), epoch=0, index=1)


def test_training_reads_them_and_nothing_else_changes(tmp_path) -> None:
    """The same positions and order; windows are those of the text with needles woven in."""
    plain = tiny.train_config(tmp_path, model={"vocab_size": 50, "max_sequence_length": 16})
    with_needles = replace(plain, needles=replace(plain.needles, share=1.0, value_tokens=[1]))
    batches = [
        next(iter(open_training_data(config_of_run).batches(0))) for config_of_run in (plain, with_needles)
    ]
    assert np.array_equal(batches[0].position_ids, batches[1].position_ids)
    for before, after in zip(batches[0].input_ids.tolist(), batches[1].input_ids.tolist(), strict=True):
        kept = [token for token in after if token in before]
        assert len(kept) == 16 - 6 and kept == before[:10]
