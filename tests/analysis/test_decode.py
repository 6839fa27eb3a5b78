"""Pieces of text against what the tokenizers themselves decode, against bytes, and by hand."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from analysis.model.tokenizer import TextDecoder, TextTokenizer
from olmo_sparsity.data.text import train_bpe

ENGLISH = "The fox met the other fox, and the foxes didn't talk to “those” others."
FOREIGN = "Zoë saw 日本語 and हिन्दी 🦊🦊!\n\n  Ångström: ok"


def byte_level():
    return train_bpe([ENGLISH], 300)  # no merge covers a foreign character


def word_piece():
    """BERT's way; spaces before marks are taken away where text is decoded."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    special = {"special_tokens": ["[UNK]"], "show_progress": False}
    tokenizer.train_from_iterator([ENGLISH], trainers.WordPieceTrainer(vocab_size=80, **special))
    return tokenizer


def unigram():
    """SentencePiece's way, with a visible space before each word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"unk_token": "<unk>", "special_tokens": ["<unk>"], "show_progress": False}
    tokenizer.train_from_iterator([ENGLISH], trainers.UnigramTrainer(vocab_size=60, **special))
    return tokenizer


def byte_fallback():
    """Llama 2's way: characters, and bytes for those that the vocabulary lacks."""
    characters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(ENGLISH) - {" "})]
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_level():
    """As tests/support/tiny.py has it: no decoder at all."""
    words = {word: number for number, word in enumerate(["[UNK]", *sorted(set(ENGLISH.split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


TOKENIZERS = [byte_level, word_piece, unigram, byte_fallback, word_level]


def decoder_of(tokenizer):
    return TextDecoder(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("make", TOKENIZERS)
def test_pieces_of_every_window_join_to_the_decoded_text(make):
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    decoder = decoder_of(tokenizer)
    ids = tokenizer.encode(f"{FOREIGN}\ufffd <|end|>{ENGLISH}").ids
    assert tokenizer.token_to_id("<|end|>") in ids
    for start in range(len(ids)):
        for end in range(start, min(start + 30, len(ids)) + 1):
            pieces = decoder.pieces(ids[start:end])
            assert len(pieces) == end - start
            assert "".join(pieces) == tokenizer.decode(ids[start:end], skip_special_tokens=False)


def bytes_of(token):
    """The bytes of a byte-level token: visible bytes stand for themselves, the n-th other one is character 256 + n."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in visible]
    return bytes(ord(c) if ord(c) < 256 else others[ord(c) - 256] for c in token)


def test_a_character_belongs_to_the_token_that_completes_it():
    tokenizer = byte_level()
    encoding = tokenizer.encode(FOREIGN + ENGLISH)
    raw = [bytes_of(token) for token in encoding.tokens]
    # "ignore" leaves a character out as long as its last byte is missing
    whole = [b"".join(raw[: i + 1]).decode("utf8", "ignore") for i in range(len(raw))]
    expected = [text[len(before) :] for text, before in zip(whole, ["", *whole], strict=False)]
    assert expected.count("") > 10
    assert decoder_of(tokenizer).pieces(encoding.ids) == expected


def test_byte_fallback_by_hand():
    tokenizer = byte_fallback()
    decoder = decoder_of(tokenizer)
    ids = tokenizer.encode("日本 fox").ids
    assert decoder.pieces(ids)[1:] == ["", "", "日", "", "", "本", " ", "f", "o", "x"]
    # Its decoder gives up a whole run of bytes when the last one is missing.
    assert "".join(decoder.pieces(ids[1:6])) == "\ufffd" * 5


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (word_level, "the fox met", ["the", " fox", " met"]),
        (word_piece, "the fox the", ["the", " fox", " the"]),
    ],
)
def test_spaces_go_with_the_word_behind_them(make, text, expected):
    tokenizer = make()
    assert decoder_of(tokenizer).pieces(tokenizer.encode(text).ids) == expected


def test_special_tokens_are_shown_and_no_space_is_cleaned_up():
    tokenizer = byte_level()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    ids = [*tokenizer.encode("The fox , and 🦊 .").ids, 0, *tokenizer.encode("foxes").ids]
    pieces = TextTokenizer(fast).decoder.pieces(ids)
    assert "".join(pieces) == "The fox , and 🦊 .<|endoftext|>foxes"
    assert pieces == TextTokenizer(tokenizer).decoder.pieces(ids)
