"""How tokens are shown that are a part of a character, or cannot be seen."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from analysis.model.tokenizer import TextTokenizer
from analysis.pieces import readable


def bytes_as_tokens() -> TextTokenizer:
    """A tokenizer whose tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


@pytest.mark.parametrize("text", ["é", "aé b", "家", "x家é😀.", "\N{ZERO WIDTH SPACE}a", "Привет, мир"])
def test_every_byte_of_a_character_says_which_one_and_its_number(text: str) -> None:
    tokenizer = bytes_as_tokens()
    labels = readable(tokenizer.decoder.pieces(tokenizer.encode(text).tolist()))
    expected = []
    for character in text:
        count = len(character.encode())
        name = "U+200B" if character == "\N{ZERO WIDTH SPACE}" else character
        expected += [name] if count == 1 else [f"{name} ({number}/{count})" for number in range(1, count + 1)]
    assert labels == expected


def test_a_character_that_is_cut_at_an_end_is_shown_as_broken() -> None:
    tokenizer = bytes_as_tokens()
    ids = tokenizer.encode("家 a家").tolist()
    assert readable(tokenizer.decoder.pieces(ids[1:-1])) == ["�", "�", " ", "a", "�", "�"]


@pytest.mark.parametrize(
    ("pieces", "labels"),
    [
        ([" the", "\n", "  ", " Mr"], [" the", "\n", "  ", " Mr"]),
        (["", "Hello"], ["(no text)", "Hello"]),  # a space that a decoder drops
        (["a", "", ""], ["a", "(no text)", "(no text)"]),
        (["", "", "és"], ["(no text)", "é (1/2)", "és (2/2)"]),  # two bytes are at most two tokens
        (
            ["\u200d", "\ufe0f", "\x00\x01", "\N{SOFT HYPHEN} "],
            ["U+200D", "U+FE0F", "U+0000 U+0001", "U+00AD"],
        ),
        ([], []),
    ],
)
def test_labels(pieces: list[str], labels: list[str]) -> None:
    assert readable(pieces) == labels
