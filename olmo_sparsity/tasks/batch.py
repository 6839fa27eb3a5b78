"""A batch of samples of a task.

Shapes: B samples, T tokens of the longest sample of the batch, k planted tokens at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAD, BEGIN, END = 0, 1, 2


@dataclass(frozen=True)
class TaskBatch:
    """B samples: tokens, what is to be predicted of them, and which position ids belong together."""

    tokens: np.ndarray
    """(B, T) int64: the prompt, the response, then padding (`PAD`)."""
    lengths: np.ndarray
    """(B,) int64: tokens of the prompt and the response together."""
    response_start: np.ndarray
    """(B,) int64: the column of the first token of the response; the prompt is what stands before it."""
    task_length: np.ndarray
    """(B,) int64: the length of each sample in the task's own unit, as `Task.at_length` takes it."""
    coupled_ids: np.ndarray | None = None
    """(B, T) int64: tokens that belong together share an id of 1 or more, to which a random start is added; 0 for the
    beginning, the end and padding, which stay 0. None: the task has no coupling."""
    second_ids: np.ndarray | None = None
    """(B, T) int64: the ids of the second level, likewise 1 or more, and 0. None: the task couples on one level."""
    planted: np.ndarray | None = None
    """(B, k) int64: the columns that alone decide the label, ascending, then -1. None: the task plants none."""
    label: np.ndarray | None = None
    """(B,) int64: the token that is the response, where that is a single one. None: it has more."""

    @property
    def loss_mask(self) -> np.ndarray:
        """(B, T) bool: True exactly at the tokens of the response, the end token included.

        It marks *targets*: token t is predicted at column t-1, where a batch of the training loop has its label.
        """
        return between(self.response_start, self.lengths, self.tokens.shape[1])

    def put(self, rows: np.ndarray, others: TaskBatch) -> None:
        """Write ``others``, samples of the same lengths, over some rows of this batch."""
        for name, values in vars(self).items():
            if values is not None:
                source = getattr(others, name)
                values[(rows, *(slice(0, size) for size in source.shape[1:]))] = source


def between(first: int | np.ndarray, end: np.ndarray, width: int) -> np.ndarray:
    """Which of ``width`` columns are in {first … end-1} of each row, (B, width) bool."""
    columns = np.arange(width)
    return (columns >= np.asarray(first)[..., None]) & (columns < end[:, None])
