"""Tiny models of transformers, of many families, and directories of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": REACH,
        "initializer_range": 0.3,
    },
    "xglm": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": REACH,
        "init_std": 0.3,
        "eos_token_id": 0,
    },
    # composite: a text model with another for images
    "gemma3": {
        "text_config": {**ROTARY, "sliding_window": REACH, "query_pre_attn_scalar": 8},
        "vision_config": {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
        },
        "initializer_range": 0.3,
    },
}


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
