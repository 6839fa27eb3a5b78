"""Kinds of dependency: what a target token is, to a reader who sees its far context (docs/method.md, 2.6; [ours]).

Everything is decided on text, so that the kind of a word does not depend on how a tokenizer cuts it. Text is read as
*units*:

    word          letters and digits, with inner apostrophes (don't, O'Brien); inner points and commas between digits
                  (1,000  3.14)
    ideograph     each Han, Hiragana or Katakana character by itself, as these scripts write no spaces
    mark          each other visible character by itself: punctuation, brackets, quotes, symbols

A hyphen, a slash and an underscore part words. The unit of a target is the one that holds the first character of its
piece that is not a space; it may have begun in earlier tokens and may end in later ones. A piece that is a single space
right before a unit is the beginning of that unit. Any other piece of spaces or line breaks alone is layout.

The kind is the first of these that holds:

    repeat          the target's unit and the two units before it, at least one of them no mark, stand in a row in the
                    far context too, letter by letter (spaces and line breaks between units do not count)
    name            a capitalised word that the far context has too (both with or without 's), and that is no function
                    word and no number. Where it opens a sentence or quotation its capital says nothing: then the far
                    context must have it at a place that opens none
    number          begins with a digit (1,000  3rd  1990s), or is a cardinal in letters (two, ninety, hundred; "one" is
                    a function word)
    punctuation     a mark, or layout
    function word   one of a closed English list, or its contraction (it's, don't)
    content word    everything else; also a piece that is "", a part of a character

A sentence or quotation opens at the beginning of the text; after an empty line; after . ! ? : … and a space, closing
quotes and brackets between them; and after a quote that stands right before the word. The points of titles (Mr.) and
initials (J.) close no sentence, and a line break alone opens none, since wrapped text is full of them.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from analysis.model.tokenizer import TextDecoder
    from analysis.settings import ContextSettings
    from analysis.texts import Texts

KINDS = ("repeat", "name", "number", "punctuation", "function word", "content word")
"""In the order in which they are tried."""
REPEATED_UNITS = 3
"""Length of a verbatim repeat, the target's own unit included."""
TOKENS_AFTER = 12
"""So many tokens behind a target are read, where they are there: they complete a word that it begins."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _words("""
    a an the this that these those such another other each every either neither some any no none all both half several
    many much more most few fewer little less least enough own same one
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves thou thee thy thine ye oneself somebody someone something
    anybody anyone anything nobody nothing everybody everyone everything
    who whom whose which what whoever whatever whichever when whenever where wherever why how however
    about above across after against along amid among amongst around as at before behind below beneath beside besides
    between beyond but by concerning despite down during except for from in inside into like near of off on onto out
    outside over past per since through throughout till to toward towards under underneath until unto up upon via with
    within without
    and or nor so yet if unless although though because while whereas whether than lest
    am is are was were be been being have has had having do does did doing done will would shall should can could may
    might must ought cannot
    not never there here then thus too very also just only even tis twas
    """)
"""English articles, determiners, pronouns, prepositions, conjunctions, auxiliaries and particles, in lower case."""

_CONTRACTED = _words("""
    ain aren couldn didn doesn don hadn hasn haven isn let mightn mustn needn shan shouldn wasn weren won wouldn y
    """)
"""What stands before the apostrophe of contractions where that is no function word itself: don't, let's, y'all."""
_NUMBER_WORDS = _words("""
    zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion
    """)
_TITLES = _words("mr mrs ms messrs dr prof st rev hon capt col gen lt sgt maj gov sen mme mlle")
_LONGEST_TITLE = max(map(len, _TITLES))

_REACH = 240
"""Characters on either side of the target in which its unit and the two before it are looked for."""
_APOSTROPHES = "'’"
_QUOTES = "\"'“”„‟‘’‚‛«»‹›`"
_CLOSING = _QUOTES + ")]}*_"
_OPENING = "([{*_—–-"
_SENTENCE_ENDS = ".!?:…"
_IDEOGRAPHS = (("\u3040", "\u30ff"), ("\u3400", "\u9fff"), ("\uf900", "\ufaff"), ("\U00020000", "\U0003ffff"))


_UNIT = re.compile(r"[wd][wdm]*(?:'[wd][wdm]*|(?<=d)\.d[wdm]*)*|[ip.']m*|m+")
"""A unit in a text of `_class_of` its characters."""


def classify(far: str, short: str, target_piece: str, after: str) -> str:
    """The kind of a target token, one of `KINDS`, as the head of this module defines them [ours].

    Args:
        far: text of the far context, which stands right before ``short``.
        short: text of the short context.
        target_piece: text of the target token, as `analysis.model.tokenizer.TextDecoder` gives it.
        after: the text that follows, a few words or nothing; it completes a word that the target token begins.
    """
    if not target_piece:
        return "content word"
    first = _first_visible(target_piece, after)
    if first is None:
        return "punctuation"
    before = (far[-_REACH:] + short)[-_REACH:]
    text = before + target_piece + after[:_REACH]
    units = [span for span in _units(text) if span[0] <= len(before) + first][-REPEATED_UNITS:]
    row = [text[start:end] for start, end in units]
    unit = row[-1]
    if _is_repeated(row, far, short):
        return "repeat"
    if _is_name(_without_possessive(unit), far, short, opens=_opens_sentence(text, units[-1][0])):
        return "name"
    if _class_of(unit[0]) == "d" or unit.lower() in _NUMBER_WORDS:
        return "number"
    if _is_mark(unit):
        return "punctuation"
    return "function word" if _is_function_word(unit) else "content word"


def kinds_of(
    targets: pd.DataFrame, texts: Texts, decoder: TextDecoder, lengths: ContextSettings
) -> list[str]:
    """The kind of every target, by its target_id, text (its number) and position in it."""
    kinds = []
    n_far = lengths.n_far
    for target_id, text, position in targets[["target_id", "text", "position"]].itertuples(index=False):
        read = lengths.n_long + target_id % lengths.targets_per_block
        tokens = texts.tokens(text)[position - read : position + 1 + TOKENS_AFTER]
        pieces = decoder.pieces(tokens.tolist())
        far = "".join(pieces[:n_far])
        short = "".join(pieces[n_far:read])
        after = "".join(pieces[read + 1 :])
        kinds.append(classify(far, short, pieces[read], after))
    return kinds


def _first_visible(piece: str, after: str) -> int | None:
    """Index of the piece's first character that is no space, ``after`` behind it; None for layout."""
    if piece.strip():
        return len(piece) - len(piece.lstrip())
    return 1 if piece == " " and after[:1].strip() else None


@cache
def _class_of(character: str) -> str:
    """What Unicode says of a character.

    w letter, d digit, i ideograph, m sign that belongs to the character before it (an accent, a joiner), ' apostrophe,
    . point or comma, p other visible character, and a space.
    """
    if character in _APOSTROPHES:
        return "'"
    if character in ".,":
        return "."
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    if category[0] == "L":
        return "i" if any(low <= character <= high for low, high in _IDEOGRAPHS) else "w"
    if category == "Cf":
        return "m"
    return {"M": "m", "N": "d"}.get(category[0], "p")


def _units(text: str) -> list[tuple[int, int]]:
    """(start, end) of every unit of a text."""
    return [match.span() for match in _UNIT.finditer("".join(map(_class_of, text)))]


def _units_of_far(far: str, short: str) -> list[tuple[int, int]]:
    """The units of the far context, without a last one that goes on in the short context."""
    return [span for span in _units(far + short[:2]) if span[1] <= len(far)]


def _is_repeated(row: list[str], far: str, short: str) -> bool:
    """Whether the target's unit and those before it stand in a row in the far context too."""
    if len(row) < REPEATED_UNITS or all(map(_is_mark, row)):  # marks alone are the form of a dialogue, say
        return False
    if not all(unit in far for unit in row):  # a quick look: finding the units of far is what costs
        return False
    units = [far[start:end] for start, end in _units_of_far(far, short)]
    return "\n{}\n".format("\n".join(row)) in "\n{}\n".format("\n".join(units))  # no unit holds a line break


def _is_name(word: str, far: str, short: str, *, opens: bool) -> bool:
    """Whether a word is a name that the far context has; ``opens``: it opens a sentence or quotation."""
    if not word[0].isupper() or _is_function_word(word) or word.lower() in _NUMBER_WORDS or word not in far:
        return False
    return any(
        _without_possessive(far[start:end]) == word and not (opens and _opens_sentence(far, start))
        for start, end in _units_of_far(far, short)
    )


def _opens_sentence(text: str, start: int) -> bool:
    """Whether the unit at ``start`` opens a sentence or quotation; where the text does not show it, it does."""
    opening = len(text[:start].rstrip(_OPENING))
    if opening and text[opening - 1] in _QUOTES:
        return True
    end = len(text[:opening].rstrip())
    gap = text[end:opening]
    sentence = text[:end].rstrip(_CLOSING)
    if not sentence or gap.count("\n") > 1:
        return True
    if not gap or sentence[-1] not in _SENTENCE_ENDS:
        return False
    last_word = re.split(r"\W", sentence[-_LONGEST_TITLE - 2 : -1])[-1]
    initial = len(last_word) == 1 and last_word.isupper()
    return sentence[-1] != "." or not (initial or last_word.lower() in _TITLES)


def _is_mark(unit: str) -> bool:
    return _class_of(unit[0]) not in "wdi"


def _is_function_word(unit: str) -> bool:
    stem, apostrophe, _ = unit.lower().replace("’", "'").partition("'")
    return stem in FUNCTION_WORDS or (bool(apostrophe) and stem in _CONTRACTED)


def _without_possessive(unit: str) -> str:
    return unit[:-2] if len(unit) > 2 and unit[-2] in _APOSTROPHES and unit[-1] in "sS" else unit
