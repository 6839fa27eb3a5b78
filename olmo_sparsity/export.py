"""Checkpoints as directories that transformers loads, without remote code.

    DIR/  config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
          olmo_sparsity.json, which says what it was made of

The class is the one whose arithmetic is exactly that of the checkpoint; a shape that none has is refused by name.
Shapes: B batch, T tokens, V embedding size (logits).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from olmo.config import ActivationType, BlockType, LayerNormType
from tokenizers import Tokenizer, processors
from torch import Tensor

from olmo_sparsity.attention import SOFTMAX
from olmo_sparsity.checkpoint import TOKENIZER, load_model, load_state, resolve_checkpoint, weights_sha256
from olmo_sparsity.config.schema import Config, ModelConfig
from olmo_sparsity.data.build import fitting_tokenizer
from olmo_sparsity.model.neox import PositionedNeoX, transformers_config
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file, user_path, write_json
from olmo_sparsity.util.provenance import provenance

EXPORT_NAME = "olmo_sparsity.json"


def export_checkpoint(checkpoint: str | Path, out: str | Path, *, bf16: bool = False) -> dict[str, Any]:
    """Write the directory ``out``, whole or not at all, after comparing logits of both models.

    Returns what its `EXPORT_NAME` says. With ``bf16`` the weights are rounded, in half the space: another model,
    whose numbers differ a little. Raises `UserError` for bad input, for a shape that no class has, and where ``out`` is
    there already.
    """
    source, out = resolve_checkpoint(checkpoint), user_path(out)
    if (source / "config.json").is_file():
        raise UserError(f"{source} is a transformers directory already; give a checkpoint of this project")
    if out.exists():
        raise UserError(f"{out} exists already; give another --out, or remove it")
    original, config = load_model(source)
    if not isinstance(original, PositionedOLMo | PositionedNeoX):
        raise UserError(
            "the export is for OLMo and GPT-NeoX without coupled ids; this checkpoint has another model"
        )
    tokens = source / TOKENIZER
    if not tokens.is_file():
        raise UserError(f"{tokens} is missing; copy the tokenizer there that the model was trained with")
    model = to_transformers(original, config)
    assert_same_logits(original, model, config)
    model = model.bfloat16() if bf16 else model
    note = {
        "kind": "olmo-sparsity export",
        "source": str(source),
        "source_weights_sha256": weights_sha256(source, is_verified=True),
        "dtype": str(model.dtype).removeprefix("torch."),
        "step": load_state(source).step,
        "training_seed": config.seed,
        "architecture": type(model).__name__,
        "parameters": model.num_parameters(),
        "max_positions": config.max_positions,
        "tokenizer_sha256": sha256_file(tokens),
        **provenance(),
    }
    with atomic_path(out) as temporary:
        temporary.mkdir()
        model.save_pretrained(temporary)
        _save_tokenizer(tokens, temporary, config)
        write_json(temporary / EXPORT_NAME, note)
    return note


def family_of(config: ModelConfig) -> str:
    """The transformers family that computes exactly this shape; GPT-NeoX is itself, and of OLMo's shapes

    - llama has RMSNorm before each layer; smollm3 is the same with some or all layers of NoPE;
    - olmo has LayerNorm without weights before each layer, clip_qkv or not;
    - olmo2 has RMSNorm after each layer and on queries and keys;

    all with SwiGLU, without biases, and with RoPE where nothing else is said. Raises one `UserError` that names
    everything about the shape that does not fit.
    """
    if config.family == "gpt_neox":
        return config.family
    off = ("include_bias", "bias_for_layer_norm", "scale_logits", "embedding_layer_norm")
    needed: dict[str, Any] = {  # what Llama computes
        **dict.fromkeys((*off, "norm_after", "attention_layer_norm"), False),
        **dict.fromkeys(("rope_window", "nope_layer_interval", "clip_qkv"), None),
        "attention": SOFTMAX,
        "rope": True,
        "activation_type": ActivationType.swiglu,
        "layer_norm_type": LayerNormType.rms,
    }
    family = "llama"
    if config.norm_after or config.attention_layer_norm:
        family = "olmo2"  # the llama block ignores norm_after
        needed |= {"norm_after": True, "attention_layer_norm": True, "block_type": BlockType.sequential}
    elif config.layer_norm_type != LayerNormType.rms:
        family = "olmo"
        needed |= {"layer_norm_with_affine": False, "layer_norm_eps": 1e-5}  # both fixed in transformers
        needed |= {name: getattr(config, name) for name in ("layer_norm_type", "clip_qkv")}  # any
    elif not config.rope or config.nope_layer_interval:
        family = "smollm3"
        needed |= {"rope": not config.nope, "nope_layer_interval": config.nope_layer_interval}
    actual = {name: getattr(config, name) for name in needed}
    actual["bias_for_layer_norm"] = bool(config.bias_for_layer_norm)  # null is include_bias
    misfits = [f"model.{name}: {value}" for name, value in actual.items() if value != needed[name]]
    if misfits:
        raise UserError(
            f"transformers has no class for this shape, the closest is {family}: {'; '.join(misfits)}; use the "
            "checkpoint folder itself, which olmo-sparsity measure reads"
        )
    return family


def to_transformers(model: PositionedOLMo | PositionedNeoX, config: Config) -> Any:
    """The transformers model with copies of the weights of ``model``, on the CPU in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    shape = config.model
    family = family_of(config.model)
    eos = shape.eos_token_id
    pad = shape.pad_token_id
    pad = pad if pad < shape.embedding_rows else eos  # where the model has no row for it; training reads none
    ids = {
        "max_position_embeddings": config.max_positions,
        "bos_token_id": eos,  # in training an end of text stands before every document but the first
        "eos_token_id": eos,
        # A padding id of the model makes its embedding row untrainable; the end-of-text row must stay trainable.
        "pad_token_id": None if pad == eos else pad,
    }
    if family == "gpt_neox":
        sizes = transformers_config(shape, **ids)
    else:
        norm = {"clip_qkv": shape.clip_qkv} if family == "olmo" else {"rms_norm_eps": shape.layer_norm_eps}
        every = shape.nope_layer_interval or shape.n_layers + 1
        rotated = [int(shape.rope and layer % every != 0) for layer in range(1, shape.n_layers + 1)]
        sizes = AutoConfig.for_model(
            family,
            # The rows that pad the vocabulary stay: softmax runs over them in training and analysis too, so that
            # cutting them off would change every probability.
            vocab_size=shape.embedding_rows,
            hidden_size=shape.d_model,
            # OLMo counts both halves of SwiGLU
            intermediate_size=(shape.mlp_hidden_size or shape.mlp_ratio * shape.d_model) // 2,
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.effective_n_kv_heads,
            rope_parameters={"rope_type": "default", "rope_theta": float(shape.rope_theta)},
            tie_word_embeddings=shape.weight_tying,
            attention_dropout=shape.attention_dropout,
            initializer_range=shape.init_std,
            **ids,
            **norm,
            **({"no_rope_layers": rotated} if family == "smollm3" else {}),
        )
    with torch.random.fork_rng(devices=[]):  # it draws weights before they are replaced
        exported = AutoModelForCausalLM.from_config(sizes)
    norms = {name: weight for name, weight in exported.state_dict().items() if name.endswith("norm.weight")}
    exported.load_state_dict(norms | _weights(model), strict=True)  # ones where OLMo's norm has no weights
    exported.generation_config = GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=pad)
    return exported.eval()


def _weights(model: PositionedOLMo | PositionedNeoX) -> dict[str, Tensor]:
    """All weights there are, by transformers' names; read from modules, since OLMo may group its blocks."""
    if isinstance(model, PositionedNeoX):
        return model.model.state_dict()
    modules: Any = model.transformer
    tensors = {
        "model.embed_tokens": modules["wte"].weight,
        "model.norm": modules["ln_f"].weight,
        "lm_head": model.head().weight,
    }
    norms = ("input_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
    attn_norm, ff_norm = norms[1:] if model.config.norm_after else norms[:2]
    for layer, block in enumerate(model.blocks()):
        if model.config.block_type == BlockType.llama:
            q = block.q_proj.weight
            k = block.k_proj.weight
            v = block.v_proj.weight
        else:
            q, k, v = block.att_proj.weight.split(block.fused_dims)
        up, gate = block.ff_proj.weight.chunk(2)  # OLMo: silu(second half) * first half
        of_block = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.attn_out.weight,
            "mlp.up_proj": up,
            "mlp.gate_proj": gate,
            "mlp.down_proj": block.ff_out.weight,
            attn_norm: block.attn_norm.weight,
            ff_norm: block.ff_norm.weight,
        }
        if model.config.attention_layer_norm:
            of_block |= {"self_attn.q_norm": block.q_norm.weight, "self_attn.k_norm": block.k_norm.weight}
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in of_block.items()}
    return {f"{name}.weight": tensor.detach() for name, tensor in tensors.items() if tensor is not None}


@torch.inference_mode()
def assert_same_logits(original: PositionedOLMo | PositionedNeoX, exported: Any, config: Config) -> None:
    """Compare logits (1, T, V) of both on random tokens, at contiguous and at jumping position ids."""
    length = min(config.model.max_sequence_length, 64)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (1, length), generator=generator)
    jumping = torch.randperm(config.max_positions, generator=generator)[:length].sort().values[None]
    for ids in (torch.arange(length)[None], jumping):
        expected = original(tokens, position_ids=ids).logits
        # Without a mask, transformers takes a jump of the ids for the beginning of another document.
        mask = torch.ones_like(tokens)
        actual = exported(tokens, position_ids=ids, attention_mask=mask, use_cache=False).logits
        atol = 1e-3 * float(expected.abs().nan_to_num().max()) + 1e-6
        same = torch.allclose(actual, expected, rtol=0.0, atol=atol, equal_nan=True)
        assert same, f"exported logits differ by up to {(actual - expected).abs().max()}: a defect of ours"


def _save_tokenizer(path: Path, folder: Path, config: Config) -> None:
    """tokenizer_config.json by transformers; tokenizer.json byte for byte, unless it would add, cut or pad tokens."""
    from transformers import PreTrainedTokenizerFast

    shape = config.model
    tokenizer = fitting_tokenizer(path, shape.vocab_size)  # neither cuts nor pads
    if tokenizer.num_special_tokens_to_add(is_pair=False):
        tokenizer.post_processor = processors.ByteLevel()  # which adds nothing, as corpora are encoded
    eos, pad = map(tokenizer.id_to_token, (shape.eos_token_id, shape.pad_token_id))
    if eos is None:
        raise UserError(
            f"{path} has no token of id {shape.eos_token_id}, the model's eos_token_id; name its own"
        )
    special = {str(token) for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=eos,  # a name only: nothing is added to a text
        eos_token=eos,
        pad_token=pad if pad in special else eos,  # naming an ordinary token would change how text is split
        model_max_length=config.max_positions,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)
    if tokenizer.to_str() == Tokenizer.from_file(str(path)).to_str():
        shutil.copyfile(path, folder / TOKENIZER)
