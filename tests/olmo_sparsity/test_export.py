"""Exported directories against the checkpoints they were made of, and what a user does wrong."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

import olmo_sparsity.export as export_module
from olmo_sparsity.attention import ATTENTIONS
from olmo_sparsity.checkpoint import TOKENIZER
from olmo_sparsity.data.text import train_bpe
from olmo_sparsity.data.tokens import load_tokenizer, tokenizer_file
from olmo_sparsity.export import export_checkpoint, family_of
from olmo_sparsity.util.files import sha256_file
from tests.support import tiny
from tests.support.refusals import refused
from tests.support.slow import slow_but
from tests.support.tiny import checkpoint

PLAIN_NORM = {"layer_norm_type": "default", "layer_norm_with_affine": False}
NORM_AFTER = {"norm_after": True, "attention_layer_norm": True}
SHAPES = {  # name: changes of the model, class of transformers
    "rms": ({}, "LlamaForCausalLM"),
    "rms without weights": ({"layer_norm_with_affine": False, "weight_tying": True}, "LlamaForCausalLM"),
    "rms grouped heads": ({"n_kv_heads": 2, "rope_theta": 500, "layer_norm_eps": 1e-3}, "LlamaForCausalLM"),
    "rms multi-query": ({"multi_query_attention": True}, "LlamaForCausalLM"),
    "rms block groups": ({"block_group_size": 2}, "LlamaForCausalLM"),
    "rms llama block": ({"block_type": "llama"}, "LlamaForCausalLM"),
    "hybrid": ({"nope_layer_interval": 2}, "SmolLM3ForCausalLM"),
    "nope": ({"rope": False, "nope": True, "n_kv_heads": 2}, "SmolLM3ForCausalLM"),
    "plain": (PLAIN_NORM, "OlmoForCausalLM"),
    "plain low precision": ({**PLAIN_NORM, "layer_norm_type": "low_precision"}, "OlmoForCausalLM"),
    "plain clipped": ({**PLAIN_NORM, "clip_qkv": 0.3, "n_kv_heads": 2}, "OlmoForCausalLM"),
    "after": (NORM_AFTER, "Olmo2ForCausalLM"),
    "after without weights": (
        {**NORM_AFTER, "attention_layer_norm_with_affine": False, "weight_tying": True},
        "Olmo2ForCausalLM",
    ),
    "neox": ({"family": "gpt_neox", "rope_theta": 500, "layer_norm_eps": 1e-3}, "GPTNeoXForCausalLM"),
}
MISFITS = {
    "alibi": ({"rope": False, "alibi": True}, "model.rope: False"),
    **{name: ({"attention": name}, f"model.attention: {name}") for name in ATTENTIONS},
    "plain hybrid": ({**PLAIN_NORM, "nope_layer_interval": 2}, "model.nope_layer_interval: 2"),
    "norm biases": ({"bias_for_layer_norm": True}, "llama: model.bias_for_layer_norm: True;"),
    "clipped rms": ({"clip_qkv": 1.0}, "is llama: model.clip_qkv: 1.0"),
    "weighted plain norm": ({"layer_norm_type": "default"}, "is olmo: model.layer_norm_with_affine: True"),
    "eps": ({**PLAIN_NORM, "layer_norm_eps": 1e-6}, "model.layer_norm_eps: 1e-06"),
    "query norm": ({"attention_layer_norm": True}, "is olmo2: model.norm_after: False"),
    "llama block after": ({**NORM_AFTER, "block_type": "llama"}, "is olmo2: model.block_type: llama"),
}


@torch.no_grad()
def logits_of_both(original, folder, position_ids, **options):
    length = position_ids.shape[1]
    tokens = torch.randint(50, (3, length), generator=torch.Generator().manual_seed(1))
    exported = AutoModelForCausalLM.from_pretrained(folder, **options)
    ids = position_ids.expand(3, -1)
    output = exported(tokens, position_ids=ids, attention_mask=torch.ones_like(tokens), use_cache=False)
    return original(tokens, position_ids=ids).logits, output.logits


@pytest.mark.parametrize("name", slow_but(SHAPES, *list(SHAPES)[::3]))
def test_logits_are_those_of_the_checkpoint(name, tmp_path):
    changes, architecture = SHAPES[name]
    source, original = checkpoint(tmp_path, **changes)
    done = export_checkpoint(source, tmp_path / "hf")
    assert done["architecture"] == architecture
    jumping = torch.tensor([[0, 1, 2, 9, 10, 11, 30, 31, 45, 60, 61, 63]])
    for ids in (torch.arange(32)[None], jumping):
        expected, of_export = logits_of_both(original, tmp_path / "hf", ids)
        assert (
            of_export.shape == expected.shape == (3, ids.shape[1], changes.get("embedding_size", 128) or 50)
        )
        torch.testing.assert_close(of_export, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    eager, _ = logits_of_both(original, tmp_path / "hf", jumping, attn_implementation="eager")
    torch.testing.assert_close(eager, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_in_bf16_it_is_the_rounded_model_in_half_the_space(tmp_path):
    source, original = checkpoint(tmp_path)
    sizes = {}
    for bf16 in (False, True):
        note = export_checkpoint(source, tmp_path / f"hf-{bf16}", bf16=bf16)
        assert note["dtype"] == ("bfloat16" if bf16 else "float32")
        sizes[bf16] = (tmp_path / f"hf-{bf16}" / "model.safetensors").stat().st_size
    assert sizes[True] < 0.6 * sizes[False]
    ids = torch.arange(12)[None]
    before, _ = logits_of_both(original, tmp_path / "hf-True", ids, dtype=torch.float32)
    for parameter in original.parameters():
        parameter.data = parameter.data.bfloat16().float()
    expected, of_export = logits_of_both(original, tmp_path / "hf-True", ids, dtype=torch.float32)
    scale = float(expected.abs().max())
    torch.testing.assert_close(of_export, expected, rtol=0, atol=1e-5 * scale)
    assert float((before - of_export).abs().max()) > 1e-3 * scale


@pytest.mark.parametrize("name", MISFITS)
def test_a_shape_that_no_class_has_is_refused_by_name(name):
    changes, message = MISFITS[name]
    with refused(message):
        family_of(tiny.model_config(**changes))


def test_ids_and_the_number_of_positions_are_written_down(tmp_path):
    for scheme, expected in (("contiguous", 32), ("random_start", 64), ("pose", 64)):
        assert tiny.train_config(tmp_path, f"--positions.scheme={scheme}").max_positions == expected
    source, _ = checkpoint(tmp_path, weight_tying=True, eos_token_id=0, pad_token_id=1)
    done = export_checkpoint(source, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert done["max_positions"] == exported.config.max_position_embeddings == 64  # PoSE's target length
    for config in (exported.config, exported.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 0, 1)
    assert exported.get_output_embeddings().weight is exported.get_input_embeddings().weight
    note = json.loads((tmp_path / "hf" / "olmo_sparsity.json").read_text())
    assert note["source_weights_sha256"] == sha256_file(source / "model.safetensors")
    assert (note["training_seed"], note["step"], note["kind"]) == (3, 1, "olmo-sparsity export")


TEXT = "The ship, which  had sailed — isn't 'gone'!\n\nÉtoile 42<|endoftext|> again"


def bpe_checkpoint(folder, adding=False, **changes):
    """A checkpoint of a byte-level tokenizer, which may add a beginning token, cut and pad."""
    tokenizer = train_bpe([TEXT, "the ship sailed again and again"], 300)
    if adding:
        beginning = {"single": "<|endoftext|> $A", "special_tokens": [("<|endoftext|>", 0)]}
        tokenizer.post_processor = processors.TemplateProcessing(**beginning)
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=50)
    (folder / "corpus").mkdir()
    tokenizer.save(str(folder / "corpus" / TOKENIZER))
    return checkpoint(folder, corpus=folder / "corpus", vocab_size=300, embedding_size=384, **changes)[0]


@pytest.mark.parametrize("adding", [False, True])
def test_a_text_has_the_ids_that_the_model_was_trained_on(tmp_path, adding):
    """Corpora are encoded without what a tokenizer adds, so the model has never seen it."""
    source = bpe_checkpoint(tmp_path, adding)
    export_checkpoint(source, tmp_path / "hf")
    assert adding or (tmp_path / "hf" / TOKENIZER).read_bytes() == (source / TOKENIZER).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = load_tokenizer(source / TOKENIZER).encode(TEXT, add_special_tokens=False).ids
    assert tokenizer(TEXT)["input_ids"] == ids and len(ids) > 3
    assert tokenizer.decode(ids) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 0)
    assert tokenizer.model_max_length == 64


def test_an_ordinary_token_does_not_become_the_padding_token(tmp_path):
    """base.yaml's pad_token_id 1 is GPT-NeoX's; in another vocabulary it may be "!", which must stay plain text."""
    source = bpe_checkpoint(tmp_path, pad_token_id=1)
    export_checkpoint(source, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = Tokenizer.from_file(str(source / TOKENIZER)).id_to_token(1)
    assert tokenizer.pad_token_id == 0
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_nothing_is_exported_twice(tmp_path, run_here):
    source, _ = checkpoint(tmp_path)
    assert run_here("scripts/export_hf.py", source.parent, "--out", tmp_path / "hf").returncode == 0
    for path, out, message in (
        (source, tmp_path / "hf", "exists already; give another --out, or remove it"),
        (tmp_path / "hf", tmp_path / "again", "is a transformers directory already"),
    ):
        with refused(message):
            export_checkpoint(path, out)


def test_bad_input_leaves_nothing(tmp_path):
    out = tmp_path / "hf"
    source, _ = checkpoint(tmp_path / "none", tokenizer=False)
    with refused("tokenizer.json is missing; copy the tokenizer there"):
        export_checkpoint(source, out)
    shutil.copyfile(tokenizer_file("olmo"), source / "tokenizer.json")
    with refused("has vocab_size 50280, the model has 50"):
        export_checkpoint(source, out)
    source, _ = checkpoint(tmp_path / "end", eos_token_id=100)
    with refused("has no token of id 100, the model's eos_token_id; name its own"):
        export_checkpoint(source, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "none"]


def test_an_export_that_computes_something_else_leaves_nothing(tmp_path, monkeypatch):
    source, _ = checkpoint(tmp_path / "own")
    real = export_module.to_transformers

    def broken(*arguments):
        model = real(*arguments)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.neg_()
        return model

    monkeypatch.setattr(export_module, "to_transformers", broken)
    with pytest.raises(AssertionError, match="exported logits differ by up to"):
        export_checkpoint(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
