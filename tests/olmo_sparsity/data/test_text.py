"""Tokenizers and ids: the same as of the tokenizers library for any text, however it is cut on the way."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data import text as text_module
from olmo_sparsity.data.text import (
    MAX_RUN_CHARACTERS,
    Document,
    Encoding,
    _trainable,
    encode_documents,
    train_bpe,
)
from olmo_sparsity.data.tokens import EOS_TOKEN, find_eos, id_range, load_tokenizer, tokenizer_file
from tests.support.corpora import PROSE, ROOT, some_texts
from tests.support.refusals import refused
from tests.support.slow import slow_but


def ids_of(texts: list[str], tokenizer: Tokenizer, folder) -> list[list[int]]:
    tokenizer.save(str(folder / "tokenizer.json"))
    encoding = Encoding(str(folder / "tokenizer.json"), tokenizer.to_str(), 0, "uint16")
    return [ids[:-1].tolist() for _, ids in encode_documents(map(Document, texts), encoding)]


# --- tokenizers ---


def test_bpe_gives_every_text_back_and_has_all_bytes():
    tokenizer = train_bpe([PROSE] * 3, 300)
    text = "naïve \U0001f600\x00\r\n\t  end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert id_range(tokenizer) == 300
    assert find_eos(tokenizer) == tokenizer.token_to_id(EOS_TOKEN) == 0


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
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *asked: tmp_path.joinpath(*asked))
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
    parts = list(_trainable(text))
    assert "".join(parts) == text and max(map(len, parts)) <= MAX_RUN_CHARACTERS + 50
    tokenizer = train_bpe([text], 300)
    assert tokenizer.decode(ids_of([text], tokenizer, tmp_path)[0]) == text


def test_documents_in_batches_have_the_ids_of_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "BATCH_CHARACTERS", 170)
    texts = [" \n ".join(some_texts(1, seed, words=60)) + "\n\nfoo  bar" for seed in range(5)]
    texts += ["x" * 500, ""]
    tokenizer = train_bpe(texts, 400)
    assert ids_of(texts, tokenizer, tmp_path) == [tokenizer.encode(text).ids for text in texts]
