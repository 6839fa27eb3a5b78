"""What the keys of a config mean to this engine, and what values go together.

Every field of OLMo's `TrainConfig` is in exactly one of three tables: honoured, replaced (accepted with a
warning), refused (it would change the result, and is not implemented). A test holds the tables complete, so
that a new version of OLMo cannot add a field that is silently ignored.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

from olmo_sparsity.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.config import Config

Problem = tuple[tuple[str, ...], str]
"""The fields that were looked at, the one to name first, and what is wrong with it."""

_HONOURED_BY_SECTION = {
    "": """run_name seed epoch dry_run save_folder save_interval save_interval_unsharded save_num_checkpoints_to_keep
        save_num_unsharded_checkpoints_to_keep save_overwrite max_duration stop_at stop_after time_limit
        global_train_batch_size device_train_microbatch_size max_grad_norm precision console_log_interval
        compile activation_checkpointing""",
    "model.": """d_model n_heads n_kv_heads clip_qkv n_layers mlp_ratio mlp_hidden_size activation_type
        block_type block_group_size alibi alibi_bias_max rope rope_full_precision rope_theta nope
        flash_attention attention_dropout multi_query_attention attention_layer_norm residual_dropout
        embedding_dropout embedding_layer_norm layer_norm_type layer_norm_with_affine layer_norm_eps
        attention_layer_norm_with_affine max_sequence_length include_bias bias_for_layer_norm scale_logits
        vocab_size embedding_size weight_tying eos_token_id pad_token_id init_fn init_std init_cutoff_factor
        scale_emb_init emb_init_std norm_after""",
    "optimizer.": """name learning_rate weight_decay betas eps selective_updates decay_norm_and_bias
        decay_embeddings""",
    "scheduler.": """name units t_warmup t_max alpha_f grad_clip_warmup_steps grad_clip_warmup_factor
        warmup_min_lr""",
    "data.": """paths memmap_dtype datasets num_workers pin_memory prefetch_factor persistent_workers timeout
        seed instance_filter""",
    "tokenizer.": "identifier",
    "speed_monitor.": "window_size",
    "positions.": "scheme chunks target_length content",
    "corpus.": "path train_split heldout_split",
}
HONOURED = frozenset(
    section + name for section, names in _HONOURED_BY_SECTION.items() for name in names.split()
)
"""Fields, or whole sections (compile, data.instance_filter), that do here what they do in OLMo."""

_REPLACED_BY_REASON = {
    "Accelerate or DeepSpeed spreads the work": """distributed_strategy fsdp ddp device_train_batch_size
        device_train_grad_accum model.init_device model.precision""",
    "checkpoints here have one format, in save_folder": """remote_save_folder sharded_checkpointer
        load_path_sharded_checkpointer new_style_checkpoints save_interval_ephemeral force_save_unsharded
        no_pre_train_checkpoint save_data_indices""",
    "metrics go to metrics.jsonl": """wandb optimizer.metrics_log_interval optimizer.record_update_metrics
        speed_monitor.gpu_flops_available module_outputs_save_steps python_profiling torch_profiling""",
    "evaluators are not run in training yet": """evaluators eval_interval eval_subset_num_batches eval_on_load
        device_eval_batch_size hf_datasets_cache_dir""",
    "windows are always full": "data.pad_direction tokenizer.truncate_direction",
    "the loop has its own way": """canceled_check_interval extra_steps_after_cancel gen1_gc_interval
        fused_loss auxiliary_loss_multiplier""",
}
REPLACED = {name: reason for reason, names in _REPLACED_BY_REASON.items() for name in names.split()}
"""Fields, or whole sections, that change nothing about the result; what this engine has in their place."""

REFUSED = {
    "softmax_auxiliary_loss": "the auxiliary loss is not implemented; set it to false",
    "max_grad_norm_ratio": "only a fixed limit is implemented; set it to null and use max_grad_norm",
    "early_stopping_factor": "early stopping is not implemented; set it to null and use stop_at",
    "fast_forward_batches": "no data can be skipped; set it to null",
    "restore_dataloader": "a resumed run goes on where its data stopped; set it to true, or start a new run",
    "reset_optimizer_state": "a resumed run keeps its optimizer; set it to false, or start a new run",
    "reset_trainer_state": "a resumed run keeps its step and its data; set it to false, or start a new run",
    "load_path": "set it to null, and pass --resume with the run's folder",
    "try_load_latest_save": "set it to false, and pass --resume with the run's folder",
    "optimizer.no_decay_norm_and_bias": "OLMo ignores it; set decay_norm_and_bias and decay_embeddings",
    "data.label_mask_paths": "label masks are not implemented; set it to null",
    "data.generate_attention_mask": "windows have no padding to mask; set it to false",
    "data.generate_doc_lengths": "attention inside documents only is not implemented; set it to false",
    "data.drop_last": "every step trains on a whole global batch; set it to true",
}
"""Fields that would change the result and are not implemented, each with the remedy."""

_POSITIVE_BY_SECTION = {
    "": """global_train_batch_size device_train_microbatch_size console_log_interval save_interval
        save_interval_unsharded max_grad_norm time_limit""",
    "speed_monitor.": "window_size",
    "model.": """d_model n_heads n_kv_heads n_layers mlp_ratio mlp_hidden_size block_group_size
        max_sequence_length vocab_size""",
}
_POSITIVE = [section + name for section, names in _POSITIVE_BY_SECTION.items() for name in names.split()]
_PRECISIONS = ("amp_bf16", "fp32")
_UNITS = {"": "steps", "T": "tokens", "ep": "epochs"}
_CONTENTS = ("contiguous", "skip")


def parse_duration(value: int | str) -> tuple[float, str]:
    """The number in ``10000`` or ``"1e4"`` (steps), ``"2e12T"`` (tokens) or ``"2ep"`` (epochs), and its unit.

    Raises `UserError` for anything else.
    """
    text = str(value).strip()
    suffix = next((suffix for suffix in _UNITS if suffix and text.endswith(suffix)), "")
    try:
        number = float(text.removesuffix(suffix))
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0 and number == int(number)):
        raise UserError(
            f"{show(value)} is no duration; give whole steps (10000), tokens (2e12T) or epochs (2ep)"
        )
    return number, _UNITS[suffix]


def replaced_fields(config: Config) -> list[str]:
    """The fields of ``config`` that ask for something which this engine does otherwise.

    A field that has its default, or that asks for nothing (null, false, 0, an empty list), is not among them.
    """
    defaults = type(config)()
    values = {name: _get(config, name) for name in REPLACED}
    if values["model.init_device"] == "cpu":
        values["model.init_device"] = None  # weights are drawn on the CPU anyway
    return [name for name, value in values.items() if value and value != _get(defaults, name)]


def describe_replaced(names: list[str]) -> str:
    """One line: the fields, grouped by what this engine has in their place."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(REPLACED[name], []).append(name)
    return "; ".join(f"{', '.join(group)} ({reason})" for reason, group in grouped.items())


def find_problems(config: Config) -> Iterator[Problem]:
    """Everything about the values of ``config`` that this engine cannot or must not run."""
    defaults = type(config)()
    for name, remedy in REFUSED.items():
        value, default = _get(config, name), _get(defaults, name)
        if value != default and (value or default):
            yield (name,), f"{show(value)} is not supported: {remedy}"
    for name in _POSITIVE:
        value = _get(config, name)
        if value is not None and not value > 0:
            yield (name,), f"{show(value)} is not above 0; give a positive number"
    for check in (_check_model, _check_position_encoding, _check_positions, _check_data, _check_optimization):
        yield from check(config)


def _get(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def _check_model(config: Config) -> Iterator[Problem]:
    model, heads = config.model, config.model.n_heads
    shape = ("model.d_model", "model.n_heads", "model.rope")
    if min(model.d_model, heads) > 0:
        if model.d_model % heads:
            yield shape[:2], f"{model.d_model} is no multiple of model.n_heads {heads}; make it one"
        elif model.rope and model.d_model // heads % 2:
            yield shape, f"RoPE needs an even d_model / n_heads, not {model.d_model // heads}; double it"
    if model.n_kv_heads and min(model.n_kv_heads, heads) > 0 and heads % model.n_kv_heads:
        yield (
            ("model.n_kv_heads", "model.n_heads"),
            f"{model.n_kv_heads} does not divide model.n_heads {heads}; choose a divisor of it",
        )
    if model.embedding_size is not None and model.embedding_size < model.vocab_size:
        yield (
            ("model.embedding_size", "model.vocab_size"),
            f"{model.embedding_size} is below model.vocab_size {model.vocab_size}; "
            "raise it to a multiple of 128 that is not smaller, or set it to null",
        )


def _check_position_encoding(config: Config) -> Iterator[Problem]:
    model, scheme = config.model, config.positions.scheme
    if model.alibi and model.rope:
        yield ("model.alibi", "model.rope"), "excludes model.rope; set one of them to false"
    if model.alibi and model.flash_attention:
        yield ("model.alibi", "model.flash_attention"), "excludes model.flash_attention; set that to false"
    if model.nope and (model.rope or model.alibi):
        yield (
            ("model.nope", "model.rope", "model.alibi"),
            "means no position information at all; set model.rope and model.alibi to false, or model.nope",
        )
    if not (model.rope or model.alibi or model.nope) and scheme != "contiguous":
        yield (
            ("positions.scheme", "model.rope", "model.alibi", "model.nope"),
            f"{scheme} needs position ids past the table of learned position embeddings; "
            "set model.rope: true, or positions.scheme: contiguous",
        )


def _check_positions(config: Config) -> Iterator[Problem]:
    from olmo_sparsity.positions import SCHEMES  # here, because what registers schemes may read configs

    positions, length = config.positions, config.model.max_sequence_length
    scheme, target = positions.scheme, positions.target_length
    target_fields = ("positions.target_length", "positions.scheme", "model.max_sequence_length")
    if scheme not in SCHEMES:
        yield ("positions.scheme",), f"{show(scheme)} is no position scheme; {_choices(scheme, SCHEMES)}"
    if positions.content not in _CONTENTS:
        choices = _choices(positions.content, _CONTENTS)
        yield ("positions.content",), f"{show(positions.content)} is unknown; {choices}"
    elif positions.content == "skip" and scheme != "pose":
        yield (
            ("positions.content", "positions.scheme"),
            f"skip needs positions.scheme: pose, not {scheme}; set it to contiguous",
        )
    if scheme == "pose" and (target is None or target <= length):
        yield (
            target_fields,
            f"{show(target)} is not above model.max_sequence_length {length}, as PoSE needs it; raise it",
        )
    elif target is not None and target < length:
        yield target_fields, f"{target} is below model.max_sequence_length {length}; raise it, or set null"
    if scheme == "pose" and not 2 <= positions.chunks <= length // 2:
        yield (
            ("positions.chunks", "positions.scheme", "model.max_sequence_length"),
            f"{positions.chunks} is not in 2 … {length // 2}, half of model.max_sequence_length; 2 is usual",
        )


def _check_data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.paths and data.datasets:
        yield ("data.datasets", "data.paths"), "excludes data.paths; keep one of them"
    given = next((name for name in ("data.paths", "data.datasets") if _get(config, name)), None)
    if config.corpus.path is not None and given:
        yield ("corpus.path", given), f"excludes {given}; set it to null to train on those files"
    try:
        _ = data.effective_memmap_dtype
    except TypeError:
        yield ("data.memmap_dtype",), f"{show(data.memmap_dtype)} is no number type; uint16 is usual"


def _check_optimization(config: Config) -> Iterator[Problem]:
    optimizer, scheduler, precision = config.optimizer, config.scheduler, config.precision
    rate, warmup = optimizer.learning_rate, scheduler.t_warmup
    if precision == "amp_fp16":
        yield ("precision",), "amp_fp16 is not supported: no loss scaling is implemented; set it to amp_bf16"
    elif precision is not None and precision not in _PRECISIONS:
        choices = _choices(precision, _PRECISIONS)
        yield ("precision",), f"{show(precision)} is unknown; {choices}; null is the machine's best"
    if not (math.isfinite(rate) and rate >= 0):
        yield ("optimizer.learning_rate",), f"{rate} is no learning rate; 5.0e-5 is the paper's"
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield ("optimizer.betas",), f"{list(optimizer.betas)} are not in 0 … 1; [0.9, 0.95] is usual"
    try:
        duration, unit = parse_duration(config.max_duration)
    except UserError as error:
        yield ("max_duration",), str(error)
        return
    if unit == scheduler.units and scheduler.name != "constant" and warmup > duration:
        yield (
            ("scheduler.t_warmup", "scheduler.units", "scheduler.name", "max_duration"),
            f"a warm-up of {warmup:,} {unit} is longer than max_duration, {duration:,.0f}; shorten it",
        )


def _choices(given: str, choices: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(choices), 1)
    return f"choose {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def section_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` is, or is optionally."""
    return next(
        (choice for choice in _union(hint) if isinstance(choice, type) and is_dataclass(choice)), None
    )


def list_section_of(hint: Any) -> type | None:
    """The dataclass that ``hint`` is a list of."""
    return section_of(typing.get_args(hint)[0]) if typing.get_origin(hint) is list else None


def _union(hint: Any) -> tuple:
    """The types that ``hint`` allows, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(choice for choice in typing.get_args(hint) if choice is not type(None))
    return (hint,)


def expectation(hint: Any, value: Any = None) -> str:
    """What a value is that does not fit ``hint``: "no whole number", "none of lionw, adamw"."""
    choices = _union(hint)
    if choices == (bool,):
        return "neither true nor false"
    if isinstance(choices[0], type) and issubclass(choices[0], Enum):
        names = [name for name in choices[0].__members__ if not name.startswith("_")]
        near = difflib.get_close_matches(str(value), names, 1)
        return f"none of {', '.join(names)}" + (f"; did you mean {near[0]}?" if near else "")
    return "no " + _noun(hint)


def _noun(hint: Any) -> str:
    choices = [choice for choice in _union(hint) if not (choice is int and float in _union(hint))]
    if len(choices) > 1:
        return " or ".join(_noun(choice) for choice in choices)
    (choice,), args = choices, typing.get_args(choices[0])
    if typing.get_origin(choice) is list:
        return f"list of {_noun(args[0])}s"
    if typing.get_origin(choice) is tuple:
        return f"list of {len(args)} {_noun(args[0])}s"
    if typing.get_origin(choice) is dict:
        return f"mapping of names to a {_noun(args[1])}"
    if is_dataclass(choice):
        return "section; write its keys below it"
    return {int: "whole number", float: "number", str: "text"}.get(choice, str(choice))


def show(value: Any) -> str:
    """A value as YAML has it, cut to fit a line."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else repr(value)
    return shorten(text, 60)


def shorten(text: str, length: int) -> str:
    """``text``, cut to ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 2]} …"


@cache
def dotted_names(cls: type, prefix: str = "") -> dict[str, bool]:
    """The full name of every key of ``cls``, and whether it is a section."""
    names: dict[str, bool] = {}
    for key, hint in typing.get_type_hints(cls).items():
        section = section_of(hint)
        names[f"{prefix}{key}"] = section is not None
        if section:
            names |= dotted_names(section, f"{prefix}{key}.")
    return names


def did_you_mean(
    key: str, prefix: str, is_section: bool, siblings: dict[str, Any], names: dict[str, bool]
) -> str:
    """What an unknown key may have meant: a sibling, else a key of ``names``, else where to look.

    A section is only ever mistaken for a section, a value for a value.
    """
    alike = [name for name, hint in siblings.items() if (section_of(hint) is not None) == is_section]
    by_last_part: dict[str, list[str]] = {}
    for name, section in names.items():
        if section == is_section:
            by_last_part.setdefault(name.rpartition(".")[2], []).append(name)
    last = key.rpartition(".")[2]
    # A slip of the pen in a sibling, the right name in another section, then looser likenesses of both.
    for candidates, likeness in ((alike, 0.85), (by_last_part, 1.0), (alike, 0.6), (by_last_part, 0.75)):
        if near := difflib.get_close_matches(last, list(candidates), 1, likeness):
            meant = [prefix + near[0]] if candidates is alike else by_last_part[near[0]][:3]
            return f"did you mean {' or '.join(meant)}?"
    if len(siblings) <= 12:
        return f"{prefix.rstrip('.')} has {', '.join(siblings)}"
    return "the keys are the fields of Config in olmo_sparsity/config.py and of TrainConfig in olmo/config.py"
