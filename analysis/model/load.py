"""The model that is analysed: a checkpoint of this project, or a directory that transformers loads.

Both answer the calls of `analysis.model.adapters.AnalysedModel`. No remote code is run.
Shapes: R rows, L tokens, N tokens of long context, V vocabulary (logits).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from analysis.model.adapters import Adapter, OlmoForAnalysis, PositionedCausalLM, with_prefix
from analysis.model.directory import TRANSFORMERS_CONFIG, checked_copy, offline, weight_files
from analysis.model.trial import check_long_context
from olmo_sparsity.checkpoint import (
    CONFIG,
    TOKENIZER,
    config_of,
    load_model,
    refuse_wrapped,
    resolve_checkpoint,
    weights_sha256,
)
from olmo_sparsity.corpus.tokens import TOKENIZER_NAME, CorpusManifest
from olmo_sparsity.data.tokenizers import HUB_ID, load_tokenizer
from olmo_sparsity.exported import EXPORT_KIND, EXPORT_NAME, quiet_transformers
from olmo_sparsity.model.rope_scaling import MESA, RopeScaling
from olmo_sparsity.util.errors import UserError, first_line, printable
from olmo_sparsity.util.files import read_json, sha256_file

OWN_FAMILY = "olmo-sparsity"
DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "auto": "auto",
}
"""Types that weights are loaded in, by name; auto: as they are stored."""
OF_WEIGHTS = "-weights"
"""Ends the type in records of a model whose weights were loaded in it; without it, bf16 is autocast."""
PREFIXES = ("auto", "none", "bos", "eos")
_NOT_WHAT_IS_TOKENIZED = ("post_processor", "truncation", "padding")  # corpora are encoded without them


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, on the CPU, and what identifies it in records."""

    model: Adapter
    checkpoint: Path
    """Its folder."""
    family: str
    """`OWN_FAMILY`, or transformers' model type, such as llama."""
    weights_sha256: str
    training_seed: int | None
    """None where it is unknown."""
    rope_scaling: RopeScaling | None = None
    """How its RoPE was scaled; None: as it was trained."""
    untrained: bool = False
    """Whether its weights are freshly drawn ones instead of the checkpoint's."""
    prefix: tuple[int, ...] = ()
    """Tokens that stand before every context (docs/method.md, 2.1 [ours])."""

    def behind(self, prefix: str) -> LoadedModel:
        """The same model behind a prefix, see `prefix_of`; ``auto`` is what its tokenizer puts before a text.

        That is nothing for models of this project, which read no such token in training.
        """

        def added() -> tuple[int, ...]:
            own = (self.checkpoint / CONFIG).is_file() or not self.tokenizer_file.is_file()
            return () if own else added_before(self.tokenizer_file)

        ids = prefix_of(prefix, self.model.model.config, added)
        if ids and max(ids) >= self.model.vocabulary_size:
            raise UserError(
                f"--prefix {prefix}: {self.checkpoint} has no token {max(ids):,}; give another one"
            )
        return replace(self, model=with_prefix(self.model, ids), prefix=ids)

    @property
    def name(self) -> str:
        """What records and messages call it: ``CKPT``, ``CKPT@scheme:factor`` or ``CKPT@untrained``."""
        if self.untrained:
            return f"{self.checkpoint}@untrained"
        return f"{self.checkpoint}@{self.rope_scaling}" if self.rope_scaling else str(self.checkpoint)

    @property
    def dtype(self) -> str:
        """What records say of the type that it computes in, where nothing else is asked for."""
        found = next(self.model.parameters()).dtype
        name = {each: name for name, each in DTYPES.items()}.get(found, str(found))
        return name if name == "fp32" else f"{name}{OF_WEIGHTS}"

    @property
    def tokenizer_file(self) -> Path:
        """Its tokenizer.json, which need not exist."""
        return self.checkpoint / TOKENIZER

    def check_corpus(self, corpus: str | Path) -> None:
        """Raise `UserError` where the corpus was made with another tokenizer than the model's, or has ids beyond it."""
        manifest = CorpusManifest.load(corpus)
        if not self.tokenizer_file.is_file():
            raise UserError(
                f"{self.tokenizer_file} is missing, so that nobody knows whether {corpus} was made with the same "
                "tokenizer; copy it there"
            )
        if not self._tokenizes_as(Path(corpus) / TOKENIZER_NAME, manifest.tokenizer_sha256):
            raise UserError(
                f"{corpus} was made with another tokenizer than {self.checkpoint} was trained with; prepare the text "
                f"with --tokenizer {self.tokenizer_file}"
            )
        known = self.model.vocabulary_size
        if known < manifest.vocab_size:
            raise UserError(
                f"{corpus} has a vocabulary of {manifest.vocab_size:,} tokens, {self.checkpoint} one of {known:,}; "
                "give a model that was trained with the corpus's tokenizer"
            )

    def _tokenizes_as(self, kept: Path, made_with: str) -> bool:
        """Whether the model's tokenizer does to text what the one with this checksum did; ``kept`` is its file."""
        if sha256_file(self.tokenizer_file) == made_with:
            return True
        same_file = kept.is_file() and sha256_file(kept) == made_with
        return same_file and tokenization(kept) == tokenization(self.tokenizer_file)

    def check_context(self, n_long: int, targets_per_block: int = 1, option: str = "--n-long") -> None:
        """Raise `UserError` where the model cannot be measured on N tokens, see `check_long_context`."""
        if self.rope_scaling and self.rope_scaling.name == MESA:
            raise UserError(
                f"{self.name}: no token can be dropped from a context that is read in chunks; give another scheme, or "
                "measure loss by position or needles"
            )
        name = f"{self.checkpoint} ({self.family})"
        factor = self.rope_scaling.factor if self.rope_scaling else 1.0
        check_long_context(
            self.model, n_long, targets_per_block, name=name, option=option, reach_factor=factor
        )

    def check_reach(self, length: int, more: int = 0) -> None:
        """Raise `UserError` where the model has no position embedding for ids up to L - 1, and ``more`` behind them.

        A rotary model is measured past the length that its configuration names: that is what is asked. Only a table of
        learned positions has an end, as one token at the last id shows.
        """
        at_most = self.model.max_positions
        if at_most is None or length + more <= at_most:
            return
        last = torch.tensor([[length + more - 1]])
        try:
            with torch.inference_mode():
                self.model(torch.zeros_like(last), position_ids=last)
        except (IndexError, RuntimeError) as error:
            raise UserError(
                f"{length + more:,} tokens are beyond the {at_most:,} learned positions of {self.checkpoint} "
                f"({self.family}); lower --lengths to at most {at_most - more:,}"
            ) from error


def prefix_of(prefix: str, config: Any, added: Callable[[], Sequence[int]]) -> tuple[int, ...]:
    """Token ids of a prefix: one of `PREFIXES`, or ids with commas between them; ``auto`` means what ``added`` gives.

    Raises `UserError` where the model's configuration names no such token.
    """
    if prefix == "none":
        return ()
    if prefix == "auto":
        return tuple(added())
    if prefix in PREFIXES:
        found = getattr(config, f"{prefix}_token_id", None)
        found = found[0] if isinstance(found, list) else found
        if found is None:
            raise UserError(f"--prefix {prefix}: the model's configuration names no such token; give its id")
        return (found,)
    if not all(each.isdecimal() for each in prefix.split(",")):
        raise UserError(f"--prefix {prefix}: give {', '.join(PREFIXES)}, or token ids such as 1 or 1,2")
    return tuple(map(int, prefix.split(",")))


def what_stands_before(plain: list[int], whole: list[int]) -> tuple[int, ...]:
    """The special tokens before a text, given its ids without and with special tokens."""
    return tuple(whole[: next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)])


def added_before(tokenizer_file: Path) -> tuple[int, ...]:
    """What a tokenizer puts before every text, by its post-processor or by `tokenizer_config.json` beside it."""
    tokenizer = load_tokenizer(tokenizer_file)
    found = what_stands_before(
        *(tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    )
    about = tokenizer_file.with_name("tokenizer_config.json")
    if found or not about.is_file():
        return found
    config = read_json(about, "save the tokenizer again")
    named = config.get("bos_token")
    named = named.get("content") if isinstance(named, dict) else named
    token = tokenizer.token_to_id(named) if config.get("add_bos_token") and named else None
    return () if token is None else (token,)


def is_of_project(model: Any, name: str) -> bool:
    """Whether a model is of this class of `olmo_sparsity.model`, which is not imported to ask: it needs OLMo."""
    return any(
        each.__name__ == name and each.__module__.startswith("olmo_sparsity.model.")
        for each in type(model).__mro__
    )


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter of a model object of this project or of transformers; an adapter is its own.

    Raises `UserError`, calling the model ``name``, where it takes no position ids, or cannot be read as it is.
    """
    model = unwrapped(model, name)
    if isinstance(model, Adapter):
        return model
    if is_of_project(model, "PositionedOLMo"):
        return OlmoForAnalysis(model)
    if is_of_project(model, "PositionedNeoX"):
        return PositionedCausalLM(model.model)
    if is_of_project(model, "PositionPredictor"):
        raise UserError(
            f"{name} reads position ids in another way than RoPE alone (positions.scheme, positions.rotate), so that "
            "dropping a token is not defined for it; give a model trained with positions.rotate: ids and no coupling"
        )
    if is_of_project(model, "TupleAttention"):
        raise UserError(
            f"{name} attends to tuples of tokens (model.family: tuples), so that no single token has an influence; "
            "give a transformer"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(
            f"{name} takes no position ids, so that no token can be dropped from its context; give a model with "
            "rotary or learned positions"
        )
    return PositionedCausalLM(model)


def unwrapped(model: Any, name: str) -> Any:
    """The model inside torch.compile, data parallelism and PEFT.

    Raises `UserError` for one that is more than the model inside, or that is spread over devices: it is never moved.
    """
    for inside in ("_orig_mod", "module"):
        model = getattr(model, inside, model)
    if hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise UserError(f"{name} reads learned prompts before a text; give it without its PEFT prompts")
        model = model.get_base_model()
    devices = sorted({str(weight.device) for weight in getattr(model, "parameters", list)()})
    if len(devices) > 1 or devices == ["meta"]:
        raise UserError(
            f'{name} is spread over {", ".join(devices)}; load it on one device, without device_map="auto"'
        )
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if not attention.startswith(("eager", "sdpa")):
        raise UserError(
            f"{name} has the attention {attention}, which may cut texts where position ids jump; call "
            'model.set_attn_implementation("sdpa")'
        )
    return model


def check_vocabulary(model: Adapter, ids: np.ndarray) -> None:
    """Raise `UserError` where token ids are beyond those that a model knows."""
    known = model.vocabulary_size
    if len(ids) and ids.max() >= known:
        raise UserError(
            f"the tokenizer gives token id {ids.max():,}, and the model has {known:,} tokens; give the "
            "tokenizer that the model was trained with"
        )


def tokenization(path: Path) -> dict[str, Any]:
    """What a tokenizer.json does to text, however it was written down: vocabulary, merges, pre-tokenizer, …"""
    parsed = json.loads(load_tokenizer(path).to_str())
    return {key: value for key, value in parsed.items() if key not in _NOT_WHAT_IS_TOKENIZED}


def find_model(path: str | Path) -> Path:
    """The folder that ``path`` means: itself, a run's last checkpoint, or the local copy of a model of the hub.

    A path that does not exist and reads like ``owner/name`` is a model of the Hugging Face hub; its configuration,
    tokenizer and safetensors weights are downloaded, or found in the cache. Raises `UserError` for anything else.
    """
    if not Path(path).exists() and HUB_ID.fullmatch(str(path)):
        return _from_hub(str(path))
    path = Path(path)
    return path if (path / TRANSFORMERS_CONFIG).is_file() else resolve_checkpoint(path)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors"]
    try:
        # A star reaches into folders, whose files transformers never reads.
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{name} is neither a folder here nor a model that could be fetched from the hub ({first_line(error)}); "
            "check the spelling and the connection, or download it first"
        ) from error
    if not (folder / TRANSFORMERS_CONFIG).is_file():
        raise UserError(f"{name} on the hub has no {TRANSFORMERS_CONFIG}; it is no model of transformers")
    return folder


def own_corpus(folder: Path) -> str:
    """Path of the prepared corpus that a checkpoint was trained on. Raises `UserError` where it names none."""
    path = None
    if (folder / CONFIG).is_file():
        path = config_of(folder).corpus.path
    if path is None:
        raise UserError(
            f"{folder} does not say on which prepared corpus it was trained; name one with --corpus"
        )
    return path


def load_for_analysis(path: str | Path, dtype: str = "fp32") -> LoadedModel:
    """Load a checkpoint of this project, a run (then its last one), or a transformers directory.

    ``dtype``: one of `DTYPES`, for a transformers directory; this project's own are in fp32.

    Raises `UserError` where it is none of them, is damaged, or needs what this project never does: remote code, or
    weights that are pickles.
    """
    folder = find_model(path)
    if (folder / TRANSFORMERS_CONFIG).is_file():
        return _load_directory(folder, dtype)
    if dtype not in ("fp32", "auto"):
        raise UserError(f"{folder} is a checkpoint of this project, measured in fp32; leave out --dtype")
    model, config = load_model(folder)
    return LoadedModel(
        model=adapter_of(model, str(folder)).eval().requires_grad_(False),
        checkpoint=folder,
        family=OWN_FAMILY if config.model.family == "olmo" else config.model.family,
        weights_sha256=weights_sha256(folder),
        training_seed=config.seed,
    )


def _load_directory(folder: Path, dtype: str) -> LoadedModel:
    files = weight_files(folder)
    with checked_copy(folder, files) as copy:
        model = _from_pretrained(copy, folder, DTYPES[dtype])
    adapter = adapter_of(model, f"{folder} ({model.config.model_type})")
    return LoadedModel(
        model=adapter.eval().requires_grad_(False),
        checkpoint=folder,
        family=model.config.model_type,
        weights_sha256=_sha256_of_all(files),
        training_seed=_exported_seed(folder),
    )


def _from_pretrained(copy: Path, folder: Path, dtype: Any) -> Any:
    """The transformers model of a `checked_copy` of a directory, whole."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    try:
        with quiet_transformers(), offline():
            model, loading = loader.from_pretrained(
                copy,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except MemoryError:
        raise
    except Exception as error:  # a config.json of wrong values makes transformers raise anything
        reason = printable(first_line(error)).replace(str(copy), str(folder))
        raise UserError(
            f"{folder} cannot be loaded by transformers ({reason}); give another model"
        ) from error
    refuse_wrapped(loading["unexpected_keys"], folder)
    if absent := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise UserError(  # transformers would draw them at random
            f"{folder} lacks {len(absent)} of its model's weights, such as {absent[0]}; save it again with "
            "save_pretrained"
        )
    model.config._name_or_path = str(folder)
    return model


def _sha256_of_all(files: list[Path]) -> str:
    """SHA-256 of the files' bytes one after the other; of one file it is the file's own."""
    if len(files) == 1:
        return sha256_file(files[0])
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _exported_seed(folder: Path) -> int | None:
    """Training seed of a directory that scripts/export_hf.py wrote."""
    path = folder / EXPORT_NAME
    if not path.is_file():
        return None
    note = read_json(path, "export the checkpoint again")
    if note.get("kind") != EXPORT_KIND:
        return None
    seed = note.get("training_seed")
    if type(seed) is not int:
        raise UserError(f"{path} is damaged (it has no training_seed); export the checkpoint again")
    return seed
