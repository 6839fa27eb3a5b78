"""OLMo with explicit position ids.

Shapes: B batch, T tokens, P past tokens in a key-value cache, D width, V embedding size (logits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import OLMo, OLMoSequentialBlock, causal_attention_bias
from torch import Tensor, nn

from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.model.linear_loss import Head, loss_sums
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

KeyValue = tuple[Tensor, Tensor]


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """An attention bias in ``dtype``, or in autocast's; finite. As OLMo's, which no compiler traces."""
    kind = bias.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return bias if bias.dtype == dtype else bias.to(dtype).clamp(min=torch.finfo(dtype).min)


class LastBlock(OLMoSequentialBlock):
    """OLMo's block, which can compute the last positions alone; of the others it needs keys and values only."""

    asked: int = 0
    """Q; 0: all positions."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attention_bias: Tensor | None = None,
        layer_past: KeyValue | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> tuple[Tensor, KeyValue | None]:
        """As OLMo's block: from (B, T, D) to (B, T, D), or (B, Q, D), and the keys and values with ``use_cache``."""
        if not 0 < self.asked < x.shape[1]:
            return super().forward(x, attention_bias, layer_past, use_cache, **options)
        last = x[:, -self.asked :]
        attended, present = self._attend(x, attention_bias, layer_past, use_cache)
        after = self.config.norm_after
        last = last + self.dropout(self.attn_norm(attended) if after else attended)
        changed = self.ff_out(self.act(self.ff_proj(last if after else self.ff_norm(last))))
        return last + self.dropout(self.ff_norm(changed) if after else changed), present

    def _attend(
        self, x: Tensor, attention_bias: Tensor | None, layer_past: KeyValue | None, use_cache: bool
    ) -> tuple[Tensor, KeyValue | None]:
        """Attention of the last Q positions: the keys and values before them are handed on as if they were cached."""
        h = x if self.config.norm_after else self.attn_norm(x)
        width, bias = self.fused_dims[0], self.att_proj.bias
        parts = slice(width), slice(width, None)
        q, kv = (
            nn.functional.linear(inputs, self.att_proj.weight[part], None if bias is None else bias[part])
            for inputs, part in zip((h[:, -self.asked :], h), parts, strict=True)
        )
        if (limit := self.config.clip_qkv) is not None:
            q, kv = q.clamp(-limit, limit), kv.clamp(-limit, limit)
        k, v = kv.split(self.fused_dims[1:], dim=-1)
        earlier = k[:, : -self.asked], v[:, : -self.asked]
        if self.k_norm is not None:
            earlier = self.k_norm(earlier[0]).to(k.dtype), earlier[1]
        shape = (len(x), -1, self.config.effective_n_kv_heads, width // self.config.n_heads)
        past = [each.view(shape).transpose(1, 2) for each in earlier]
        if layer_past is not None:
            past = [torch.cat(pair, dim=-2) for pair in zip(layer_past, past, strict=True)]
        if attention_bias is None:
            attention_bias = causal_attention_bias(past[0].shape[-2] + self.asked, x.device)
        return self.attention(
            q,
            k[:, -self.asked :],
            v[:, -self.asked :],
            attention_bias,
            layer_past=(past[0], past[1]),
            use_cache=use_cache,
        )


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
        self._logits_to_keep = 0
        self._hidden: Tensor | None = None  # what the head reads, while a loss is asked for
        self._asks_loss = self._can_make_loss = False
        self._olmo_checkpoint = self._activation_checkpoint_fn
        self._activation_checkpoint_fn = self._checkpoint_with_positions
        parts: Any = self.transformer
        parts["ln_f"].register_forward_pre_hook(self._only_last)
        if type(self.blocks()[-1]) is OLMoSequentialBlock:
            self.blocks()[-1].__class__ = LastBlock
        for group in parts["block_groups"] if config.block_group_size > 1 else ():
            group._activation_checkpoint_fn = self._checkpoint_with_positions
        for block in self.blocks():
            block._cast_attn_bias = cast_bias
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

    def _only_last(self, norm: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the final norm reads of (B, T, D): all positions, or the last ones."""
        kept = self._logits_to_keep
        return (arguments[0][:, -kept:], *arguments[1:]) if kept else arguments

    def _keep_hidden(self, norm: nn.Module, arguments: tuple[Any, ...], hidden: Tensor) -> Tensor:
        """Where a loss is asked for, `linear_loss` computes it, and OLMo's own gets nothing to do."""
        if not self._asks_loss:
            return hidden
        self._hidden = hidden
        return hidden[:, :0]

    def prepare_loss(self) -> None:
        """Call it once the model is wrapped, by DeepSpeed for one, whose hooks must see the whole hidden state.

        Hooks run in the order in which they are registered.
        """
        parts: Any = self.transformer
        if not self._can_make_loss:
            parts["ln_f"].register_forward_hook(self._keep_hidden)
            self._can_make_loss = True

    def final_hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """What the head reads, (B, T, D), for inputs of `forward`; no logits are made."""
        self.prepare_loss()
        self._asks_loss = True
        try:
            PositionedOLMo.forward(self, input_ids, **inputs)
            assert self._hidden is not None
            return self._hidden
        finally:
            self._asks_loss, self._hidden = False, None

    def head(self) -> Head:
        """What makes logits of `final_hidden`."""
        parts: Any = self.transformer
        scale = self.config.d_model**-0.5 if self.config.scale_logits else 1.0
        if self.config.weight_tying:
            return Head(parts["wte"].weight, None, scale)
        return Head(parts["ff_out"].weight, parts["ff_out"].bias, scale)

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
        logits_to_keep: int = 0,
        labels: Tensor | None = None,
        z_weight: float = 0.0,
        **options: Any,
    ) -> Any:
        """Logits (B, T, V), or of the last ``logits_to_keep`` positions where it is not 0.

        With ``labels`` (B, T) what `loss_sums` gives of them and of ``z_weight`` instead: the logits of all tokens then
        never exist together.

        ``position_ids``: (B, P + T) or (1, P + T) integers, the ids of cached tokens included (OLMo caches keys before
        rotation); None means 0 … P+T-1. ``document_ids``: (B, P + T) integers; a token then attends only to those
        before it that have its own document id, instead of to all before it. ``options`` are those of `OLMo.forward`
        (attention_mask, attention_bias, past_key_values, use_cache, output_hidden_states).
        """
        if labels is not None:
            options |= {"position_ids": position_ids, "document_ids": document_ids}
            return loss_sums(self.final_hidden(input_ids, **options), self.head(), labels, z_weight)
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
        last = self.blocks()[-1]
        self._logits_to_keep = last.asked = logits_to_keep
        try:
            with self.current_positions.holding(ids, sin_cos):
                return super().forward(input_ids, **options)  # type: ignore[arg-type]
        finally:
            self._logits_to_keep = last.asked = 0
