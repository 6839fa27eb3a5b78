"""A tiny model as a GGUF file, the way llama.cpp has it, and its words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from tests.support.families import VOCABULARY

LETTERS = "abcdefghij"
WORDS = ["<s>", "</s>", *LETTERS, *(a + b for a in LETTERS for b in LETTERS)][:VOCABULARY]
MERGES = [f"{word[0]} {word[1]}" for word in WORDS[12:]]


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: str = "gpt2") -> Path:
    """A model of llama's class as llama.cpp has it: other names, and the rows of queries and keys in another order."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3] + [1] * (len(WORDS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])  # rotated together: i and i + D / 2 …
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(
                values.shape
            )  # … become 2 i and 2 i + 1
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
