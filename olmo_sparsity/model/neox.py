"""GPT-NeoX of transformers, from random weights, with explicit position ids.

Shapes: B batch, T tokens, P past tokens in a key-value cache, D width, V vocabulary (logits).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from olmo.config import ActivationCheckpointingStrategy
from olmo.model import OLMoOutput, should_checkpoint_block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from olmo_sparsity.attention.cpu_attention import by_products, causal_products
from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.model.linear_loss import Head, losses


class PositionedNeoX(nn.Module):
    """GPT-NeoX whose forward pass takes ``position_ids``, with the interface of `PositionedOLMo` as far as it goes.

    Two things differ. Keys are cached after rotation, so the ids of cached tokens are not read again; and the cache is
    an object of transformers that grows in place: pass the one that the last call returned, and use it once.
    """

    def __init__(self, config: ModelConfig):
        """With freshly drawn weights."""
        super().__init__()
        from transformers import DynamicCache, GPTNeoXForCausalLM

        self.config = config
        sizes = transformers_config(config, bos_token_id=None, eos_token_id=None, use_cache=False)
        self.model: Any = GPTNeoXForCausalLM(sizes)
        self.model.set_attn_implementation(_attention())
        self._stays_empty = DynamicCache()
        self._stays_empty.update = _keep_nothing  # type: ignore[method-assign, assignment]

    def blocks(self) -> list[Any]:
        """The transformer layers in order."""
        return list(self.model.gpt_neox.layers)

    def set_activation_checkpointing(self, strategy: ActivationCheckpointingStrategy) -> None:
        """As in OLMo, once, for every strategy of whole layers."""
        layers = self.blocks()
        kind = _recomputed(type(layers[0]))
        for index, layer in enumerate(layers):
            if should_checkpoint_block(strategy, index):
                layer.__class__ = kind

    def embed(self, input_ids: Tensor) -> Tensor:
        """Token embeddings, (B, T, D), which `forward` takes back as ``input_embeddings``."""
        return self.model.gpt_neox.embed_in(input_ids)

    def final_hidden(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """The final hidden state, which the head reads, (B, T, D), for inputs of `forward`; no logits are computed."""
        return self._decoded(input_ids, **inputs).last_hidden_state

    def head(self) -> Head:
        """The linear head, from `final_hidden` to logits."""
        return Head(self.model.lm_head.weight)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        labels: Tensor | None = None,
        z_weight: float = 0.0,
        **inputs: Any,
    ) -> Any:
        """``logits`` (B, T, V), or of the last ``logits_to_keep`` positions; ``attn_key_values`` with ``use_cache``.

        ``input_ids``: (B, T) integers. ``position_ids``: (B or 1, T) integers, or (B or 1, P + T) as `PositionedOLMo`
        takes them, of which the last T are read; None means P … P+T-1. ``inputs``: input_embeddings (B, T, D), in
        place of the token embedding; attention_mask (B, P + T), 0 hides a token from every query; past_key_values;
        use_cache. With ``output_hidden_states``, ``hidden_states`` holds one tensor (B, T, D): the final one, after the
        last norm, cut like the logits. With ``labels`` (B, T) the result of `losses` for them and
        ``z_weight`` instead.
        """
        if labels is not None:
            hidden = self.final_hidden(input_ids, position_ids=position_ids, **inputs)
            return losses(hidden, self.head(), labels, z_weight)
        output = self._decoded(input_ids, position_ids, **inputs)
        hidden = output.last_hidden_state[:, -logits_to_keep:]  # -0: all
        return OLMoOutput(
            logits=self.model.lm_head(hidden),
            attn_key_values=output.past_key_values if inputs.get("use_cache") else None,
            hidden_states=(hidden,) if output_hidden_states else None,
        )

    def _decoded(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        input_embeddings: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        """The output of transformers' model without its head, for inputs of `forward`."""
        length = input_ids.shape[1]
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)[None]
        if attention_mask is None and past_key_values is None and not use_cache:
            # With neither mask nor cache transformers takes an id that jumps or repeats for the beginning of another
            # packed document, and cuts attention there without a warning (docs/method.md 4). A mask of ones would do,
            # but transformers reads whether it is all ones: the processor would wait for the GPU in every micro-batch.
            past_key_values = self._stays_empty
        return self.model.gpt_neox(
            inputs_embeds=self.embed(input_ids) if input_embeddings is None else input_embeddings,
            position_ids=position_ids[:, -length:],
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )


def transformers_config(config: ModelConfig, **more: Any) -> Any:
    """The shape as transformers has it; all that ``config`` does not say is GPT-NeoX's own (parallel residual, …)."""
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=config.embedding_rows,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        intermediate_size=4 * config.d_model,
        layer_norm_eps=config.layer_norm_eps,
        initializer_range=config.init_std,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(config.rope_theta),
            "partial_rotary_factor": 1.0,
        },
        hidden_dropout=config.residual_dropout,
        attention_dropout=config.residual_dropout,
        **more,
    )


def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    """Layers of this kind that are run again for their gradients, outside of what is compiled of a layer.

    Transformers' own switch is inside it.
    """

    def call(layer: nn.Module, *inputs: Any, **options: Any) -> Any:
        return checkpoint(partial(kind.__call__, layer), *inputs, use_reentrant=False, **options)

    return type(f"Recomputed{kind.__name__}", (kind,), {"__call__": call})


def _attention() -> str:
    """The name under which transformers is given its own `sdpa`, with `causal_products` where that is faster."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        if by_products(q, k, mask):
            return causal_products(q, k, v, options["dropout"]).transpose(1, 2), None
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    name = "sdpa_of_olmo_sparsity"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _keep_nothing(keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer attends to: its own alone."""
    return keys, values
