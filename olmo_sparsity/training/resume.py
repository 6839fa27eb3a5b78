"""Which checkpoint a run goes on from, and that nobody else trains in its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from olmo_sparsity.checkpoint import (
    TOKENIZER,
    checkpoints,
    config_of,
    load_state,
    resolve_checkpoint,
    setting_aside,
    step_of,
    weights_sha256,
)
from olmo_sparsity.config.durations import parse_steps
from olmo_sparsity.config.fields import RECORDED_ON_RESUME, field_value, leaves, may_change
from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.build import run_tokenizer
from olmo_sparsity.training.engine import Engine, chosen_precision
from olmo_sparsity.training.log import METRICS_NAME
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import folder_lock, read_json, remove, set_aside, sha256_file, write_json
from olmo_sparsity.util.provenance import provenance

log = logging.getLogger(__name__)

PROVENANCE_NAME = "provenance.json"
_PRECISIONS = {"no": "fp32", "bf16": "amp_bf16"}
"""Accelerate's names, and those of the config."""


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

    Raises `UserError` where it is none, has another tokenizer or other heads, or would be overwritten.
    """
    if config.initial_weights is None:
        return None
    initial = resolve_checkpoint(config.initial_weights)
    tokenizer = run_tokenizer(config)
    if initial.resolve().parent == Path(config.save_folder).resolve():
        raise UserError(
            f"initial_weights: {initial} is in the folder that would be overwritten; choose another --save_folder"
        )
    heads = config_of(initial).model.n_heads
    if heads != config.model.n_heads:  # tensors have the same shapes, and mean something else
        raise UserError(
            f"initial_weights: {initial} has model.n_heads {heads}, and this model has {config.model.n_heads}; "
            f"set --model.n_heads={heads}"
        )
    its_tokenizer = initial / TOKENIZER
    if (
        tokenizer is not None
        and its_tokenizer.is_file()
        and sha256_file(tokenizer) != sha256_file(its_tokenizer)
    ):
        raise UserError(
            f"initial_weights: {initial} has another tokenizer than the text; prepare the text with --tokenizer "
            f"{its_tokenizer}"
        )
    log.info("starting from the weights of %s", initial)
    return initial


def is_finished(config: Config, checkpoint: Path) -> bool:
    """Whether the run reached the end that ``config`` sets."""
    saved = config_of(checkpoint)
    same_end = saved.max_duration == config.max_duration and saved.evaluation.until == config.evaluation.until
    return load_state(checkpoint).finished and same_end


def _refuse_another_run(config: Config, folder: Path) -> None:
    """A run goes on only with the settings that decide its losses, but for those that a remedy may change."""
    saved = config_of(folder)
    state = load_state(folder)
    previous = leaves(saved)
    current = leaves(config)
    for name in {**previous, **current}:  # a section may have its fields in one of them alone
        if not may_change(name):
            refuse_change(folder, name, previous.get(name), current.get(name))
    chosen = chosen_precision(config.precision)
    if config.precision is None and state.precision not in (None, chosen):
        was = _PRECISIONS[str(state.precision)]
        would_be = _PRECISIONS[chosen]
        raise UserError(
            f"cannot resume {folder}: precision was {was}, and this machine would choose {would_be}; set "
            f"--precision={was} to keep it, or --precision={would_be} to change it"
        )
    _refuse_other_skips(config, saved, folder)


def _refuse_other_skips(config: Config, saved: Config, folder: Path) -> None:
    """Steps that are done were trained or skipped, whatever `data.skip_steps` says now."""
    last_step = step_of(folder)
    previous = parse_steps(saved.data.skip_steps)
    current = parse_steps(config.data.skip_steps)
    # Where two lists of ranges first differ, a range begins or ends.
    edges = {edge for steps in (*previous, *current) for edge in (steps.start, steps.stop)}
    for step in sorted(edge for edge in edges if edge <= last_step):
        was_skipped = any(step in steps for steps in previous)
        if was_skipped == any(step in steps for steps in current):
            continue
        if was_skipped:
            raise UserError(
                f"cannot resume {folder}: data.skip_steps was {saved.data.skip_steps}, and step {step} was left out; "
                f"give --data.skip_steps={saved.data.skip_steps} again, and further ranges after a comma"
            )
        all_checkpoints = checkpoints(folder.parent)
        later = [path for path in all_checkpoints if step_of(path) >= step]
        if len(later) < len(all_checkpoints):
            remedy = f"go on from before it: {setting_aside(later)}, and the same command again"
        else:
            remedy = "start over with --save_overwrite in place of --resume"
        raise UserError(
            f"data.skip_steps: step {step} is trained already, for {folder} is the checkpoint after step {last_step}; "
            f"skip steps from {last_step + 1} on, or {remedy}"
        )


def changed_settings(config: Config, folder: Path) -> dict[str, dict[str, Any]]:
    """What decides losses and is not as it was when the checkpoint ``folder`` was written: before and now, by name."""
    saved = config_of(folder)
    state = load_state(folder)
    previous = {name: field_value(saved, name) for name in sorted(RECORDED_ON_RESUME)}
    current = {name: field_value(config, name) for name in sorted(RECORDED_ON_RESUME)}
    if state.precision is not None:
        previous["precision"] = _PRECISIONS[state.precision]
        current["precision"] = _PRECISIONS[chosen_precision(config.precision)]
    return {
        name: {"before": previous[name], "now": current[name]}
        for name in previous
        if previous[name] != current[name]
    }


def append_provenance(config: Config, last: Path | None) -> None:
    """Add this start to the list in the `provenance.json` of the run folder, and say what changed since ``last``.

    A damaged file is set aside: no loss depends on it.
    """
    start: dict[str, Any] = {**provenance(), "precision": chosen_precision(config.precision)}
    if last is not None:
        start["resumed_at_step"] = step_of(last)
        start["changed"] = changed_settings(config, last)
        if start["changed"]:
            texts = [
                f"{name} {_short(values['before'])} -> {_short(values['now'])}"
                for name, values in start["changed"].items()
            ]
            log.info("resumed at step %s with %s", f"{step_of(last):,}", ", ".join(texts))
    elif config.initial_weights is not None:
        start["initial_weights_sha256"] = weights_sha256(config.initial_weights, is_verified=True)
    path = Path(config.save_folder) / PROVENANCE_NAME
    write_json(path, [*_earlier_starts(path), start])


def _short(value: object) -> str:
    """5e-05 as people write it, 5e-5."""
    return str(value).replace("e-0", "e-") if isinstance(value, float) else str(value)


def _earlier_starts(path: Path) -> list[Any]:
    if not path.exists():
        return []
    try:
        starts: list[Any] = read_json(path, "", expect=list)
    except UserError as error:
        log.warning("%skept as %s, and a new one is begun", error, set_aside(path).name)
        return []
    return starts


def refuse_change(folder: Path, name: str, previous: object, current: object) -> None:
    """Raise `UserError` unless what decides the losses is as it was when the checkpoint ``folder`` was written."""
    if previous != current:
        raise UserError(
            f"cannot resume {folder}: {name} was {previous} and is now {current}; set it back, or choose another "
            "--save_folder"
        )


@contextmanager
def run_folder(config: Config, engine: Engine, last: Path | None, resume: bool) -> Iterator[None]:
    """Hold the run's folder while the block trains, cleared of what a killed or overwritten run left in it. Collective.

    Raises `UserError` in every process where another one trains there, and where not all of them see the folder, in
    which each saves a share.
    """

    def claim() -> Path:
        held.enter_context(folder_lock(config.save_folder))
        if starting_checkpoint(config, resume) != last:
            raise UserError(
                f"{config.save_folder} was changed by another process; run the same command again"
            )
        # Of a run that was killed while it saved; another command may be writing to the folder now.
        folder = Path(config.save_folder)
        names = ("step*", METRICS_NAME, PROVENANCE_NAME)
        leftovers = [path for name in names for path in folder.glob(f".{name}.tmp-*")]
        for path in [*leftovers, *([] if resume else checkpoints(folder))]:
            remove(path)
        return folder

    with ExitStack() as held:
        folder = engine.on_rank_zero(claim)
        if any(engine.any_rank(not folder.is_dir())):
            raise UserError(
                f"{folder} is not there for all processes, which save their shares in it; give a --save_folder on a "
                "file system that all machines share"
            )
        yield
