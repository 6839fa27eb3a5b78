"""Opening a model that is to be measured, and its tokenizer.

A model is named by the path of a run or checkpoint of this project, of a folder of transformers or of a ``.gguf`` file,
or by its id on the Hugging Face hub; a loaded one is given with its tokenizer. ``MODEL@yarn:4`` is MODEL with RoPE
scaled by YaRN to 4 times its length, ``MODEL@untrained`` its architecture with freshly drawn weights (docs/method.md,
2.8). No code of a model is run, and no weights that are pickles are read.

Shapes: T tokens of a text, N tokens of long context, B targets of a block.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from analysis.decode import TextDecoder
from analysis.model.adapter import Adapter, TransformersAdapter, with_prefix
from analysis.model.check import check_long_context
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import read_json, sha256_file
from olmo_sparsity.util.provenance import pick_device

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from analysis.contexts import Texts

DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "auto": "auto",
}
"""Types that weights are loaded in, by name; auto: as they are stored."""
PREFIXES = ("auto", "none", "bos", "eos")
UNTRAINED, UNTRAINED_SEED = "untrained", 0
MESA = "mesa"
"""A scheme that reads a text in chunks (`analysis.ours`)."""
_CHANGED = re.compile(r"(?P<path>.+)@(?P<change>untrained|[A-Za-z][\w-]*:\d+(\.\d+)?)")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPORT, _EXPORT_KIND = "olmo_sparsity.json", "olmo-sparsity export"
"""The note in a folder that this project exported."""
_NOT_TOKENIZATION = ("post_processor", "truncation", "padding")
"""Parts of a tokenizer.json that texts are encoded without."""


class TextTokenizer:
    """A tokenizer of the tokenizers library or of transformers, fast or slow, as measurements need it.

    Args:
        tokenizer: the object.
        sha256: what identifies it; by default the hash of the tokenizer.json that it would save.
        config: what a `tokenizer_config.json` beside a tokenizer.json says.
    """

    def __init__(self, tokenizer: Any, sha256: str | None = None, config: Mapping[str, Any] | None = None):
        self.tokenizer, self._sha256, self._config = tokenizer, sha256, config or {}

    @classmethod
    def from_file(cls, path: str | Path) -> TextTokenizer:
        """The tokenizer of a tokenizer.json, without padding and truncation."""
        about = Path(path).with_name("tokenizer_config.json")
        config = read_json(about, "save the tokenizer again") if about.is_file() else {}
        return cls(_read_tokenizer(path), sha256_file(path), config)

    @classmethod
    def of(cls, tokenizer: Any) -> TextTokenizer:
        """A tokenizer object, or the path of a tokenizer.json."""
        return cls.from_file(tokenizer) if isinstance(tokenizer, str | Path) else cls(tokenizer)

    @property
    def _of_transformers(self) -> bool:
        return hasattr(self.tokenizer, "all_special_ids")

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if not self._of_transformers:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # not verbose: that a text is longer than the model's window is no mistake here
        options = {"truncation": False, "padding": False, "verbose": False}
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens, **options)["input_ids"])

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens around it."""
        return np.array(self._ids(text, False), dtype=np.int64)

    @cached_property
    def decoder(self) -> TextDecoder:
        """The text of token ids, token by token."""
        # cleaning up would take spaces away that are in the text
        options = {"clean_up_tokenization_spaces": False} if self._of_transformers else {}
        return TextDecoder(partial(self.tokenizer.decode, skip_special_tokens=False, **options))

    @cached_property
    def added_before(self) -> tuple[int, ...]:
        """Special tokens that it puts before every text, by its post-processor or its configuration."""
        plain, whole = self._ids("a", False), self._ids("a", True)
        start = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        bos = self._config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        if start or not (self._config.get("add_bos_token") and bos):
            return tuple(whole[:start])
        token = self.tokenizer.token_to_id(bos)
        return () if token is None else (token,)

    @cached_property
    def _written(self) -> str:
        """It as a tokenizer.json; of a slow one of transformers, its vocabulary."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        backend = self.tokenizer if backend is None and not self._of_transformers else backend
        if backend is None:
            return json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        return backend.to_str(pretty=True)

    @property
    def sha256(self) -> str:
        """Of its tokenizer.json."""
        return self._sha256 or hashlib.sha256(self._written.encode()).hexdigest()

    def tokenizes_as(self, file: Path, sha256: str) -> bool:
        """Whether it does to text what the tokenizer.json ``file`` does, which has had this checksum."""
        if self.sha256 == sha256:
            return True
        unchanged = file.is_file() and sha256_file(file) == sha256
        return unchanged and _rules(self._written) == _rules(_read_tokenizer(file).to_str())


def _read_tokenizer(path: str | Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not Path(path).is_file():
        raise UserError(f"{path} is missing; give a tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _rules(written: str) -> dict[str, Any]:
    """What a tokenizer.json does to text, however it was written down: vocabulary, merges, pre-tokenizer, …"""
    return {name: part for name, part in json.loads(written).items() if name not in _NOT_TOKENIZATION}


@dataclass
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and what identifies both in results."""

    model: Adapter
    """Behind its prefix, if it has one."""
    name: str
    """``PATH``, ``PATH@scheme:factor`` or ``PATH@untrained``; of a run it is the path of its last checkpoint."""
    sha256: str
    """Of the weights: of their files' bytes in order of their names; of a model object, of its tensors."""
    family: str
    """Transformers' model type, such as llama; of a checkpoint of this project see `analysis.ours`."""
    tokenizer: TextTokenizer | None = None
    training_seed: int | None = None
    """None where it is unknown."""
    rope_scaling: str | None = None
    """How its RoPE was scaled, such as yarn:4; None: as it was trained."""
    untrained: bool = False
    """Whether its weights are freshly drawn ones."""
    prefix: tuple[int, ...] = ()
    """Token ids that stand before every context (docs/method.md, 2.1 [ours])."""
    of_project: bool = False
    """Whether this project's trainer made its class."""
    trained: dict[str, Any] = field(default_factory=dict)
    """Of this project's checkpoints: ``training_length``, ``position_scheme``, and ``position_target``, what ids
    reached beyond that length; None: they did not."""
    _before: list[tuple[Any, str, bool]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def dtype(self) -> str:
        """Type of its weights as results name it: fp32, or such as bf16-weights."""
        of_weights = next(self.model.parameters()).dtype
        name = {dtype: name for name, dtype in DTYPES.items()}.get(of_weights, str(of_weights))
        return name if name == "fp32" else f"{name}-weights"

    @property
    def reads(self) -> int | None:
        """How many tokens it reads, as far as its configuration says."""
        reach = self.trained.get("position_target") or self.trained.get("training_length")
        factor = float(self.rope_scaling.partition(":")[2]) if self.rope_scaling else 1.0
        return int(factor * reach) if reach else self.model.max_positions

    def describe(self) -> dict[str, Any]:
        """What identifies it in `analysis.result.Result.settings`."""
        return {
            "model": self.name,
            "model_sha256": self.sha256,
            "family": self.family,
            "parameters": self.parameters,
            "training_seed": self.training_seed,
            "tokenizer_sha256": self.tokenizer_sha256,
            "prefix": list(self.prefix),
            "rope_scaling": self.rope_scaling,
            "dtype": self.dtype,
        }

    def _its_tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self.name} has no {_TOKENIZER}; copy it there, or give the tokenizer")
        return self.tokenizer

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens. Raises `UserError` without a tokenizer."""
        return self._its_tokenizer().encode(text)

    @property
    def decoder(self) -> TextDecoder:
        """The text of token ids. Raises `UserError` without a tokenizer."""
        return self._its_tokenizer().decoder

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of the tokenizer.json; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.sha256

    def check_texts(self, texts: Texts) -> None:
        """Raise `UserError` where texts have ids that it does not know, or a prepared corpus another tokenizer."""
        prepared: Any = texts if hasattr(texts, "tokenizer_sha256") else None  # `analysis.ours.PreparedTexts`
        if prepared is None:
            largest = max(int(texts.tokens(number).max(initial=0)) for number in range(len(texts.lengths)))
        elif self._its_tokenizer().tokenizes_as(prepared.tokenizer_file, prepared.tokenizer_sha256):
            largest = prepared.vocabulary_size - 1
        else:
            raise UserError(
                f"{texts.name} was made with another tokenizer than {self.name}; prepare the text with the model's, "
                "--tokenizer"
            )
        if largest >= self.model.vocabulary_size:
            raise UserError(
                f"{texts.name} has token ids up to {largest:,}, {self.name} knows {self.model.vocabulary_size:,} "
                "tokens; give the tokenizer that the model was trained with"
            )

    def check_context(self, n_long: int, targets_per_block: int = 1) -> None:
        """Raise `UserError` where it cannot be measured on N tokens, see `check_long_context`."""
        if self.rope_scaling and self.rope_scaling.startswith(MESA):
            raise UserError(
                f"{self.name}: no token can be dropped from a context that is read in chunks; give another scheme, or "
                "measure loss by position or needles"
            )
        factor = float(self.rope_scaling.partition(":")[2]) if self.rope_scaling else 1.0
        name = f"{self.name} ({self.family})"
        check_long_context(self.model, n_long, targets_per_block, name=name, reach_factor=factor)

    def give_back(self) -> None:
        """Put a model object of the caller back as it came: modules that were training, weights with gradients."""
        for part, name, value in self._before:
            setattr(part, name, value)


def open_model(
    model: Any,
    *,
    tokenizer: Any = None,
    prefix: str = "auto",
    dtype: str = "fp32",
    device: str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """A model in evaluation mode, on a device and behind its prefix.

    Args:
        model: a path or hub id, maybe with ``@yarn:4`` or ``@untrained`` behind it; or (model, tokenizer), both loaded.
        tokenizer: instead of the model's: an object of transformers or tokenizers, or the path of a tokenizer.json.
        prefix: what stands before every context: ``auto`` (what the tokenizer puts before a text, nothing for a model
            of this project, which read no such token in training), ``none``, ``bos``, ``eos``, or ids such as ``1,2``.
        dtype: one of `DTYPES`; checkpoints of this project are in fp32, and a model object stays as it is.
        device: such as ``cuda:0``; by default a GPU where there is one, and where a model object is already.
        attn_implementation: of transformers, ``sdpa`` or ``eager``; by default the model's usual one.

    Raises `UserError` where there is no such model, it takes no position ids, lacks weights, or the prefix names no
    token of it.
    """
    if isinstance(model, str | Path):
        loaded = _open_path(str(model), dtype, attn_implementation)
        loaded.model.to(pick_device(device))
    else:
        model, paired = model if isinstance(model, tuple) else (model, None)
        tokenizer = tokenizer if paired is None else paired
        loaded = _open_object(model)
        if device is not None:
            loaded.model.to(pick_device(device))
    if tokenizer is not None:
        loaded.tokenizer = TextTokenizer.of(tokenizer)
    loaded.model.eval().requires_grad_(False)
    loaded.prefix = loaded.model.prefix or _prefix_ids(prefix, loaded)
    if not loaded.model.prefix:
        loaded.model = with_prefix(loaded.model, loaded.prefix)
    return loaded


def _prefix_ids(prefix: str, loaded: LoadedModel) -> tuple[int, ...]:
    if prefix == "none":
        return ()
    if prefix == "auto":
        ids = () if loaded.tokenizer is None or loaded.of_project else loaded.tokenizer.added_before
    elif prefix in PREFIXES:
        inner: Any = loaded.model.model
        token = getattr(inner.config, f"{prefix}_token_id", None)
        token = token[0] if isinstance(token, list) else token
        if token is None:
            raise UserError(f"--prefix {prefix}: {loaded.name} names no such token; give its id")
        ids = (token,)
    elif all(each.isdecimal() for each in prefix.split(",")):
        ids = tuple(map(int, prefix.split(",")))
    else:
        raise UserError(f"--prefix {prefix}: give {', '.join(PREFIXES)}, or token ids such as 1 or 1,2")
    if ids and max(ids) >= loaded.model.vocabulary_size:
        raise UserError(f"--prefix {prefix}: {loaded.name} has no token {max(ids):,}; give another one")
    return ids


# --- where models come from ---


def _ours() -> Any:
    """This project's own checkpoints; other models are measured without the packages that these need."""
    return importlib.import_module("analysis.ours")


def _open_path(text: str, dtype: str, attention: str | None) -> LoadedModel:
    changed = None if Path(text).exists() else _CHANGED.fullmatch(text)
    path, change = (changed["path"], changed["change"]) if changed else (text, None)
    folder = Path(path)
    if folder.suffix != ".gguf" and not folder.exists() and _HUB_ID.fullmatch(path):
        folder = _from_hub(path)
    if folder.suffix == ".gguf":
        loaded = _open_gguf(folder, dtype, attention)
    elif (folder / _CONFIG).is_file():
        loaded = _open_folder(folder, path, dtype, attention)
    elif dtype not in ("fp32", "auto") or attention:
        raise UserError(
            f"{path} is a checkpoint of this project, measured in fp32 with its own attention; leave out dtype and "
            "attn_implementation"
        )
    else:
        loaded = _ours().open_checkpoint(folder, untrained=change == UNTRAINED)
    if change == UNTRAINED:
        return loaded if loaded.of_project else _untrained(loaded)
    return _ours().scale_rope(loaded, change) if change else loaded


def _from_hub(name: str) -> Path:
    """The local copy of a model's configuration, tokenizer and safetensors weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.model", "*.safetensors"]
    try:  # a star reaches into folders, whose files transformers never reads
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name} is neither a folder here nor a model that could be fetched from the hub ({first_line(error)}); "
            "check the spelling and the connection, or download it first"
        ) from error


def _open_folder(folder: Path, name: str, dtype: str, attention: str | None) -> LoadedModel:
    names = [_WEIGHTS]
    if not (folder / _WEIGHTS).is_file() and (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX, "save the model again")["weight_map"]
        names = sorted(set(weight_map.values()))
    for each in names:
        if not (folder / each).is_file():
            raise UserError(
                f"{folder / each} is missing; save the model with save_pretrained, which writes safetensors (weights "
                "that are pickles are never read)"
            )
    model = _from_pretrained(folder, dtype, attention)
    tokenizer = folder / _TOKENIZER
    return LoadedModel(
        model=adapter_of(model, f"{name} ({model.config.model_type})"),
        name=name,
        sha256=_sha256_of_all([folder / each for each in names]),
        family=model.config.model_type,
        tokenizer=TextTokenizer.from_file(tokenizer) if tokenizer.is_file() else None,
        training_seed=_exported_seed(folder),
    )


def _open_gguf(file: Path, dtype: str, attention: str | None) -> LoadedModel:
    """A GGUF file, dequantised; its tokenizer is the one in it."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"{file}: GGUF files are read by the package gguf; pip install 'olmo-sparsity[gguf]'")
    if not file.is_file():
        raise UserError(f"{file} is missing; give the path of a GGUF file")
    from transformers import AutoTokenizer

    model = _from_pretrained(file.parent, dtype, attention, gguf_file=file.name)
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    return LoadedModel(
        model=adapter_of(model, f"{file} ({model.config.model_type})"),
        name=str(file),
        sha256=sha256_file(file),
        family=model.config.model_type,
        tokenizer=TextTokenizer(tokenizer),
    )


def _from_pretrained(folder: Path, dtype: str, attention: str | None, **options: Any) -> Any:
    """The transformers model of a folder, or of a GGUF file in it, whole."""
    from transformers import AutoModelForCausalLM

    if attention:
        options["attn_implementation"] = attention
    loader: Any = AutoModelForCausalLM
    with _quiet_transformers():
        model, loading = loader.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    if absent := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise UserError(  # transformers draws them at random
            f"{folder} lacks {len(absent)} of its model's weights, such as {absent[0]}; save it again with "
            "save_pretrained"
        )
    return model


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars, and no warnings about what a measurement does not use."""
    from transformers.utils import logging as of_transformers

    bars, level = of_transformers.is_progress_bar_enabled(), logging.root.manager.disable
    of_transformers.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        if bars:
            of_transformers.enable_progress_bar()


def _untrained(loaded: LoadedModel) -> LoadedModel:
    """The same architecture with weights as they are before the first step, drawn with `UNTRAINED_SEED`."""
    trained: Any = loaded.model.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(UNTRAINED_SEED)
        fresh: nn.Module = type(trained)(trained.config)
    return replace(
        loaded,
        model=TransformersAdapter(fresh),
        name=f"{loaded.name}@{UNTRAINED}",
        sha256=sha256_of_tensors(fresh),
        training_seed=None,
        untrained=True,
    )


def _sha256_of_all(files: Sequence[Path]) -> str:
    """SHA-256 of the files' bytes one after the other; of one file it is the file's own."""
    if len(files) == 1:
        return sha256_file(files[0])
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def sha256_of_tensors(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of a model's tensors, which no file holds."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode() + values.numpy().tobytes())
    return digest.hexdigest()


def _exported_seed(folder: Path) -> int | None:
    """Training seed of a folder that this project exported."""
    if not (folder / _EXPORT).is_file():
        return None
    note = read_json(folder / _EXPORT, "export the checkpoint again")
    return note["training_seed"] if note.get("kind") == _EXPORT_KIND else None


def _open_object(model: Any) -> LoadedModel:
    """A loaded model; `LoadedModel.give_back` undoes what measuring changes of it."""
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model is a {type(model).__name__}; give a path, a hub id, or (model, tokenizer), both loaded"
        )
    before: list[tuple[Any, str, bool]] = [
        (module, "training", module.training) for module in model.modules()
    ]
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
    return any(each.__module__.startswith("olmo_sparsity.model.") for each in type(model).__mro__)


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter of a model object of this project or of transformers; an adapter is its own.

    Raises `UserError`, calling the model ``name``, where it takes no position ids, or cannot be read as it is.
    """
    for wrapper in ("_orig_mod", "module"):  # torch.compile, data parallelism
        model = getattr(model, wrapper, model)
    if hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise UserError(f"{name} reads learned prompts before a text; give it without its PEFT prompts")
        model = model.get_base_model()
    if isinstance(model, Adapter):
        return model
    if _is_of_project(model):
        return _ours().adapter_of(model, name)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if not attention.startswith(("eager", "sdpa")):
        raise UserError(
            f"{name} has the attention {attention}, which may cut texts where position ids jump; load it with "
            'attn_implementation="sdpa"'
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"{name} takes no position ids, so that no token can be dropped from its context; give a model with "
            "rotary or learned positions"
        )
    return TransformersAdapter(model)
