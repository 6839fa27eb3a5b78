"""Text to token ids and token files. Shapes: n tokens of one document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.data.groups import groups_name, write_groups
from olmo_sparsity.data.text import SPACE, Document
from olmo_sparsity.data.tokenizers import load_tokenizer
from olmo_sparsity.data.tokens import TokenFile
from olmo_sparsity.util.files import atomic_path, sha256_file

BATCH_CHARACTERS = 1 << 20
"""Text tokenized at once: enough to keep the tokenizer's threads busy, little enough to bound memory."""


@dataclass(frozen=True)
class Encoding:
    """How text becomes token ids."""

    tokenizer: str
    """Path of the tokenizer.json."""
    tokenizer_sha256: str
    eos_token_id: int
    dtype: str
    """uint16 or uint32."""


def write_token_file(output: Path, documents: Iterable[tuple[Document, np.ndarray]]) -> TokenFile:
    """Write the ids of documents one after the other, and their groups into a file beside it, if any has one.

    Without documents there is no file: a token file must not be empty.
    """
    groups: list[str | None] = []
    tokens = 0
    with atomic_path(output) as temporary:
        with open(temporary, "wb") as file:
            for document, ids in documents:
                file.write(ids.data)
                groups.append(document.group)
                tokens += len(ids)
        if not tokens:
            temporary.unlink()
    sha256 = sha256_file(output) if tokens else ""
    groups_sha256 = write_groups(output.with_name(groups_name(output.name)), groups)
    return TokenFile(output.name, tokens, len(groups), sha256, groups_sha256)


def encode_documents(
    documents: Iterable[Document], encoding: Encoding
) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids and the EOS id, (n+1,).

    Where a text spells out the EOS token, that is left out: EOS ends a document and stands nowhere else.
    """
    encode = _encoder(encoding)
    for batch in _batches(documents):
        for document, ids in zip(batch, encode([document.text for document in batch]), strict=True):
            yield (
                document,
                np.append(ids[ids != encoding.eos_token_id], ids.dtype.type(encoding.eos_token_id)),
            )


@lru_cache(maxsize=2)
def _encoder(encoding: Encoding) -> Callable[[Sequence[str]], list[np.ndarray]]:
    """A function from texts to ids. Cached, because it remembers words."""
    tokenizer, dtype = load_tokenizer(encoding.tokenizer), np.dtype(encoding.dtype)
    if cuts_at_words(tokenizer):
        return WordEncoder(tokenizer, dtype).encode

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=dtype) for one in encoded]

    return encode


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# --- words that were met before ---

_WORD = re.compile(rf"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
_SPACE_INSIDE = re.compile(rf"[^{SPACE}][{SPACE}]")
MAX_KNOWN = 500_000
MAX_KNOWN_CHARACTERS = 20_000_000
"""Words that are remembered: some 100 MB. A run of characters without white space is a word too, however long."""


class WordEncoder:
    """The ids of `Tokenizer.encode`, several times as fast, for a tokenizer that `cuts_at_words`; keep it.

    A byte-level BPE cuts text with GPT-2's expression before it merges anything, and where white space follows
    something else it always cuts, whatever stands around it. So the ids of a text are those of its words one after
    the other, a word being white space and what follows it, and most words were met before.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype):
        self.tokenizer, self.dtype = tokenizer, dtype
        self.known: dict[str, bytes] = {}
        self.known_characters = 0

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, (n,)."""
        words = [_WORD.findall(text) for text in texts]
        new = list(set(chain.from_iterable(words)) - self.known.keys())
        encoded = self.tokenizer.encode_batch_fast(new, add_special_tokens=False)
        for word, one in zip(new, encoded, strict=True):
            self.known[word] = np.array(one.ids, self.dtype).tobytes()
            self.known_characters += len(word)
        ids = [np.frombuffer(b"".join(map(self.known.__getitem__, each)), self.dtype) for each in words]
        if len(self.known) > MAX_KNOWN or self.known_characters > MAX_KNOWN_CHARACTERS:
            self.known.clear()  # the frequent ones are back after one batch
            self.known_characters = 0
        return ids


def cuts_at_words(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its words: a byte-level BPE with nothing added that changes this."""
    parts = json.loads(tokenizer.to_str())
    cutter, normalizer = parts["pre_tokenizer"] or {}, parts["normalizer"]
    return (
        parts["model"]["type"] == "BPE"
        and not parts["model"]["dropout"]
        and (normalizer is None or normalizer["type"] == "NFC")
        and cutter.get("type") == "ByteLevel"
        and cutter["use_regex"]
        and not cutter["add_prefix_space"]
        and not any(
            token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or _SPACE_INSIDE.search(token["content"])
            for token in parts["added_tokens"]
        )
    )
