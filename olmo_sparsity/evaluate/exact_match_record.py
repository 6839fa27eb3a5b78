"""The record of an exact match, `exact_match.json`: its content, and whether a file has it already."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from olmo_sparsity.checkpoint import load_state, weights_sha256
from olmo_sparsity.config.fields import field_value
from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.build import task_of
from olmo_sparsity.evaluate.exact_match import LengthResult, Size
from olmo_sparsity.model.predictive import PositionPredictor
from olmo_sparsity.tasks import Task
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import EXACT_MATCH, read_exact_match
from olmo_sparsity.util.provenance import available_cores, current_commit

_FURTHER = (
    "positions.coupled_share",
    "positions.id_noise",
    "positions.id_weight",
    "task.length_groups",
    "model.attention",
    "model.rope_window",
    "model.nope_layer_interval",
    "positions.target_length",
    "positions.chunks",
    "positions.table_size",
    "evaluation.until",
    "max_duration",
    "global_train_batch_size",
    "optimizer.learning_rate",
)


def exact_match_record(
    checkpoint: Path,
    config: Config,
    task: Task,
    model: PositionPredictor,
    rows: Sequence[LengthResult],
    *,
    seed: int,
    device: torch.device | str,
) -> dict[str, Any]:
    """What `exact_match.json` says of a checkpoint folder, whose weights `load_model` has verified.

    ``config`` is the run's, ``task`` what was measured, perhaps with other parameters, ``seed`` the evaluation's.
    """
    return {
        **EXACT_MATCH,
        "run": checkpoint.resolve().parent.name,
        "checkpoint": str(checkpoint),
        "step": load_state(checkpoint).step,
        "weights_sha256": weights_sha256(checkpoint, is_verified=True),
        "commit": current_commit(),
        "machine": torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else f"{available_cores()} {platform.machine()} cores",
        "task": {"name": task.name, "parameters": asdict(task)},
        "trained": asdict(task_of(config)),
        "scheme": config.positions.scheme,
        "rotate": model.options.rotate,
        "skip_probability": config.positions.skip_probability if model.options.is_coupled else None,
        "family": config.model.family,
        "options": further_options(config),
        "initial_weights": config.initial_weights is not None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seed": config.seed,
        "evaluation_seed": seed,
        "rows": [asdict(row) for row in rows],
    }


def further_options(config: Config) -> dict[str, Any]:
    """What else of a config decides how a task was learned, by dotted name: what is not at its default.

    Of tuples all of their options.
    """
    default = Config()
    options = {
        name: field_value(config, name)
        for name in _FURTHER
        if field_value(config, name) != field_value(default, name)
    }
    if config.model.family == "tuples":
        options |= {f"model.tuples.{name}": value for name, value in asdict(config.model.tuples).items()}
    return options


def record_is_of(
    path: Path, checkpoint: Path, task: Task, sizes: Sequence[Size], *, samples: int, seed: int
) -> bool:
    """Whether a record is there already, of these weights on these sizes of the task; False for a file that is not one.

    The weights are verified, by `load_model`.
    """
    try:
        record = read_exact_match(path)
        rows = [(row["length"], row["k"], row["samples"]) for row in record["rows"]]
        parameters = record["task"]["parameters"]
        weights = record["weights_sha256"]
        evaluation_seed = record["evaluation_seed"]
    except (KeyError, TypeError, UserError):  # one that lacks fields is no record
        return False
    return (
        weights == weights_sha256(checkpoint, is_verified=True)
        and evaluation_seed == seed
        and parameters == json.loads(json.dumps(asdict(task)))
        and rows == [(length, k, samples) for length, k in sizes]
    )
