"""What people read of a token: its piece of the text, or what it is where that cannot be read.

`analysis.model.tokenizer.TextDecoder.pieces` gives the pieces; all displays show them as `readable` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character."""
NO_TEXT = "(no text)"
_VARIATION_SELECTORS = range(0xFE00, 0xFE10)
"""They choose the look of the character before them, and Python counts them as printable."""


def readable(pieces: Sequence[str]) -> list[str]:
    """A label for each token of a sequence; that of most tokens is the piece itself.

    A character whose bytes are spread over n tokens belongs to the piece of the last one. All of them are shown with
    it and their number: "é (1/2)", "é (2/2)". (A token of a space and the first bytes is shown as the space.)
    Where the sequence ends before the character does, they are shown as `BROKEN`. Pieces in which nothing can be seen,
    such as a zero-width space, are shown as code points: "U+200B". White space stays as it is.
    """
    labels = [_visible(piece) for piece in pieces]
    start = 0
    for has_text, run in groupby(pieces, key=bool):
        end = start + len(list(run))
        if not has_text:
            before = pieces[start - 1] if start else ""
            completing = pieces[end] if end < len(pieces) else ""
            labels[start:end] = [BROKEN if before.endswith(BROKEN) else NO_TEXT] * (end - start)
            if completing and not completing[0].isascii() and completing[0] != BROKEN:
                character = _visible(completing[0])
                # a token holds a byte at least: more tokens than bytes are none of this character
                first = max(start, end + 1 - len(completing[0].encode()))
                count = end + 1 - first
                for place in range(first, end):
                    labels[place] = f"{character} ({place - first + 1}/{count})"
                labels[end] += f" ({count}/{count})"
        start = end
    return labels


def code_point(character: str) -> str:
    """Such as "U+4E2D"."""
    return f"U+{ord(character):04X}"


def _visible(piece: str) -> str:
    """The piece, or its code points where nothing in it can be seen."""
    letters = piece.strip()
    if any(letter.isprintable() and ord(letter) not in _VARIATION_SELECTORS for letter in letters):
        return piece
    return " ".join(map(code_point, letters)) or piece
