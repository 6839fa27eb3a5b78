"""OLMo's transformer block, with another attention than the softmax, within a window, and for the last positions alone.

Shapes: B batch, T tokens, P past tokens in a key-value cache, Q positions that are asked for, H heads, D head
dimension, E numbers that an attention keeps beside a value, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from olmo.model import OLMoSequentialBlock, causal_attention_bias
from torch import Tensor, nn

from olmo_sparsity.attention import Attention, Places
from olmo_sparsity.model.dot_product import attend
from olmo_sparsity.model.rope import CurrentPositions

KeyValue = tuple[Tensor, Tensor]
"""Keys (B, H, P, D) before rotation, and values with what an attention keeps beside them, (B, H, P, D + E)."""


def cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """An attention bias in ``dtype``, or in autocast's; finite. As OLMo's, which no compiler traces."""
    kind = bias.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return bias if bias.dtype == dtype else bias.to(dtype).clamp(min=torch.finfo(dtype).min)


class PositionedBlock(OLMoSequentialBlock):
    """OLMo's block. Of the last one the last positions may be asked alone: the others give keys and values only."""

    mixer: Attention | None
    """What attends in the place of the softmax."""
    window: int | None
    """Keys are seen whose ids are fewer than this many behind; None: all of them."""
    current: CurrentPositions
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
        """As OLMo's block: from (B, T, W) to (B, T, W), or (B, Q, W), and the keys and values with ``use_cache``."""
        asked = self.asked if 0 < self.asked < x.shape[1] else x.shape[1]
        if self.mixer is None and self.window is None and asked == x.shape[1]:
            return super().forward(x, attention_bias, layer_past, use_cache, **options)
        last = x[:, -asked:]
        attended, present = self._attend(x, asked, attention_bias, layer_past)
        after = self.config.norm_after
        last = last + self.dropout(self.attn_norm(attended) if after else attended)
        changed = self.ff_out(self.act(self.ff_proj(last if after else self.ff_norm(last))))
        last = last + self.dropout(self.ff_norm(changed) if after else changed)
        return last, present if use_cache else None

    def _attend(
        self, x: Tensor, asked: int, attention_bias: Tensor | None, layer_past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Attention of the last Q positions, (B, Q, W), and keys and values of all."""
        h = x if self.config.norm_after else self.attn_norm(x)
        q, k, v = self._projected(h, asked)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(k.dtype), self.k_norm(k).to(k.dtype)
        width = self.config.d_model // self.config.n_heads
        q, k, v = (each.unflatten(-1, (-1, width)).transpose(1, 2) for each in (q, k, v))
        if self.mixer is not None and self.mixer.extras:
            v = torch.cat([self._for_each_head(v), self.mixer.per_token(h).to(v.dtype)], dim=-1)
        if layer_past is not None:
            k, v = (torch.cat(pair, dim=-2) for pair in zip(layer_past, (k, v), strict=True))
        present = k, v
        if self.config.rope:
            q, k = self.rotary_emb(q, k)
        keys = k.shape[-2]
        own = self.mixer is not None or self.window is not None
        if attention_bias is None and (own or asked < keys):
            attention_bias = causal_attention_bias(keys, x.device)
        if attention_bias is not None:
            attention_bias = attention_bias[:, :, keys - asked : keys, :keys]
        if self.window is not None:
            assert attention_bias is not None
            attention_bias = self._within_window(attention_bias, self.window)
        dropout = self.config.attention_dropout if self.training else 0.0
        if self.mixer is None:
            bias = None if attention_bias is None else self._cast_attn_bias(attention_bias, k.dtype)
            mixed = self._scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=bias is None
            )
        else:
            assert attention_bias is not None
            mixed = self.mixer(
                q, self._for_each_head(k), self._for_each_head(v), self.places(attention_bias, asked), dropout
            )
        return self.attn_out(mixed.transpose(1, 2).flatten(2)), present

    def _scaled_dot_product_attention(  # type: ignore[override]
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As OLMo's."""
        return attend(super()._scaled_dot_product_attention, q, k, v, attn_mask, **options)

    def _projected(self, h: Tensor, asked: int) -> list[Tensor]:
        """Queries (B, Q, W) of the last positions, keys and values (B, T, …) of all, from the normed input."""
        width, bias = self.fused_dims[0], self.att_proj.bias
        parts = slice(width), slice(width, None)
        q, kv = (
            nn.functional.linear(inputs, self.att_proj.weight[part], None if bias is None else bias[part])
            for inputs, part in zip((h[:, -asked:], h), parts, strict=True)
        )
        if (limit := self.config.clip_qkv) is not None:
            q, kv = q.clamp(-limit, limit), kv.clamp(-limit, limit)
        return [q, *kv.split(self.fused_dims[1:], dim=-1)]

    def _within_window(self, attention_bias: Tensor, window: int) -> Tensor:
        """The bias, and its lowest number where a key (B, 1 or H, Q, K) is ``window`` ids or more from the query."""
        ids = self.current.ids
        assert ids is not None
        away = (ids[:, None, -attention_bias.shape[2] :, None] - ids[:, None, None, :]).abs()
        return attention_bias.masked_fill(away >= window, torch.finfo(attention_bias.dtype).min)

    def _for_each_head(self, of_groups: Tensor) -> Tensor:
        """Keys or values of as many heads as there are queries."""
        times = self.config.n_heads // of_groups.shape[1]
        return of_groups if times == 1 else of_groups.repeat_interleave(times, dim=1)

    def places(self, attention_bias: Tensor, asked: int) -> Places:
        """Where the last Q queries and the keys are; of the bias (B, 1 or H, Q, K) its lowest numbers hide a key."""
        ids = self.current.ids
        assert ids is not None
        seen = (attention_bias > torch.finfo(attention_bias.dtype).min / 2).any(dim=1, keepdim=True)
        return Places(ids[:, -asked:], ids, seen, attention_bias.masked_fill(~seen, 0))
