"""Which checkpoint a run goes on from, and that nobody else trains in its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from olmo_sparsity.checkpoint import (
    CONFIG,
    TOKENIZER,
    checkpoints,
    load_state,
    resolve_checkpoint,
)
from olmo_sparsity.config.load import load_config
from olmo_sparsity.config.schema import Config, leaves, may_change
from olmo_sparsity.data.windows import run_tokenizer
from olmo_sparsity.training.engine import Engine, chosen_precision
from olmo_sparsity.training.log import METRICS_NAME
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import folder_lock, remove, sha256_file

log = logging.getLogger(__name__)

PROVENANCE_NAME = "provenance.json"


def starting_checkpoint(config: Config, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a fresh start. Changes nothing.

    Raises `UserError` for a folder that holds a run which is neither to be resumed nor overwritten, or one of other
    settings.
    """
    existing = checkpoints(config.save_folder)
    if not existing or (config.save_overwrite and not resume):
        return None
    if not resume:
        raise UserError(
            f"{config.save_folder} already holds {existing[-1].name}; go on with --resume, start over with "
            "--save_overwrite, or choose another --save_folder"
        )
    _refuse_another_run(config, existing[-1])
    return existing[-1]


def initial_checkpoint(config: Config) -> Path | None:
    """The checkpoint that a fresh start takes its weights from; None for freshly drawn ones.

    Raises `UserError` where it is none, has another tokenizer, or would be overwritten.
    """
    if config.initial_weights is None:
        return None
    initial, tokenizer = resolve_checkpoint(config.initial_weights), run_tokenizer(config)
    if initial.resolve().parent == Path(config.save_folder).resolve():
        raise UserError(
            f"initial_weights: {initial} is in the folder that would be overwritten; choose another --save_folder"
        )
    its = initial / TOKENIZER
    if tokenizer is not None and its.is_file() and sha256_file(tokenizer) != sha256_file(its):
        raise UserError(
            f"initial_weights: {initial} has another tokenizer than the text; prepare the text with --tokenizer {its}"
        )
    log.info("starting from the weights of %s", initial)
    return initial


def is_finished(config: Config, checkpoint: Path) -> bool:
    """Whether the run reached what ``config`` asks for."""
    saved = load_config(checkpoint / CONFIG, warn=False)
    same_end = saved.max_duration == config.max_duration and saved.evaluation.until == config.evaluation.until
    return load_state(checkpoint).finished and same_end


def _refuse_another_run(config: Config, folder: Path) -> None:
    """A run goes on only with the settings that decide its losses, and in the precision that was chosen for it."""
    saved = load_config(folder / CONFIG, warn=False)
    before, now = leaves(saved), leaves(config)
    for name in {**before, **now}:  # a section may have its fields in one of them alone
        if not may_change(name):
            refuse_change(folder, name, before.get(name), now.get(name))
    precision = load_state(folder).precision
    if precision is not None:
        names = {"no": "fp32", "bf16": "amp_bf16"}
        refuse_change(folder, "precision", names[precision], names[chosen_precision(config)])
    if saved.max_duration != config.max_duration:
        log.warning(
            "%s: max_duration was %s and is now %s; from here on the learning rate follows the new length",
            *(folder, saved.max_duration, config.max_duration),
        )


def refuse_change(folder: Path, name: str, before: object, now: object) -> None:
    """Raise `UserError` unless what decides the losses is as it was when the checkpoint ``folder`` was written."""
    if before != now:
        raise UserError(
            f"cannot resume {folder}: {name} was {before} and is now {now}; set it back, or choose another "
            "--save_folder"
        )


@contextmanager
def run_folder(config: Config, engine: Engine, last: Path | None, resume: bool) -> Iterator[None]:
    """Hold the run's folder while the block trains, cleared of what a killed or overwritten run left in it. Collective.

    Raises `UserError` in every process where another one trains there.
    """

    def claim() -> None:
        held.enter_context(folder_lock(config.save_folder))
        if starting_checkpoint(config, resume) != last:
            raise UserError(
                f"{config.save_folder} was changed by another process; run the same command again"
            )
        # Of a run that was killed while it saved; another command may be writing to the folder now.
        folder, names = Path(config.save_folder), ("step*", METRICS_NAME, PROVENANCE_NAME)
        leftovers = [path for name in names for path in folder.glob(f".{name}.tmp-*")]
        for path in [*leftovers, *([] if resume else checkpoints(folder))]:
            remove(path)

    with ExitStack() as held:
        engine.on_main(claim)
        yield
