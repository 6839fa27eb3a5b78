"""What every field of OLMo's `TrainConfig` means to this engine: honoured, replaced or refused.

Each is in exactly one of the three tables. A test holds them complete, so that a new version of OLMo cannot add a field
that is silently ignored.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config

_HONOURED_BY_SECTION = {
    "": """run_name seed epoch dry_run save_folder save_interval save_interval_unsharded save_num_checkpoints_to_keep
        save_num_unsharded_checkpoints_to_keep save_overwrite max_duration stop_at stop_after time_limit
        global_train_batch_size device_train_microbatch_size max_grad_norm precision console_log_interval
        compile activation_checkpointing wandb tensorboard""",
    "model.": """d_model n_heads n_kv_heads clip_qkv n_layers mlp_ratio mlp_hidden_size activation_type
        block_type block_group_size alibi alibi_bias_max rope rope_full_precision rope_theta nope
        flash_attention attention_dropout multi_query_attention attention_layer_norm residual_dropout
        embedding_dropout embedding_layer_norm layer_norm_type layer_norm_with_affine layer_norm_eps
        attention_layer_norm_with_affine max_sequence_length include_bias bias_for_layer_norm scale_logits
        vocab_size embedding_size weight_tying eos_token_id pad_token_id init_fn init_std init_cutoff_factor
        scale_emb_init emb_init_std norm_after family""",
    "optimizer.": """name learning_rate weight_decay betas eps selective_updates decay_norm_and_bias
        decay_embeddings""",
    "scheduler.": """name units t_warmup t_max alpha_f grad_clip_warmup_steps grad_clip_warmup_factor
        warmup_min_lr""",
    "data.": """paths memmap_dtype datasets num_workers pin_memory prefetch_factor persistent_workers timeout
        seed instance_filter generate_doc_lengths""",
    "tokenizer.": "identifier",
    "speed_monitor.": "window_size gpu_flops_available",
    "positions.": """scheme chunks target_length table_size skip_probability rotate id_weight content doc_mask
        restart_at_documents""",
    "task.": "name parameters",
    "evaluation.": "interval windows batch_size position_length position_bins paths seed",
    "deepspeed.": "config offload_optimizer",
    "checkpoints.": "keep_every",
    "corpus.": "path train_split heldout_split verify_checksums stream",
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
    "not measured; metrics go to metrics.jsonl": """optimizer.metrics_log_interval
        optimizer.record_update_metrics module_outputs_save_steps python_profiling torch_profiling""",
    "held-out loss has the section evaluation": """evaluators eval_interval eval_subset_num_batches eval_on_load
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
    "data.drop_last": "every step trains on a whole global batch; set it to true",
}
"""Fields that would change the result and are not implemented, each with the remedy."""


def replaced_fields(config: Config) -> list[str]:
    """The fields of ``config`` that ask for something which this engine does otherwise.

    A field that has its default, or that asks for nothing (null, false, 0, an empty list), is not among them.
    """
    defaults = type(config)()
    values = {name: field_value(config, name) for name in REPLACED}
    if values["model.init_device"] == "cpu":
        values["model.init_device"] = None  # weights are drawn on the CPU anyway
    return [name for name, value in values.items() if value and value != field_value(defaults, name)]


def describe_replaced(names: list[str]) -> str:
    """One line: the fields, grouped by what this engine has in their place."""
    grouped: dict[str, list[str]] = {}
    for name in names:
        grouped.setdefault(REPLACED[name], []).append(name)
    return "; ".join(f"{', '.join(group)} ({reason})" for reason, group in grouped.items())


def field_value(config: Any, name: str) -> Any:
    return reduce(getattr, name.split("."), config)
