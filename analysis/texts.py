"""Texts as token ids, and the groups that they are parts of. Shapes: D texts of T tokens each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from olmo_sparsity.util.errors import UserError

Encode = Callable[[str], np.ndarray]
"""Token ids of a text, (T,), without special tokens."""
Chat = Callable[[list[dict[str, Any]]], tuple[str, list[bool]]] | None
"""Messages as text, and whether each of its tokens lies in one, (T,). None: messages are refused."""


class Texts:
    """Texts as token ids, by number. `open_texts` makes them; a prepared corpus is `analysis.ours.PreparedTexts`.

    Args:
        encode: token ids of a string.
        texts: pairs of group and string or messages; None is the group of a text that stands by itself.
        name: where they are from, in words or as a path.
        chat: what writes messages as a string.
    """

    name: str
    sha256: str
    """Of what was tokenized; of a prepared corpus, of its manifest."""
    lengths: np.ndarray
    """Tokens of each text, (D,) int64."""
    groups: np.ndarray | None = None
    """Name of the group of each text, (D,) strings: its book, site or package. None where there are no groups."""
    in_message: dict[int, np.ndarray] | None = None
    """Of each conversation, by number: which tokens lie in a message and may be targets, (T,) bool."""

    def __init__(self, encode: Encode, texts: Sequence[tuple[Any, Any]], name: str, chat: Chat = None):
        if not texts:
            raise UserError(f"{name}: there is no text; give at least one")
        if chat is None and not all(isinstance(text, str) for _, text in texts):
            raise UserError(f"{name}: only `influence` reads messages; write them out as text")
        read = [(g, *chat(text)) if chat and not isinstance(text, str) else (g, text) for g, text in texts]
        self.name = name
        self.sha256 = hashlib.sha256(json.dumps(read).encode()).hexdigest()
        self._tokens = [encode(row[1]) for row in read]
        self.in_message = {n: np.array(row[2]) for n, row in enumerate(read) if len(row) > 2} or None
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        if any(group is not None for group, _ in texts):
            names = [f"text {n} by itself" if own is None else str(own) for n, (own, _) in enumerate(texts)]
            self.groups = np.array(names, dtype=object)

    def tokens(self, number: int) -> np.ndarray:
        """Token ids of a text, (T,), without special tokens."""
        return self._tokens[number]

    def in_near_copy(self, text: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy of training text, (n,) bool; None where they were not looked for."""
        return None
