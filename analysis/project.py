"""The one door to this project's trainer: its checkpoints, RoPE scaling, and prepared corpora.

`analysis.open_model` and `analysis.open_texts` import this file when one of these is opened, and not before: models of
transformers are measured on plain texts without it. Position ids are explicit, as in every `Adapter`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from analysis.model.adapter import (
    PLAIN,
    Adapter,
    Output,
    PassOptions,
    ReduceAttention,
    TransformersAdapter,
    causal_bias,
    one_at_a_time,
)
from analysis.model.far_attention import FarKeys, KeyValues, Scores, attend
from analysis.model.layer_states import LayerStates, ReadLayer
from analysis.model.loaded import LoadedModel
from analysis.model.tokenizer import TextTokenizer
from analysis.texts import Texts
from olmo_sparsity.checkpoint import (
    TOKENIZER,
    config_of,
    load_model,
    resolve_checkpoint,
    weights_sha256,
)
from olmo_sparsity.data.groups import groups_of
from olmo_sparsity.data.near_copies import in_near_copy
from olmo_sparsity.data.tokens import MANIFEST_NAME, CorpusManifest, open_verified
from olmo_sparsity.model.rope_scaling import LOG_N, RopeScaling, split_scaling
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file, user_path

if TYPE_CHECKING:
    from olmo_sparsity.model.olmo import PositionedOLMo

# --- checkpoints ---


def open_checkpoint(path: str | Path) -> LoadedModel:
    """A checkpoint of this project, or of a run its last one, in fp32 on the CPU.

    Raises `UserError` where there is none, or it is damaged.
    """
    folder = resolve_checkpoint(path)
    model, config = load_model(folder)
    tokenizer = folder / TOKENIZER
    window_length = config.model.max_sequence_length
    return LoadedModel(
        model=adapter_of(model, str(folder)),
        name=str(folder),
        sha256=weights_sha256(folder, is_verified=True),
        family="olmo-sparsity" if config.model.family == "olmo" else config.model.family,
        tokenizer=TextTokenizer(tokenizer) if tokenizer.is_file() else None,
        training_seed=config.seed,
        of_project=True,
        trained={
            "training_length": window_length,
            "position_scheme": config.positions.scheme,
            "position_target": config.max_positions if config.max_positions > window_length else None,
            "share_of_needles": config.needles.share,
        },
    )


def adapter_of(model: Any, name: str) -> Adapter:
    """The adapter of a model object of this project.

    Raises `UserError`, calling the model ``name``, for one from whose context single tokens cannot be dropped.
    """
    kinds = {base.__name__ for base in type(model).__mro__}  # by name: their modules need OLMo
    if "PositionedOLMo" in kinds:
        return OlmoAdapter(model)
    if "PositionedNeoX" in kinds:
        return TransformersAdapter(model.model)
    raise UserError(
        f"{name} attends to tuples of tokens, or reads position ids in another way than RoPE alone, so that dropping a "
        "token is not defined for it; give a transformer with positions.rotate: ids and no coupling"
    )


class OlmoAdapter(Adapter):
    """This project's OLMo, with any of its position encodings and attentions."""

    caches_rotated_keys = False  # they are rotated whenever they are read

    def __init__(self, model: PositionedOLMo):
        super().__init__()
        self.model, config = model, model.config
        self.vocabulary_size, self.baseline_token = config.vocab_size, config.eos_token_id
        # only a table of learned positions ends
        self.last_position = config.max_sequence_length if config.learns_positions else None

    @property
    def shares_far_keys(self) -> bool:  # type: ignore[override]
        """Whether all layers have the softmax, at any window; a mixer computes weights of its own from all keys."""
        return all(block.mixer is None for block in self.model.blocks())

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `Adapter`."""
        return self.model.embed(input_ids)

    @one_at_a_time
    def raw_forward(
        self, inputs: Tensor, position_ids: Tensor, logits_to_keep: int, options: PassOptions = PLAIN
    ) -> Output:
        """See `Adapter`; OLMo caches keys before it rotates them."""
        embedded = inputs.ndim == 3
        bias = options.bias
        if bias is not None:
            if not getattr(self.model.blocks()[0].mixer, "supports_presence", True):
                raise UserError(
                    f"model.attention: {self.model.config.attention} has more than its scores to drop a token from, "
                    "so that the selector gradient does not apply to it; leave it out"
                )
            from olmo_sparsity.model.rope import alibi_causal_bias  # needs OLMo

            config = self.model.config
            causal = alibi_causal_bias(config, position_ids) if config.alibi else causal_bias(bias)
            bias = bias[:, None] + causal
        output = self.model(
            None if embedded else inputs,
            input_embeddings=inputs if embedded else None,
            position_ids=position_ids,
            logits_to_keep=logits_to_keep,
            attention_mask=options.attention_mask,
            attention_bias=bias,
            past_key_values=options.past or None,
            use_cache=options.past == [],
            **options.further,
        )
        return Output(output.logits, output.attn_key_values or [])

    def rotated(self, far: KeyValues) -> KeyValues:
        """See `Adapter`; a layer without RoPE leaves its keys as they are."""
        from olmo_sparsity.model.rope import rotary_sin_cos  # needs OLMo

        config = self.model.config
        if not config.rope:
            return far
        ids = torch.arange(far[0][0].shape[2], device=far[0][0].device)[None]
        current = self.model.current_positions
        current.of_queries = None
        layers = []
        with current.holding(ids, rotary_sin_cos(config, ids, self.model.rope_scaling)):
            for block, (keys, values) in zip(self.model.blocks(), far, strict=True):
                _, rotated = block.rotary_emb(keys, keys)
                layers.append((rotated, values))
        return layers

    @one_at_a_time
    def raw_near_logits(self, far: FarKeys, input_ids: Tensor, logits_to_keep: int) -> Tensor:
        """See `Adapter`: one pass over the near tokens alone, whose attention reads the far keys too."""
        from olmo_sparsity.model.rope import alibi_slopes  # needs OLMo

        config = self.model.config
        far_bias = None
        if config.alibi:
            distance = far.near_ids[:, None] - far.ids
            far_bias = -alibi_slopes(config, distance.device)[:, None, None] * distance
        with ExitStack() as restored:
            for layer, block in enumerate(self.model.blocks()):
                how = Scores(
                    (config.d_model // config.n_heads) ** -0.5, window=block.rope_window, far_bias=far_bias
                )
                block._scaled_dot_product_attention = partial(_with_far_keys, far, layer, how)
                restored.callback(delattr, block, "_scaled_dot_product_attention")
            ids = far.near_ids.expand(len(input_ids), -1)
            return self.raw_forward(input_ids, ids, logits_to_keep).logits

    @one_at_a_time
    def raw_attention(
        self, input_ids: Tensor, position_ids: Tensor, queries: int, reduce: ReduceAttention
    ) -> list[Tensor]:
        """See `Adapter`: a mixer has all of its weights at once."""
        mixers = [block.mixer for block in self.model.blocks() if block.mixer is not None]
        if not mixers:
            return self.raw_layers(
                input_ids, position_ids, lambda layer: reduce(layer.attention_slices(queries))
            )
        recorded: list[Tensor] = []

        def record(compute: Any, *arguments: Any, **options: Any) -> Tensor:
            weights: Tensor = compute(*arguments, **options)
            recorded.append(reduce([weights[:, :, -queries:]]))
            return weights

        with ExitStack() as restored:
            for mixer in mixers:
                mixer.weights = partial(record, mixer.weights)
                restored.callback(delattr, mixer, "weights")  # the class's method is there again
            self.raw_forward(input_ids, position_ids, queries)
        return recorded

    def raw_layers(self, input_ids: Tensor, position_ids: Tensor, read: ReadLayer) -> list[Tensor]:
        """See `Adapter`: every layer hands over what it gives to the softmax. A mixer has weights of its own."""
        config = self.model.config
        if any(block.mixer is not None for block in self.model.blocks()):
            raise UserError(
                f"model.attention: {config.attention} has more than queries and keys to make its weights of, so that "
                "policies cannot read them; leave out all policies but h2o, snapkv, ada-snapkv, tova and kvzip"
            )
        from olmo_sparsity.model.rope import PositionedRotaryEmbedding  # needs OLMo

        recorded: list[Tensor] = []

        def record(
            block: Any,
            compute: Any,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            **named: Any,
        ) -> Tensor:
            """``compute``, whose queries, keys and values are read first."""
            rotation = None
            if config.rope and isinstance(block.rotary_emb, PositionedRotaryEmbedding):
                sine, cosine = self.model.current_positions.sin_cos
                rotation = (cosine[:, 0], sine[:, 0])
            how = Scores((config.d_model // config.n_heads) ** -0.5)
            recorded.append(read(LayerStates(len(recorded), q, k, v, how, attn_mask, rotation)))
            return compute(q, k, v, attn_mask, **named)

        with ExitStack() as restored:
            for block in self.model.blocks():
                compute = block._scaled_dot_product_attention
                block._scaled_dot_product_attention = partial(record, block, compute)
                restored.callback(delattr, block, "_scaled_dot_product_attention")
            self.raw_forward(input_ids, position_ids, 0)  # all queries of the last layer, too
        return recorded


def _with_far_keys(
    far: FarKeys,
    layer: int,
    how: Scores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """In the place of `scaled_dot_product_attention`."""
    return attend(q, k, v, attn_mask, far, layer, how)


# --- RoPE past the length that it was trained on (docs/method.md, 2.8) ---


def scale_rope(loaded: LoadedModel, change: str) -> LoadedModel:
    """A model of this project or of transformers with RoPE scaled as ``change`` says, such as yarn:4.

    The length to start from is what position ids reached in training. Raises `UserError` for a scheme that there is
    not, and where the model has no RoPE that could be scaled.
    """
    text = f"{loaded.name}@{change}"
    _, split = split_scaling(text)
    assert split is not None, text
    adapter: Any = loaded.model
    trained = loaded.trained.get("position_target") or loaded.trained.get("training_length")
    length = trained if isinstance(adapter, OlmoAdapter) else adapter.max_positions
    if length is None:
        raise UserError(
            f"{text}: the configuration names no max_position_embeddings, the length to start from; leave @… out"
        )
    scaling = RopeScaling(*split, length)
    scale = _scale_olmo if isinstance(adapter, OlmoAdapter) else _scale_transformers
    scale(adapter.model, scaling, text)
    return replace(loaded, name=f"{loaded.name}@{scaling}", rope_scaling=str(scaling))


def _scale_olmo(model: PositionedOLMo, scaling: RopeScaling, text: str) -> None:
    from olmo_sparsity.attention import SOFTMAX

    config = model.config
    if not config.rope:
        raise UserError(f"{text}: it was not trained with RoPE: there is nothing to scale; leave @… out")
    plain = config.attention == SOFTMAX and config.nope_layer_interval is None
    if scaling.name == LOG_N and not plain:
        raise UserError(
            f"{text}: {LOG_N} is for softmax attention with RoPE in every layer, and this model has model.attention "
            f"{config.attention} and model.nope_layer_interval {config.nope_layer_interval}; leave @… out"
        )
    model.rope_scaling = scaling


def _scale_transformers(model: Any, scaling: RopeScaling, text: str) -> None:
    """Change the frequencies that a transformers model keeps in its rotary modules."""
    if scaling.name == LOG_N:
        raise UserError(
            f"{text}: transformers' attention has no place for {LOG_N}; give the checkpoint it was exported from"
        )
    rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "no RoPE") if rotary else "no RoPE"
    if kind != "default":  # transformers' name of RoPE as it was trained
        raise UserError(f"{text}: this model has {kind}, and only plain RoPE can be scaled; leave @… out")
    for module in rotary:
        module.inv_freq, module.attention_scaling = scaling.apply(module.inv_freq, parameters["rope_theta"])


# --- prepared corpora ---


class PreparedTexts(Texts):
    """The documents of one split of a corpus that `prepare_data` made, without the EOS id that ends each.

    ``special``: ids of special tokens, which are no targets.

    Raises `UserError` where there is none, or it does not have its checksums.
    """

    def __init__(self, corpus: str | Path, split: str = "heldout", special: frozenset[int] = frozenset()):
        self.special = special
        self._files = open_verified(corpus, split)
        self.name, self.sha256 = str(corpus), sha256_file(user_path(corpus) / MANIFEST_NAME)
        self.lengths = np.diff(self._files.document_bounds[:, 1:], axis=1)[:, 0]
        self.groups = groups_of(self._files)
        self.in_message = {}
        manifest = CorpusManifest.load(corpus)
        self.tokenizer_sha256, self.vocabulary_size = manifest.tokenizer_sha256, manifest.vocab_size

    def tokens(self, number: int) -> np.ndarray:
        """Token ids of a document, (T,)."""
        return self._files.document(number)

    def in_near_copy(self, text: np.ndarray, position: np.ndarray) -> np.ndarray | None:
        """Whether each token lies in a near copy of training text, (n,) bool; None where they were not looked for."""
        return in_near_copy(self._files, text, position)


def corpus_of(model: str) -> str:
    """Path of the prepared corpus that a run or checkpoint was trained on. Raises `UserError` where it names none."""
    folder = user_path(model if user_path(model).exists() else model.rpartition("@")[0] or model)
    of_project = folder.is_dir() and not (folder / "config.json").is_file()
    corpus = config_of(resolve_checkpoint(folder)).corpus.path if of_project else None
    if corpus is None:
        raise UserError(
            f"{model} does not say on which prepared corpus it was trained; give --text or --corpus"
        )
    return corpus
