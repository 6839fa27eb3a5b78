"""Checkpoint life: which one a run goes on from, when one is written, which are kept."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from olmo_sparsity.checkpoint import (
    CONFIG,
    TOKENIZER,
    TrainState,
    checkpoints,
    last_whole_checkpoint,
    load_state,
    resolve_checkpoint,
    save_checkpoint,
    step_folder,
    step_of,
    what_is_torn,
)
from olmo_sparsity.config.load import load_config
from olmo_sparsity.config.schema import Config, each_field
from olmo_sparsity.data.windows import run_tokenizer
from olmo_sparsity.training.engine import Engine, chosen_precision
from olmo_sparsity.training.metrics import METRICS_NAME
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import read_json, remove, sha256_file, write_json
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.provenance import provenance
from olmo_sparsity.util.signals import StoppedBySignal

log = logging.getLogger(__name__)

PROVENANCE_NAME = "provenance.json"


def starting_checkpoint(config: Config, resume: bool) -> Path | None:
    """The checkpoint to go on from; None for a fresh start. Changes nothing.

    Raises `UserError` for a folder that holds a run which is neither to be resumed nor overwritten, one of other
    settings, or one whose checkpoints are all damaged.
    """
    found = checkpoints(config.save_folder)
    if not found or (config.save_overwrite and not resume):
        return None
    if not resume:
        raise UserError(
            f"{config.save_folder} already holds {found[-1].name}; go on with --resume, start over with "
            "--save_overwrite, or choose another --save_folder"
        )
    last = last_whole_checkpoint(config.save_folder)
    assert last is not None, "there are checkpoints, so it raises where none is whole"
    _refuse_another_run(config, last)
    return last


def initial_checkpoint(config: Config) -> Path | None:
    """The checkpoint that a fresh start takes its weights from; None for freshly drawn ones.

    Raises `UserError` where it is none, has another tokenizer, or would be overwritten.
    """
    if config.initial_weights is None:
        return None
    found, own = resolve_checkpoint(config.initial_weights), run_tokenizer(config)
    if found.resolve().parent == Path(config.save_folder).resolve():
        raise UserError(
            f"initial_weights: {found} is in the folder that would be overwritten; choose another --save_folder"
        )
    its = found / TOKENIZER
    if own is not None and its.is_file() and sha256_file(own) != sha256_file(its):
        raise UserError(
            f"initial_weights: {found} has another tokenizer than the text; prepare the text with --tokenizer {its}"
        )
    log.info("starting from the weights of %s", found)
    return found


def is_finished(config: Config, checkpoint: Path) -> bool:
    """Whether the run reached what ``config`` asks for."""
    saved = load_config(checkpoint / CONFIG, warn=False)
    same_end = saved.max_duration == config.max_duration and saved.evaluation.until == config.evaluation.until
    return load_state(checkpoint).finished and same_end


def _refuse_another_run(config: Config, folder: Path) -> None:
    """A run goes on only with the settings that decide its losses."""
    saved = load_config(folder / CONFIG, warn=False)
    before, now = ({name: value for name, value, _ in each_field(values)} for values in (saved, config))
    fields = [*each_field(saved), *each_field(config)]  # a section may have its fields in one of them alone
    for name, _, known in fields:
        if before.get(name) != now.get(name) and not (known.free or known.replaced):
            raise _another_run(folder, name, before.get(name), now.get(name))
    _refuse_other_precision(config, folder)
    if saved.max_duration != config.max_duration:
        log.warning(
            "%s: max_duration was %s and is now %s; from here on the learning rate follows the new length",
            *(folder, saved.max_duration, config.max_duration),
        )


def _refuse_other_precision(config: Config, folder: Path) -> None:
    names = {"no": "fp32", "bf16": "amp_bf16"}
    before, now = load_state(folder).precision, chosen_precision(config)
    if before not in (None, now):
        asked = names.get(before, before)
        raise UserError(
            f"cannot resume {folder}: it was trained in {asked} and would go on here in {names[now]}; set "
            f"--precision={asked}"
        )


def refuse_other_data(state: TrainState, folder: Path, data: str | None) -> None:
    """Refuse to go on from ``folder`` on another text than it was trained on."""
    if state.data not in (None, data):
        raise _another_run(folder, "the text it is trained on", f"sha256 {state.data[:12]}", str(data)[:12])


def _another_run(folder: Path, name: str, before: object, now: object) -> UserError:
    return UserError(
        f"cannot resume {folder}: {name} was {before} and is now {now}; set it back, or choose another --save_folder"
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
        overwritten = [] if resume else [*checkpoints(folder), *folder.glob("error-rank*.txt")]
        for path in [*leftovers, *overwritten]:
            remove(path)

    with ExitStack() as held:
        engine.on_main(claim)
        yield


@contextmanager
def errors_noted(config: Config, engine: Engine) -> Iterator[None]:
    """Append the traceback of what ends the block to `error-rank<n>.txt` in the run's folder.

    Of many processes, standard error has them mixed, or only what the launcher let through. Bad input of one process
    alone is not noted: it is one line there.
    """
    try:
        yield
    except StoppedBySignal:
        raise
    except Exception as error:
        folder = Path(config.save_folder)
        if not isinstance(error, UserError) or (engine.processes > 1 and folder.is_dir()):
            time = datetime.now().astimezone().isoformat(timespec="seconds")
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / f"error-rank{engine.rank}.txt", "a", encoding="utf8") as file:
                    file.write(f"{time}\n{traceback.format_exc()}\n")
        raise


def saves_at(config: Config, step: int) -> bool:
    """Whether a checkpoint is due after this step."""
    intervals = (config.save_interval, config.save_interval_unsharded)
    return any(interval is not None and step % interval == 0 for interval in intervals)


def saved_tokenizer(config: Config) -> bytes | None:
    """What a checkpoint holds as its tokenizer, read at the start: the corpus may be gone when one is saved."""
    path = run_tokenizer(config)
    return None if path is None else path.read_bytes()


def save(
    config: Config, engine: Engine, step: int, data: str | None, tokenizer: bytes | None, *, finished: bool
) -> Path:
    """Write the checkpoint after ``step`` from the main process and drop those that are not kept. Collective."""
    weights, optimizer = engine.weights(), engine.optimizer_tensors()
    state = TrainState(step, step * config.tokens_per_step, finished, chosen_precision(config), data)

    def write() -> None:
        saved = save_checkpoint(config.save_folder, config, state, weights, optimizer, tokenizer)
        for old in dropped(config, saved):
            remove(old)

    engine.on_main(write)
    return step_folder(config.save_folder, step)


def dropped(config: Config, saved: Path) -> list[Path]:
    """Checkpoints of the run beyond the last m that are not among every p-th; ``saved`` is the last.

    Those due at OLMo's second interval, `save_interval_unsharded`, have a count of their own, as in OLMo; a count
    below 1 keeps all. Torn ones count for nothing and are left to the user, and so is what a damaged run has beyond
    ``saved``.
    """
    every, second = config.checkpoints.keep_every, config.save_interval_unsharded
    whole = [
        folder
        for folder in checkpoints(config.save_folder)
        if step_of(folder) <= step_of(saved) and what_is_torn(folder, checksums=False) is None
    ]
    of_second = [folder for folder in whole if second is not None and step_of(folder) % second == 0]
    of_first = [folder for folder in whole if folder not in of_second]
    old = []
    for folders, keep in (
        (of_first, config.save_num_checkpoints_to_keep),
        (of_second, config.save_num_unsharded_checkpoints_to_keep),
    ):
        old += folders[:-keep] if keep > 0 else []
    return [folder for folder in old if every is None or step_of(folder) % every]


def append_provenance(folder: str | Path, **told: Any) -> None:
    """Add this process, and what is ``told`` of it, to the list of starts in the `provenance.json` of a run folder."""
    path = Path(folder) / PROVENANCE_NAME
    remedy = "remove it, and run the same command again"
    before = read_json(path, remedy, expect=list) if path.is_file() else []
    write_json(path, [*before, {**provenance(), **told}])
