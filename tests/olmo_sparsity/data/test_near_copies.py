"""Near copies against a search with sets of tuples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from olmo_sparsity.data import near_copies
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.tokens import TokenFiles
from tests.support.corpora import some_texts, text_settings, write_lines
from tests.support.refusals import refused

EOS, LENGTH = 0, 5


def runs_of(tokens: np.ndarray, length: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + length].tolist()) for i in range(len(tokens) - length + 1)]


def plain(heldout: np.ndarray, train: list[np.ndarray], length: int = LENGTH) -> np.ndarray:
    """Whether each held-out token is in a run that also stands in training."""
    known = {run for tokens in train for run in runs_of(tokens, length) if EOS not in run}
    covered = np.zeros(len(heldout), dtype=bool)
    for start, run in enumerate(runs_of(heldout, length)):
        covered[start : start + length] |= run in known
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
    copies = near_copies.find_near_copies(
        tmp_path / "0",
        [tmp_path / str(number) for number in (1, 2, 3)],
        dtype,
        EOS,
        LENGTH,
        workers=1,
    )
    covered = np.zeros(len(heldout), dtype=bool)
    for first, end in copies:
        assert not covered[max(0, first - 1) : end].any()  # apart from each other
        covered[first:end] = True
    expected = plain(heldout, train)
    np.testing.assert_array_equal(covered, expected)
    assert 0 < expected.sum() < len(expected)


def test_a_corpus_marks_the_held_out_tokens_that_a_plain_search_finds(tmp_path: Path) -> None:
    train, heldout = (some_texts(count, count, paragraphs=1, words=60) for count in (30, 6))
    copied = " ".join(train[4].split()[10:45])
    heldout[2] = f"new words here {copied} and more of them"  # no paragraph is equal
    files = [write_lines(tmp_path / "train.jsonl", train)], [write_lines(tmp_path / "heldout.jsonl", heldout)]
    settings = text_settings(*files, near_copy_tokens=20)
    manifest = prepare(settings, tmp_path / "corpus")
    tokens = TokenFiles.of_split(tmp_path / "corpus", "heldout")
    expected = plain(tokens.read(0), [TokenFiles.of_split(tmp_path / "corpus", "train").read(0)], 20)
    document = np.repeat(np.arange(6), 4)
    position = np.tile([0, 5, 40, 60], 6)
    at = tokens.document_bounds[document, 1] + position
    np.testing.assert_array_equal(near_copies.in_near_copy(tokens, document, position), expected[at])
    assert expected[at].any() and not expected[at].all()
    assert manifest.settings["near_copies"]["tokens"] == expected.sum() > 20
    assert prepare(settings, tmp_path / "corpus") == manifest  # finished
    (tmp_path / "corpus" / "heldout-00000.near-copies").write_bytes(b"x")
    with refused(r"checksum mismatch in .*heldout-00000\.near-copies"):
        near_copies.in_near_copy(tokens, document, position)
