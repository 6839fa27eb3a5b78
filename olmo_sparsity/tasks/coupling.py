"""Which tokens of a sample belong together, where it was found and not told by the task (docs/method.md 3.5) [ours].

A prompt is read as *segments*, stretches of tokens that differ from sample to sample, between *marks*, which do not.
The token of a segment that is counted first, from its start or its end, has some id, and those behind it the ids that
follow. The response has 2, 3, … in its order; a mark behind the first segment has 1.
Shapes: B samples, T tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.samples import TaskBatch, between
from olmo_sparsity.util.errors import UserError

FIRST_OF_RESPONSE = 2
ENDS = ("start", "end")


@dataclass(frozen=True)
class Segment:
    """How the tokens of a segment are numbered."""

    counted_from: str
    """One of `ENDS`."""
    first_id: int
    """Of the token counted first."""


@dataclass(frozen=True)
class Segments:
    """Where the segments of a batch of prompts are."""

    number: np.ndarray
    """(B, T): 1 in the first segment of a prompt, 2 in the second, …; 0 at marks, response and padding."""
    from_start: np.ndarray
    """(B, T): how many tokens of its segment stand before a token."""
    from_end: np.ndarray
    """(B, T): how many stand behind it."""


def segments_of(batch: TaskBatch, marks: Sequence[int]) -> Segments:
    """The segments between these token ids."""
    width = batch.tokens.shape[1]
    inside = between(0, batch.response_start, width) & ~np.isin(batch.tokens, marks)
    begins = inside & ~np.pad(inside, ((0, 0), (1, 0)))[:, :-1]
    ends = inside & ~np.pad(inside, ((0, 0), (0, 1)))[:, 1:]
    columns = np.arange(width)
    start = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    end = np.minimum.accumulate(np.where(ends, columns, width)[:, ::-1], axis=1)[:, ::-1]
    number = np.where(inside, begins.cumsum(axis=1), 0)
    return Segments(number, np.where(inside, columns - start, 0), np.where(inside, end - columns, 0))


def found_ids(
    batch: TaskBatch, marks: Sequence[int], segments: Sequence[Segment], end_id: int | None
) -> np.ndarray:
    """The ids of the samples, (B, T) int64, in the place of `TaskBatch.coupled_ids`.

    ``end_id``: the token that ends a response, which has id 0. Raises `UserError` where a prompt has another number of
    segments.
    """
    places = segments_of(batch, marks)
    counts = places.number.max(axis=1, initial=0)
    if len(odd := counts[counts != len(segments)]):
        raise UserError(
            f"positions.found: {len(segments)} segments, and a prompt has {odd[0]} between the marks {list(marks)}; "
            "find the coupling of this task, with results/synthetic/couple.py"
        )
    prompt = between(0, batch.response_start, batch.tokens.shape[1])
    begun = places.number.cumsum(axis=1) > 0
    ids = (prompt & begun).astype(np.int64)  # 1, which marks keep
    for number, segment in enumerate(segments, start=1):
        counted = places.from_start if segment.counted_from == "start" else places.from_end
        ids = np.where(places.number == number, counted + segment.first_id, ids)
    answers = batch.loss_mask if end_id is None else batch.loss_mask & (batch.tokens != end_id)
    behind = np.arange(batch.tokens.shape[1]) - batch.response_start[:, None]
    return np.where(answers, behind + FIRST_OF_RESPONSE, ids)
