"""The record of an exact match, `exact_match.json`: what it says, and whether it is there already."""

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
from olmo_sparsity.evaluate.exact_match import Cell, LengthResult
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
    values, default = ({name: field_value(of, name) for name in _FURTHER} for of in (config, Config()))
    options = {name: value for name, value in values.items() if value != default[name]}
    if config.model.family == "tuples":
        options |= {f"model.tuples.{name}": value for name, value in asdict(config.model.tuples).items()}
    return options


def record_is_of(
    path: Path, checkpoint: Path, task: Task, cells: Sequence[Cell], *, samples: int, seed: int
) -> bool:
    """Whether a record is there already, of these weights on this task's cells; False for a file that is not one.

    The weights are verified, by `load_model`.
    """
    try:
        record = read_exact_match(path)
    except UserError:
        return False
    of_record = record["weights_sha256"], record["evaluation_seed"], record["task"]["parameters"]
    rows = [(row["length"], row["k"], row["samples"]) for row in record["rows"]]
    wanted = weights_sha256(checkpoint, is_verified=True), seed, json.loads(json.dumps(asdict(task)))
    return of_record == wanted and rows == [(*cell, samples) for cell in cells]
