"""Records of exact match as the evaluation writes them, with counts made up: what Figure 1 is tested against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SAMPLES = 200
SPARSE = {
    "train_length": [20, 50],
    "test_length": [20, 500],
    "k_train": 4,
    "k_test": [4, 6, 8, 10, 12, 14, 16],
}
PARITY = {"train_length": [5, 20], "test_length": [5, 200]}
ASSIGNMENT = {
    "train_length": [1, 4], "test_length": [1, 12], "chains": 2, "distractors": 2, "num_variables": 32,
    "num_values": 10,
}  # fmt: skip


def row(length: int, exact: int, k: int | None = None, wrong: tuple[int, int, int] = (0, 0, 0)) -> dict:
    """A row whose samples are what is exact and what is wrong in token, id and stop."""
    names = ("wrong_token", "wrong_id", "wrong_stop")
    samples = exact + sum(wrong)
    return {
        "length": length, "k": k, "samples": samples, "exact": exact, **dict(zip(names, wrong, strict=True)),
        "teacher_forced_exact": exact, "response_tokens": samples, "teacher_forced_tokens": exact,
        "teacher_forced_ids": None,
    }  # fmt: skip


def record(rows: Sequence[dict], task: str = "sparse_parity", **changes: Any) -> dict:
    """A record of these rows; ``task_changes`` replaces parameters of the task, ``changes`` fields of the record."""
    own = {"scratchpad_parity": PARITY, "variable_assignment": ASSIGNMENT}.get(task, SPARSE)
    parameters = {**own, **changes.pop("task_changes", {})}
    values = {
        "format": 1, "run": "made-up", "checkpoint": "runs/made-up/step3000", "step": 3000, "weights_sha256": "a" * 64,
        "commit": "abc", "machine": "none", "task": {"name": task, "parameters": parameters}, "scheme": "pose",
        "rotate": None, "skip_probability": None, "family": "gpt_neox", "parameters": 420_000, "seed": 1,
        "evaluation_seed": 0,
        "rows": list(rows),
    }  # fmt: skip
    return {**values, **changes}


def write(path: Path, value: dict) -> Path:
    """A record as `exact_match.json` in the folder ``path``."""
    path.mkdir(parents=True)
    (path / "exact_match.json").write_text(json.dumps(value), encoding="utf8")
    return path / "exact_match.json"
