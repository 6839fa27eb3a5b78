"""Text: documents, their paragraphs, the BPE that is trained on them, and their ids. Shapes: n tokens of a document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Set
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_sparsity.data.tokens import id_range, load_tokenizer
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.special_tokens import END_OF_TEXT

EOS_TOKEN = "<|endoftext|>"
PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
BATCH_DOCUMENTS = 64
"""Tokenized at once: enough to keep the tokenizer's threads busy, little enough to bound memory."""


class Document(NamedTuple):
    """A text, and what it is a part of."""

    text: str
    group: str | None = None
    """Name of its book, site or package (docs/method.md, 2.4); None where it stands by itself."""


Unit = Callable[[], Iterator[Document]]
"""A part of a corpus that becomes one token file: gives its documents, no text empty, or raises `UserError`."""


def write_rows(unit: Unit, path: Path) -> None:
    """Write documents as JSON lines, which `text_files.read_rows` reads."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf8") as file:
        file.writelines(json.dumps(document._asdict()) + "\n" for document in unit())


def paragraphs(text: str) -> Iterator[tuple[str, int]]:
    """Paragraphs of a text, which blank lines separate, each with a 64-bit hash of its words; indentation is kept."""
    for paragraph in PARAGRAPH_BREAK.split(text):
        if words := " ".join(paragraph.split()):
            yield paragraph, int.from_bytes(blake2b(words.encode("utf8"), digest_size=8).digest(), "little")


def decontaminated(
    documents: Iterable[Document], contaminated: Set[int], counts: dict[str, int]
) -> Iterator[Document]:
    """Documents without the paragraphs of these hashes: unchanged where they have none, left out where none is left.

    ``counts`` becomes how many there were, and what was done.
    """
    counts.update(paragraphs=0, removed_paragraphs=0, changed_documents=0, dropped_documents=0)
    for document in documents:
        hashed = list(paragraphs(document.text))
        kept = [paragraph for paragraph, digest in hashed if digest not in contaminated]
        removed = len(hashed) - len(kept)
        counts["paragraphs"] += len(hashed)
        counts["removed_paragraphs"] += removed
        counts["changed_documents"] += bool(kept and removed)
        counts["dropped_documents"] += not kept
        if kept:
            yield document._replace(text="\n\n".join(kept)) if removed else document


MAX_RUN_CHARACTERS = 1000
"""Longer runs of one of these kinds of characters are cut in training, which takes the square of a word's length."""
_KINDS = r"[\p{L}\p{N}]", r"\s", r"[^\s\p{L}\p{N}]"
_CUT = Regex("|".join(f"{kind}{{{MAX_RUN_CHARACTERS}}}(?={kind})" for kind in _KINDS))
CUT_RUNS = pre_tokenizers.Split(_CUT, "merged_with_previous")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` ids, EOS id 0; any text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([CUT_RUNS, by_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=by_bytes.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer, tokenizer.decoder = by_bytes, decoders.ByteLevel()
    return tokenizer


def find_eos(tokenizer: Tokenizer, eos_token: str | None = None) -> int:
    """Id of the token that ends a document: ``eos_token``, else a usual one. Raises `UserError` for none."""
    names = [eos_token] if eos_token else END_OF_TEXT
    for token_id in map(tokenizer.token_to_id, names):
        if token_id is not None:
            return token_id
    raise UserError(f"the tokenizer has no token {' or '.join(names)}; name its own with --eos-token")


# The characters of Unicode's property White_Space, as the tokenizers library has them; Python's \s has four more.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
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
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"
        self.cuts, self.characters = cuts_at_words(self.tokenizer), 0

    def __reduce__(self) -> Any:
        """For other processes: each reads the file once."""
        return _encoder, (self.path, self.sha256, self.eos_token)

    def __missing__(self, word: str) -> bytes:
        self[word] = np.array(self.tokenizer.encode(word, add_special_tokens=False).ids, self.dtype).tobytes()
        self.characters += len(word)
        return self[word]

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        """Each document with its ids and the EOS id, (n+1,). Where a text spells out the EOS token, that is left out:
        EOS ends a document and stands nowhere else."""
        eos = np.dtype(self.dtype).type(self.eos_token_id)
        left = iter(documents)
        while batch := list(islice(left, BATCH_DOCUMENTS)):
            for document, ids in zip(batch, self._ids([document.text for document in batch]), strict=True):
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
    settings = json.loads(tokenizer.to_str())
    cutter = {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}
    added = settings["added_tokens"]
    return (
        settings["model"]["type"] == "BPE"
        and not settings["model"]["dropout"]
        and (settings["normalizer"] or {"type": "NFC"})["type"] == "NFC"
        and cutter.items() <= (settings["pre_tokenizer"] or {}).items()
        and not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        and not any(_SPACE_INSIDE.search(token["content"]) for token in added)
    )
