"""Checkpoint life: which one a run goes on from, when one is written, which are kept."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path

from olmo_sparsity.checkpoint import (
    CONFIG,
    TrainState,
    checkpoints,
    last_whole_checkpoint,
    load_state,
    save_checkpoint,
    step_folder,
)
from olmo_sparsity.config import Config, load_config
from olmo_sparsity.data.windows import run_tokenizer
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import remove
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.training.schedule import Schedule

log = logging.getLogger(__name__)

_DECIDES_THE_LOSSES = (
    "model",
    "task",
    "optimizer",
    "positions",
    "corpus",
    "data",
    "seed",
    "global_train_batch_size",
)
_CHANGES_NO_LOSS = (
    "init_device",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "timeout",
    "heldout_split",
    "verify_checksums",
)


def starting_checkpoint(config: Config, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a fresh start.

    Raises `UserError` for a folder that holds a run which is neither to be resumed nor overwritten, or one of other
    settings.
    """
    found = checkpoints(config.save_folder)
    is_main = int(os.environ.get("RANK", "0")) == 0
    for leftover in Path(config.save_folder).glob(".*.tmp-*") if is_main else ():
        remove(leftover)  # of a run that was killed while it saved
    if not found:
        return None
    if resume:
        last = last_whole_checkpoint(config.save_folder)
        if last is not None:
            _refuse_another_run(config, last)
        return last
    if not config.save_overwrite:
        raise UserError(
            f"{config.save_folder} already holds {found[-1].name}; go on with --resume, start over with "
            "--save_overwrite, or choose another --save_folder"
        )
    for folder in found if is_main else ():
        remove(folder)
    return None


def _refuse_another_run(config: Config, folder: Path) -> None:
    """A run goes on only with the settings that decide its losses; its length and what it writes may change."""
    before, now = asdict(load_config(folder / CONFIG, warn=False)), asdict(config)
    for section in _DECIDES_THE_LOSSES:
        old, new = before[section], now[section]
        if not isinstance(old, dict):
            old, new = {"": old}, {"": new}
        for key in old:
            if old[key] != new.get(key) and key not in _CHANGES_NO_LOSS:
                name = f"{section}.{key}".rstrip(".")
                raise UserError(
                    f"cannot resume {folder}: {name} was {old[key]} and is now {new.get(key)}; set it back, or choose "
                    "another --save_folder"
                )


def saves_at(config: Config, step: int) -> bool:
    """Whether a checkpoint is due after this step."""
    intervals = (config.save_interval, config.save_interval_unsharded)
    return any(interval is not None and step % interval == 0 for interval in intervals)


def save(config: Config, engine: Engine, schedule: Schedule, step: int) -> Path:
    """Write the checkpoint after ``step`` from the main process and drop those that are not kept. Collective."""
    weights, optimizer = engine.weights(), engine.optimizer_tensors()
    state = TrainState(step, step * schedule.tokens_per_step, finished=step >= schedule.max_steps)

    def write() -> None:
        save_checkpoint(config.save_folder, config, state, weights, optimizer, run_tokenizer(config))
        for old in dropped(config, checkpoints(config.save_folder)):
            remove(old)

    engine.on_main(write)
    return step_folder(config.save_folder, step)


def dropped(config: Config, found: list[Path]) -> list[Path]:
    """Of the checkpoints ``found``, oldest first, those beyond the last m that are not among every p-th."""
    keep = max(config.save_num_checkpoints_to_keep, config.save_num_unsharded_checkpoints_to_keep)
    if keep <= 0:
        return []
    every = config.checkpoints.keep_every
    return [folder for folder in found[:-keep] if every is None or load_state(folder).step % every]
