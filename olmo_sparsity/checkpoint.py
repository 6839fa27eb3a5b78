"""Checkpoint folders: written whole or not at all, read without Accelerate or DeepSpeed.

    RUN/step00001000/  model.safetensors  optimizer.safetensors  state.json  config.yaml  tokenizer.json  checksums.json

No file is a pickle. `state.json` is the data and step state; tensors of the optimizer are stored under
`<parameter>|<state>`. Random state is not stored: data order, position ids and dropout are functions of the step.
"""

from __future__ import annotations

import base64
import json
import logging
import pickletools
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from olmo_sparsity.util.errors import UserError, hidden_os_error
from olmo_sparsity.util.files import atomic_path, read_json, sha256_file

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.build import Model

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, CONFIG, TOKENIZER, CHECKSUMS = "state.json", "config.yaml", "tokenizer.json", "checksums.json"
_NEVER_ABSENT = (WEIGHTS, OPTIMIZER, STATE, CONFIG)
_STEP_FOLDER = re.compile(r"step(\d+)$")
_WRAPPER = re.compile(r"(_orig_mod|module)\.")


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; with the configuration it determines every batch that follows."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    finished: bool = False
    """The run reached its full duration."""
    precision: str | None = None
    """Accelerate's name of the precision that it was trained in; None in checkpoints of older versions."""
    data: str | None = None
    """Identity of the text it is trained on, whatever its path; None for a task, and in older checkpoints."""


def step_folder(run: str | Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return Path(run) / f"step{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; they are renamed into place when whole."""
    found = [path for path in Path(run).glob("step*") if _STEP_FOLDER.match(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """After how many steps a checkpoint was written, by the name of its folder."""
    match = _STEP_FOLDER.match(folder.name)
    assert match is not None, folder
    return int(match[1])


def incompleteness(folder: Path, *, optimizer: bool = True) -> str | None:
    """What is missing of a checkpoint's files, in words; None where all have the sizes noted in it.

    Folders are renamed when whole, so this finds what happened later: a copy that was cut off, a disk that failed.
    Without ``optimizer`` it does not look at the optimizer's file.
    """
    try:
        listed = read_json(folder / CHECKSUMS, "")
        names = (*_NEVER_ABSENT, *listed.keys() & {TOKENIZER})
        sizes = {name: listed[name]["bytes"] for name in names}
    except (UserError, KeyError, TypeError):
        return f"{CHECKSUMS} is missing or damaged"
    for name, size in sizes.items():
        path = folder / name
        if name == OPTIMIZER and not optimizer:
            continue
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} is damaged"
    return None


def last_whole_checkpoint(run: str | Path, *, optimizer: bool = True) -> Path | None:
    """The latest checkpoint whose files are whole; torn ones are skipped with a warning.

    Raises `UserError` that says what is damaged where there are checkpoints and none is whole.
    """
    torn = {}
    for folder in reversed(checkpoints(run)):
        torn[folder] = incompleteness(folder, optimizer=optimizer)
        if torn[folder] is None:
            for other in list(torn)[:-1]:
                log.warning("skipping the torn checkpoint %s: %s", other, torn[other])
            return folder
    if not torn:
        return None
    damage = "; ".join(f"{folder.name}: {what}" for folder, what in torn.items())
    raise UserError(
        f"no checkpoint of {run} is whole ({damage}); copy one again from where it was saved, or start over with "
        "--save_overwrite, which removes them"
    )


def resolve_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder with whole weights, given itself or the run that holds it (then its last).

    Raises `UserError` for neither, for a damaged checkpoint, and for a run that has gone on to a damaged one: what an
    earlier checkpoint says may not be what is asked.
    """
    path = Path(path)
    found = checkpoints(path)
    if (path / WEIGHTS).is_file() or (path.is_dir() and _STEP_FOLDER.match(path.name) and not found):
        if (path / "config.json").is_file():
            return path  # a directory of transformers
        if is_of_olmo(path):
            return path
        if torn := incompleteness(path, optimizer=False):
            raise UserError(f"{path} is damaged ({torn}); copy it again, or give another checkpoint")
        return path
    last = last_whole_checkpoint(path, optimizer=False)
    if last is None and (path / "model.pt").is_file():
        raise UserError(
            f"{path / 'model.pt'} is a pickle, and none is read; write its tensors beside it as {WEIGHTS} with OLMo's "
            "olmo.safetensors_util.state_dict_to_safetensors_file"
        )
    if last is None:
        raise UserError(f"{path} is neither a checkpoint nor a run with one; train it with scripts/train.py")
    if last != found[-1] and not load_state(last).finished:
        torn = incompleteness(found[-1], optimizer=False)
        raise UserError(
            f"{found[-1]} is damaged ({torn}); copy it again, or give an earlier checkpoint, such as {last}"
        )
    return last


def save_checkpoint(
    run: str | Path,
    config: Config,
    state: TrainState,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tokenizer: bytes | None,
) -> Path:
    """Write one checkpoint folder, atomically, and return it."""
    folder = step_folder(run, state.step)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        _save_tensors(weights, temporary / WEIGHTS)
        _save_tensors(optimizer, temporary / OPTIMIZER)
        config.save(temporary / CONFIG)
        if tokenizer is not None:
            (temporary / TOKENIZER).write_bytes(tokenizer)
        (temporary / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf8")
        files: dict[str, dict[str, int | str]] = {
            path.name: {"bytes": path.stat().st_size} for path in temporary.iterdir()
        }
        files[WEIGHTS]["sha256"] = sha256_file(temporary / WEIGHTS)
        (temporary / CHECKSUMS).write_text(json.dumps(files) + "\n", encoding="utf8")
    return folder


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise (hidden_os_error(error, path) or error) from error


def load_state(folder: Path) -> TrainState:
    """Where the run stood at this checkpoint."""
    remedy = "resume from an earlier checkpoint"
    try:
        state = TrainState(**read_json(folder / STATE, remedy))
    except TypeError as error:
        raise UserError(f"{folder / STATE} is damaged ({error}); {remedy}") from error
    if [type(value) for value in (state.step, state.tokens, state.finished)] != [int, int, bool]:
        raise UserError(
            f"{folder / STATE} is damaged (step, tokens or finished is of another type); {remedy}"
        )
    return state


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises `UserError` for a missing or damaged one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); use an earlier checkpoint") from error


def config_of(folder: Path) -> Config:
    """The configuration of a checkpoint folder. Raises `UserError` for one that this project did not train."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}; give a run that scripts/train.py trained")
    from olmo_sparsity.config.load import (
        load_config,  # here: it needs OLMo, and measuring other models does not
    )

    return load_config(folder / CONFIG, warn=False, only=("model", "seed") if is_of_olmo(folder) else ())


def is_of_olmo(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ai2-olmo itself: its config.yaml and safetensors of its names, unlisted."""
    if (folder / CHECKSUMS).exists() or not ((folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()):
        return False
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return all(name != _without_pickle(name) for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _without_pickle(name: str) -> str:
    """A tensor's name, which OLMo's safetensors hold as a pickled tuple in base64; the pickle is not run."""
    if "." in name:  # no sign of base64
        return name
    try:
        read = pickletools.genops(base64.urlsafe_b64decode(name))
        return ".".join(str(text) for code, text, _ in read if "UNICODE" in code.name)
    except ValueError:
        return name


def load_model(checkpoint: str | Path) -> tuple[Model, Config]:
    """The model of a checkpoint (or of a run's last one), on the CPU in evaluation mode, and its configuration."""
    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    from olmo_sparsity.model.build import empty_model

    model = empty_model(config)
    load_weights(model, folder)
    return model.eval(), config


def load_weights(model: torch.nn.Module, folder: Path, *, attention_may_be_new: bool = False) -> None:
    """Load a checkpoint's weights. Raises `UserError` that names the first tensor which does not fit.

    With ``attention_may_be_new`` what the model's attention has of its own, and the checkpoint has not, stays as drawn.
    """
    tensors = load_tensors(folder / WEIGHTS)
    if is_of_olmo(folder):
        tensors = {_without_pickle(name): each.float() for name, each in tensors.items()}
    expected = model.state_dict()
    if attention_may_be_new:
        tensors = {name: each for name, each in expected.items() if ".mixer." in name} | tensors
    for name in sorted(expected.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "absent"
        wanted = tuple(expected[name].shape) if name in expected else "absent"
        if found != wanted:
            refuse_wrapped(tensors, folder / WEIGHTS)
            raise UserError(
                f"{folder / WEIGHTS} is of another model shape: {name} is {found} there and {wanted} in the "
                "configuration; use the config.yaml beside the checkpoint"
            )
    model.load_state_dict(tensors)


def refuse_wrapped(names: Iterable[str], path: Path) -> None:
    """Raise `UserError` where tensors have the names that torch.compile or data parallel training gives them."""
    if wrapper := next(filter(None, map(_WRAPPER.match, names)), None):
        raise UserError(
            f"the names of weights in {path} begin with {wrapper[0]}, as of a model inside torch.compile or data "
            f"parallel training; save the model inside, model.{wrapper[1]}"
        )


def weights_sha256(checkpoint: str | Path) -> str:
    """Checksum of a checkpoint's weights, which identifies it in records.

    Raises `UserError` where it is not the one that was noted when they were saved.
    """
    folder = resolve_checkpoint(checkpoint)
    sha256 = sha256_file(folder / WEIGHTS)
    noted = read_json(folder / CHECKSUMS, "")[WEIGHTS] if (folder / CHECKSUMS).is_file() else {}
    if noted.get("sha256", sha256) != sha256:
        raise UserError(
            f"{folder / WEIGHTS} is damaged: its checksum is another than when it was saved; copy it again"
        )
    return sha256
