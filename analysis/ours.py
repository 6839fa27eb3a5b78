"""The one door to this project's trainer: its checkpoints, RoPE scaling, and prepared corpora.

`analysis.model.loading` and `analysis.contexts` import this file when one of them is opened, and not before: models of
transformers are measured on plain texts without it. Position ids are explicit, as in every `Adapter`.

Shapes: R rows, L tokens, P tokens whose keys and values are cached, Q positions at the end whose logits are kept, V
vocabulary (logits), W width, H heads, D head dimension; of a corpus D documents of T tokens each, n targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from analysis.contexts import Texts
from analysis.model.adapter import (
    Adapter,
    KeyValues,
    ReadAttention,
    TransformersAdapter,
    causal_bias,
    mean_over_heads,
)
from analysis.model.loading import (
    MESA,
    UNTRAINED,
    UNTRAINED_SEED,
    LoadedModel,
    TextTokenizer,
    sha256_of_tensors,
)
from olmo_sparsity.checkpoint import (
    TOKENIZER,
    config_of,
    load_model,
    resolve_checkpoint,
    weights_sha256,
)
from olmo_sparsity.corpus.tokens import MANIFEST_NAME, TOKENIZER_NAME, CorpusManifest, Verified
from olmo_sparsity.model.rope_scaling import LOG_N, RopeScaling, split_scaling
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.model.olmo import PositionedOLMo

FAMILY = "olmo-sparsity"
"""Of checkpoints of this project's OLMo."""
_USUAL = "default"  # transformers' name of RoPE as it was trained


# --- checkpoints ---


def open_checkpoint(path: str | Path, *, untrained: bool = False) -> LoadedModel:
    """A checkpoint of this project, or of a run its last one, in fp32 on the CPU.

    Raises `UserError` where there is none, or it is damaged. ``untrained``: its architecture with weights as they are
    before the first step, drawn with `UNTRAINED_SEED`.
    """
    folder = resolve_checkpoint(path)
    if untrained:
        from olmo_sparsity.model.build import build_model

        config = config_of(folder)
        model: Any = build_model(replace(config, seed=UNTRAINED_SEED))
        sha256, seed = sha256_of_tensors(model), None
    else:
        model, config = load_model(folder)
        sha256, seed = weights_sha256(folder), config.seed
    tokenizer = folder / TOKENIZER
    window, reach = config.model.max_sequence_length, _reach(config)
    return LoadedModel(
        model=adapter_of(model, str(folder)),
        name=f"{folder}@{UNTRAINED}" if untrained else str(folder),
        sha256=sha256,
        family=FAMILY if config.model.family == "olmo" else config.model.family,
        tokenizer=TextTokenizer.from_file(tokenizer) if tokenizer.is_file() else None,
        training_seed=seed,
        untrained=untrained,
        of_project=True,
        trained={
            "training_length": window,
            "position_scheme": config.positions.scheme,
            "position_target": reach if reach > window else None,
        },
    )


def _reach(config: Config) -> int:
    """One more than the largest position id of training: T' of the position scheme, or the window."""
    contiguous = config.positions.scheme == "contiguous"  # it ignores the target length
    return config.model.max_sequence_length if contiguous else config.target_length


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter of a model object of this project.

    Raises `UserError`, calling the model ``name``, for one from whose context single tokens cannot be dropped.
    """
    kinds = {each.__name__ for each in type(model).__mro__}  # by name: their modules need OLMo
    if "PositionedOLMo" in kinds:
        return OlmoAdapter(model)
    if "PositionedNeoX" in kinds:
        return TransformersAdapter(model.model)
    if "PositionPredictor" in kinds:
        raise UserError(
            f"{name} reads position ids in another way than RoPE alone (positions.scheme, positions.rotate), so that "
            "dropping a token is not defined for it; give a model trained with positions.rotate: ids and no coupling"
        )
    raise UserError(
        f"{name} attends to tuples of tokens (model.family: tuples), so that no single token has an influence; give a "
        "transformer"
    )


class OlmoAdapter(Adapter):
    """This project's OLMo, with any of its position encodings and attentions."""

    def __init__(self, model: PositionedOLMo):
        super().__init__()
        self.model = model

    @property
    def vocabulary_size(self) -> int:
        """See `Adapter`."""
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """See `Adapter`; only a table of learned positions ends."""
        config = self.model.config
        return config.max_sequence_length if config.encoding.has_table else None

    @property
    def baseline_token(self) -> int:
        """See `Adapter`."""
        return self.model.config.eos_token_id

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **options: Any) -> Any:
        """As `PositionedOLMo.forward`; without ids they are 0 … L - 1."""
        return self.model(input_ids, position_ids=position_ids, **options)

    @property
    def caches_rotated_keys(self) -> bool:
        """See `Adapter`: they are rotated whenever they are read."""
        return False

    def key_values(self, input_ids: Tensor, position_ids: Tensor) -> KeyValues:
        """See `Adapter`; OLMo caches keys before it rotates them."""
        options = {"use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids, position_ids=position_ids, **options).attn_key_values

    def logits_after(
        self, past: KeyValues, input_ids: Tensor, position_ids: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        return self.model(
            input_ids, position_ids=position_ids, past_key_values=past, logits_to_keep=logits_to_keep
        ).logits

    def biased_logits(
        self, input_ids: Tensor, position_ids: Tensor, bias: Tensor, logits_to_keep: int
    ) -> Tensor:
        """See `Adapter`."""
        if not getattr(self.model.blocks()[0].mixer, "fades", True):
            raise UserError(
                f"model.attention: {self.model.config.attention} has more than its scores to drop a token from, so "
                "that the selector gradient does not apply to it; leave it out"
            )
        of_encoding = self.model._attention_bias(position_ids, None)
        bias = bias[:, None] + (causal_bias(bias) if of_encoding is None else of_encoding)
        return self.model(
            input_ids, position_ids=position_ids, attention_bias=bias, logits_to_keep=logits_to_keep
        ).logits

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.embed(input_ids)

    def embedded_logits(self, embeddings: Tensor, position_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`."""
        return self.model(
            input_ids=None,
            position_ids=position_ids,
            input_embeddings=embeddings,
            logits_to_keep=logits_to_keep,
        ).logits

    def attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, read: ReadAttention = mean_over_heads
    ) -> list[Tensor]:
        """See `Adapter`."""
        with _recording_attention(self.model, queries, read) as recorded:
            self.model(input_ids, position_ids=position_ids, logits_to_keep=queries)
        return recorded


@contextmanager
def _recording_attention(model: PositionedOLMo, queries: int, read: ReadAttention) -> Iterator[list[Tensor]]:
    """While it runs, every layer appends what ``read`` gives of the attention of the last Q positions."""
    recorded: list[Tensor] = []

    def recording_softmax(attend: Any) -> Any:
        """Of `scaled_dot_product_attention`, which keeps its weights to itself: they are computed once more."""

        def attend_and_record(
            q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **rest: Any
        ) -> Any:
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = (q[:, :, -queries:].float() @ keys.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
            length = keys.shape[2]
            mask = causal_bias(scores.new_zeros(length, length)) if attn_mask is None else attn_mask
            recorded.append(read((scores + mask[..., -queries:, :].float()).softmax(dim=-1)))
            return attend(q, k, v, attn_mask=attn_mask, **rest)

        return attend_and_record

    def recording_weights(weights: Any) -> Any:
        """Of an attention of `olmo_sparsity.attention`, whose ``weights`` are all that it gives."""

        def weigh_and_record(*arguments: Any) -> Tensor:
            attention = weights(*arguments)
            recorded.append(read(attention[:, :, -queries:]))
            return attention

        return weigh_and_record

    wrapped = [
        (block, "_scaled_dot_product_attention", recording_softmax)
        if block.mixer is None
        else (block.mixer, "weights", recording_weights)
        for block in model.blocks()
    ]
    for holder, name, recording in wrapped:
        setattr(holder, name, recording(getattr(holder, name)))
    try:
        yield recorded
    finally:
        for holder, name, _ in wrapped:
            delattr(holder, name)  # the class's method is there again


# --- RoPE past the length that it was trained on (docs/method.md, 2.8) ---


def scale_rope(loaded: LoadedModel, change: str) -> LoadedModel:
    """A model of this project or of transformers with RoPE scaled as ``change`` says, such as yarn:4.

    The length to start from is what position ids reached in training. Raises `UserError` for a scheme that there is
    not, and where the model has no RoPE that could be scaled.
    """
    text = f"{loaded.name}@{change}"
    _, split = split_scaling(text)
    assert split is not None, text
    scheme, factor = split
    adapter = loaded.model
    if isinstance(adapter, OlmoAdapter):
        scaling = RopeScaling(scheme, factor, _trained_reach(loaded, scheme, text))
        adapter.model.rope_scaling = scaling
        adapter = MesaAdapter(adapter.model, scaling) if scheme == MESA else adapter
    else:
        if loaded.model.max_positions is None:
            raise UserError(
                f"{text}: the configuration names no max_position_embeddings, the length to start from; leave @… out"
            )
        scaling = RopeScaling(scheme, factor, loaded.model.max_positions)
        _scale_transformers(adapter, scaling, text)
    return replace(loaded, model=adapter, name=f"{loaded.name}@{scaling}", rope_scaling=str(scaling))


def _trained_reach(loaded: LoadedModel, scheme: str, text: str) -> int:
    from olmo_sparsity.attention import SOFTMAX

    inner: Any = loaded.model.model
    config = inner.config
    if not config.encoding.rotates:
        raise UserError(f"{text}: it was not trained with RoPE: there is nothing to scale; leave @… out")
    if scheme in (LOG_N, MESA) and (config.attention != SOFTMAX or config.nope_layer_interval is not None):
        raise UserError(
            f"{text}: {scheme} is for softmax attention with RoPE in every layer, and this model has model.attention "
            f"{config.attention} and model.nope_layer_interval {config.nope_layer_interval}; leave @… out"
        )
    return loaded.trained["position_target"] or loaded.trained["training_length"]


def _scale_transformers(adapter: Adapter, scaling: RopeScaling, text: str) -> None:
    """Change the frequencies that a transformers model keeps in its rotary modules."""
    if scaling.name in (LOG_N, MESA):
        raise UserError(
            f"{text}: transformers' attention has no place for {scaling.name}; give the checkpoint it was exported from"
        )
    inner: Any = adapter.model
    rotary = [module for module in inner.modules() if hasattr(module, "inv_freq")]
    parameters = getattr(inner.config.get_text_config(), "rope_parameters", None) or {}
    if not rotary or parameters.get("rope_type") != _USUAL:
        has = parameters.get("rope_type", "no RoPE") if rotary else "no RoPE"
        raise UserError(f"{text}: this model has {has}, and only plain RoPE can be scaled; leave @… out")
    for module in rotary:
        module.inv_freq, module.attention_scaling = scaling.apply(module.inv_freq, parameters["rope_theta"])


@dataclass(frozen=True)
class Chunks:
    """How Mesa-Extrapolation cuts a text, and the ids at which a chunk reads what is before it."""

    trained: int
    """T_train: ids were below it in training."""
    first: int
    """Tokens of the first chunk."""
    others: int
    """Tokens of each other chunk."""
    repeated: int
    """E: how often an id before the chunk is repeated."""

    @classmethod
    def reaching(cls, scaling: RopeScaling) -> Chunks:
        """Chunks of T_train / 16, then T_train / 2 tokens, and the least E at which s · T_train tokens fit [ours]."""
        trained = scaling.original_length
        others = max(1, trained // 2)
        room = max(1, trained - others - 1)
        repeated = max(1, math.ceil((scaling.factor * trained - others) / room))
        return cls(trained, max(1, trained // 16), others, repeated)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Where each chunk of a text begins and ends."""
        begins = [0, *range(self.first, length, self.others)]
        return list(zip(begins, [*begins[1:], length], strict=True))

    def woven_ids(self, begin: int, end: int) -> Tensor:
        """(end,) ids at which the chunk from ``begin`` on reads itself and what is before it.

        Token i, of those before the chunk, has id begin - 1 - floor((begin - 1 - i) / E).
        """
        ids = torch.arange(end)
        back = begin - 1 - ids[:begin]
        return torch.cat([begin - 1 - back // self.repeated, ids[begin:]])


class MesaAdapter(OlmoAdapter):
    """This project's OLMo with RoPE, reading a text in chunks. Tokens cannot be dropped: the chunks would move.

    Ma et al. 2024 (NeurIPS, "Mesa-Extrapolation: A Weave Position Encoding Method for Enhanced Extrapolation in LLMs"),
    without training. A chunk reads itself and the first chunk, at ids next to each other, so its keys and values never
    saw an id beyond those of training. The chunk whose logits are kept reads everything before it: its own tokens at
    their ids, those before it at ids of which each is repeated E times ("stair"), so that no distance exceeds what was
    trained. Its scores are sharpened by log n, as in the authors' code. The first T_train tokens are read as usual.
    Every chunk is read so in its turn [ours], so that a loss by position costs about two passes.
    """

    def __init__(self, model: PositionedOLMo, scaling: RopeScaling):
        super().__init__(model)
        self.chunks = Chunks.reaching(scaling)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> Any:
        """See `Adapter`; tokens are read from id 0 on, whatever their ids: RoPE knows differences only."""
        length, trained = input_ids.shape[1], self.chunks.trained
        keep_from = length - (logits_to_keep or length)
        logits = []
        if keep_from < trained:
            usual = input_ids[:, :trained]
            logits.append(self.model(usual, logits_to_keep=usual.shape[1] - keep_from).logits)
        past: KeyValues = []
        first: KeyValues = []
        for begin, end in self.chunks.spans(length) if length > trained else ():
            chunk = input_ids[:, begin:end]
            keep = end - max(begin, keep_from, trained)
            if keep > 0:
                ids = self.chunks.woven_ids(begin, end).to(chunk.device)[None]
                logits.append(self.logits_after(past, chunk, ids, keep))
            read = self._read_alone(first, chunk)
            past = _joined(past, read) if past else read
            first = first or past
        return SimpleNamespace(logits=torch.cat(logits, dim=1))

    def _read_alone(self, first: KeyValues, chunk: Tensor) -> KeyValues:
        """Keys and values of a chunk that reads itself and the first chunk."""
        options = {"use_cache": True, "logits_to_keep": 1}
        layers = self.model(chunk, past_key_values=first or None, **options).attn_key_values
        of_chunk = slice(-chunk.shape[1], None)
        return [(keys[:, :, of_chunk], values[:, :, of_chunk]) for keys, values in layers]


def _joined(past: KeyValues, more: KeyValues) -> KeyValues:
    """Keys and values of both, one behind the other."""
    return [
        (torch.cat([k, more_k], dim=2), torch.cat([v, more_v], dim=2))
        for (k, v), (more_k, more_v) in zip(past, more, strict=True)
    ]


# --- prepared corpora ---


class PreparedTexts(Texts):
    """The documents of one split of a corpus that `prepare_data` made, without the EOS id that ends each."""

    def __init__(self, corpus: str | Path, split: str):
        manifest, self._files = CorpusManifest.load(corpus), Verified(corpus).open_split(corpus, split)
        self.name, self.sha256 = str(corpus), sha256_file(Path(corpus) / MANIFEST_NAME)
        self.tokenizer_file = Path(corpus) / TOKENIZER_NAME
        self.tokenizer_sha256, self.vocabulary_size = manifest.tokenizer_sha256, manifest.vocab_size

    def tokens(self, number: int) -> np.ndarray:
        """Token ids of a document, (T,)."""
        return self._files.document(number)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, (D,) int64."""
        return np.diff(self._files.document_bounds[:, 1:], axis=1)[:, 0]

    @property
    def groups(self) -> np.ndarray | None:
        """Name of the group of each document, (D,) strings; None where the corpus has no groups."""
        return self._files.groups

    def in_near_copy(self, text: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy of training text, (n,) bool; None where they were not looked for."""
        return self._files.in_near_copy(text, position)


def open_corpus(corpus: str | Path, split: str = "heldout") -> PreparedTexts:
    """A split of a prepared corpus, compared with its checksums. Raises `UserError` where it is none or is damaged."""
    return PreparedTexts(corpus, split)


def corpus_of(model: str) -> str:
    """Path of the prepared corpus that a run or checkpoint was trained on. Raises `UserError` where it names none."""
    folder = Path(model if Path(model).exists() else model.rpartition("@")[0] or model)
    of_project = folder.is_dir() and not (folder / "config.json").is_file()
    corpus = config_of(resolve_checkpoint(folder)).corpus.path if of_project else None
    if corpus is None:
        raise UserError(
            f"{model} does not say on which prepared corpus it was trained; give --text or --corpus"
        )
    return corpus
