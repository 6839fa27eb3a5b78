"""Tokenizers and ids: the same as of the tokenizers library for any text, however it is cut on the way."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from olmo_sparsity.data import text as text_module
from olmo_sparsity.data.text import (
    CUT_RUNS,
    EOS_TOKEN,
    MAX_RUN_CHARACTERS,
    Document,
    Encoder,
    cuts_at_words,
    find_eos,
    train_bpe,
)
from olmo_sparsity.data.tokens import id_range, load_tokenizer, tokenizer_file
from tests.support.corpora import PROSE, ROOT, some_texts
from tests.support.refusals import refused
from tests.support.slow import slow_but

PARTS = [
    *("a", "the", "Word", "x1", "42", "½", "²", "_", "'s", "don't", "...", "|||", "<|endoftext|>", "|||IP_ADDRESS|||"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u200b"),
    *("é", "e\u0301", "\u0301", "\u0338", "=\u0338", "한", "\u1112\u1161", "中文", "\U0001f600", "\u202e", "\x00"),
    *("\u2028", "\ufeff"),
]  # fmt: skip


def ids_of(texts: list[str], tokenizer: Tokenizer, folder) -> list[list[int]]:
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = Encoder(folder / "tokenizer.json")
    return [ids[:-1].tolist() for _, ids in encoder.encode(map(Document, texts))]


# --- tokenizers ---


def test_olmos_tokenizer_and_the_search_for_eos(tmp_path, monkeypatch):
    olmo = load_tokenizer(tokenizer_file("olmo"))
    assert (id_range(olmo), find_eos(olmo)) == (50280, 50279)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 7}, unk_token="<unk>"))
    words.enable_truncation(2)
    words.save(str(tmp_path / "words.json"))
    loaded = load_tokenizer(tokenizer_file(str(tmp_path / "words.json")))
    assert (id_range(loaded), find_eos(loaded), find_eos(loaded, "<unk>")) == (8, 7, 0)
    assert loaded.truncation is None
    with refused(r"no token <stop>; .*--eos-token"):
        find_eos(loaded, "<stop>")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "words.json").read_bytes())
    assert tokenizer_file(str(tmp_path)) == tmp_path / "tokenizer.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *names: tmp_path.joinpath(*names))
    assert tokenizer_file("owner/model") == tmp_path / "owner" / "model" / "tokenizer.json"


def test_the_tokenizer_of_real_text_is_the_one_without_cuts():
    """Long words and white space are cut before training; no text that people write has such."""
    texts = [*topics.values(), *(path.read_text(encoding="utf8") for path in ROOT.glob("*/*.py"))]
    texts.append("\n\n".join(texts))
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=[EOS_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator(texts, trainer)
    assert train_bpe(texts, 1000).to_str() == plain.to_str()


# --- texts that are cut ---


@pytest.mark.parametrize("run", slow_but(["a", " ", "-", "1", "_-", "a1", "\u3000\t", "é"], "a"))
def test_a_long_run_is_cut_before_training_and_comes_back(tmp_path, run):
    """Training took the square of the length."""
    text = "some words " + run * (1_200_000 // len(run)) + " and more\n"
    parts = [part for part, _ in CUT_RUNS.pre_tokenize_str(text)]
    assert "".join(parts) == text and max(map(len, parts)) <= MAX_RUN_CHARACTERS + 50
    tokenizer = train_bpe([text], 300)
    assert tokenizer.decode(ids_of([text], tokenizer, tmp_path)[0]) == text


def test_documents_in_batches_have_the_ids_of_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BATCH_DOCUMENTS", 2)
    texts = [" \n ".join(some_texts(1, seed, words=60)) + "\n\nfoo  bar" for seed in range(5)]
    texts += ["x" * 500, ""]
    tokenizer = train_bpe(texts, 400)
    assert ids_of(texts, tokenizer, tmp_path) == [tokenizer.encode(text).ids for text in texts]


# --- words that are remembered ---


def trained() -> Tokenizer:
    return train_bpe([PROSE, *some_texts(20, seed=1)], 400)


@pytest.mark.parametrize(
    "tokenizer", [load_tokenizer(tokenizer_file("olmo")), trained()], ids=["olmo", "bpe"]
)
def test_any_text_has_the_ids_that_the_tokenizer_gives(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(text_module, "MAX_KNOWN_CHARACTERS", 20_000)
    assert cuts_at_words(tokenizer)
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(60))) for _ in range(4000)]
    for _ in range(2000):
        texts.append("".join(chr(draw.choice((draw.randrange(32, 0x3000), 32))) for _ in range(40)))
    texts += [PROSE, "", " ", "\n x  \n", *some_texts(20, seed=2)]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(tmp_path / "tokenizer.json")
    for start in range(0, len(texts), 500):
        batch = texts[start : start + 500]
        for text, ids in zip(batch, encoder._ids(batch), strict=True):
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
        assert sum(map(len, encoder)) == encoder.characters <= 20_000


def test_tokenizers_that_look_beyond_a_word_are_left_to_themselves():
    tokenizer = trained()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    assert not cuts_at_words(tokenizer)
    with_prefix = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for cutter in (pre_tokenizers.Metaspace(), with_prefix, pre_tokenizers.Whitespace()):
        tokenizer = trained()
        tokenizer.pre_tokenizer = cutter
        assert not cuts_at_words(tokenizer)
    tokenizer = trained()
    tokenizer.add_tokens(["two words"])
    assert not cuts_at_words(tokenizer)
    assert not cuts_at_words(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
