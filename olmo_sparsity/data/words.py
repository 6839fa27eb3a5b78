"""Encoding by words that were met before: the ids of `Tokenizer.encode`, several times as fast.

A byte-level BPE cuts text with GPT-2's expression before it merges anything, and at a place where white space follows
something else it always cuts, whatever stands around it. So the ids of a text are those of its words one after the
other, a word being white space and what follows it; most words of a text were met before.

Shapes: n tokens of one text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.data.text import SPACE

_WORD = re.compile(rf"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
_SPACE_INSIDE = re.compile(rf"[^{SPACE}][{SPACE}]")
MAX_KNOWN = 500_000
MAX_KNOWN_CHARACTERS = 20_000_000
"""Words that are remembered: some 100 MB. A run of characters without white space is a word too, however long."""


class WordEncoder:
    """Ids of texts by a tokenizer that `cuts_at_words`; remembers words, so keep it."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype):
        self.tokenizer, self.dtype = tokenizer, np.dtype(dtype)
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
