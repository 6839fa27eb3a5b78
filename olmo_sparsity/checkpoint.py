"""Checkpoint folders: written whole or not at all, read without Accelerate or DeepSpeed.

    RUN/step00001000/  model.safetensors  optimizer.safetensors  state.json  config.yaml  tokenizer.json  checksums.json

No file is a pickle. `state.json` is the data and step state; tensors of the optimizer are stored under
`<parameter>|<state>`. Random state is not stored: data order, position ids and dropout are functions of the step.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from olmo_sparsity.build import Model, empty_model
from olmo_sparsity.config import Config, load_config
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import atomic_path, read_json, sha256_file

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, STATE, CONFIG, TOKENIZER = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.yaml",
    "tokenizer.json",
)
CHECKSUMS = "checksums.json"
_FILES = {WEIGHTS, OPTIMIZER, STATE, CONFIG, TOKENIZER}
_STEP_FOLDER = re.compile(r"step(\d+)$")


@dataclass(frozen=True)
class TrainState:
    """Where a run stands; with the configuration it determines every batch that follows."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    finished: bool = False
    """The run reached its full duration."""


def step_folder(run: str | Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return Path(run) / f"step{step:08d}"


def checkpoints(run: str | Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; they are renamed into place when whole."""
    found = [path for path in Path(run).glob("step*") if _STEP_FOLDER.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(_STEP_FOLDER.match(path.name).group(1)))  # type: ignore[union-attr]


def what_is_torn(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None where all have the sizes and checksums noted in it.

    Folders are renamed when whole, so this finds what happened later: a copy that was cut off, a disk that failed.
    """
    try:
        noted = read_json(folder / CHECKSUMS, "resume from an earlier checkpoint")
        sizes = {name: (expected["bytes"], expected["sha256"]) for name, expected in noted.items()}
    except (UserError, TypeError, KeyError):
        return f"{CHECKSUMS} is missing or damaged"
    if not sizes.keys() <= _FILES:
        return f"{CHECKSUMS} names other files than those of a checkpoint"
    for name, (size, sha256) in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or sha256_file(path) != sha256:
            return f"{name} is damaged"
    return None


def last_whole_checkpoint(run: str | Path) -> Path | None:
    """The latest checkpoint whose files are whole; torn ones are skipped with a warning."""
    for folder in reversed(checkpoints(run)):
        torn = what_is_torn(folder)
        if torn is None:
            return folder
        log.warning("skipping the torn checkpoint %s: %s", folder, torn)
    return None


def resolve_checkpoint(path: str | Path) -> Path:
    """A checkpoint folder, given itself or the run that holds it (then its last). Raises `UserError` for neither."""
    path = Path(path)
    if (path / WEIGHTS).is_file():
        return path
    found = checkpoints(path)
    if not found:
        raise UserError(f"{path} is neither a checkpoint nor a run with one; train it with scripts/train.py")
    return found[-1]


def save_checkpoint(
    run: str | Path,
    config: Config,
    state: TrainState,
    weights: dict[str, Tensor],
    optimizer: dict[str, Tensor],
    tokenizer: Path | None,
) -> Path:
    """Write one checkpoint folder, atomically, and return it."""
    folder = step_folder(run, state.step)
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        _save_tensors(weights, temporary / WEIGHTS)
        _save_tensors(optimizer, temporary / OPTIMIZER)
        config.save(temporary / CONFIG)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, temporary / TOKENIZER)
        (temporary / STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf8")
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in temporary.iterdir()
        }
        (temporary / CHECKSUMS).write_text(json.dumps(files) + "\n", encoding="utf8")
    return folder


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # the library hides the system's error number in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number.group(1)) if number else 0, str(error), str(path)) from error


def load_state(folder: Path) -> TrainState:
    """Where the run stood at this checkpoint."""
    remedy = "resume from an earlier checkpoint"
    values = read_json(folder / STATE, remedy)
    step, tokens, finished = (
        values.pop("step", None),
        values.pop("tokens", None),
        values.pop("finished", False),
    )
    if values or type(step) is not int or type(tokens) is not int or type(finished) is not bool:
        raise UserError(f"{folder / STATE} is damaged (it has other fields); {remedy}")
    return TrainState(step, tokens, finished)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file. Raises `UserError` for a missing or damaged one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); use an earlier checkpoint") from error


def load_model(checkpoint: str | Path) -> tuple[Model, Config]:
    """The model of a checkpoint (or of a run's last one), on the CPU in evaluation mode, and its configuration."""
    folder = resolve_checkpoint(checkpoint)
    config = load_config(folder / CONFIG, warn=False)
    model = empty_model(config)
    load_weights(model, folder)
    return model.eval(), config


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load a checkpoint's weights. Raises `UserError` that names the first tensor which does not fit."""
    tensors = load_tensors(folder / WEIGHTS)
    expected = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "absent"
        wanted = tuple(expected[name].shape) if name in expected else "absent"
        if found != wanted:
            raise UserError(
                f"{folder / WEIGHTS} is of another model shape: {name} is {found} there and {wanted} in the "
                "configuration; use the config.yaml beside the checkpoint"
            )
    model.load_state_dict(tensors)


def weights_sha256(checkpoint: str | Path) -> str:
    """Checksum of a checkpoint's weights, which identifies it in records."""
    return sha256_file(resolve_checkpoint(checkpoint) / WEIGHTS)
