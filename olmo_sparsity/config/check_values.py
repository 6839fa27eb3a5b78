"""Which single values no run can use: numbers that are not finite or out of range, and text that cannot be saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from olmo_sparsity.config.fields import field_value
from olmo_sparsity.config.words import show

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config

Problem = tuple[tuple[str, ...], str]

_ABOVE_0 = {
    "": """global_train_batch_size device_train_microbatch_size console_log_interval save_interval
        save_interval_unsharded max_grad_norm time_limit""",
    "speed_monitor.": "window_size gpu_flops_available",
    "evaluation.": "interval windows batch_size position_length position_bins",
    "checkpoints.": "keep_every",
    "positions.": "target_length table_size",
    "model.": """d_model n_heads n_kv_heads n_layers mlp_ratio mlp_hidden_size block_group_size
        max_sequence_length vocab_size rope_theta alibi_bias_max clip_qkv init_cutoff_factor""",
}
_NOT_BELOW_0 = {
    "": "seed epoch stop_at stop_after",
    "model.": "layer_norm_eps init_std emb_init_std eos_token_id pad_token_id",
    "optimizer.": "weight_decay eps",
    "scheduler.": "t_warmup t_max alpha_f grad_clip_warmup_steps grad_clip_warmup_factor warmup_min_lr",
    "data.": "seed num_workers timeout prefetch_factor",
    "evaluation.": "seed",
    "positions.": "id_weight",
}
_PROBABILITIES = {
    "model.": "attention_dropout residual_dropout embedding_dropout",
    "positions.": "skip_probability",
}
_INTEGER_LIMIT = 1 << 63


def unusable_values(config: Config) -> Iterator[tuple[str, str]]:
    """The name of each number that is not finite or too long, and of each text that cannot be saved, and why."""
    for name, value in _leaves(config):
        if text := _why_unusable(value):
            yield name, text


def check_ranges(config: Config) -> Iterator[Problem]:
    """Every number on its own, whatever the others are."""
    for names, is_right, text in (
        (_ABOVE_0, lambda value: value > 0, "is not above 0; give a positive number"),
        (_NOT_BELOW_0, lambda value: value >= 0, "is below 0; give 0 or more"),
        (_PROBABILITIES, lambda value: 0 <= value <= 1, "is no probability; give 0 … 1"),
    ):
        for name in _dotted(names):
            value = field_value(config, name)
            if value is not None and not is_right(value):
                yield (name,), f"{show(value)} {text}"


def _dotted(by_section: dict[str, str]) -> list[str]:
    return [section + name for section, names in by_section.items() for name in names.split()]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no section, list or mapping, and every key of a mapping, with its dotted name."""
    inside = f"{name}." if name else ""
    if is_dataclass(value):
        for item in fields(value):
            yield from _leaves(getattr(value, item.name), f"{inside}{item.name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{inside}{number}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield name, key
            yield from _leaves(item, f"{inside}{key}")
    else:
        yield name, value


def _why_unusable(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no finite number; give one"
    if isinstance(value, int) and abs(value) >= _INTEGER_LIMIT:
        return f"{show(value)} has more than 64 bits; give a smaller number"
    if not isinstance(value, str):
        return None
    if "${" in value:  # it was written \${…}: a saved config would ask for it again, and be another one
        return f"{show(value)} still has ${{ in it when it is resolved; write it without"
    if "\0" in value or value.encode("utf8", "replace").decode("utf8") != value:
        return f"{show(value)} has characters that no file can hold; leave them out"
    return None
