"""Tiny models, corpora and configs that the tests share. Everything is made here; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from olmo_sparsity.attention import ATTENTIONS
from olmo_sparsity.checkpoint import TrainState, config_of, load_state, step_folder
from olmo_sparsity.config.load import Config, load_config
from olmo_sparsity.config.schema import ModelConfig
from olmo_sparsity.data.groups import write_groups
from olmo_sparsity.data.tokens import TOKENIZER_NAME, CorpusManifest, TokenFile
from olmo_sparsity.model.neox import PositionedNeoX
from olmo_sparsity.model.olmo import PositionedOLMo
from olmo_sparsity.new_checkpoint import NewCheckpoint, Share
from olmo_sparsity.util.files import sha256_file

EOS = 0
ENCODINGS = {
    "rope": {"rope": True},
    "nope": {"rope": False, "nope": True},
    "alibi": {"rope": False, "alibi": True},
    "learned": {"rope": False},
    "hybrid": {"nope_layer_interval": 2},
    "windowed hybrid": {"nope_layer_interval": 2, "rope_window": 9},
    **{name: {"attention": name} for name in ATTENTIONS},
}
"""Changes of the model that choose each position encoding, and each attention."""


def model_config(**changes) -> ModelConfig:
    values = {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "mlp_ratio": 4,
        "vocab_size": 50,
        "embedding_size": 128,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "rope": True,
        "include_bias": False,
        "layer_norm_type": "rms",
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "max_sequence_length": 32,
        "weight_tying": False,
        "init_device": "cpu",
    }
    return ModelConfig(**{**values, **changes})


def model(seed: int = 0, std: float = 0.2, **changes) -> PositionedOLMo:
    """A random model; its weights are large enough for positions and tokens to matter."""
    torch.manual_seed(seed)
    return PositionedOLMo(model_config(init_std=std, **changes)).eval()


def tokens(batch: int = 3, length: int = 20, seed: int = 0) -> torch.Tensor:
    """Random token ids, (batch, length)."""
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_dropped_is_masked(model: PositionedOLMo, position_ids: torch.Tensor | None = None) -> None:
    """The subsequence at the original ids has the logits of hiding the dropped tokens from every layer.

    ``position_ids``: (24,), 0 … 23 unless given.
    """
    positions = (torch.arange(24) if position_ids is None else position_ids).expand(2, -1)
    ids = tokens(2, 24)
    dropped = torch.tensor([0, 3, 4, 11, 17])
    keep = torch.tensor([i for i in range(24) if i not in dropped])
    kept = model(ids[:, keep], position_ids=positions[:, keep], logits_to_keep=1).logits[:, 0]
    mask = torch.ones_like(ids)
    mask[:, dropped] = 0
    masked = model(ids, position_ids=positions, attention_mask=mask).logits[:, -1]
    torch.testing.assert_close(kept, masked, atol=2e-5, rtol=1e-4)
    whole = model(ids, position_ids=positions).logits[:, -1]
    assert (kept - whole).abs().max() > 1e-3  # dropping them did change the prediction


def neox(**changes) -> PositionedNeoX:
    """A GPT-NeoX with freshly drawn weights."""
    torch.manual_seed(0)
    return PositionedNeoX(model_config(**{"family": "gpt_neox", "embedding_size": None, **changes}))


def write_corpus(folder: Path, splits: dict[str, list[list[int]]], vocab_size: int = 50) -> Path:
    """A prepared corpus of these documents (token ids without EOS), with a word-level tokenizer of w0, w1, …"""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<|endoftext|>": EOS, **{f"w{i}": i for i in range(1, vocab_size)}}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>")).save(str(folder / TOKENIZER_NAME))
    files = {}
    for split, documents in splits.items():
        path = folder / f"{split}-00000.npy"
        ids = np.concatenate([np.array([*document, EOS], dtype=np.uint16) for document in documents])
        ids.tofile(path)
        files[split] = [TokenFile(path.name, len(ids), len(documents), sha256_file(path))]
    CorpusManifest(
        corpus="text",
        tokenizer_sha256=sha256_file(folder / TOKENIZER_NAME),
        vocab_size=vocab_size,
        eos_token_id=EOS,
        dtype="uint16",
        splits=files,
    ).save(folder)
    return folder


def add_groups(folder: Path, groups: Sequence[str | None]) -> None:
    """Name the group of each held-out document of a corpus that `write_corpus` wrote."""
    manifest = CorpusManifest.load(folder)
    [file] = manifest.splits["heldout"]
    sha256 = write_groups(folder / file.name, groups)
    splits = {**manifest.splits, "heldout": [replace(file, groups_sha256=sha256)]}
    replace(manifest, splits=splits).save(folder)


def random_documents(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Documents that repeat a random phrase, so that there is something to learn."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        phrase = generator.integers(1, 50, 10)
        documents.append(np.tile(phrase, length // 10 + 1)[:length].tolist())
    return documents


def write_yaml(folder: Path, corpus: Path, **changes) -> Path:
    """A training config for `corpus`; changes are sections or plain values."""
    model_section = {
        key: value
        for key, value in vars(model_config()).items()
        if value is not None and not is_dataclass(value)
    }
    values = {
        "seed": 3,
        "model": {key: getattr(value, "value", value) for key, value in model_section.items()},
        "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1},
        "scheduler": {"name": "linear_with_warmup", "t_warmup": 4, "alpha_f": 0.0, "warmup_min_lr": 0.0},
        "positions": {"scheme": "pose", "target_length": 64},
        "corpus": {"path": str(corpus)},
        "save_folder": str(folder / "run"),
        "save_interval": 4,
        "max_duration": 8,
        "global_train_batch_size": 4,
        "device_train_microbatch_size": 2,
        "precision": "fp32",
        "max_grad_norm": 1.0,
        "compile": None,
    }
    return write_values(folder / "config.yaml", values, changes)


def write_values(path: Path, values: dict[str, Any], changes: dict[str, Any]) -> Path:
    """A YAML file of ``values`` with changes, which are sections or plain values."""
    for key, value in changes.items():
        values[key] = {**(values.get(key) or {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(values), encoding="utf8")
    return path


def train_config(folder: Path, *overrides: str, **changes) -> Config:
    """A config over a small corpus in ``folder``."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus, {"train": random_documents(12, 90), "heldout": random_documents(6, 80, seed=1)})
    return load_config(write_yaml(folder, corpus, **changes), overrides)


def checkpoint(
    folder: Path, tokenizer=True, corpus=None, positions=None, **changes
) -> tuple[Path, PositionedOLMo]:
    """A checkpoint of a random model whose norm weights are random too."""
    corpus = corpus or write_corpus(folder / "corpus", {"heldout": random_documents(4, 60)})
    config = load_config(write_yaml(folder, corpus, model=changes, positions=positions or {}))
    config.model = model_config(**changes)
    torch.manual_seed(0)
    config.model.init_std = 0.2
    kind: Any = PositionedNeoX if config.model.family == "gpt_neox" else PositionedOLMo
    model = kind(config.model).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_f" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    file = (corpus / TOKENIZER_NAME).read_bytes() if tokenizer else None
    return save_model(folder / "run", config, model, tokenizer=file), model


def save_model(
    run: str | Path, config: Config, model: torch.nn.Module, *, step: int = 1, tokenizer: bytes | None = None
) -> Path:
    """A checkpoint of these weights, with no state of an optimizer."""
    return save_shares(
        run, [Share(model.state_dict(), {})], config=config, state=TrainState(step, step), tokenizer=tokenizer
    )


def save_shares(
    run: str | Path,
    shares: list[Share],
    *,
    config: Config,
    state: TrainState | None = None,
    tokenizer: bytes | None = None,
) -> Path:
    """A checkpoint that processes with these shares would have written."""
    state = state or TrainState(1, 1)
    checkpoint = NewCheckpoint.begin(step_folder(run, state.step))
    files = [file for share in shares for file in checkpoint.write(share)]
    checkpoint.finish(files, state, config, tokenizer)
    return checkpoint.folder


def in_shards(source: Path, run: str | Path, count: int) -> Path:
    """The checkpoint ``source``, of one process, as ``count`` processes would have written it."""
    weights, optimizer = (load_file(source / f"{name}.safetensors") for name in ("model", "optimizer"))
    shares = [Share({}, {}, rank, count) for rank in range(count)]
    for number, name in enumerate(weights):
        share = shares[number % count]
        share.weights[name] = weights[name]
        share.optimizer.update({key: optimizer[key] for key in optimizer if key.split("|")[0] == name})
    tokenizer = (source / "tokenizer.json").read_bytes()
    return save_shares(run, shares, config=config_of(source), state=load_state(source), tokenizer=tokenizer)
