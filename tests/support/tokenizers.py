"""Tokenizers that are trained on a few sentences."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def unigram(texts: list[str], size: int) -> Tokenizer:
    """Unigram with a visible space before each word, as SentencePiece has it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"unk_token": "<unk>", "special_tokens": ["<unk>"]}
    trainer = trainers.UnigramTrainer(vocab_size=size, show_progress=False, **special)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_piece(
    texts: list[str], size: int, pre_tokenizer: pre_tokenizers.PreTokenizer, cleanup: bool = True
) -> Tokenizer:
    """WordPiece, as BERT has it; ``cleanup`` takes spaces before marks away where text is decoded."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
