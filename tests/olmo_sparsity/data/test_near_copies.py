"""Near copies against a search with sets of tuples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.data import near_copies
from olmo_sparsity.data.near_copies import (
    find_near_copies,
    in_near_copy,
    run_hashes,
    stretches,
)
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles
from tests.support.corpora import some_texts, text_settings, write_lines
from tests.support.refusals import refused

EOS, LENGTH = 0, 5


def runs_of(tokens: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + LENGTH].tolist()) for i in range(len(tokens) - LENGTH + 1)]


def plain(heldout: np.ndarray, train: list[np.ndarray]) -> np.ndarray:
    """Whether each held-out token is in a run that also stands in training."""
    known = {run for tokens in train for run in runs_of(tokens) if EOS not in run}
    covered = np.zeros(len(heldout), dtype=bool)
    for start, run in enumerate(runs_of(heldout)):
        covered[start : start + LENGTH] |= run in known
    return covered


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_stretches_are_those_of_a_plain_search(
    tmp_path: Path, monkeypatch, seed: int, dtype: str
) -> None:
    monkeypatch.setattr(near_copies, "CHUNK_TOKENS", 64)  # so that runs lie across chunks
    rng = np.random.default_rng(seed)
    train = [rng.integers(0, 9, size=size).astype(dtype) for size in (300, 3, 150)]
    heldout = rng.integers(0, 12, size=400).astype(dtype)
    for at in (10, 60, 63, 200, 395):
        piece = train[0][at // 2 : at // 2 + int(rng.integers(6, 20))][: 400 - at]
        heldout[at : at + len(piece)] = piece
    for number, tokens in enumerate([heldout, *train]):
        tokens.tofile(tmp_path / str(number))
    found = find_near_copies(
        tmp_path / "0",
        [tmp_path / str(number) for number in (1, 2, 3)],
        dtype=np.dtype(dtype),
        eos_token_id=EOS,
        length=LENGTH,
        workers=1,
    )
    covered = np.zeros(len(heldout), dtype=bool)
    for first, end in found:
        assert not covered[max(0, first - 1) : end].any()  # apart from each other
        covered[first:end] = True
    expected = plain(heldout, train)
    np.testing.assert_array_equal(covered, expected)
    assert 0 < expected.sum() < len(expected)


def test_hashes_are_equal_where_runs_are_wherever_they_stand() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, size=500).astype(np.uint16)
    twice = np.concatenate([tokens[:3], tokens, tokens]).astype(np.uint32)
    hashes, again = run_hashes(tokens, 32), run_hashes(twice, 32)
    np.testing.assert_array_equal(again[3:][: len(hashes)], hashes)
    np.testing.assert_array_equal(again[-len(hashes) :], hashes)
    assert len(np.unique(hashes)) == len(hashes)
    assert len(run_hashes(tokens[:31], 32)) == 0


def test_runs_that_touch_are_one_stretch() -> None:
    assert stretches(np.array([2, 3, 8, 14, 40]), 5).tolist() == [[2, 13], [14, 19], [40, 45]]
    assert stretches(np.array([], dtype=np.int64), 5).shape == (0, 2)


def test_a_corpus_marks_the_held_out_tokens_that_a_plain_search_finds(tmp_path: Path) -> None:
    train, heldout = (
        some_texts(30, seed=1, paragraphs=1, words=60),
        some_texts(6, seed=2, paragraphs=1, words=60),
    )
    copied = " ".join(train[4].split()[10:45])
    heldout[2] = f"new words here {copied} and more of them"  # no paragraph is equal
    files = [write_lines(tmp_path / "train.jsonl", train)], [write_lines(tmp_path / "heldout.jsonl", heldout)]
    settings = text_settings(*files, near_copy_tokens=20)
    found = prepare(settings, tmp_path / "corpus").manifest
    tokens = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    texts = [TokenFiles.of_split(tmp_path / "corpus", "train").read(0), tokens.read(0)]
    known = {tuple(texts[0][i : i + 20]) for i in range(len(texts[0]) - 19)}
    expected = np.zeros(len(texts[1]), dtype=bool)
    for i in range(len(texts[1]) - 19):
        run = tuple(texts[1][i : i + 20])
        expected[i : i + 20] |= run in known and tokens.eos_token_id not in run
    document = np.repeat(np.arange(6), 4)
    position = np.tile([0, 5, 40, 60], 6)
    at = tokens.document_bounds[document, 1] + position
    np.testing.assert_array_equal(in_near_copy(tokens, document, position), expected[at])
    assert expected[at].any() and not expected[at].all()
    assert found.settings["near_copies"]["tokens"] == expected.sum() > 20
    assert not prepare(settings, tmp_path / "corpus").tokens_written  # finished
    (tmp_path / "corpus" / "heldout-00000.near-copies").write_bytes(b"x")
    with refused(r"checksum mismatch in .*heldout-00000\.near-copies"):
        in_near_copy(tokens, document, position)


def test_a_corpus_for_which_nobody_looked_says_so(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{name}.jsonl", some_texts(9, seed)) for seed, name in enumerate("ab")]
    settings = text_settings(files[:1], files[1:], near_copy_tokens=0)
    found = prepare(settings, tmp_path / "corpus").manifest
    tokens = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    assert in_near_copy(tokens, np.array([0]), np.array([0])) is None
    assert "near_copy_tokens" not in found.settings
    assert "near_copies_sha256" not in (tmp_path / "corpus" / "manifest.json").read_text()
    assert CorpusManifest.load(tmp_path / "corpus") == found
