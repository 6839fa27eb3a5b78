"""Exact match with counts made up, as records and frames: what pooling, figures and the bound are tested against."""

import numpy as np
import pandas as pd

from analysis.synthetic.exact_match import pool, record_frame

SAMPLES = 200
SPARSE = {
    "train_length": [20, 50],
    "test_length": [20, 500],
    "k_train": 4,
    "k_test": [4, 6, 8, 10, 12, 14, 16],
}
PARITY = {"train_length": [5, 20], "test_length": [5, 200]}
ASSIGNMENT = {"train_length": [1, 4], "test_length": [1, 12], "chains": 2}


def row(
    length: int, exact: int, k: int | None = None, wrong: tuple[int, int, int] = (0, 0, 0), p=np.nan
) -> dict:
    """Samples that are exact, and whose first error is in token, id, stop; ``p``: mean probability, deviation 0.1."""
    names = ("wrong_token", "wrong_id", "wrong_stop")
    samples = exact + sum(wrong)
    counts = {"samples": samples, "exact": exact, **dict(zip(names, wrong, strict=True))}
    forced = {"teacher_forced_exact": exact, "response_tokens": samples, "teacher_forced_tokens": exact}
    probabilities = {"mean_probability": p, "std_probability": 0.1 + 0 * p}
    return {"length": length, "k": k, **counts, **forced, "teacher_forced_ids": None, **probabilities}


def record(rows_of_record: list[dict], task: str = "sparse_parity", **changes) -> dict:
    """The record of one evaluation; ``task_changes`` replaces parameters of the task, ``changes`` the record's."""
    defaults = {"scratchpad_parity": PARITY, "variable_assignment": ASSIGNMENT}.get(task, SPARSE)
    parameters = {**defaults, **changes.pop("task_changes", {})}
    values = {
        **{"checkpoint": "runs/made-up/step3000", "step": 3000, "weights_sha256": "a" * 64, "commit": "abc"},
        **{"machine": "none", "task": {"name": task, "parameters": parameters}, "trained": parameters},
        **{"scheme": "pose", "rotate": None, "skip_probability": None, "family": "gpt_neox", "options": {}},
        **{
            "initial_weights": False,
            "parameters": 420_000,
            "seed": 1,
            "evaluation_seed": 0,
            "rows": rows_of_record,
        },
    }
    return {**values, **changes}


def rows(rows_of_record: list[dict], task: str = "sparse_parity", **changes) -> pd.DataFrame:
    """The frame of a `record`."""
    return record_frame(record(rows_of_record, task, **changes))


def pooled(*frames: pd.DataFrame) -> pd.DataFrame:
    """Their points."""
    return pool(pd.concat(frames, ignore_index=True))
