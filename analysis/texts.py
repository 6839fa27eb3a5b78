"""Texts as token ids, and the groups that they are parts of.

Tokens that a tokenizer calls special are read where a text spells them out, and are no targets: what a template or a
packed file writes between texts is no language that a prediction of the model tells anything about [ours]. Those that
end or begin a document divide a text, so that no context crosses from one document into another.
Shapes: D texts of T tokens each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from olmo_sparsity.util.errors import UserError

Encode = Callable[[str], np.ndarray]
"""Token ids of a text, (T,), without special tokens around it."""
Chat = Callable[[list[dict[str, Any]]], tuple[str, list[bool]]]
"""Messages as text, and whether each of its tokens lies in one, (T,)."""


@dataclass(frozen=True)
class TextReader:
    """How a model reads texts: all that `Texts` needs to know of it."""

    encode: Encode
    chat: Chat | None = None
    """What writes messages as a string; None: messages are refused."""
    special: frozenset[int] = frozenset()
    """Ids of the tokens that its tokenizer calls special."""
    boundaries: frozenset[int] = frozenset()
    """Those that end or begin a document."""
    prefix: tuple[int, ...] = ()
    """Ids that stand before every context: a text that begins with them is read without."""
    decode: Callable[[list[int]], str] | None = None
    """The text of token ids; None: no document is known to be white space only."""


class Texts:
    """Texts as token ids, by number. `open_texts` makes them; a prepared corpus is `analysis.project.PreparedTexts`.

    A string that spells out tokens which end or begin a document becomes several texts, of one group: that of the
    string or, where it has none, one of its own. What is only white space between them is none. Messages stay one text.

    Args:
        reader: how the model reads them.
        texts: pairs of group and string or messages; None is the group of a text that stands by itself.
        name: where they are from, in words or as a path.
    """

    name: str
    sha256: str
    """Of what was tokenized; of a prepared corpus, of its manifest."""
    lengths: np.ndarray
    """Tokens of each text, (D,) int64."""
    groups: np.ndarray | None = None
    """Name of the group of each text, (D,) strings: its book, site or package. None where there are no groups."""
    special: frozenset[int] = frozenset()
    """Ids of special tokens, which are no targets."""
    divided: int = 0
    """How many strings became several texts."""
    read_with: dict[str, str] | None = None
    """Of files: the fields and the encoding that were named, as `TextFiles` takes them."""
    in_message: dict[int, np.ndarray]
    """Of each conversation, by number: which tokens lie in a message and may be targets, (T,) bool."""

    def __init__(self, reader: TextReader, texts: Sequence[tuple[Any, Any]], name: str):
        if not texts:
            raise UserError(f"{name}: there is no text; give at least one")
        if reader.chat is None and not all(isinstance(text, str) for _, text in texts):
            raise UserError(f"{name}: only `measure` reads messages; write them out as text")
        self.name, self.special = name, reader.special
        self.in_message = {}
        self._tokens: list[np.ndarray] = []
        groups: list[str | None] = []
        written: list[tuple[Any, ...]] = []
        for group, text in texts:
            if isinstance(text, str):
                written.append((group, text))
                documents = _documents(reader.encode(text), reader)
            else:
                assert reader.chat is not None
                text, in_message = reader.chat(text)
                written.append((group, text, in_message))
                self.in_message[len(self._tokens)] = np.array(in_message)
                documents = [reader.encode(text)]
            if len(documents) > 1:
                self.divided += 1
                first = len(self._tokens)
                group = f"texts {first} to {first + len(documents) - 1}" if group is None else group
            self._tokens += documents
            groups += [None if group is None else str(group)] * len(documents)
        self.sha256 = hashlib.sha256(json.dumps(written, default=str).encode()).hexdigest()
        self.lengths = np.array([len(tokens) for tokens in self._tokens], dtype=np.int64)
        if any(group is not None for group in groups):
            names = [group or f"text {text_index} by itself" for text_index, group in enumerate(groups)]
            self.groups = np.array(names, dtype=object)

    def tokens(self, text_index: int) -> np.ndarray:
        """Token ids of a text, (T,), without special tokens around it."""
        return self._tokens[text_index]

    def is_special(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each of some tokens is special, bool of the same shape."""
        return np.isin(tokens, list(self.special))

    def special_tokens(self) -> int:
        """How many special tokens stand in all texts."""
        return sum(
            int(self.is_special(self.tokens(text_index)).sum()) for text_index in range(len(self.lengths))
        )

    def may_be_target(self, text: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Whether tokens may be targets: not special, nor of a chat template. All (n,); ``position`` in ``text``."""
        allowed = np.ones(len(text), dtype=bool)
        for text_index in np.unique(text).tolist():
            rows = text == text_index
            allowed[rows] = ~self.is_special(self.tokens(text_index)[position[rows]])
            if text_index in self.in_message:
                allowed[rows] &= self.in_message[text_index][position[rows]]
        return allowed

    def in_near_copy(self, text: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy of training text, (n,) bool; None where they were not looked for."""
        return None


def _documents(tokens: np.ndarray, reader: TextReader) -> list[np.ndarray]:
    """The documents of a text, without the tokens that end or begin them and without the prefix: at least one.

    In a text of more than one they are those that are not only white space, such as a line break behind the last.
    """
    is_boundary = np.isin(tokens, list(reader.boundaries))
    parts = [_inside(part, reader) for part in np.split(tokens, np.flatnonzero(is_boundary))]
    parts = [part for part in parts if len(part)]
    if is_boundary.any() and reader.decode is not None:
        parts = [part for part in parts if reader.decode(part.tolist()).strip()]
    return parts or [tokens[:0]]


def _inside(tokens: np.ndarray, reader: TextReader) -> np.ndarray:
    """What of some tokens stands behind the prefix, or else the boundary, that they may begin with."""
    length = len(reader.prefix)
    if length and tokens[:length].tolist() == list(reader.prefix):
        return tokens[length:]
    if len(tokens) and int(tokens[0]) in reader.boundaries:
        return tokens[1:]
    return tokens
