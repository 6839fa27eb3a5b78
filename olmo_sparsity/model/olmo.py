"""OLMo with explicit position ids.

Shapes: B batch, T tokens, P past tokens in a key-value cache, D width, V embedding size (logits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import OLMo, OLMoOutput
from torch import Tensor

from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.model.rope import (
    CurrentPositions,
    NoPositionEmbedding,
    PositionedEmbedding,
    PositionedRotaryEmbedding,
    alibi_causal_bias,
    document_mask,
    rotary_sin_cos,
)
from olmo_sparsity.model.rope_scaling import RopeScaling


class PositionedOLMo(OLMo):
    """OLMo whose forward pass takes ``position_ids``; without them it is OLMo, to the last bit of its weights' names.

    RoPE rotates by the ids, ALiBi counts distance in ids, learned embeddings are looked up by id, NoPE ignores them.
    No mask is made for RoPE and NoPE, so attention stays fused and causal, unless ``document_ids`` ask for one.
    """

    config: ModelConfig
    rope_scaling: RopeScaling | None
    """Set to read a trained model beyond its length; not part of a checkpoint."""

    def __init__(self, config: ModelConfig, init_params: bool = True):
        super().__init__(config, init_params)
        self.current_positions = CurrentPositions()
        self.rope_scaling = None
        self.encoding = config.encoding
        self._olmo_checkpoint = self._activation_checkpoint_fn
        self._activation_checkpoint_fn = self._checkpoint_with_positions
        parts: Any = self.transformer
        for group in parts["block_groups"] if config.block_group_size > 1 else ():
            group._activation_checkpoint_fn = self._checkpoint_with_positions
        if self.encoding.rotates:
            for block in self.blocks():
                block.rotary_emb = PositionedRotaryEmbedding(config, self.current_positions)
        elif self.encoding.has_table:
            parts["wpe"].__class__ = PositionedEmbedding  # keeps OLMo's initial weights
            parts["wpe"].current = self.current_positions
        elif "wpe" in parts:  # OLMo's table, where neither of its own switches is on
            parts["wpe"] = NoPositionEmbedding()

    def blocks(self) -> list[Any]:
        """The transformer blocks in order, whether OLMo grouped them or not."""
        parts: Any = self.transformer
        if self.config.block_group_size == 1:
            return list(parts["blocks"])
        return [block for group in parts["block_groups"] for block in group]

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings, (B, T, D), which `forward` takes back as ``input_embeddings``."""
        parts: Any = self.transformer
        return parts["wte"](input_ids)

    def set_activation_checkpointing(
        self, strategy: ActivationCheckpointingStrategy | None, checkpoint_func: Callable | None = None
    ) -> None:
        """As in OLMo; the recomputed layers see the position ids of their own forward pass."""
        super().set_activation_checkpointing(strategy, checkpoint_func or self._checkpoint_with_positions)
        self.activation_checkpointing_strategy = strategy

    def _checkpoint_with_positions(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        ids, sin_cos = self.current_positions.ids, self.current_positions.sin_cos

        def run(*inner: Any, **options: Any) -> Any:
            with self.current_positions.holding(ids, sin_cos):
                return function(*inner, **options)

        return self._olmo_checkpoint(run, *args, **kwargs)

    def _attention_bias(self, ids: Tensor, document_ids: Tensor | None) -> Tensor | None:
        """What OLMo adds to attention scores, (B, 1 or H, T, T); None where fused causal attention is all there is."""
        seen = None if document_ids is None else document_mask(document_ids)
        if not self.encoding.biases:
            return seen
        bias = alibi_causal_bias(self.config, ids)
        return bias if seen is None else torch.where(seen, bias, torch.finfo(bias.dtype).min)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        **options: Any,
    ) -> OLMoOutput:
        """Logits (B, T, V), or (B, 1, V) with ``last_logits_only``.

        ``position_ids``: (B, P + T) or (1, P + T) integers, the ids of cached tokens included (OLMo caches keys before
        rotation); None means 0 … P+T-1. ``document_ids``: (B, P + T) integers; a token then attends only to those
        before it that have its own document id, instead of to all before it. ``options`` are those of `OLMo.forward`
        (attention_mask, attention_bias, past_key_values, use_cache, last_logits_only, output_hidden_states).
        """
        past = options.get("past_key_values")
        if position_ids is None:
            length = input_ids.shape[-1] + (past[0][0].shape[-2] if past else 0)
            ids = torch.arange(length, device=input_ids.device)[None]
        else:
            ids = position_ids
        if position_ids is not None or document_ids is not None:
            assert document_ids is None or options.get("attention_bias") is None, "the mask is made here"
            if options.get("attention_bias") is None:
                options["attention_bias"] = self._attention_bias(ids, document_ids)
        rotates = self.encoding.rotates
        sin_cos = rotary_sin_cos(self.config, ids, self.rope_scaling) if rotates else None
        with self.current_positions.holding(ids, sin_cos):
            return super().forward(input_ids, **options)  # type: ignore[arg-type]
