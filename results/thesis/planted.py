"""The texts of the positive control: stretches of held-out docstrings with k planted bits, whose parity comes last.

    python results/thesis/planted.py CORPUS OUT

Token ids are those of the task `planted` with this corpus as its text. Every stretch has a text for each k, with the
same tokens between the bits, which stand in its far context. Behind these texts comes one document of every package,
without bits: what stands before a context in a longer one. Writes planted.jsonl and tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from analysis.project import PreparedTexts
from analysis.texts import Texts
from olmo_sparsity.data.tokens import CorpusManifest
from olmo_sparsity.util.files import atomic_path

PLANTED_KS = (1, 2, 4)
STRETCHES = 400
WINDOW = 64
N_LONG, N_SHORT = 56, 8
"""Of a prompt. With its label it is shorter than a window, so that no prompt, whose bits would count, stands before
another."""
LONGEST_BEFORE = 7 * WINDOW
"""Tokens of another text before eight windows' last."""
SEED = 0


def rows(texts: Texts, vocabulary: int, stretches: int = STRETCHES) -> Iterator[dict[str, Any]]:
    """The texts, as rows of planted.jsonl: text (its ids), group, k, farthest (tokens from the label to a bit).

    k is 0 of a document without bits. ``vocabulary``: how many tokens the corpus has; the bits follow its ids plus one.
    """
    assert texts.groups is not None, "docstrings have packages"
    generator = np.random.default_rng(SEED)
    first_bit = 1 + vocabulary
    long_enough = np.flatnonzero(texts.lengths >= N_LONG)
    for _ in range(stretches):
        number = int(generator.choice(long_enough))
        start = int(generator.integers(texts.lengths[number] - N_LONG + 1))
        background = 1 + texts.tokens(number)[start : start + N_LONG].astype(np.int64)
        for k in PLANTED_KS:
            places = generator.choice(N_LONG - N_SHORT, k, replace=False)
            bits = generator.integers(2, size=k)
            prompt = background.copy()
            prompt[places] = first_bit + bits
            label = first_bit + bits.sum() % 2
            yield {
                "text": written([*prompt, label]),
                "group": str(texts.groups[number]),
                "k": k,
                "farthest": int(N_LONG - places.min()),
            }
    for group in np.unique(texts.groups):
        of_group = np.flatnonzero(texts.groups == group)
        longest = of_group[texts.lengths[of_group].argmax()]
        if texts.lengths[longest] >= LONGEST_BEFORE:
            tokens = 1 + texts.tokens(longest).astype(np.int64)
            yield {"text": written(tokens), "group": str(group), "k": 0, "farthest": 0}


def written(ids: Sequence[int] | np.ndarray) -> str:
    """Token ids as text for `words`."""
    return " ".join(f"t{token}" for token in ids)


def words(vocabulary: int) -> Tokenizer:
    """A tokenizer of the words t0, t1, …, whose ids are their numbers, padding and both bits among them."""
    ids = {f"t{token}": token for token in range(vocabulary + 3)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def main(arguments: Sequence[str] | None = None) -> None:
    """Write texts and tokenizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args(arguments)
    vocabulary = CorpusManifest.load(options.corpus).vocab_size
    options.out.mkdir(parents=True, exist_ok=True)
    words(vocabulary).save(str(options.out / "tokenizer.json"))
    with atomic_path(options.out / "planted.jsonl") as temporary:
        lines = [json.dumps(row) for row in rows(PreparedTexts(options.corpus), vocabulary)]
        Path(temporary).write_text("\n".join(lines) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
