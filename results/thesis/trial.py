"""The blocks of targets that the script of the first look draws: `collect.py` leaves them out.

    python results/thesis/trial.py CORPUS   writes trial.json

The look before this study (README.md) was at documents of the same held-out packages. Its script draws 200 blocks of 16
targets with a seed of their own; these are its draws, in its order, on CORPUS.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.project import PreparedTexts
from olmo_sparsity.data.tokens import CorpusManifest
from olmo_sparsity.util.files import atomic_path

HERE = Path(__file__).parent
BLOCKS, BLOCK = 200, 16
LONGEST = 1024
"""Tokens of its longest context."""


def blocks_of(lengths: np.ndarray, groups: np.ndarray) -> list[tuple[int, int]]:
    """Text and position of the first target of every block; ``lengths`` and ``groups``: of the texts, (D,).

    Of each block it draws a text, a place in it, texts until one is of another package, and a place in that.
    """
    generator = np.random.default_rng(0)
    long_enough = np.flatnonzero(lengths > LONGEST + BLOCK + 1)
    blocks = []
    for _ in range(BLOCKS):
        text = long_enough[generator.integers(len(long_enough))]
        position = generator.integers(LONGEST, lengths[text] - BLOCK)
        blocks.append((int(text), int(position)))
        other = text
        while groups[other] == groups[text]:
            other = long_enough[generator.integers(len(long_enough))]
        generator.integers(lengths[other] - LONGEST)
    return blocks


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the blocks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, metavar="CORPUS")
    parser.add_argument("--out", type=Path, default=HERE / "trial.json", metavar="JSON")
    options = parser.parse_args(arguments)
    texts = PreparedTexts(options.corpus)
    assert texts.groups is not None, "docstrings have packages"
    [heldout] = CorpusManifest.load(options.corpus).splits["heldout"]
    blocks = blocks_of(texts.lengths, texts.groups)
    trial = {"heldout_sha256": heldout.sha256, "targets_per_block": BLOCK, "first_targets": blocks}
    with atomic_path(options.out) as temporary:
        temporary.write_text(json.dumps(trial).replace("], [", "],\n[") + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
