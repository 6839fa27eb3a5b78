"""How tasks put their samples together.

Shapes: B samples, T tokens of the longest sample of the batch, L tokens of a part at most.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from olmo_sparsity.tasks.batch import BEGIN, END, PAD, TaskBatch, between

MARKS = ("<pad>", "<bos>", "<eos>")
"""The names of ids 0, 1 and 2 in the tasks that have a beginning and an end."""


@dataclass(frozen=True)
class Part:
    """A stretch of tokens with their coupled ids, of a length of its own in every row."""

    tokens: np.ndarray
    """(B, L) int64; what stands past the length of a row is not read."""
    ids: np.ndarray
    """(B, L) int64."""
    lengths: np.ndarray
    """(B,) int64."""
    second_id: int = 0
    """Of all of its tokens, where the task couples on two levels."""

    @staticmethod
    def same(token: int, coupled_id: int, rows: int) -> Part:
        """One token that every row has."""
        return Part(np.full((rows, 1), token), np.full((rows, 1), coupled_id), np.ones(rows, dtype=np.int64))

    def where(self, rows: np.ndarray, second_id: int) -> Part:
        """The same in those rows (B,) alone, with this id of the second level."""
        return Part(self.tokens, self.ids, np.where(rows, self.lengths, 0), second_id)


def coupled_batch(
    prompt: Sequence[Part], response: Sequence[Part], task_length: np.ndarray, *, levels: int = 1
) -> TaskBatch:
    """The samples whose prompt and response are these parts, with a beginning and an end token around them.

    ``levels``: 2 where the tokens are coupled on a second one, too.
    """
    rows = len(task_length)
    prompt = [Part.same(BEGIN, 0, rows), *prompt]
    response = [*response, Part.same(END, 0, rows)]
    response_start = np.sum([part.lengths for part in prompt], axis=0)
    lengths = response_start + np.sum([part.lengths for part in response], axis=0)
    tokens = np.full((rows, int(lengths.max(initial=0))), PAD, dtype=np.int64)
    ids = np.zeros_like(tokens)
    second_ids = np.zeros_like(tokens)
    first = np.zeros(rows, dtype=np.int64)
    for part in (*prompt, *response):
        row, place = np.nonzero(np.arange(part.tokens.shape[1]) < part.lengths[:, None])
        tokens[row, first[row] + place] = part.tokens[row, place]
        ids[row, first[row] + place] = part.ids[row, place]
        second_ids[row, first[row] + place] = part.second_id
        first = first + part.lengths
    return TaskBatch(
        tokens=tokens,
        lengths=lengths,
        response_start=response_start,
        task_length=task_length,
        coupled_ids=ids,
        second_ids=second_ids if levels == 2 else None,
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
    found = np.full((len(marked), int(counts.max(initial=0))), -1, dtype=np.int64)
    found[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns
    return found


def letter_names(count: int) -> list[str]:
    """``count`` different names: a … z, a1 … z1, …."""
    return [string.ascii_lowercase[i % 26] + (str(i // 26) if i >= 26 else "") for i in range(count)]
