"""How tasks put their samples together.

Shapes: B samples, T tokens of the longest sample of the batch, L tokens of a span at most.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.batch import BEGIN, END, PAD, TaskBatch, between

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
"""The names of ids 0, 1 and 2 in the tasks whose samples have a begin and an end token."""


@dataclass(frozen=True)
class Span:
    """Consecutive tokens with their coupled ids, of a different length in every row."""

    tokens: np.ndarray
    """(B, L) int64; columns past the length of a row are not read."""
    ids: np.ndarray
    """(B, L) int64."""
    lengths: np.ndarray
    """(B,) int64."""
    second_id: int = 0
    """The id of all of its tokens on the second level, where the task couples on two."""

    @staticmethod
    def same(token: int, coupled_id: int, rows: int) -> Span:
        """One token that every row has."""
        return Span(np.full((rows, 1), token), np.full((rows, 1), coupled_id), np.ones(rows, dtype=np.int64))

    def where(self, rows: np.ndarray, second_id: int) -> Span:
        """The same in those rows (B,) only, with this id on the second level."""
        return Span(self.tokens, self.ids, np.where(rows, self.lengths, 0), second_id)


def coupled_batch(
    prompt: Sequence[Span], response: Sequence[Span], task_length: np.ndarray, *, id_levels: int = 1
) -> TaskBatch:
    """The samples whose prompt and response are these spans, with a begin and an end token around them.

    ``id_levels``: 2 where the tokens are coupled on a second level, too.
    """
    rows = len(task_length)
    prompt = [Span.same(BEGIN, 0, rows), *prompt]
    response = [*response, Span.same(END, 0, rows)]
    response_start = np.sum([span.lengths for span in prompt], axis=0)
    lengths = response_start + np.sum([span.lengths for span in response], axis=0)
    tokens = np.full((rows, int(lengths.max(initial=0))), PAD, dtype=np.int64)
    ids = np.zeros_like(tokens)
    second_ids = np.zeros_like(tokens)
    start = np.zeros(rows, dtype=np.int64)
    for span in (*prompt, *response):
        row, offset = np.nonzero(np.arange(span.tokens.shape[1]) < span.lengths[:, None])
        column = start[row] + offset
        tokens[row, column] = span.tokens[row, offset]
        ids[row, column] = span.ids[row, offset]
        second_ids[row, column] = span.second_id
        start = start + span.lengths
    return TaskBatch(
        tokens=tokens,
        lengths=lengths,
        response_start=response_start,
        task_length=task_length,
        coupled_ids=ids,
        second_ids=second_ids if id_levels == 2 else None,
    )


def labelled_batch(
    prompt: np.ndarray, prompt_lengths: np.ndarray, label: np.ndarray, planted: np.ndarray
) -> TaskBatch:
    """The samples whose response is one label token, right after the prompt (B, T-1); no beginning, no end.

    ``planted`` (B, T-1) bool marks the columns that decide the label.
    """
    rows, width = prompt.shape
    tokens = np.full((rows, width + 1), PAD, dtype=np.int64)
    tokens[:, :-1] = np.where(between(0, prompt_lengths, width), prompt, PAD)
    tokens[np.arange(rows), prompt_lengths] = label
    return TaskBatch(
        tokens=tokens,
        lengths=prompt_lengths + 1,
        response_start=prompt_lengths.copy(),
        task_length=prompt_lengths.copy(),
        planted=marked_columns(planted),
        label=label,
    )


def marked_columns(marked: np.ndarray) -> np.ndarray:
    """The columns that are True in each row (B, C), ascending, then -1, (B, the most of any row) int64."""
    counts = marked.sum(axis=1)
    rows, columns = np.nonzero(marked)
    index_in_row = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    ascending = np.full((len(marked), int(counts.max(initial=0))), -1, dtype=np.int64)
    ascending[rows, index_in_row] = columns
    return ascending


def letter_names(count: int) -> list[str]:
    """``count`` different names: a … z, a1 … z1, …."""
    return [string.ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]
