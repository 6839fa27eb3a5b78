"""Checkpoint folders: written whole or not at all, read without Accelerate or DeepSpeed.

    RUN/step00001000/  model.safetensors  optimizer.safetensors  state.json  config.yaml  tokenizer.json  checksums.json

No file is a pickle. `state.json` is the data and step state; tensors of the optimizer are stored under
`<parameter>|<state>`. Random state is not stored: data order, position ids and dropout are functions of the step.
"""

from __future__ import annotations

import base64
import json
import pickletools
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.extras import require_extra
from olmo_sparsity.util.files import atomic_path, read_json, sha256_file, user_path

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.build import Model

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, CONFIG, TOKENIZER, CHECKSUMS = "state.json", "config.yaml", "tokenizer.json", "checksums.json"
_STEP_FOLDER = re.compile(r"step(\d+)$")
_DAMAGED = "copy it again, or remove this checkpoint to go on from the one before it"


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
    folders = [path for path in Path(run).glob("step*") if _STEP_FOLDER.match(path.name) and path.is_dir()]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """After how many steps a checkpoint was written, by the name of its folder."""
    match = _STEP_FOLDER.match(folder.name)
    assert match is not None, folder
    return int(match[1])


def resolve_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, given itself or the run that holds it (then its last). Raises `UserError` for neither."""
    path = user_path(path)
    if (path / WEIGHTS).is_file():
        return path
    if not (existing := checkpoints(path)):
        raise UserError(
            f"{path} is neither a checkpoint nor a run with one; train it with olmo-sparsity train (of ai2-olmo's, "
            f"{WEIGHTS} is read, and model.pt, a pickle, is not)"
        )
    return existing[-1]


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
        for name, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / name)
        config.save(temporary / CONFIG)
        if tokenizer is not None:
            (temporary / TOKENIZER).write_bytes(tokenizer)
        (temporary / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf8")
        noted = {WEIGHTS: {"sha256": sha256_file(temporary / WEIGHTS)}}
        (temporary / CHECKSUMS).write_text(json.dumps(noted) + "\n", encoding="utf8")
    return folder


def load_state(folder: Path) -> TrainState:
    """Where the run stood at this checkpoint."""
    return TrainState(**read_json(folder / STATE, _DAMAGED))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises `UserError` for a missing or damaged one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_DAMAGED}") from error


def config_of(folder: Path) -> Config:
    """The configuration of a checkpoint folder. Raises `UserError` for one that this project did not train."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder} has no {CONFIG}; give a run of olmo-sparsity train")
    require_extra("train", "olmo", "omegaconf")  # not above: measuring other models does not need them
    from olmo_sparsity.config.load import load_config

    return load_config(folder / CONFIG, warn=False, only=("model", "seed") if is_of_olmo(folder) else ())


def is_of_olmo(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ai2-olmo itself: its config.yaml and safetensors of its names, unlisted."""
    if (folder / CHECKSUMS).exists() or not ((folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()):
        return False
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            return not any("." in name for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return False


def _without_pickle(name: str) -> str:
    """A tensor's name, which OLMo's safetensors hold as a pickled tuple in base64; the pickle is not run."""
    read = pickletools.genops(base64.urlsafe_b64decode(name))
    return ".".join(str(text) for code, text, _ in read if "UNICODE" in code.name)


def load_model(checkpoint: str | Path) -> tuple[Model, Config]:
    """The model of a checkpoint (or of a run's last one), on the CPU in evaluation mode, and its configuration."""
    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    from olmo_sparsity.model.build import empty_model

    model = empty_model(config)
    load_weights(model, folder)
    return model.eval(), config


def load_weights(model: torch.nn.Module, folder: Path, *, attention_may_be_new: bool = False) -> None:
    """Load a checkpoint's weights. Raises `UserError` that names the tensors which do not fit.

    With ``attention_may_be_new`` what the model's attention has of its own, and the checkpoint has not, stays as drawn.
    """
    tensors = load_tensors(folder / WEIGHTS)
    if is_of_olmo(folder):
        tensors = {_without_pickle(name): tensor.float() for name, tensor in tensors.items()}
    if attention_may_be_new:
        drawn = model.state_dict()
        tensors = {name: drawn[name] for name in drawn if ".mixer." in name} | tensors
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{folder / WEIGHTS} is of another model: {' '.join(str(error).split())}") from error


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
