"""A directory of transformers: which of its files are read, and that its config.json asks for nothing else."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError, printable
from olmo_sparsity.util.files import read_json

TRANSFORMERS_CONFIG = "config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BARE_NAME = re.compile(r"[\w-][\w.+-]*\.safetensors", re.ASCII)
_ATTENTION, _EXPERTS = ("eager", "sdpa"), ("eager", "batched_mm", "grouped_mm")
_ALLOWED = {
    **dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), _ATTENTION
    ),
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation", "_experts_implementation_internal"), _EXPERTS
    ),
    # read in place of the usual files
    **dict.fromkeys(("transformers_weights", "configuration_files"), ()),
    # code from the hub
    **dict.fromkeys(("kernel_config", "use_kernels", "fusion_config"), ()),
    # other packages, other downloads
    **dict.fromkeys(("quantization_config", "use_pretrained_backbone"), ()),
}
"""Settings of a config.json, at any depth, that could fetch or read something else, and the values that do not."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a directory in order of their names, links followed.

    A link may lead anywhere, as in the hub's cache: it leads to what its owner chose, and only safetensors are read.
    Raises `UserError` where one is missing, or the index names anything but a safetensors file in the folder.
    """
    index = folder / _INDEX
    names = [_WEIGHTS] if (folder / _WEIGHTS).is_file() or not index.is_file() else _indexed(index)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name} is missing; save the model with save_pretrained, which writes safetensors (weights "
                "that are pickles are never read)"
            )
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    weight_map = read_json(index, "save the model again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} is damaged (it has no weight_map); save the model again")
    for name in weight_map.values():
        if not isinstance(name, str) or not _BARE_NAME.fullmatch(name):
            raise UserError(
                f"{index} names {str(name)[:100]!r}, which is no safetensors file in its folder (weights that are "
                "pickles, or elsewhere, are never read); save the model again with save_pretrained"
            )
    return sorted(set(weight_map.values()))


@contextmanager
def checked_copy(folder: Path, files: list[Path]) -> Iterator[Path]:
    """A temporary folder with the checked config.json of ``folder`` and links to its weights ``files``.

    Raises `UserError` for a config.json that is damaged or asks for anything else.
    """
    config = read_json(folder / TRANSFORMERS_CONFIG, "save the model again with save_pretrained")
    _check(config, folder / TRANSFORMERS_CONFIG)
    with tempfile.TemporaryDirectory(prefix="olmo-sparsity-") as temporary:
        copy = Path(temporary)
        (copy / TRANSFORMERS_CONFIG).write_text(json.dumps(config), encoding="utf8")
        for path in files:
            (copy / path.name).symlink_to(path.resolve())
        if [path.name for path in files] != [_WEIGHTS]:
            index = {"metadata": {}, "weight_map": {path.name: path.name for path in files}}
            (copy / _INDEX).write_text(json.dumps(index), encoding="utf8")
        yield copy


def _check(value: Any, path: Path, name: str = "") -> None:
    """Refuse what `_ALLOWED` does not allow, at any depth: a model may hold the config of another."""
    if isinstance(value, list):
        for item in value:
            _check(item, path, name)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key in _ALLOWED and not all(each in _ALLOWED[key] for each in _asked(item)):
            raise UserError(
                f"{path}: {printable(name + key)} asks for other files, packages or code than the "
                "folder's; remove it, or give a model in full precision without it"
            )
        _check(item, path, f"{name}{key}."[-100:])


def _asked(value: Any) -> list[Any]:
    """What a setting asks for, of each part of the model where it is a mapping; nothing where it is off."""
    parts = list(value.values()) if isinstance(value, dict) and value else [value]
    return [part for part in parts if part not in (None, False, {}, [])]


@contextmanager
def offline() -> Iterator[None]:
    """Nothing is fetched from the hub, and no kernel of it is run, whatever a model's class asks for."""
    import huggingface_hub.constants as hub
    from transformers.integrations import hub_kernels

    before = hub.HF_HUB_OFFLINE, hub_kernels._kernels_enabled
    hub.HF_HUB_OFFLINE, hub_kernels._kernels_enabled = True, False
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE, hub_kernels._kernels_enabled = before
