"""A task with a known answer: two parts, of which only the first has been asked for when a policy chooses.

    python results/eviction/needles.py MODEL BOOKS.jsonl OUT      measures; the same command goes on

In a stretch of every book stand "The first secret word is W." and, elsewhere, "The second secret word is V.", in either
order, W and V random words of one token. The context ends with "The first secret word is", and the block's targets are
" W.", "The second secret word is" and " V". So an aware policy has seen the question for W and not that for V, a blind
one neither. Near tokens: M 32; all in the far context is book but for the two parts. OUT has the comparison, with kept
sets, and places.json: of every text the columns of both words in the far context.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis import eviction
from analysis.cache_eviction.settings import BUDGETS
from analysis.open_model import open_model
from olmo_sparsity.util.files import write_json

N_LONG, N_SHORT = 256, 32
OF_EACH_BOOK = 2
FIRST, SECOND = "asked for", "not asked for yet"
"""What the word of the first part is, which the near tokens ask for, and that of the second."""


def _words(text: str) -> list[str]:
    return text.split()


WORDS = _words("""
    apple river stone candle winter garden silver mountain orange window butter castle dragon engine
    falcon guitar hammer island jacket kitchen ladder magnet needle ocean pencil rabbit saddle turtle
    velvet wagon yellow bridge carpet desert eagle forest hotel lemon market north paper queen rocket
    spider tiger uncle violin wheat
    """)


@dataclass(frozen=True)
class Reader:
    """How a model reads text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def one_token(self, words: Sequence[str]) -> list[str]:
        """The words that are one token behind a space."""
        return [word for word in words if len(self.encode(f" {word}")) == 1]


@dataclass(frozen=True)
class Needle:
    """A text of exactly N + B tokens, and where its two words stand."""

    text: str
    columns: dict[str, int]
    """Of the word `FIRST` and of that `SECOND`, in the far context."""


def part(ordinal: str, word: str) -> str:
    """One of the two parts."""
    return f"\nThe {ordinal} secret word is {word}.\n"


def question_and_answer(words: tuple[str, str]) -> tuple[str, str]:
    """What the near tokens end with, and what the targets are."""
    first, second = words
    return "\nThe first secret word is", f" {first}.\nThe second secret word is {second}"


def targets_per_block(reader: Reader) -> int:
    """B, of words of one token."""
    first, second, *_ = reader.one_token(WORDS)
    question, answer = question_and_answer((first, second))
    return len(reader.encode(question + answer)) - len(reader.encode(question))


def needle(
    reader: Reader,
    filler: list[int],
    words: tuple[str, str],
    generator: np.random.Generator,
    n_long: int = N_LONG,
) -> Needle:
    """A needle in a stretch of the filler. Raises `SystemExit` where no stretch reads as it was put together."""
    n_far = n_long - N_SHORT
    question, answer = question_and_answer(words)
    asked = reader.encode(question)
    end = reader.encode(question + answer)
    parts = [reader.encode(part(*of_part)) for of_part in zip(("first", "second"), words, strict=True)]
    number_first = int(generator.integers(2))
    order = (number_first, 1 - number_first)
    text_tokens = n_long - len(asked) - sum(map(len, parts))
    # both parts end before the near tokens begin
    of_filler = n_far - sum(map(len, parts))
    places = np.sort(generator.integers(4, of_filler, 2))
    for start in generator.permutation(len(filler) - text_tokens).tolist():
        stretch = filler[start : start + text_tokens]
        ids: list[int] = []
        columns = {}
        used = 0
        for number, place in zip(order, places.tolist(), strict=True):
            ids += stretch[used:place]
            used = place
            word_in_part = parts[number].index(reader.encode(f" {words[number]}")[0])
            columns[number] = len(ids) + word_in_part
            ids += parts[number]
        ids += stretch[used:] + end
        if (
            reader.encode(reader.decode(ids)) == ids
        ):  # most places in a word or a run of spaces are read otherwise
            return Needle(reader.decode(ids), {FIRST: columns[0], SECOND: columns[1]})
    raise SystemExit("no stretch of the book reads as it was put together; give longer ones")


def needles_of(
    reader: Reader, books: Sequence[dict[str, str]], of_each: int, n_long: int = N_LONG
) -> dict[str, list[Needle]]:
    """Some needles of every book, by its group."""
    single = reader.one_token(WORDS)
    needles: dict[str, list[Needle]] = {}
    for number, book in enumerate(books):
        filler = reader.encode(book["text"][-20_000:])
        for again in range(of_each):
            generator = np.random.default_rng([number, again])
            first, second = generator.choice(single, 2, replace=False).tolist()
            made = needle(reader, filler, (first, second), generator, n_long)
            needles.setdefault(book["group"], []).append(made)
    return needles


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the texts, write where their words stand, and judge all policies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--policies", default="all")
    parser.add_argument("--references", default="leave-one-out-kl")
    parser.add_argument("--n-long", type=int, default=N_LONG)
    parser.add_argument("--of-each", type=int, default=OF_EACH_BOOK, help="needles of every book")
    options = parser.parse_args(arguments)
    loaded = open_model(options.model)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None, f"{options.model} comes without a tokenizer"
    reader = Reader(lambda text: loaded.encode(text).tolist(), tokenizer.tokenizer.decode)
    lines = options.books.read_text(encoding="utf8").splitlines()
    needles = needles_of(reader, [json.loads(line) for line in lines], options.of_each, options.n_long)
    texts = {group: [one.text for one in of_group] for group, of_group in needles.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    places = [one.columns for of_group in needles.values() for one in of_group]
    write_json(options.out / "places.json", places)
    result = eviction(
        loaded,
        texts,
        n_long=options.n_long,
        n_short=N_SHORT,
        targets_per_block=targets_per_block(reader),
        blocks=len(places),
        budgets=BUDGETS,
        policies=options.policies.split(","),
        references=[name for name in options.references.split(",") if name != "none"],
        kept_sets=True,
        out=options.out,
    )
    print(result)


if __name__ == "__main__":
    main()
