"""Kinds of dependency against a corpus whose kinds were written down by hand, however its words are cut."""

import pytest

from analysis.token_kinds import KINDS, classify

# far context, short context, the target's word (a space before it is part of its token), what follows, its kind
CASES = [
    # verbatim repeats
    ("He sat by the old mill and slept.", " They met by the old", " mill", " again", "repeat"),
    ("He sat by the\nold mill.", " It was the  old", " mill", ".", "repeat"),  # spaces do not count
    ("Well, said Ann, no.", " He called Ann", ",", " who", "punctuation"),
    ("Well, said Ann, no.", " He said Ann", ",", " who", "repeat"),  # marks are units too
    ("Well, said Ann, no.", " Now, said", " Ann", ".", "repeat"),
    ("By the old millstone.", " They met by the old", " mill", ".", "content word"),  # another word
    ("He sat by the Old Mill.", " They met by the old", " mill", " again", "content word"),  # another case
    ("He sat by the old mi", "ll. Go to the old", " mill", ".", "content word"),  # far holds only half of it
    ("He sat by the old mi", "ll. Go to the old", " mi", ".", "content word"),  # which is no word by itself
    ('"No."\n\n"Yes."\n\n', '"Why?" he said. "So."\n\n', '"', "Because", "punctuation"),  # marks alone
    ("It cost 1,250 francs.", " She paid: cost 1,250", " francs", ".", "repeat"),
    ("我喜欢猫。", "他也喜欢", "猫", "。", "repeat"),  # each ideograph is a unit
    ("我喜欢狗。", "他也喜欢", "猫", "。", "content word"),
    # names
    ("There was Alice, alone.", " Then came", " Alice", " back", "name"),
    ("There was Alice, alone.", " Then came", " Bob", " back", "content word"),  # not in far
    ("There was alice, alone.", " Then came", " Alice", " back", "content word"),  # not a name there
    ("There was Alicent, alone.", " Then came", " Alice", " back", "content word"),  # only begins like one
    ("Even so, he came.", " It rained. ", "Even", " now", "function word"),
    ("Cows slept.", " It rained.", " Cows", " woke", "content word"),  # opens a sentence here and there
    ("I saw Rome.", " It rained.", " Rome", " woke", "name"),  # opens a sentence here, none there
    ("Rome slept.", " I went to", " Rome", ".", "name"),
    ("Rome slept.", ' "', "Rome", '!"', "content word"),  # opens a quotation
    ("I saw Rome.", ' He cried, "', "Rome", '!"', "name"),
    ("I saw Rome.", " ‘", "Rome", "’", "name"),
    ("Old Cows slept.", " Rain!\n\n", "Cows", " woke", "name"),  # "Cows" within a sentence of far
    ("Cows slept.", " the\n", "Cows", " woke", "name"),  # a line break opens no sentence
    ("Cows slept.", " the\n\n", "Cows", " woke", "content word"),  # an empty line does
    ("Cows slept.", " It rained. (", "Cows", " woke", "content word"),
    ("Cows slept.", " a farm (", "Cows", " Inc.)", "name"),
    ("Cows slept.", ' "It rained!" ', "Cows", " woke", "content word"),
    ("Cows slept.", ' the "farm" ', "Cows", " woke", "name"),
    ("Cows slept.", " of non-", "Cows", ".", "name"),
    ("Smith left.", " I saw Mr.", " Smith", " go", "name"),  # no sentence ends after Mr.
    ("Smith left.", " I saw J.", " Smith", " go", "name"),  # nor after an initial
    ("Smith left.", " I saw him.", " Smith", " waved", "content word"),
    ("We met Bob's aunt.", " It was", " Bob", "!", "name"),
    ("We met Bob there.", " It was", " Bob’s", " hat", "name"),
    ("Mr. O'Brien sang.", " Then", " O'Brien", " slept", "name"),
    ("He saw Ångström there.", " Then", " Ångström", " slept", "name"),
    (
        "He saw Étienne there.",
        " Then",
        " E\u0301tienne",
        " slept",
        "content word",
    ),  # other letters: not the same
    ("In chapter Two he came.", " It was", " Two", " again", "number"),
    ("May I go? The May fair.", " It was", " The", " end", "function word"),
    # numbers
    ("It was so.", " They sold", " 1,250", " boxes", "number"),
    ("It was so.", " It weighs", " 3.14", " pounds", "number"),
    ("It was so.", " On the", " 3rd", " day", "number"),
    ("It was so.", " There were", " ninety", "-nine", "number"),
    ("It was so.", " There was", " one", " left", "function word"),
    ("It was so.", " It is", " utf8", " text", "content word"),  # begins with a letter
    ("It was so.", " They were", " ½", " full", "number"),
    ("It was so.", " in 1990", ",", " when", "punctuation"),  # no digit behind the comma
    # punctuation
    ("It was so.", " the end", ".", " Then", "punctuation"),
    ("It was so.", " (the end", ")", ", he", "punctuation"),
    ("It was so.", " x[3", "]", " = 4", "punctuation"),
    ("It was so.", " “the end", "”", " he", "punctuation"),
    ("It was so.", " the cats", "'", " tails", "punctuation"),
    ("It was so.", " well", "-", "known", "punctuation"),
    ("It was so.", " x", " +", " y", "punctuation"),
    ("It was so.", " how nice ", "🦊", "!", "punctuation"),
    ("It was so.", " end.", "\n\n", "Then", "punctuation"),
    ("It was so.", " if x:", "\n    ", "y", "punctuation"),
    ("It was so.", " end", " ", "", "punctuation"),
    # function and content words
    ("It was so.", " And", " the", " end", "function word"),
    ("It was so.", " Go. ", "The", " end", "function word"),
    ("It was so.", " He", " don't", " know", "function word"),
    ("It was so.", " It", " isn’t", " so", "function word"),
    ("It was so.", " I think", " we'll", " see", "function word"),
    ("It was so.", " Both", " another", "-day", "function word"),
    ("It was so.", " It was", " theirs", "", "function word"),
    ("It was so.", " five", " o'clock", " now", "content word"),
    ("It was so.", " the", " apples", " fell", "content word"),
    ("It was so.", " a", " naïve", " man", "content word"),
    ("It was so.", " हिन्दी", " भाषा", " है", "content word"),  # vowel signs part no word
    ("It was so.", " the ", "", "日本", "content word"),  # a part of a character
    ("", "", "Apples", " fell", "content word"),
    ("", "", "The", " end", "function word"),
]


@pytest.mark.parametrize(("far", "short", "word", "after", "kind"), CASES)
def test_kinds_by_hand_however_the_word_is_cut(far, short, word, after, kind):
    assert kind in KINDS
    assert classify(far, short, word, after) == kind
    if word.strip() == "":
        return  # layout, or a part of a character
    for start in range(len(word)):
        for end in range(start + 1, len(word) + 1):
            assert classify(far, short + word[:start], word[start:end], word[end:] + after) == kind


@pytest.mark.parametrize(
    ("far", "short", "piece", "after", "kind"),
    [
        # the word may begin in the far context
        ("He sat by the old mill. Go to the old mi", "", "ll", ".", "repeat"),
        ("I went to Ro", "", "me", ".", "content word"),  # Rome is not in far, though Ro is
        ("It was 1", "", ",", "250 then", "number"),
        # a piece of several units counts as its first
        ("It was so.", " the end", '."', " Then", "punctuation"),
        ("It was so.", " at", " the end.", " Then", "function word"),
        ("It was so.", " at", "\n\n  apples", " fell", "content word"),
        # what follows may be unknown
        ("There was Alice, alone.", " Then came", " Alice", "", "name"),
        ("There was Alice, alone.", " Then came", " Ali", "", "content word"),
        ("There was Alice, alone.", " Then came", " Ali", "ce", "name"),
    ],
)
def test_kinds_of_pieces_by_hand(far, short, piece, after, kind):
    assert classify(far, short, piece, after) == kind
