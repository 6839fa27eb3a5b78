"""Fields of OLMo that this trainer does not read: refused where one is set, or ignored, with the reason."""

REFUSED = {
    "max_grad_norm_ratio": "only a fixed limit is implemented; set it to null and use max_grad_norm",
    "early_stopping_factor": "early stopping is not implemented; set it to null and use stop_at",
    "fast_forward_batches": "set it to null, and name the steps to leave out in data.skip_steps",
    "restore_dataloader": "a resumed run goes on where its data stopped; set it to true, or start a new run",
    "reset_optimizer_state": "a resumed run keeps its optimizer; set it to false, or start a new run",
    "reset_trainer_state": "a resumed run keeps its step and its data; set it to false, or start a new run",
    "load_path": "a run goes on with --resume; for its weights alone give --load_path a checkpoint's local folder and "
    "set restore_dataloader: false",
    "try_load_latest_save": "set it to false, and pass --resume with the run's folder",
    "optimizer.no_decay_norm_and_bias": "OLMo ignores it; set decay_norm_and_bias and decay_embeddings",
    "data.datasets": "groups of files are not distinguished; list all of them in data.paths",
    "data.label_mask_paths": "label masks are not implemented; set it to null",
    "data.generate_doc_lengths": "a token attends to all before it in its window; set it to false",
    "data.generate_attention_mask": "windows have no padding to mask; set it to false",
    "data.drop_last": "every step trains on a whole global batch; set it to true",
}
"""Fields of OLMo that would change the result and are not implemented, and the remedy where one is set."""

_NOT_READ = {
    "Accelerate or DeepSpeed spreads the work": (
        "distributed_strategy",
        "fsdp",
        "ddp",
        "device_train_batch_size",
        "device_train_grad_accum",
        "model.init_device",
        "model.precision",
    ),
    "checkpoints here have one format, in save_folder": (
        "remote_save_folder",
        "sharded_checkpointer",
        "load_path_sharded_checkpointer",
        "new_style_checkpoints",
        "save_interval_ephemeral",
        "force_save_unsharded",
        "no_pre_train_checkpoint",
        "save_data_indices",
        "save_interval_unsharded",
        "save_num_unsharded_checkpoints_to_keep",
    ),
    "profile: STEPS is the profiler here": ("python_profiling", "torch_profiling"),
    "not measured; metrics go to metrics.jsonl": (
        "module_outputs_save_steps",
        "optimizer.metrics_log_interval",
        "optimizer.record_update_metrics",
    ),
    "held-out loss has evaluation.paths, which are local and of type data.memmap_dtype": (
        "evaluators",
        "eval_interval",
        "eval_subset_num_batches",
        "eval_on_load",
        "device_eval_batch_size",
        "hf_datasets_cache_dir",
    ),
    "windows are always full": ("data.pad_direction", "tokenizer.truncate_direction"),
    "signals and time_limit are looked for after every step": (
        "canceled_check_interval",
        "extra_steps_after_cancel",
    ),
    "the last layer and the loss are computed together": ("fused_loss",),
}
IGNORED = {name: reason for reason, names in _NOT_READ.items() for name in names}
"""Fields and sections of OLMo that change nothing about the result, and what this engine has in their place."""
