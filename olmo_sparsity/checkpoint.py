"""Checkpoint folders: read without Accelerate or DeepSpeed, written by `new_checkpoint.py`.

    RUN/step00001000/  model.safetensors  optimizer.safetensors  state.json  config.yaml  tokenizer.json  checksums.json

Of P > 1 processes each writes a shard of the weights and of the optimizer's state:

    model-00001-of-0000P.safetensors … model.safetensors.index.json  (for the optimizer likewise)

The index is of transformers' form and says which shard has a tensor. Any number of processes reads either form.
No file is a pickle. `state.json` is the data and step state; tensors of the optimizer are stored under
`<parameter>|<state>`. Random state is not stored: data order, position ids and dropout are functions of the step.
`checksums.json` has the SHA-256 of every other file. Whoever reads one compares it; older checkpoints have that of the
weights alone.
"""

from __future__ import annotations

import base64
import logging
import pickletools
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from olmo_sparsity.tensor_files import load_tensors, tensors_sha256
from olmo_sparsity.util.background import in_background
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.extras import require_extra
from olmo_sparsity.util.files import read_json, sha256_file, shard_names, user_path

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.build import Model

log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, CONFIG, TOKENIZER, CHECKSUMS = "state.json", "config.yaml", "tokenizer.json", "checksums.json"
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
    evaluation_due: bool = False
    """The run was stopped before the evaluation after this step."""
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
    # A checkpoint that lacks its weights has its checksums; those who read it name what is missing.
    if any((path / name).is_file() for name in (WEIGHTS, index_of(WEIGHTS), CHECKSUMS)):
        return path
    if not (existing := checkpoints(path)):
        raise UserError(
            f"{path} is neither a checkpoint nor a run with one; train it with olmo-sparsity train (of ai2-olmo's, "
            f"{WEIGHTS} is read, and model.pt, a pickle, is not)"
        )
    return existing[-1]


def index_of(name: str) -> str:
    """The index of the shards that stand in the place of one file, `WEIGHTS` or `OPTIMIZER`."""
    return f"{name}.index.json"


def shard_of(name: str, rank: int, count: int) -> str:
    """The file that ``rank`` of ``count`` processes writes in the place of one file, `WEIGHTS` or `OPTIMIZER`."""
    path = Path(name)
    return name if count == 1 else f"{path.stem}-{rank + 1:05d}-of-{count:05d}{path.suffix}"


def tensor_files(folder: Path, name: str) -> list[str]:
    """The files of a checkpoint that have the tensors of `WEIGHTS` or `OPTIMIZER`: this one, or its shards.

    Raises `UserError` for a damaged index, and for a shard without a checksum.
    """
    noted = noted_checksums(folder)
    if index_of(name) not in noted:
        return [name]
    shards = shard_names(verified(folder / index_of(name)), remedy_for(folder))
    if lacking := [shard for shard in shards if shard not in noted]:
        raise UserError(
            f"{folder / CHECKSUMS} is damaged (it has no checksum of {lacking[0]}); {remedy_for(folder)}"
        )
    return shards


def load_state(folder: Path) -> TrainState:
    """Where the run stood at this checkpoint."""
    path = verified(folder / STATE)
    remedy = remedy_for(folder)
    try:
        return TrainState(**read_json(path, remedy))
    except TypeError as error:  # of an older checkpoint, whose state has no checksum
        raise UserError(f"{path} is damaged ({first_line(error)}); {remedy}") from error


# --- damage, and what to do about it ---


def verify_checkpoint(folder: Path, names: Sequence[str]) -> None:
    """Compare the files of `WEIGHTS` or `OPTIMIZER`, all at once, with the checksums noted when they were saved.

    Raises `UserError` for the first that is another one. Says which have no checksum, as in older checkpoints; those of
    ai2-olmo itself have none.
    """
    noted = noted_checksums(folder)
    files = [file for name in names for file in tensor_files(folder, name)]
    running = {file: in_background(partial(sha256_file, folder / file)) for file in files if file in noted}
    for file, digest in running.items():
        path = folder / file
        with _unreadable_named(path):
            _refuse_other(path, digest.result(), noted[file])
    if noted and (unknown := [file for file in files if file not in noted]):
        log.warning(
            "%s: %s cannot be verified: the version that saved it noted no checksum",
            folder,
            ", ".join(unknown),
        )


def verified(path: Path) -> Path:
    """A small file of a checkpoint, verified where its checksum was noted; a missing one is left to who reads it."""
    noted = noted_checksums(path.parent).get(path.name)
    if noted is not None and path.is_file():
        _refuse_other(path, sha256_file(path), noted)
    return path


@contextmanager
def _unreadable_named(path: Path) -> Iterator[None]:
    """Say of a file of a checkpoint that it cannot be read, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy_for(path.parent)}") from error


def _refuse_other(path: Path, sha256: str, noted: str) -> None:
    if sha256 != noted:
        raise UserError(
            f"{path} is damaged: its checksum differs from that of when it was saved; {remedy_for(path.parent)}"
        )


def noted_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files by name, as noted when they were saved; none for a checkpoint of ai2-olmo.

    Raises `UserError` where they are missing or damaged.
    """
    if is_of_olmo(folder):
        return {}
    path = folder / CHECKSUMS
    remedy = remedy_for(folder)
    content = read_json(path, remedy)
    try:
        noted = {name: str(of_file["sha256"]) for name, of_file in content.items()}
    except (TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged (it holds no checksums); {remedy}") from error
    if WEIGHTS not in noted and index_of(WEIGHTS) not in noted:
        raise UserError(f"{path} is damaged (it has no checksum of {WEIGHTS}); {remedy}")
    return noted


def remedy_for(folder: Path) -> str:
    """What to do about a damaged checkpoint: the command that makes the one before it the last."""
    siblings = checkpoints(folder.parent)
    earlier = siblings[: siblings.index(folder)] if folder in siblings else []
    if not earlier:
        return "copy it again; there is no earlier checkpoint to go on from"
    return f"copy it again, or go on from {earlier[-1].name}: {setting_aside([folder])}, and the same command again"


def setting_aside(folders: Sequence[Path]) -> str:
    """The command that moves checkpoints of one run to where nothing looks for them."""
    aside = folders[0].parent / "aside"
    return (
        f"{shlex.join(['mkdir', '-p', str(aside)])} && {shlex.join(['mv', *map(str, folders), str(aside)])}"
    )


def config_of(folder: Path) -> Config:
    """The configuration of a checkpoint folder. Raises `UserError` for a damaged one, and where there is none."""
    if not (folder / CONFIG).is_file():
        if (folder / CHECKSUMS).is_file():
            raise UserError(f"{folder / CONFIG} is missing; {remedy_for(folder)}")
        raise UserError(f"{folder} has no {CONFIG}; give a run of olmo-sparsity train")
    require_extra("train", "olmo", "omegaconf")  # not above: measuring other models does not need them
    from olmo_sparsity.config.load import load_config

    path = verified(folder / CONFIG)
    if not re.search("^model:", path.read_text(encoding="utf8", errors="replace"), re.MULTILINE):
        raise UserError(f"{path} is damaged (it describes no model); {remedy_for(folder)}")
    return load_config(path, warn=False, only=("model", "seed") if is_of_olmo(folder) else ())


def is_of_olmo(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ai2-olmo itself: its config.yaml and safetensors of its names, unlisted.

    Raises `UserError` where the weights would tell, and are damaged.
    """
    path = folder / WEIGHTS
    if (folder / CHECKSUMS).exists() or not ((folder / CONFIG).is_file() and path.is_file()):
        return False
    try:
        with safe_open(path, "pt") as file:
            return not any("." in name for name in file.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); {remedy_for(folder)}") from error


def _without_pickle(name: str) -> str:
    """A tensor's name, which OLMo's safetensors hold as a pickled tuple in base64; the pickle is not run."""
    opcodes = pickletools.genops(base64.urlsafe_b64decode(name))
    return ".".join(str(text) for opcode, text, _ in opcodes if "UNICODE" in opcode.name)


def load_model(checkpoint: str | Path) -> tuple[Model, Config]:
    """The model of a checkpoint (or of a run's last one), on the CPU in evaluation mode, and its configuration.

    Raises `UserError` where either is damaged.
    """
    folder = resolve_checkpoint(checkpoint)
    config = config_of(folder)
    verifying = in_background(lambda: verify_checkpoint(folder, [WEIGHTS]))
    from olmo_sparsity.model.build import empty_model

    model = empty_model(config)
    load_weights(model, folder)
    verifying.result()
    return model.eval(), config


def load_weights(model: torch.nn.Module, folder: Path, *, attention_may_be_new: bool = False) -> None:
    """Load a checkpoint's weights; `verify_checkpoint` checks them.

    Raises `UserError` that names the tensors which do not fit.

    With ``attention_may_be_new`` weights of the model's attention that the checkpoint does not have stay as drawn.
    """
    tensors = _load(folder, WEIGHTS)
    if is_of_olmo(folder):
        tensors = {_without_pickle(name): tensor.float() for name, tensor in tensors.items()}
    if attention_may_be_new:
        drawn = model.state_dict()
        tensors = {name: drawn[name] for name in drawn if ".mixer." in name} | tensors
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{folder / WEIGHTS} is of another model: {' '.join(str(error).split())}") from error


def load_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors of a checkpoint; `verify_checkpoint` checks them.

    Raises `UserError` where they cannot be read.
    """
    return _load(folder, OPTIMIZER)


def _load(folder: Path, name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in tensor_files(folder, name):
        tensors |= load_tensors(folder / file, remedy_for(folder))
    return tensors


def weights_sha256(checkpoint: str | Path, *, is_verified: bool = False) -> str:
    """Identity of a checkpoint's weights in records: the SHA-256 of the one file that holds or would hold them all.

    So it does not depend on the number of processes that saved them; of shards it is computed here. Raises `UserError`
    where a file is not the one that was saved. ``is_verified``: this process has verified them already (`load_model`,
    `verify_checkpoint`).
    """
    folder = resolve_checkpoint(checkpoint)
    noted = noted_checksums(folder)
    if index_of(WEIGHTS) in noted:
        if not is_verified:
            verify_checkpoint(folder, [WEIGHTS])
        return tensors_sha256(_load(folder, WEIGHTS))
    if is_verified and WEIGHTS in noted:
        return noted[WEIGHTS]
    with _unreadable_named(folder / WEIGHTS):
        sha256 = sha256_file(folder / WEIGHTS)
    _refuse_other(folder / WEIGHTS, sha256, noted.get(WEIGHTS, sha256))
    return sha256
