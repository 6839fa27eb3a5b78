"""Models of transformers: folders, ``.gguf`` files and the Hugging Face hub. No code of a model is run."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.model.adapter import TransformersAdapter
from analysis.model.loaded import DTYPES, LoadedModel
from analysis.model.tokenizer import TOKENIZER, TextTokenizer, read_tokenizer
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.extras import require_extra
from olmo_sparsity.util.files import read_json, shard_names, user_path

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_OF_TOKENIZERS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that are not saved as a tokenizer.json."""
_EXPORT = "olmo_sparsity.json"
"""The note in a folder that this project exported."""


def local_path(name: str) -> Path:
    """Where a model lies, got from the hub first where its name is of one there. Raises `UserError` for no model."""
    path = user_path(name)
    if path.is_file() and path.suffix.lower() != ".gguf":
        raise UserError(f"{name} is a file, and no .gguf; give the folder of the model, with its config.json")
    if path.exists():
        return path
    if path.suffix.lower() == ".gguf":
        raise UserError(f"there is no file {name}; give the path of a .gguf file")
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise UserError(
        f"there is no folder and no .gguf file {name}, and as the id of a model on the Hugging Face hub it lacks the "
        f"organization: org/name, such as HuggingFaceTB/SmolLM2-135M"
    )


def _from_hub(name: str) -> Path:
    """The local copy of a model's configuration, tokenizer and safetensors weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.model", "*.jinja", "*.safetensors"]
    try:
        # a star reaches into folders, whose files transformers never reads
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(
            f"{name} is no path here and was not got from the Hugging Face hub ({first_line(error)}); check the name, "
            "the network and, of a gated model, the login"
        ) from None


def open_transformers(path: Path, name: str, dtype: str, attention: str | None) -> LoadedModel:
    """A folder, or a GGUF file, which is dequantised and holds its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    is_gguf = path.suffix.lower() == ".gguf"
    if is_gguf:
        require_extra("gguf", "gguf", "accelerate")  # transformers reads such files with both
    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent if is_gguf else path}
    source |= {"local_files_only": True, "trust_remote_code": False}
    if is_gguf:
        source["gguf_file"] = path.name
    loader: Any = AutoModelForCausalLM
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        disable_progress_bar()  # each of its refreshes would be a line of a log file
    try:
        model, report = loader.from_pretrained(
            **source,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except Exception as error:  # of many libraries
        raise UserError(
            f"transformers cannot load {name} as a causal language model from safetensors or GGUF, without code of its "
            f"own ({first_line(error)}); fix or convert it, or load it yourself and give (model, tokenizer)"
        ) from error
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise UserError(  # transformers draws them at random
            f"{path} lacks {len(absent)} of its model's weights, such as {absent[0]}; save it again with "
            "save_pretrained"
        )
    tokenizer = path / TOKENIZER
    exported = path / _EXPORT
    loaded = LoadedModel(
        model=transformers_adapter(model, f"{name} ({model.config.model_type})"),
        name=name,
        sha256=_sha256_of([path] if is_gguf else _weights_of(path)),
        family=model.config.model_type,
    )
    if is_gguf:
        try:
            packed = AutoTokenizer.from_pretrained(**source)
        except Exception as error:  # of many libraries
            raise UserError(
                f"transformers cannot read the tokenizer in {name} ({first_line(error)}); load the model yourself and "
                "give (model, tokenizer)"
            ) from error
        loaded.tokenizer = TextTokenizer(packed)
    elif tokenizer.is_file() or any((path / name).is_file() for name in _OF_TOKENIZERS):
        loaded.tokenizer = read_tokenizer(path)
    if exported.is_file():
        loaded.training_seed = read_json(exported, "export the checkpoint again").get("training_seed")
    return loaded


def _weights_of(folder: Path) -> list[Path]:
    """The files of the weights that transformers reads, in order of their names."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    names = shard_names(folder / "model.safetensors.index.json", "save the model again")
    return [folder / name for name in names]


def _sha256_of(files: Sequence[Path]) -> str:
    """SHA-256 of the files' bytes one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def transformers_adapter(model: Any, name: str) -> TransformersAdapter:
    """The adapter of a model object of transformers.

    Raises `UserError`, calling the model ``name``, where it takes no position ids, or cannot be read as it is.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if not attention.startswith(("eager", "sdpa")):
        raise UserError(
            f"{name} has the attention {attention}, which may cut texts where position ids jump; load it with "
            'attn_implementation="sdpa"'
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} takes no position ids, so that no token can be dropped from its context")
    return TransformersAdapter(model)
