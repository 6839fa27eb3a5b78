"""Groups of documents: every row is of its document, no group is in two splits, and corpora without are as before."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from olmo_sparsity.data.build import open_training_tokens
from olmo_sparsity.data.groups import SplitRule, choose_buckets, groups_of
from olmo_sparsity.data.prepare import prepare
from olmo_sparsity.data.text import Document
from olmo_sparsity.data.tokens import CorpusManifest, TokenFiles
from tests.support import tiny
from tests.support.corpora import (
    assert_same_as_one_go,
    contents,
    some_texts,
    text_settings,
    write_lines,
)
from tests.support.refusals import refused

BOOK = "https://www.example.org/ebooks/"


def books(folder: Path, files: int = 4, works: int = 24) -> tuple[list[str], dict[str, str]]:
    """Files of 30 slices of works, some of them empty, and the work of each text."""
    folder.mkdir(exist_ok=True)
    paths, work_of = [], {}
    for number in range(files):
        texts = some_texts(30, number)
        works_of_texts = [f"{BOOK}{(7 * number + row) % works}#Title" for row in range(30)]
        work_of |= zip(texts, works_of_texts, strict=True)
        urls = [f"{work}-{row}" for row, work in enumerate(works_of_texts)]
        paths.append(
            write_lines(folder / f"{number}.jsonl.gz", ["", *texts], ["https://empty.example.org", *urls])
        )
    return paths, work_of


def rows(corpus: Path, split: str) -> list[tuple[str, str]]:
    """Text and group of every document."""
    tokenizer, files = Tokenizer.from_file(str(corpus / "tokenizer.json")), TokenFiles.of_split(corpus, split)
    groups = groups_of(files)
    assert groups is not None
    return [(tokenizer.decode(files.document(row)), group) for row, group in enumerate(groups.tolist())]


def test_every_row_is_of_its_document_and_no_group_is_in_both_splits(tmp_path):
    files, work_of = books(tmp_path / "text")
    held = {}
    for seed in (0, 1):
        out = tmp_path / f"out{seed}"
        manifest = prepare(text_settings(files, seed=seed, heldout_fraction=0.2), out, workers=2)
        train, heldout = rows(out, "train"), rows(out, "heldout")
        assert sorted(text for text, _ in train + heldout) == sorted(work_of)
        assert all(work_of[text] == group for text, group in train + heldout)
        held[seed] = {group for _, group in heldout}
        assert not held[seed] & {group for _, group in train}
        assert manifest.settings["groups"] == {"heldout": len(held[seed]), "in_both": 0}
        assert len(heldout) == pytest.approx(0.2 * len(work_of), abs=max(Counter(work_of.values()).values()))
    assert held[0] != held[1]
    assert_same_as_one_go(text_settings(files, seed=1, heldout_fraction=0.2), tmp_path / "out1")


def test_documents_that_are_dropped_take_their_rows_along(tmp_path):
    train, heldout = some_texts(6, 1), some_texts(4, 2)
    files = [write_lines(tmp_path / "t.jsonl", train, [f"http://{n % 2}.com" for n in range(6)])]
    kept = [heldout[0], train[2], heldout[1], train[3], heldout[2]]
    urls = ["http://a.com", "http://b.com", "http://1.com", "http://0.com"]  # the last one stands by itself
    settings = text_settings(files, [write_lines(tmp_path / "h.jsonl", kept, urls)])
    manifest = prepare(settings, tmp_path / "out")
    expected = [(heldout[0], "a.com"), (heldout[1], "1.com"), (heldout[2], "document 2 by itself")]
    assert rows(tmp_path / "out", "heldout") == expected
    assert manifest.settings["groups"] == {"heldout": 2, "in_both": 1}
    (tmp_path / "out" / "heldout-00000.groups.jsonl.gz").unlink()
    with refused(r"heldout-00000\.groups.* it is missing"):
        rows(tmp_path / "out", "heldout")


def held_by_a_plain_loop(sizes: dict[int, int], share: float) -> set[int]:
    held: set[int] = set()
    for bucket in sorted(sizes):
        if sum(sizes[bucket_held] for bucket_held in held) + sizes[bucket] <= share * sum(sizes.values()):
            held.add(bucket)
    left = sorted(set(sizes) - held, key=lambda bucket: (sizes[bucket], bucket))
    short = share * sum(sizes.values()) - sum(sizes[bucket_held] for bucket_held in held)
    return held | {left[0]} if len(left) > 1 and sizes[left[0]] - short < short else held


def test_the_share_is_met_as_far_as_whole_groups_go():
    draw = np.random.default_rng(0)
    for groups, share in ((60, 0.1), (60, 0.5), (7, 0.3), (2, 0.4)):
        chosen = draw.choice(2**16, groups, replace=False)
        sizes = dict(zip(chosen.tolist(), draw.zipf(1.6, groups).clip(max=5).tolist(), strict=True))
        held = choose_buckets(sizes, share)
        assert held == held_by_a_plain_loop(sizes, share)
        assert 0 < sum(sizes[bucket_held] for bucket_held in held) < sum(sizes.values())


def test_too_few_groups_are_refused_with_the_remedy(tmp_path):
    files, _ = books(tmp_path / "text", files=1, works=3)
    with refused(r"of 3 groups, too few .* 0\.1 of the documents"):
        prepare(text_settings(files), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = prepare(text_settings(files, heldout_fraction=0.2), tmp_path / "out")
    assert [manifest.splits[split][0].documents for split in ("train", "heldout")] == [20, 10]


def test_a_field_is_named_or_none(tmp_path):
    texts = some_texts(40, 5)
    lines = [
        {"text": text, "url": "http://one.example.org", "book": row % 8} for row, text in enumerate(texts)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {"files": [str(path)], "heldout_fraction": 0.25}
    prepare(text_settings(**settings, group_field="book"), tmp_path / "book")
    prepared = rows(tmp_path / "book", "train") + rows(tmp_path / "book", "heldout")
    assert prepared and all(group == str(texts.index(text) % 8) for text, group in prepared)
    with refused(r"other settings \(group_field\)"):
        prepare(text_settings(**settings, group_field="none"), tmp_path / "book")
    with refused(r"a\.jsonl:1 has no isbn to name its group"):
        prepare(text_settings(**settings, group_field="isbn"), tmp_path / "isbn")
    prepare(text_settings(**settings, group_field="none"), tmp_path / "none")
    assert groups_of(TokenFiles.of_split(tmp_path / "none", "heldout")) is None


def test_without_groups_nothing_is_added(tmp_path):
    files = [write_lines(tmp_path / "a.jsonl", texts := some_texts(60, 3))]
    settings = text_settings(files, heldout_fraction=0.3, seed=4)
    prepare(settings, tmp_path / "no url")
    settings = replace(settings, group_field="none")
    prepare(settings, tmp_path / "out")
    assert contents(tmp_path / "no url", "*.npy") == contents(tmp_path / "out", "*.npy")
    rule = SplitRule(4, 0.3)
    held = [file.documents for file in CorpusManifest.load(tmp_path / "out").splits["heldout"]]
    assert held == [sum(rule.is_heldout(Document(text)) for text in texts)]
    assert groups_of(TokenFiles.of_split(tmp_path / "out", "train")) is None


# --- to evaluate on only ---


def test_a_corpus_to_evaluate_on_only(tmp_path):
    texts = some_texts(5, 8)
    heldout = write_lines(tmp_path / "h.jsonl", texts, [f"http://{n % 2}.com" for n in range(5)])
    prepare(text_settings((), [heldout], tokenizer="olmo"), tmp_path / "out")
    assert rows(tmp_path / "out", "heldout") == [(text, f"{n % 2}.com") for n, text in enumerate(texts)]
    config = tiny.train_config(tmp_path)
    with refused("prepared to evaluate on only; prepare a corpus with training --files"):
        open_training_tokens(replace(config, corpus=replace(config.corpus, path=str(tmp_path / "out"))))
