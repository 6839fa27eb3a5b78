"""Opening a model that is to be measured, and its tokenizer.

A model is named by the path of a run or checkpoint of this project, of a folder of transformers or of a ``.gguf`` file,
or by its id on the Hugging Face hub; a loaded one is given with its tokenizer. ``MODEL@yarn:4`` is MODEL with RoPE
scaled by YaRN to 4 times its length, ``MODEL@untrained`` its architecture with freshly drawn weights (docs/method.md,
2.8). No code of a model is run, and no weights that are pickles are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from analysis.model.adapter import Adapter, with_prefix
from analysis.model.cpu import mkl_is_slow, multiply_by_onednn
from analysis.model.huggingface import local_path, open_transformers, transformers_adapter
from analysis.model.loaded import DTYPES, LoadedModel
from analysis.model.tokenizer import read_tokenizer
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import user_path
from olmo_sparsity.util.provenance import keep_freed_memory, pick_device

UNTRAINED, UNTRAINED_SEED = "untrained", 0
_CHANGED = re.compile(r"(?P<path>.+)@(?P<change>untrained|[A-Za-z][\w-]*:\d+(\.\d+)?)")


def open_model(
    model: Any,
    *,
    tokenizer: Any = None,
    prefix: str = "auto",
    dtype: str = "fp32",
    device: str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """A model in evaluation mode, on a device and behind its prefix. Lets glibc keep memory that this process frees.

    Args:
        model: a path or hub id, maybe with ``@yarn:4`` or ``@untrained`` behind it; or (model, tokenizer), both loaded;
            a `LoadedModel` is returned as it is, and no option may stand beside it.
        tokenizer: instead of the model's: an object of transformers or tokenizers, or the path of a tokenizer.json.
        prefix: what stands before every context: ``auto`` (what the tokenizer puts before a text, nothing for a model
            of this project, which read no such token in training), ``none``, ``bos``, ``eos``, or ids such as ``1,2``.
        dtype: one of `DTYPES`; checkpoints of this project are in fp32, and a model object stays as it is.
        device: such as ``cuda:0``; by default a GPU where there is one, and where a model object is already.
        attn_implementation: of transformers, ``sdpa`` or ``eager``; by default the model's usual one.

    Raises `UserError` where there is no such model, it takes no position ids, lacks weights, or the prefix names no
    token of it, and for options of a model that is open.
    """
    if isinstance(model, LoadedModel):
        given = {"tokenizer": tokenizer, "device": device, "attn_implementation": attn_implementation}
        given |= {"prefix": None if prefix == "auto" else prefix, "dtype": None if dtype == "fp32" else dtype}
        if named := [name for name, value in given.items() if value is not None]:
            raise UserError(
                f"{model.name} is open already: give {', '.join(named)} when it is opened, to open_model"
            )
        return model
    keep_freed_memory()
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if isinstance(model, tuple | list) and len(model) == 2:
        model, paired = model
        tokenizer = tokenizer if paired is None else paired
    if isinstance(model, str | Path):
        loaded = _open_path(str(model), dtype, attn_implementation)
        loaded.model.to(pick_device(device))
        if mkl_is_slow():
            multiply_by_onednn(loaded.model)
    elif isinstance(model, nn.Module):
        loaded = _open_object(model)
        if device is not None:
            loaded.model.to(pick_device(device))
    else:
        raise UserError(
            f"the model is a {type(model).__name__}; give a path, the id of a model on the Hugging Face hub, or "
            "(model, tokenizer)"
        )
    if tokenizer is not None:
        loaded.tokenizer = read_tokenizer(tokenizer)
    loaded.model.eval().requires_grad_(False)
    if not loaded.prefix:
        loaded.model = with_prefix(loaded.model, _prefix_ids(prefix, loaded))
    return loaded


def _prefix_ids(prefix: Any, loaded: LoadedModel) -> tuple[int, ...]:
    if not isinstance(prefix, str):  # ids, as a number or in a list
        prefix = ",".join(map(str, prefix if isinstance(prefix, Iterable) else [prefix]))
    ids: tuple[int, ...] = ()
    if prefix == "auto":
        if loaded.tokenizer is not None and not loaded.of_project:
            ids = loaded.tokenizer.added_before
    elif prefix in ("bos", "eos"):
        token = getattr(loaded.model.model.config, f"{prefix}_token_id", None)
        of_model = token if isinstance(token, list) else [] if token is None else [token]
        of_tokenizer = loaded.tokenizer.named(prefix) if loaded.tokenizer is not None else set()
        # a configuration may have another id than the texts are read with, often as its library's default
        named = of_model if of_tokenizer <= {*of_model} else sorted(of_tokenizer)
        if not named:
            raise UserError(f"--prefix {prefix}: {loaded.name} names no such token; give its id")
        ids = (named[0],)
    elif all(part.isdecimal() for part in prefix.split(",")):
        ids = tuple(map(int, prefix.split(",")))
    elif prefix != "none":
        raise UserError(f"--prefix {prefix}: give auto, none, bos, eos, or token ids such as 1 or 1,2")
    embeddings = loaded.model.vocabulary_size
    if max(ids, default=0) >= embeddings:
        raise UserError(
            f"--prefix {prefix}: {loaded.name} has embeddings of {embeddings:,} tokens, and none of id {max(ids):,}; "
            "give the model's own tokenizer, or smaller ids"
        )
    return ids


def _open_path(text: str, dtype: str, attention: str | None) -> LoadedModel:
    changed = None if user_path(text).exists() else _CHANGED.fullmatch(text)
    name, change = (changed["path"], changed["change"]) if changed else (text, None)
    path = local_path(name)
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        loaded = open_transformers(path, name, dtype, attention)
    else:
        from analysis import (
            project,  # not above: other models are measured without the packages that it needs
        )

        loaded = project.open_checkpoint(path)
    if change == UNTRAINED:
        return _untrained(loaded)
    if change:
        from analysis import project

        return project.scale_rope(loaded, change)
    return loaded


def _untrained(loaded: LoadedModel) -> LoadedModel:
    """The same architecture with weights as they are before the first step, drawn with `UNTRAINED_SEED`."""
    trained: Any = loaded.model.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        fresh: nn.Module = type(trained)(trained.config)
    return replace(
        loaded,
        model=type(loaded.model)(fresh),
        name=f"{loaded.name}@{UNTRAINED}",
        sha256=sha256_of_tensors(fresh),
        training_seed=None,
        untrained=True,
    )


def sha256_of_tensors(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of a model's tensors, which no file holds."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()


def _open_object(model: Any) -> LoadedModel:
    """A loaded model; leaving it as a context undoes what measuring changes of it."""
    before: list[tuple[Any, str, bool]] = [(part, "training", part.training) for part in model.modules()]
    before += [(weight, "requires_grad", True) for weight in model.parameters() if weight.requires_grad]
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    family = family if isinstance(family, str) else type(model).__name__
    name = getattr(config, "_name_or_path", "") or f"the model ({family})"
    adapter = adapter_of(model, name)
    return LoadedModel(
        model=adapter,
        name=name,
        sha256=sha256_of_tensors(model),
        family=family,
        of_project=_is_of_project(model) or _is_of_project(adapter.model),
        _before=before,
    )


def _is_of_project(model: Any) -> bool:
    """Whether its class is of this project, whose module is not imported to ask: it needs OLMo."""
    return any(base.__module__.startswith("olmo_sparsity.model.") for base in type(model).__mro__)


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter of a model object of this project or of transformers; an adapter is its own.

    Raises `UserError`, calling the model ``name``, where it takes no position ids, or cannot be read as it is.
    """
    for wrapper in ("_orig_mod", "module"):  # torch.compile, data parallelism
        model = getattr(model, wrapper, model)
    if isinstance(model, Adapter):
        return model
    if _is_of_project(model):
        from analysis import project

        return project.adapter_of(model, name)
    return transformers_adapter(model, name)
