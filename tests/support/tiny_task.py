"""Configs of tiny runs on synthetic tasks, and responses of a model, decoded without a cache."""

from pathlib import Path

import torch

from olmo_sparsity.config.load import Config, load_config
from tests.support.tiny import write_values

PARITY = {
    "seed": 3,
    "task": {"name": "scratchpad_parity", "parameters": {"train_length": [2, 5], "test_length": [2, 15]}},
    "model": {
        "family": "gpt_neox",
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 2,
        "rope": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "vocab_size": 6,
        "embedding_size": None,
        "max_sequence_length": 13,
    },
    "positions": {"scheme": "predicted", "table_size": 24, "target_length": 40, "skip_probability": 0.5},
    "optimizer": {"name": "adamw", "learning_rate": 3e-3, "weight_decay": 0.1, "decay_norm_and_bias": True},
    "scheduler": {"name": "linear_with_warmup", "t_warmup": 2, "alpha_f": 0.0, "warmup_min_lr": 0.0},
    "save_interval": 3,
    "max_duration": 6,
    "global_train_batch_size": 8,
    "device_train_microbatch_size": 4,
    "precision": "fp32",
    "max_grad_norm": 1.0,
    "console_log_interval": 1,
    "data": {"num_workers": 0},
}


def write(folder: Path, **changes) -> Path:
    """A YAML file of `PARITY` with changes, which are sections or plain values."""
    return write_values(folder / "task.yaml", {"save_folder": str(folder / "run"), **PARITY}, changes)


def config(folder: Path, *overrides: str, **changes) -> Config:
    """The config of a tiny run on parity with scratchpad, GPT-NeoX, Predictive Position Coupling."""
    return load_config(write(folder, **changes), overrides)


OLMO = {"family": "olmo", "layer_norm_type": "rms", "include_bias": False}


@torch.no_grad()
def answer_slowly(model, tokens, ids, given, end):
    """Lists of tokens and ids of one response, by a full pass for each of ``len(given)`` tokens.

    ``given``: their ids, each of them None where the model predicts it.
    """
    tokens, ids, start = [*map(int, tokens)], [*map(int, ids)], len(tokens)
    for id_ in given:
        output = model(torch.tensor([tokens]), torch.tensor([ids]))
        tokens.append(int(output.logits[0, -1].argmax()))
        ids.append(int(output.id_logits[0, -1].argmax()) if id_ is None else id_)
        if tokens[-1] == end:
            break
    return tokens[start:], ids[start:]
