"""Tiny random models of transformers, of many families, directories of them, and adapters of them and of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from analysis.model.adapter import Adapter, TransformersAdapter
from analysis.project import OlmoAdapter
from olmo_sparsity.checkpoint import TOKENIZER
from tests.support import tiny

VOCABULARY, REACH = 50, 64
ROTARY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": REACH,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": ROTARY,
    "olmo": {**ROTARY, "clip_qkv": 1.0},
    "olmo2": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "mistral": {**ROTARY, "sliding_window": None},
    "gpt_neox": {**ROTARY, "num_key_value_heads": 4},
    "gpt2": {
        **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": REACH},
        "initializer_range": 0.3,
    },
    "xglm": {
        **{"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        **{"max_position_embeddings": REACH, "init_std": 0.3, "eos_token_id": 0},
    },
    # composite: a text model with another for images
    "gemma3": {
        "text_config": {**ROTARY, "sliding_window": REACH, "query_pre_attn_scalar": 8},
        "vision_config": {
            **dict.fromkeys(("hidden_size", "intermediate_size"), 8),
            **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1),
        },
        "initializer_range": 0.3,
    },
}
WINDOWED = {
    "gemma2": {**ROTARY, "sliding_window": 9, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**ROTARY, "num_hidden_layers": 6, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        **{**ROTARY, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "cohere2": {**ROTARY, "sliding_window": 9, "num_hidden_layers": 4},
    "olmo3": {**ROTARY, "sliding_window": 9, "num_hidden_layers": 4},
    "mistral": {**ROTARY, "sliding_window": 9},
    "phi3": {**ROTARY, "sliding_window": 9},
}
"""Models with a window in some or all layers, with caps and sinks of scores among them."""
_SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner"), 64
    ),
    **dict.fromkeys(("ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **{"rotary_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "attention_types": [[["global", "local"], 1]]},
    **{"num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
"""Settings that make a configuration small, where it has them."""


def layers_of_other_heads() -> PreTrainedModel:
    """A Gemma 4 of six layers, the last with other heads of keys; tokens are looked up in every layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 9}
    heads = {"num_global_key_value_heads": 1, "global_head_dim": 16, "attention_k_eq_v": True}
    changes = {"num_hidden_layers": 6, "num_kv_shared_layers": 0, "initializer_range": 0.3, **sizes, **heads}
    config = AutoConfig.for_model("gemma4_text", **{**ROTARY, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_causal_lm(model_type: str, **changes: Any) -> PreTrainedModel | None:
    """A causal language model of any type of transformers, with random weights; None where `_SMALL` makes none.

    ``changes``: of its configuration, where it has these settings.
    """
    settings = _SMALL | changes

    def small(kind: Any) -> dict[str, Any]:
        usual = kind()
        fixed = [name for name in dir(kind) if isinstance(getattr(kind, name), property)]
        values = {key: value for key, value in settings.items() if hasattr(usual, key) and key not in fixed}
        return values | {
            part: small(type(getattr(usual, part))) for part in kind.sub_configs if hasattr(usual, part)
        }

    torch.manual_seed(0)
    try:
        kind = CONFIG_MAPPING[model_type]
        config = kind(**small(kind))
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config).num_parameters()
        model = AutoModelForCausalLM.from_config(config).eval() if size < 3e6 else None
    except Exception:  # each type raises its own
        return None
    for weight in model.parameters() if model else ():
        weight.requires_grad_(False)
        if weight.ndim > 1:
            weight += 0.1 * torch.randn_like(weight)
    return model


def random_model(family: str = "llama", **changes) -> PreTrainedModel:
    """A model of a family with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def directory(folder: Path, family: str, shards: bool = False, **changes) -> Path:
    """A directory of such a model, with a tokenizer.json, and a corpus of that tokenizer in it."""
    random_model(family, **changes).save_pretrained(folder, **({"max_shard_size": "20KB"} if shards else {}))
    corpus = tiny.write_corpus(folder / "corpus", {"heldout": tiny.random_documents(3, 60)})
    shutil.copyfile(corpus / TOKENIZER, folder / TOKENIZER)
    return folder


OURS = {**tiny.ENCODINGS, "grouped": {"n_kv_heads": 2}}
"""Names of this project's models, with what is changed in their configuration."""


def tiny_adapter(name: str) -> Adapter:
    """The model of a name in `OURS`, or of a family of transformers, with frozen weights."""
    if name in OURS:
        return OlmoAdapter(tiny.model(**OURS[name])).requires_grad_(False)
    return TransformersAdapter(random_model(name)).requires_grad_(False)
