"""OLMo with explicit position ids; its blocks may have another attention or a window, or give the last positions only.

Shapes: B batch, T tokens, P past tokens in a key-value cache, Q queries (the last positions), W width, V embedding size
(logits), H heads, D head dimension, E further numbers that an attention caches with a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import OLMo, OLMoSequentialBlock, causal_attention_bias
from torch import Tensor, nn

from olmo_sparsity.attention import ATTENTIONS, SOFTMAX, Attention, AttentionMask, Shape
from olmo_sparsity.attention.cpu_attention import by_products, causal_products
from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.model.linear_loss import Head, losses
from olmo_sparsity.model.rope import (
    CurrentPositions,
    NoPositionEmbedding,
    PositionedEmbedding,
    PositionedRotaryEmbedding,
    Scaling,
    Unrotated,
    alibi_causal_bias,
    rotary_sin_cos,
)

KeyValue = tuple[Tensor, Tensor]
"""Keys (B, H, P, D) before rotation, and values with the further numbers of an attention, (B, H, P, D + E)."""


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """An attention bias in ``dtype``, or in autocast's; finite. As OLMo's, which no compiler traces."""
    kind = bias.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return bias if bias.dtype == dtype else bias.to(dtype).clamp(min=torch.finfo(dtype).min)


class PositionedBlock(OLMoSequentialBlock):
    """OLMo's block. The last block may compute the last positions only, and just keys and values of the others."""

    mixer: Attention | None
    """The attention in the place of the softmax; None: the softmax."""
    rope_window: int | None
    """A query sees the keys whose ids are less than this far from its own; None: all of them."""
    current: CurrentPositions
    num_queries: int = 0
    """Q; 0: all positions."""

    @property
    def attends_as_olmo(self) -> bool:
        """Whether the attention is OLMo's own: the softmax over all keys."""
        return self.mixer is None and self.rope_window is None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        attention_bias: Tensor | None = None,
        layer_past: KeyValue | None = None,
        use_cache: bool = False,
        **options: Any,
    ) -> tuple[Tensor, KeyValue | None]:
        """As OLMo's block: from (B, T, W) to (B, T, W), or (B, Q, W), and the keys and values with ``use_cache``."""
        num_queries = min(self.num_queries or x.shape[1], x.shape[1])
        computes_all_positions = num_queries == x.shape[1]
        if self.attends_as_olmo and computes_all_positions:
            return super().forward(x, attention_bias, layer_past, use_cache, **options)
        hidden = x[:, -num_queries:]
        attended, present = self._attend(x, num_queries, attention_bias, layer_past)
        norm_after = self.config.norm_after
        hidden = hidden + self.dropout(self.attn_norm(attended) if norm_after else attended)
        update = self.ff_out(self.act(self.ff_proj(hidden if norm_after else self.ff_norm(hidden))))
        hidden = hidden + self.dropout(self.ff_norm(update) if norm_after else update)
        return hidden, present if use_cache else None

    def _attend(
        self, x: Tensor, num_queries: int, attention_bias: Tensor | None, layer_past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Attention of the last Q positions, (B, Q, W), and keys and values of all."""
        h = x if self.config.norm_after else self.attn_norm(x)
        q, k, v = self._projected(h, num_queries)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(k.dtype), self.k_norm(k).to(k.dtype)
        width = self.config.d_model // self.config.n_heads
        q, k, v = (projected.unflatten(-1, (-1, width)).transpose(1, 2) for projected in (q, k, v))
        if self.mixer is not None and self.mixer.cached_dims:
            v = torch.cat([self._for_each_head(v), self.mixer.per_token(h).to(v.dtype)], dim=-1)
        if layer_past is not None:
            k, v = (torch.cat(pair, dim=-2) for pair in zip(layer_past, (k, v), strict=True))
        present = k, v
        if self.config.rope:
            q, k = self.rotary_emb(q, k)
        num_keys = k.shape[-2]
        if attention_bias is None and (not self.attends_as_olmo or num_queries < num_keys):
            attention_bias = causal_attention_bias(num_keys, x.device)
        if attention_bias is not None:
            attention_bias = attention_bias[:, :, num_keys - num_queries : num_keys, :num_keys]
        if self.rope_window is not None:
            assert attention_bias is not None
            attention_bias = self._within_rope_window(attention_bias, self.rope_window)
        dropout = self.config.attention_dropout if self.training else 0.0
        if self.mixer is None:
            bias = None if attention_bias is None else self._cast_attn_bias(attention_bias, k.dtype)
            output = self._scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=bias is None
            )
        else:
            assert attention_bias is not None
            mask = self.mask(attention_bias, num_queries)
            output = self.mixer(q, self._for_each_head(k), self._for_each_head(v), mask, dropout)
        return self.attn_out(output.transpose(1, 2).flatten(2)), present

    def _scaled_dot_product_attention(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As OLMo's."""
        if by_products(q, k, attn_mask):
            return causal_products(q, k, v, options["dropout_p"])
        return super()._scaled_dot_product_attention(q, k, v, attn_mask, **options)

    def _projected(self, h: Tensor, num_queries: int) -> list[Tensor]:
        """Queries (B, Q, W) of the last positions, keys and values (B, T, …) of all, from the normed input."""

        def project(inputs: Tensor, rows: slice) -> Tensor:
            bias = None if self.att_proj.bias is None else self.att_proj.bias[rows]
            return nn.functional.linear(inputs, self.att_proj.weight[rows], bias)

        width = self.fused_dims[0]
        q = project(h[:, -num_queries:], slice(width))
        kv = project(h, slice(width, None))
        if (limit := self.config.clip_qkv) is not None:
            q, kv = q.clamp(-limit, limit), kv.clamp(-limit, limit)
        return [q, *kv.split(self.fused_dims[1:], dim=-1)]

    def _within_rope_window(self, attention_bias: Tensor, rope_window: int) -> Tensor:
        """The bias, its lowest number where a key (B, 1 or H, Q, K) is ``rope_window`` ids or more from the query."""
        ids = self.current.ids
        assert ids is not None
        distance = (ids[:, None, -attention_bias.shape[2] :, None] - ids[:, None, None, :]).abs()
        return attention_bias.masked_fill(distance >= rope_window, torch.finfo(attention_bias.dtype).min)

    def _for_each_head(self, of_groups: Tensor) -> Tensor:
        """Keys or values of as many heads as the queries have."""
        repeats = self.config.n_heads // of_groups.shape[1]
        return of_groups if repeats == 1 else of_groups.repeat_interleave(repeats, dim=1)

    def mask(self, attention_bias: Tensor, num_queries: int) -> AttentionMask:
        """Positions of the last Q queries and of the keys; the lowest bias (B, 1 or H, Q, K) hides a key."""
        ids = self.current.ids
        assert ids is not None
        seen = (attention_bias > torch.finfo(attention_bias.dtype).min / 2).any(dim=1, keepdim=True)
        return AttentionMask(ids[:, -num_queries:], ids, seen, attention_bias.masked_fill(~seen, 0))


class PositionedOLMo(OLMo):
    """OLMo whose forward pass takes ``position_ids``; without them it is OLMo, the names of its weights included.

    RoPE rotates by the ids, ALiBi counts distance in ids, learned embeddings are looked up by id, NoPE ignores them.
    No mask is made for RoPE and NoPE, so attention stays fused and causal.

    The order of calls. `forward` without labels is OLMo's forward pass; its final norm reads the last positions
    (`_only_last`). `forward` with labels calls `final_hidden`, which calls `forward` without them: a hook of the final
    norm (`_keep_hidden`) stores the hidden state and leaves OLMo's head no rows. `losses` then computes head and loss.
    """

    config: ModelConfig
    rope_scaling: Scaling | None
    """Set to read a trained model beyond its length; not part of a checkpoint."""

    def __init__(self, config: ModelConfig, init_params: bool = True):
        super().__init__(config, init_params)
        self.current_positions = CurrentPositions()
        self.rope_scaling = None
        self._logits_to_keep = 0
        self._hidden: Tensor | None = None  # the final hidden state, set by the hook within `final_hidden`
        self._keeps_hidden = False
        self._has_hidden_hook = False
        self._olmo_checkpoint = self._activation_checkpoint_fn
        self._activation_checkpoint_fn = self._checkpoint_with_positions
        modules: Any = self.transformer
        modules["ln_f"].register_forward_pre_hook(self._only_last)
        for group in modules["block_groups"] if config.block_group_size > 1 else ():
            group._activation_checkpoint_fn = self._checkpoint_with_positions
        for block in self.blocks():
            block._cast_attn_bias = cast_bias
            block.mixer = None
            block.rope_window = None
            block.current = self.current_positions
            block.num_queries = 0
            if type(block) is OLMoSequentialBlock:
                block.__class__ = PositionedBlock
        if config.attention != SOFTMAX:
            shape = Shape(config.d_model, config.n_heads, config.max_sequence_length)
            for block in self.blocks():
                block.mixer = ATTENTIONS[config.attention](shape)
                if init_params:
                    block.mixer.reset_parameters()
        if config.rope:
            for layer, block in enumerate(self.blocks(), start=1):
                if config.nope_layer_interval and layer % config.nope_layer_interval == 0:
                    block.rotary_emb = Unrotated()
                else:
                    block.rotary_emb = PositionedRotaryEmbedding(config, self.current_positions)
                    block.rope_window = config.rope_window
        elif config.learns_positions:
            modules["wpe"].__class__ = PositionedEmbedding  # keeps OLMo's initial weights
            modules["wpe"].current = self.current_positions
        elif "wpe" in modules:  # NoPE: with neither RoPE nor ALiBi OLMo makes this table
            modules["wpe"] = NoPositionEmbedding()

    def blocks(self) -> list[Any]:
        """The transformer blocks in order, whether OLMo grouped them or not."""
        modules: Any = self.transformer
        if self.config.block_group_size == 1:
            return list(modules["blocks"])
        return [block for group in modules["block_groups"] for block in group]

    def _only_last(self, norm: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The final norm's input (B, T, W), or its last positions where only their logits are computed."""
        if not self._logits_to_keep:
            return arguments
        return (arguments[0][:, -self._logits_to_keep :], *arguments[1:])

    def _keep_hidden(self, norm: nn.Module, arguments: tuple[Any, ...], hidden: Tensor) -> Tensor:
        """Within `final_hidden`: keep the hidden state, and give OLMo's head no rows to compute logits of."""
        if not self._keeps_hidden:
            return hidden
        self._hidden = hidden
        return hidden[:, :0]

    def prepare_loss(self) -> None:
        """Register the hook of `final_hidden`. Call it after the model is wrapped, by DeepSpeed for example.

        Hooks run in the order in which they are registered, and the wrapper's must see the whole hidden state.
        """
        modules: Any = self.transformer
        if not self._has_hidden_hook:
            modules["ln_f"].register_forward_hook(self._keep_hidden)
            self._has_hidden_hook = True

    def final_hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """The final hidden state, which the head reads, (B, T, W), for inputs of `forward`; no logits are computed."""
        self.prepare_loss()
        self._keeps_hidden = True
        try:
            PositionedOLMo.forward(self, input_ids, **inputs)
            assert self._hidden is not None
            return self._hidden
        finally:
            self._keeps_hidden = False
            self._hidden = None

    def head(self) -> Head:
        """The linear head, from `final_hidden` to logits."""
        modules: Any = self.transformer
        scale = self.config.d_model**-0.5 if self.config.scale_logits else 1.0
        if self.config.weight_tying:
            return Head(modules["wte"].weight, None, scale)
        return Head(modules["ff_out"].weight, modules["ff_out"].bias, scale)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings, (B, T, W), which `forward` takes back as ``input_embeddings``."""
        modules: Any = self.transformer
        return modules["wte"](input_ids)

    def set_activation_checkpointing(
        self, strategy: ActivationCheckpointingStrategy | None, checkpoint_func: Callable | None = None
    ) -> None:
        """As in OLMo; the recomputed layers see the position ids of their own forward pass."""
        super().set_activation_checkpointing(strategy, checkpoint_func or self._checkpoint_with_positions)

    def _checkpoint_with_positions(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        ids = self.current_positions.ids
        sin_cos = self.current_positions.sin_cos

        def run(*inputs: Any, **options: Any) -> Any:
            with self.current_positions.holding(ids, sin_cos):
                return function(*inputs, **options)

        return self._olmo_checkpoint(run, *args, **kwargs)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        labels: Tensor | None = None,
        z_weight: float = 0.0,
        **options: Any,
    ) -> Any:
        """Logits (B, T, V), or of the last ``logits_to_keep`` positions where it is not 0.

        With ``labels`` (B, T) the result of `losses` for them and ``z_weight`` instead: the logits of all tokens then
        never exist at once.

        ``position_ids``: (B, P + T) or (1, P + T) integers, the ids of cached tokens included (OLMo caches keys before
        rotation); None means 0 … P+T-1. ``options`` are those of `OLMo.forward` (attention_mask, attention_bias,
        past_key_values, use_cache, output_hidden_states).
        """
        if labels is not None:
            hidden = self.final_hidden(input_ids, position_ids=position_ids, **options)
            return losses(hidden, self.head(), labels, z_weight)
        past = options.get("past_key_values")
        if position_ids is None:
            length = input_ids.shape[-1] + (past[0][0].shape[-2] if past else 0)
            ids = torch.arange(length, device=input_ids.device)[None]
        else:
            ids = position_ids
            if self.config.alibi and options.get("attention_bias") is None:
                options["attention_bias"] = alibi_causal_bias(self.config, ids)
        sin_cos = rotary_sin_cos(self.config, ids, self.rope_scaling) if self.config.rope else None
        factor = self.rope_scaling.of_queries(ids) if self.rope_scaling else None
        self.current_positions.of_queries = None if factor is None else factor[:, None, :, None]
        last_block = self.blocks()[-1]
        self._logits_to_keep = last_block.num_queries = logits_to_keep
        try:
            with self.current_positions.holding(ids, sin_cos):
                return super().forward(input_ids, **options)  # type: ignore[arg-type]
        finally:
            self._logits_to_keep = last_block.num_queries = 0
