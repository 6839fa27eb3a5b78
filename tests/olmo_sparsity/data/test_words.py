"""Encoding by remembered words: the same ids as the tokenizer's own, for any text."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from olmo_sparsity.data import encode as words
from olmo_sparsity.data.tokenizers import load_tokenizer, tokenizer_file, train_bpe
from olmo_sparsity.data.encode import WordEncoder, cuts_at_words
from tests.olmo_sparsity.data.test_corpora import PROSE
from tests.olmo_sparsity.data.test_prepare import some_texts

PARTS = [
    *("a", "the", "Word", "x1", "42", "½", "²", "_", "'s", "don't", "...", "|||", "<|endoftext|>", "|||IP_ADDRESS|||"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u200b"),
    *("é", "e\u0301", "\u0301", "\u0338", "=\u0338", "한", "\u1112\u1161", "中文", "\U0001f600", "\u202e", "\x00"),
    *("\u2028", "\ufeff"),
]  # fmt: skip


def trained() -> Tokenizer:
    return train_bpe([PROSE, *some_texts(20, seed=1)], 400)


@pytest.mark.parametrize(
    "tokenizer", [load_tokenizer(tokenizer_file("olmo")), trained()], ids=["olmo", "bpe"]
)
def test_any_text_has_the_ids_that_the_tokenizer_gives(tokenizer, monkeypatch):
    monkeypatch.setattr(words, "MAX_KNOWN", 5000)
    assert cuts_at_words(tokenizer)
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(60))) for _ in range(4000)]
    texts += [
        "".join(chr(draw.choice((draw.randrange(32, 0x3000), 32))) for _ in range(40)) for _ in range(2000)
    ]
    texts += [PROSE, "", " ", "\n x  \n", *some_texts(20, seed=2)]
    encoder = WordEncoder(tokenizer, np.dtype(np.uint16))
    for start in range(0, len(texts), 500):
        batch = texts[start : start + 500]
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
        assert len(encoder.known) <= 5000


def test_tokenizers_that_look_beyond_a_word_are_left_to_themselves():
    tokenizer = trained()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert not cuts_at_words(tokenizer)
    for cutter in (
        pre_tokenizers.Metaspace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Whitespace(),
    ):
        tokenizer = trained()
        tokenizer.pre_tokenizer = cutter
        assert not cuts_at_words(tokenizer)
    tokenizer = trained()
    tokenizer.add_tokens(["two words"])
    assert not cuts_at_words(tokenizer)
    assert not cuts_at_words(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
