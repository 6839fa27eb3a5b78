"""Text: documents, their paragraphs, the BPE that is trained on them, and their token ids.

Shapes: n tokens of one document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data.tokens import id_range, load_tokenizer
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file

EOS_TOKEN = "<|endoftext|>"
USUAL_EOS_TOKENS = (EOS_TOKEN, "</s>", "<eos>", "<|end_of_text|>", "<|eos|>", "<EOS>")
PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# The characters of Unicode's property White_Space, as the tokenizers library has them; Python's \s has four more.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
BATCH_DOCUMENTS = 64
"""Tokenized at once: enough to keep the tokenizer's threads busy, little enough to bound memory."""


class Document(NamedTuple):
    """A text, and what it is a part of."""

    text: str
    group: str | None = None
    """Name of its book, site or package (docs/method.md, 2.4); None where it stands by itself."""


def write_rows(path: Path, documents: Iterable[Document]) -> None:
    """Write documents as JSON lines, which `sources.read_rows` reads."""
    with open(path, "w", encoding="utf8") as file:
        file.writelines(json.dumps(document._asdict()) + "\n" for document in documents)


def split_paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of a text, which blank lines separate; indentation is kept."""
    return (paragraph for paragraph in PARAGRAPH_BREAK.split(text) if paragraph and not paragraph.isspace())


def paragraph_hash(paragraph: str) -> int:
    """64-bit hash of a paragraph whose runs of white space count as one space."""
    words = " ".join(paragraph.split())
    return int.from_bytes(blake2b(words.encode("utf8"), digest_size=8).digest(), "little")


def paragraph_hashes(text: str) -> Iterator[int]:
    """Hashes of the paragraphs of a text."""
    return map(paragraph_hash, split_paragraphs(text))


def decontaminated(
    documents: Iterable[Document], contaminated: Set[int], counts: dict[str, int]
) -> Iterator[Document]:
    """Documents without the paragraphs of these hashes: unchanged where they have none, left out where none is left.

    ``counts`` becomes how many there were, and what was done.
    """
    names = ("paragraphs", "removed_paragraphs", "changed_documents", "dropped_documents")
    counts.update(dict.fromkeys(names, 0))
    for document in documents:
        paragraphs = list(split_paragraphs(document.text))
        kept = [paragraph for paragraph in paragraphs if paragraph_hash(paragraph) not in contaminated]
        changes = (len(paragraphs), len(paragraphs) - len(kept), 0 < len(kept) < len(paragraphs), not kept)
        for name, number in zip(names, changes, strict=True):
            counts[name] += number
        if kept:
            yield document if len(kept) == len(paragraphs) else document._replace(text="\n\n".join(kept))


# --- a byte-level BPE trained on the corpus itself ---

MAX_RUN_CHARACTERS = 1000
"""Letters and digits, other signs, or white space: longer runs of them are cut before the BPE is trained, which takes
the square of the length of what it cannot cut."""
_KINDS = r"[^\W_]", rf"[{SPACE}]", rf"(?:_|[^\w{SPACE}])"
_CUT = re.compile("|".join(f"{one}{{{MAX_RUN_CHARACTERS}}}(?={one})" for one in _KINDS))
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
    for part in _CUT.finditer(text) if may_have_run else ():  # most text has none, which is quick to see
        yield text[start : part.end()]
        start = part.end()
    yield text[start:]


# --- token ids ---


def find_eos(tokenizer: Tokenizer, eos_token: str | None = None) -> int:
    """Id of the token that ends a document: ``eos_token``, else a usual one. Raises `UserError` for none."""
    names = [eos_token] if eos_token else USUAL_EOS_TOKENS
    for token_id in map(tokenizer.token_to_id, names):
        if token_id is not None:
            return token_id
    raise UserError(f"the tokenizer has no token {' or '.join(names)}; name its own with --eos-token")


def dtype_name(vocab_size: int) -> str:
    """The smaller type of token files that holds every id below ``vocab_size``."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


_WORD = re.compile(rf"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
_SPACE_INSIDE = re.compile(rf"[^{SPACE}][{SPACE}]")
MAX_KNOWN_CHARACTERS = 4_000_000
"""Of the words that are remembered, some 100 MB; a run of characters without white space is a word, however long."""


class Encoder(dict[str, bytes]):
    """The ids of `Tokenizer.encode`, several times as fast for a tokenizer that `cuts_at_words`; keep it.

    A byte-level BPE cuts text with GPT-2's expression before it merges anything, and where white space follows
    something else it always cuts, whatever stands around it. So the ids of a text are those of its words one after
    the other, a word being white space and what follows it, and most words were met before: it is a dict of them.
    """

    def __init__(self, path: str | Path, eos_token: str | None = None):
        """``path`` is that of a tokenizer.json, ``eos_token`` as in `find_eos`."""
        self.path, self.sha256, self.eos_token = path, sha256_file(path), eos_token
        self.tokenizer = load_tokenizer(path)
        self.vocab_size, self.eos_token_id = id_range(self.tokenizer), find_eos(self.tokenizer, eos_token)
        self.dtype = dtype_name(self.vocab_size)
        self.cuts = cuts_at_words(self.tokenizer)
        self.characters = 0

    def __reduce__(self) -> Any:
        """For other processes: each reads the file once."""
        return _encoder, (self.path, self.sha256, self.eos_token)

    def __missing__(self, word: str) -> bytes:
        self[word] = np.array(self.tokenizer.encode(word, add_special_tokens=False).ids, self.dtype).tobytes()
        self.characters += len(word)
        return self[word]

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        """Each document with its ids and the EOS id, (n+1,).

        Where a text spells out the EOS token, that is left out: EOS ends a document and stands nowhere else.
        """
        eos, left = np.dtype(self.dtype).type(self.eos_token_id), iter(documents)
        while batch := list(islice(left, BATCH_DOCUMENTS)):
            for document, ids in zip(batch, self._ids([each.text for each in batch]), strict=True):
                yield document, np.append(ids[ids != eos], eos)

    def _ids(self, texts: list[str]) -> Iterator[np.ndarray]:
        if not self.cuts:
            for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoded.ids, self.dtype)
            return
        for text in texts:
            yield np.frombuffer(b"".join(map(self.__getitem__, _WORD.findall(text))), self.dtype)
            if self.characters > MAX_KNOWN_CHARACTERS:
                self.clear()  # the frequent ones are soon back
                self.characters = 0


@lru_cache(maxsize=2)
def _encoder(path: str | Path, sha256: str, eos_token: str | None) -> Encoder:
    return Encoder(path, eos_token)


def cuts_at_words(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its words: a byte-level BPE with nothing added that changes this."""
    parts = json.loads(tokenizer.to_str())
    cutter = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
    return (
        parts["model"]["type"] == "BPE"
        and not parts["model"]["dropout"]
        and (parts["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and cutter.items() <= (parts["pre_tokenizer"] or {}).items()
        and not any(
            token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or _SPACE_INSIDE.search(token["content"])
            for token in parts["added_tokens"]
        )
    )
