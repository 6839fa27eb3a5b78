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
import inspect
import logging
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from jinja2 import TemplateError
from torch import nn

from analysis.model.adapter import Adapter, TransformersAdapter, with_prefix
from analysis.model.check import check_long_context
from analysis.model.tokenizer import TOKENIZER, OtherTokenizer, TextDecoder, TextTokenizer, read_tokenizer
from analysis.texts import TextReader
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.extras import require_extra
from olmo_sparsity.util.files import read_json, user_path
from olmo_sparsity.util.provenance import keep_freed_memory, machine, pick_device

if TYPE_CHECKING:
    from analysis.texts import Texts

log = logging.getLogger(__name__)

DTYPES: dict[str, Any] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "auto": "auto",
}
"""Types that weights are loaded in, by name; auto: as they are stored."""
UNTRAINED, UNTRAINED_SEED = "untrained", 0
FOREIGN = 0.85
"""Of the loss of a uniform guess: with more, text and model do not go together. [ours]"""
_CHANGED = re.compile(r"(?P<path>.+)@(?P<change>untrained|[A-Za-z][\w-]*:\d+(\.\d+)?)")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_OF_TOKENIZERS = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers that are not saved as a tokenizer.json."""
_ON_ONE_DAY = "{% macro strftime_now(_) %}1 January 2026{% endmacro %}"  # else texts change overnight
_EXPORT = "olmo_sparsity.json"
"""The note in a folder that this project exported."""


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
    of_project: bool = False
    """Whether this project's trainer made its class."""
    trained: dict[str, Any] = field(default_factory=dict)
    """Of this project's checkpoints: ``training_length``, ``position_scheme``, ``position_target``, what ids reached
    beyond that length (None: they did not), and ``share_of_needles`` in its windows."""
    _before: list[tuple[Any, str, bool]] = field(default_factory=list)

    @property
    def prefix(self) -> tuple[int, ...]:
        """Token ids that stand before every context (docs/method.md, 2.1 [ours])."""
        return self.model.prefix

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
    def reach_factor(self) -> float:
        """How many times as far its RoPE is scaled to reach."""
        return float(self.rope_scaling.partition(":")[2]) if self.rope_scaling else 1.0

    @property
    def reads(self) -> int | None:
        """How many tokens it reads, as far as its configuration says."""
        reach = self.trained.get("position_target") or self.trained.get("training_length")
        return int(self.reach_factor * reach) if reach else self.model.max_positions

    @property
    def tokenizer_sha256(self) -> str | None:
        """Of the tokenizer.json; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.sha256

    def describe(self) -> dict[str, Any]:
        """What identifies it in `analysis.measurement.Result.settings`."""
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
            raise UserError(
                f"{self.name} has no {TOKENIZER}; copy it there, or give the tokenizer: --tokenizer PATH, in Python "
                "(model, tokenizer)"
            )
        return self.tokenizer

    @property
    def reader(self) -> TextReader:
        """How it reads texts. Raises `UserError` without a tokenizer."""
        tokenizer = self._its_tokenizer()
        return TextReader(
            encode=self.encode,
            chat=self.chat,
            special=tokenizer.special,
            boundaries=tokenizer.boundaries,
            prefix=self.prefix,
            decode=tokenizer.decode,
        )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, (T,) int64, without special tokens around it.

        Raises `UserError` without a tokenizer, and for ids that the model has no embedding of.
        """
        tokens = self._its_tokenizer().encode(text)
        self.check_ids(tokens)
        return tokens

    def check_ids(self, ids: Sequence[int] | np.ndarray) -> None:
        """Raise `UserError` where the model has no embedding of one of some token ids."""
        largest, embeddings = max(map(int, ids), default=0), self.model.vocabulary_size
        if largest >= embeddings:
            token = repr(self.tokenizer.decode([largest])) if self.tokenizer else "a token"
            raise UserError(
                f"{token} has the id {largest:,}, and {self.name} has embeddings of {embeddings:,} tokens; give the "
                "model's own tokenizer, or one whose added tokens it has learned (model.resize_token_embeddings)"
            )

    def chat(self, messages: list[dict[str, Any]]) -> tuple[str, list[bool]]:
        """A conversation as the chat template writes it, and whether each token is of a message's content, (T,).

        Special tokens never are. A prefix at its beginning is left out: one stands before every context. Raises
        `UserError` for what is no conversation, and without a template that leaves contents as they are, but for space.
        """
        tokenizer, whole = self._its_tokenizer().tokenizer, self._its_tokenizer().with_template
        if isinstance(self._its_tokenizer(), OtherTokenizer):
            raise UserError(
                f"{self.name}: the tokenizer ({type(tokenizer).__name__}) does not say where in a text its tokens are; "
                "conversations need a fast tokenizer of transformers; write them out as text"
            )
        if getattr(whole, "chat_template", None) is None:
            raise UserError(f"{self.name} has no chat template; add chat_template.jinja to it, or give text")
        prefix, given = tokenizer.decode(list(self.prefix), skip_special_tokens=False), str(messages)[:120]
        try:
            template = _ON_ONE_DAY + whole.get_chat_template()
            write = partial(whole.apply_chat_template, chat_template=template, tokenize=False)
            contents = [rf"(\s*{re.escape(message['content'].strip())}\s*)" for message in messages]
            marked = [{**message, "content": f"\ue000{n}\ue000"} for n, message in enumerate(messages)]
            text, pattern = (write(each).removeprefix(prefix) for each in (messages, marked))
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"no messages with role and content as text that fit the template ({first_line(error)})"
            raise UserError(f"{given!r}: {why}; mend or drop them") from None
        pattern = re.sub("\ue000(\\d+)\ue000", lambda mark: contents[int(mark[1])], re.escape(pattern))
        if (found := re.fullmatch(pattern, text)) is None or found.re.groups != len(messages):
            raise UserError(
                f"{given!r}: the chat template changes or drops a content, such as what a model thought; give the "
                "messages as the template leaves them (without <think> … </think>), or drop the conversation"
            )
        tokens = tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(tokens.offsets).T
        starts = np.minimum(starts, [0, *ends[:-1]])  # some tokenizers leave out the space before a word
        spans = map(found.span, range(1, found.re.groups + 1))
        inside = np.any([(first <= starts) & (ends <= end) for first, end in spans], axis=0)
        return text, (inside & ~np.isin(tokens.ids, list(self._its_tokenizer().special))).tolist()

    @property
    def decoder(self) -> TextDecoder:
        """The text of token ids. Raises `UserError` without a tokenizer."""
        return self._its_tokenizer().decoder

    def check_texts(self, texts: Texts) -> None:
        """Raise `UserError` where texts are a corpus of another tokenizer, or of ids without an embedding."""
        if getattr(texts, "tokenizer_sha256", self.tokenizer_sha256) != self.tokenizer_sha256:
            raise UserError(
                f"{texts.name} was made with another tokenizer.json than {self.name} has; prepare the text with the "
                f"model's, or, where both do the same, give --tokenizer {texts.name}/{TOKENIZER}"
            )
        if getattr(texts, "vocabulary_size", 0) > self.model.vocabulary_size:
            self.check_ids([int(texts.tokens(n).max(initial=0)) for n in range(len(texts.lengths))])

    def check_context(self, n_long: int, targets_per_block: int = 1) -> None:
        """Raise `UserError` where it cannot be measured on N tokens, see `check_long_context`."""
        name = f"{self.name} ({self.family})"
        check_long_context(self.model, n_long, targets_per_block, name=name, reach_factor=self.reach_factor)

    def check_losses(self, losses: np.ndarray) -> None:
        """Warn where losses in nats, such as L_long of some targets, are nearly those of a uniform guess."""
        ceiling = math.log(self.model.vocabulary_size)
        mean = float(losses.mean())
        if mean > FOREIGN * ceiling and not self.untrained:
            log.warning(
                "the mean loss given the long context is %.2f nats, where a uniform guess has %.2f: the tokenizer is "
                "perhaps not the model's, or the text is of a language that it has not learned",
                mean,
                ceiling,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
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
    """A model in evaluation mode, on a device and behind its prefix. Lets glibc keep memory that this process frees.

    Args:
        model: a path or hub id, maybe with ``@yarn:4`` or ``@untrained`` behind it; or (model, tokenizer), both loaded;
            a `LoadedModel` is given back as it is.
        tokenizer: instead of the model's: an object of transformers or tokenizers, or the path of a tokenizer.json.
        prefix: what stands before every context: ``auto`` (what the tokenizer puts before a text, nothing for a model
            of this project, which read no such token in training), ``none``, ``bos``, ``eos``, or ids such as ``1,2``.
        dtype: one of `DTYPES`; checkpoints of this project are in fp32, and a model object stays as it is.
        device: such as ``cuda:0``; by default a GPU where there is one, and where a model object is already.
        attn_implementation: of transformers, ``sdpa`` or ``eager``; by default the model's usual one.

    Raises `UserError` where there is no such model, it takes no position ids, lacks weights, or the prefix names no
    token of it.
    """
    if isinstance(model, LoadedModel):
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


class OneDNNLinear(nn.Linear):
    """A linear layer that multiplies fp32 on a CPU by oneDNN where no gradient is wanted."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(…, in) -> (…, out)."""
        wants_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if wants_gradient or not input.is_cpu or input.dtype != torch.float32:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")


def multiply_by_onednn(model: nn.Module) -> None:
    """Make its linear layers `OneDNNLinear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDNNLinear


def mkl_is_slow() -> bool:
    """Whether MKL, which multiplies fp32 for PyTorch, leaves the AVX-512 of this processor unused, as on AMD's."""
    uses_avx512 = torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability()
    return uses_avx512 and "AMD" in machine()["processor"]


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


# --- where models come from ---


def _ours() -> Any:
    """This project's own checkpoints; other models are measured without the packages that these need."""
    return importlib.import_module("analysis.ours")


def _open_path(text: str, dtype: str, attention: str | None) -> LoadedModel:
    changed = None if user_path(text).exists() else _CHANGED.fullmatch(text)
    name, change = (changed["path"], changed["change"]) if changed else (text, None)
    path = _local_path(name)
    if path.suffix.lower() == ".gguf" or (path / "config.json").is_file():
        loaded = _open_transformers(path, name, dtype, attention)
    else:
        loaded = _ours().open_checkpoint(path)
    if change == UNTRAINED:
        return _untrained(loaded)
    return _ours().scale_rope(loaded, change) if change else loaded


def _local_path(name: str) -> Path:
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


def _open_transformers(path: Path, name: str, dtype: str, attention: str | None) -> LoadedModel:
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
            f"own ({first_line(error)}); mend or convert it, or load it yourself and give (model, tokenizer)"
        ) from error
    if absent := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise UserError(  # transformers draws them at random
            f"{path} lacks {len(absent)} of its model's weights, such as {absent[0]}; save it again with "
            "save_pretrained"
        )
    tokenizer, exported = path / TOKENIZER, path / _EXPORT
    loaded = LoadedModel(
        model=adapter_of(model, f"{name} ({model.config.model_type})"),
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
    weight_map = read_json(folder / "model.safetensors.index.json", "save the model again")["weight_map"]
    return [folder / name for name in sorted(set(weight_map.values()))]


def _sha256_of(files: Sequence[Path]) -> str:
    """SHA-256 of the files' bytes one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


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
        raise UserError(f"{name} takes no position ids, so that no token can be dropped from its context")
    return TransformersAdapter(model)
