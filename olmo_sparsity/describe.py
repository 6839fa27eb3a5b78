"""What a config amounts to, in words: the text of ``scripts/train.py --dry-run``."""

from __future__ import annotations

from dataclasses import replace

from omegaconf import OmegaConf

from olmo_sparsity.config import Config, parse_duration
from olmo_sparsity.model import PositionedOLMo


def describe(config: Config) -> str:
    """The resolved config as YAML, then parameter counts and the arithmetic of one step; allocates no optimizer."""
    model = PositionedOLMo(replace(config.model, init_device="meta"), init_params=False)  # shapes, no memory
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_parameter("transformer.wte.weight").numel()
    batch, length = config.global_train_batch_size, config.model.max_sequence_length
    amount, unit = parse_duration(config.max_duration)
    lines = [
        OmegaConf.to_yaml(OmegaConf.structured(config)).rstrip(),
        "",
        f"parameters        {total:,} ({total - embedding:,} without the token embedding)",
        f"tokens per step   {batch} windows x {length} tokens = {batch * length:,}",
        f"micro-batches     {-(-batch // config.device_train_microbatch_size)} of at most "
        f"{config.device_train_microbatch_size} windows on one process",
        f"duration          {amount:,.10g} {unit}",
    ]
    if unit == "steps":
        lines.append(f"tokens per run    {int(amount) * batch * length:,}")
    return "\n".join(lines) + "\n"
