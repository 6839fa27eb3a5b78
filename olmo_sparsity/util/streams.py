"""Random streams: what keeps draws from one seed independent of each other.

Whatever is random is a function of (stream, seed, ...): ``default_rng([Stream.X, seed, ...])``.
"""

from __future__ import annotations

from enum import IntEnum


class Stream(IntEnum):
    """The first word of what a generator is seeded with. A new stream takes a number that no other has.

    Members with the same number are one stream to Python. Two are 4 and two are 5 for historical reasons; committed
    results depend on them, so they stay. It is harmless because none of those that share a number bears on another's
    result: examples decide of which targets a record keeps the text, passage placebos are the
    notebook's, which writes no record; planted placebos belong to tasks, made-up targets to a benchmark.
    """

    TARGETS = 1
    """Which targets are sampled."""
    PLACEBOS = 2
    """Contexts from other documents, in place of the target's own."""
    RANDOM_SELECTOR = 3
    """The selector `random`."""
    PASSAGE_PLACEBOS = 4
    """As `PLACEBOS`, of a passage given as text."""
    PLANTED_PLACEBOS = 5
    """As `PLACEBOS`, of samples of a task."""
    BENCHMARK_TARGETS = 5
    """Made-up targets of the benchmark of influence."""
    BLOCK_OFFSETS = 8
    """Where in a document its blocks of targets begin."""
    FAR_SUBSETS = 9
    """Random subsets of the far context, by block of targets."""
    SAME_GROUP = 10
    """Far contexts from other documents of the target's own group, by block of targets."""
    SHUFFLED = 11
    """Orders of the true far context's tokens, by block of targets."""
    VERIFIED = 12
    """Which recorded targets are measured again."""
    WOVEN_NEEDLES = 13
    """Needles in training windows."""
    GIVEN_IDS = 14
    """Which training samples have coupled ids, and which of these are wrong."""
    SECOND_IDS = 15
    """Where the ids of a second level start."""
    HELDOUT_WINDOWS = 0x686C64
    """Which windows the held-out loss reads."""
    ID_TABLE = 0x696473
    """Weights of the id embedding and the id head; this word is XORed with the seed."""
    NEEDLES = 0x6E6565
    """Needles, and where they stand."""
    POSITIONS = 0x706F73
    """Position ids of training windows."""
    SEGMENTS = 0x736567
    """Which segments of documents are read."""
