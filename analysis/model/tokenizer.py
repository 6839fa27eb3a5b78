"""A model's tokenizer as measurements need it: token ids of a text, and the text of each token.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.util.files import read_json, sha256_file

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or none yet."""
_REMEMBERED = 1 << 17


class TextTokenizer:
    """A tokenizer as measurements need it: without special tokens, padding and truncation.

    Args:
        tokenizer: the path of a tokenizer.json, or an object of the tokenizers library, or a fast one of transformers.
            Padding and truncation are switched off in the object.
    """

    sha256: str
    """Of the tokenizer.json, or of the one that the object would save."""

    def __init__(self, tokenizer: Any):
        self._given = tokenizer
        self._config: dict[str, Any] = {}
        sha256 = None
        if isinstance(tokenizer, str | Path):
            sha256, beside = sha256_file(tokenizer), Path(tokenizer).with_name("tokenizer_config.json")
            tokenizer = Tokenizer.from_file(str(tokenizer))
            if beside.is_file():
                self._config = read_json(beside, "save the tokenizer again")
        self.tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.sha256 = sha256 or hashlib.sha256(self.tokenizer.to_str(pretty=True).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens around it."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    @cached_property
    def with_template(self) -> Any:
        """The same one with its chat template: what was given, or of transformers where that is a path."""
        from transformers import PreTrainedTokenizerFast as Fast

        own, is_path = self._given, isinstance(self._given, str | Path)
        return Fast.from_pretrained(Path(own).parent, local_files_only=True) if is_path else own

    @cached_property
    def decoder(self) -> TextDecoder:
        """The text of token ids, token by token."""
        return TextDecoder(partial(self.tokenizer.decode, skip_special_tokens=False))

    @cached_property
    def added_before(self) -> tuple[int, ...]:
        """Special tokens that it puts before every text, by its post-processor or its configuration."""
        plain, whole = self.encode("a").tolist(), self.tokenizer.encode("a").ids
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        bos = self._config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        if start or not (self._config.get("add_bos_token") and bos):
            return tuple(whole[:start])
        token = self.tokenizer.token_to_id(bos)
        return () if token is None else (token,)


# --- the text of token ids, for any tokenizer: all that it must be able to do is decode ---


class TextDecoder:
    """Splits the text of a token sequence into one piece per token.

    No offsets are read, which many tokenizers do not have: the text of a token is what it adds to the decoded text of
    those before it.

    Args:
        decode: the text of a list of token ids, special tokens included and spaces as they are.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = lambda ids: decode(list(ids))
        # Text is mostly pairs of tokens that were met before; decoding is what costs.
        self._decode_few = lru_cache(maxsize=_REMEMBERED)(self._decode)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string per token; joined they are the decoded text of the whole sequence.

        Special tokens are shown by their own text. A character whose bytes are spread over several tokens belongs to
        the token that completes it, and the others get "" for it. Bytes that never become a character, as at the two
        ends of a window that cuts one, are shown as `BROKEN`, as the tokenizer's decoder shows them, at the first
        token that has some of them.
        """
        whole = tuple(map(int, ids))
        pieces: list[str] = []
        # A few tokens at a time, so that a long sequence costs no more per token than a short one. A group is the
        # tokens that complete a character together, mostly a single one. It is seen behind the group before it,
        # because decoders treat the first token apart (they drop its leading space).
        before = start = 0
        for end in range(1, len(whole) + 1):
            is_open = self._decode_few(whole[before:end]).endswith(BROKEN)
            if end == len(whole) or not is_open:
                pieces += _additions(self._decode_few, whole[before:end])[start - before :]
                before, start = start, end
        if "".join(pieces) == self._decode(whole):
            return pieces
        # Some decoders let a token change text far before it: a run of byte tokens that is cut at its end loses all
        # its characters. Each token is then seen behind all those before it, at quadratic cost.
        return _additions(self._decode, whole)


def _additions(decode: Callable[[tuple[int, ...]], str], ids: tuple[int, ...]) -> list[str]:
    """What each token adds to the text: the part of it that stands once the token is there, and not before."""
    text = decode(ids)
    standing = [0]
    for end in range(1, len(ids)):
        common = os.path.commonprefix([decode(ids[:end]), text])  # noqa: RUF071 (of characters, as it is meant here)
        standing.append(max(standing[-1], len(common)))
    return [text[start:end] for start, end in pairwise([*standing, len(text)])]
