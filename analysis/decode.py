"""The text of token ids, token by token, for any tokenizer: all that it must be able to do is decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or none yet."""
_REMEMBERED = 1 << 17


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
        whole = tuple(int(token) for token in ids)
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
        standing.append(max(standing[-1], _common(decode(ids[:end]), text)))
    return [text[start:end] for start, end in pairwise([*standing, len(text)])]


def _common(first: str, second: str) -> int:
    """Length of the common beginning of two texts."""
    if second.startswith(first):
        return len(first)
    different = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(different, len(second))
