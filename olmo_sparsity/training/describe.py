"""What a config amounts to, in words: the text of ``scripts/train.py --dry-run`` and ``--show``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from omegaconf import OmegaConf

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.batches import TaskPositions, task_of
from olmo_sparsity.model.build import empty_model, token_embedding
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.util.errors import UserError


def describe(config: Config) -> str:
    """The resolved config as YAML, then parameter counts and the tokens of one step; allocates no weights."""
    model = empty_model(config, device="meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = token_embedding(model).weight.numel()
    batch, length = config.global_train_batch_size, config.model.max_sequence_length
    return (
        f"{OmegaConf.to_yaml(OmegaConf.structured(config))}\n"
        f"parameters        {total:,} ({total - embedding:,} without the token embedding)\n"
        f"tokens per step   {batch} windows x {length} tokens = {batch * length:,}\n"
    )


def show_samples(config: Config, count: int) -> str:
    """The first ``count`` training samples of a task, to read, with the position ids that they are trained with.

    Raises `UserError` for a config without a task.
    """
    if config.task.name is None:
        raise UserError("there is no task to show samples of; set task.name, as configs/synthetic/*.yaml do")
    task, indices = task_of(config), np.arange(count)
    samples = task.sample("train", config.seed, indices)
    ids = TaskPositions(config).ids(samples, split="train", seed=config.seed, indices=indices)
    if samples.second_ids is not None and config.positions.scheme in COUPLED_SCHEMES:
        second, first = np.divmod(ids, config.positions.table_size or 1)
        samples = replace(samples, coupled_ids=first, second_ids=second)
    else:
        samples = replace(samples, coupled_ids=ids, second_ids=None)
    shown = [task.show(samples, row) for row in range(count)]
    return f"{config.task.name}, positions.scheme: {config.positions.scheme}\n\n" + "\n\n".join(shown) + "\n"
