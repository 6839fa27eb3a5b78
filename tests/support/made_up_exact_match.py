"""Records of exact match as the evaluation writes them, with counts made up: what Figure 1 is tested against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

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


def write_sparse(folder: Path) -> None:
    """K_train 4, 8, 12; seven k each; accuracy falls with length, and faster for a k beyond K_train."""
    rng = np.random.default_rng(0)
    for k_train in (4, 8, 12):
        for seed in (1, 2, 3):
            better = rng.normal(0, 0.25)
            rows = []
            for k in SPARSE["k_test"]:
                for length in (20, 30, 50, 80, 100, 150, 200, 300, 500):
                    if length < 2 * k:
                        continue
                    worse = max(k - k_train, 0) * 0.6 + 0.0004 * (length - 20) * k / 4 * 2**better + 0.004
                    right = int(rng.binomial(SAMPLES, 0.5 + 0.5 * np.exp(-2 * worse)))
                    rows.append(row(length, right, k, (SAMPLES - right, 0, 0)))
            value = record(rows, seed=seed, task_changes={"k_train": k_train})
            write(folder / f"k{k_train}-seed{seed}", value)


def write_schemes(folder: Path) -> None:
    """Two tasks with coupled ids under four schemes: PoSE breaks early, coupled ids late."""
    rng = np.random.default_rng(0)
    lengths = {
        "scratchpad_parity": (5, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200),
        "variable_assignment": tuple(range(1, 13)),
    }
    reach = {"contiguous": 1.15, "pose": 2.0, "coupled": 7.0, "predicted": 5.0}
    for task, places in lengths.items():
        trained = (PARITY if task == "scratchpad_parity" else ASSIGNMENT)["train_length"][1]
        for number, (scheme, far) in enumerate(reach.items()):
            for seed in (1, 2, 3):
                own = far * trained * 2 ** rng.normal(0, 0.12)
                rows = []
                for length in places:
                    right = int(rng.binomial(SAMPLES, 1 / (1 + (length / own) ** 8)))
                    ids = 0.3 if scheme == "predicted" else 0.0
                    wrong = rng.multinomial(SAMPLES - right, (0.8 - ids, ids, 0.2)).tolist()
                    rows.append(row(length, right, None, tuple(wrong)))
                value = record(rows, task, scheme=scheme, seed=seed, parameters=400_000 + number)
                write(folder / f"{task}-{scheme}-{seed}", value)


def write_options(folder: Path) -> None:
    """PPC on parity with ids in fewer samples, and with wrong ids: the fewer, or the more are wrong, the worse."""
    rng = np.random.default_rng(0)
    varied = {"positions.coupled_share": (1.0, 0.5, 0.05), "positions.id_noise": (0.1, 0.4)}
    for name, values in varied.items():
        for value in values:
            harm = value if name.endswith("noise") else 1 - value
            options = {} if value == 1 else {name: value}
            for seed in (1, 2):
                rows = []
                for length in (10, 20, 60, 100, 150, 200):
                    right = int(rng.binomial(SAMPLES, np.exp(-harm * length / 100)))
                    rows.append(row(length, right, None, (SAMPLES - right, 0, 0)))
                made = record(rows, "scratchpad_parity", scheme="predicted", seed=seed, options=options)
                write(folder / f"{name}-{value}-{seed}", made)
