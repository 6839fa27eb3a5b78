"""The data of a run, as its config has it: prepared text, token files or a task, opened and checked.

Beyond this module no part of `data` reads a whole config: each is handed what it needs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.task_data import TaskData, TaskPositions
from olmo_sparsity.data.tokens import (
    TOKENIZER_NAME,
    CorpusManifest,
    TokenFiles,
    check_ids,
    id_range,
    load_tokenizer,
    open_verified,
    tokenizer_file,
)
from olmo_sparsity.data.training_batches import Shard, TrainingBatches
from olmo_sparsity.data.windows import NeedleWeaver, TextData, WindowDataset, identity_of
from olmo_sparsity.tasks import Task, make_task
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import sha256_file


def open_training_data(config: Config, *, rank: int = 0, world_size: int = 1) -> TrainingBatches:
    """Batches of a task, or of token files (`corpus.path`, `data.paths`), as ``config`` says.

    Raises `UserError` for text or token files that are missing, unreadable or of another tokenizer.
    """
    shard = Shard(config.global_train_batch_size, rank, world_size)
    if config.task.name is None:
        return TextData(
            window_dataset(config),
            shard,
            config.data,
            order_seed=config.seed if config.data.seed is None else config.data.seed,
            first_epoch=config.epoch or 0,
        )
    text = task_text(config)
    return TaskData(
        task_of(config),
        task_positions(config),
        shard,
        config.data,
        window_length=config.model.max_sequence_length,
        seed=config.seed,
        identity=identity_of(CorpusManifest.load(text).splits["train"]) if text else None,
    )


# --- text ---


def window_dataset(config: Config) -> WindowDataset:
    """The windows of the token files that ``config`` trains on."""
    return WindowDataset(
        open_training_tokens(config),
        window_length=config.model.max_sequence_length,
        positions=config.positions,
        target_length=config.target_length,
        seed=config.seed,
        weaver=needle_weaver(config),
        instance_filter=config.data.instance_filter,
    )


def needle_weaver(config: Config) -> NeedleWeaver:
    """What weaves needles, of all tokens but the special ones, into training windows."""
    model = config.model
    special = [model.eos_token_id, model.pad_token_id]
    vocabulary = np.setdiff1d(np.arange(model.vocab_size), special)
    return NeedleWeaver(config.needles, vocabulary=vocabulary, seed=config.seed)


def open_training_tokens(config: Config) -> TokenFiles:
    """The token files that ``config`` trains on, checked against its tokenizer and vocabulary.

    Raises `UserError` for a missing or truncated file, a tokenizer that does not match, or no corpus at all.
    """
    if config.corpus.path is not None:
        tokens = TokenFiles.of_split(config.corpus.path, "train")
        check_corpus_matches(config, CorpusManifest.load(config.corpus.path))
        return tokens
    if (path := run_tokenizer(config)) is not None:
        fitting_tokenizer(path, config.model.vocab_size)
    return TokenFiles(config.data.paths or (), config.data.memmap_dtype, config.model.eos_token_id)


def open_heldout_tokens(config: Config) -> TokenFiles:
    """The held-out token files: `evaluation.paths`, else the split of the corpus. Raises `UserError` for neither."""
    if config.evaluation.paths:
        return TokenFiles(config.evaluation.paths, config.data.memmap_dtype, config.model.eos_token_id)
    if config.corpus.path is None:
        raise UserError(
            "there is no held-out text; set evaluation.paths to token files, or evaluation.interval: null"
        )
    check_corpus_matches(config, CorpusManifest.load(config.corpus.path))
    return TokenFiles.of_split(config.corpus.path, "heldout")


def check_corpus_matches(config: Config, manifest: CorpusManifest) -> None:
    """Refuse a corpus made with another tokenizer than the model's."""
    for name, expected, made_with in [
        ("vocab_size", config.model.vocab_size, manifest.vocab_size),
        ("eos_token_id", config.model.eos_token_id, manifest.eos_token_id),
    ]:
        if expected != made_with:
            raise UserError(
                f"{config.corpus.path} was made with a tokenizer of {name} {made_with}, the model has {expected}; "
                f"set --model.{name}={made_with} or prepare the corpus with the model's tokenizer"
            )
    path = run_tokenizer(config)
    assert path is not None, "a corpus has a tokenizer"
    if sha256_file(path) != manifest.tokenizer_sha256:
        raise UserError(
            f"the tokenizer {path} is not the one that {config.corpus.path} was made with; prepare it again"
        )


def fitting_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer at ``path``. Raises `UserError` where it has ids beyond the model's vocabulary."""
    tokenizer = load_tokenizer(path)
    if (largest := id_range(tokenizer)) > vocab_size:
        raise UserError(
            f"the tokenizer {path} has vocab_size {largest}, the model has {vocab_size}; "
            f"set --model.vocab_size={largest} or name the model's tokenizer"
        )
    return tokenizer


def run_tokenizer(config: Config) -> Path | None:
    """The tokenizer.json of a run: the one its config names, else its corpus's own; None where neither is known."""
    if config.tokenizer.identifier is not None:
        return tokenizer_file(config.tokenizer.identifier)
    return Path(config.corpus.path) / TOKENIZER_NAME if config.corpus.path is not None else None


# --- a task ---


def task_of(config: Config) -> Task:
    """The task that ``config`` names, with its parameters."""
    assert config.task.name is not None, "a config without a task trains on text"
    return make_task(config.task.name, config.task.parameters)


def task_positions(config: Config) -> TaskPositions:
    """The position ids of the task's samples."""
    return TaskPositions(config.positions, config.target_length)


def task_text(config: Config) -> str | None:
    """The prepared corpus that a task takes its background from; None: it has none, or there is no task."""
    return None if config.task.name is None else config.task.parameters.get("text")


# --- the check of all files before the first step ---


def verify_token_files(config: Config, *, only_heldout: bool = False) -> None:
    """Verify all token files that a run reads; for one process of a run, before its first step.

    Those of a corpus must be the ones of its manifest. Of others the ids must be of the type that they are read as, and
    in the vocabulary. Raises `UserError` for the first one that is not right. ``only_heldout``: those to train on are
    known already.
    """
    splits = [(text, split) for text in [task_text(config)] if text for split in ("train", "heldout")]
    evaluates = config.evaluation.interval is not None
    evaluation_paths = (config.evaluation.paths or []) if evaluates else []
    if config.corpus.path is not None:
        splits.append((config.corpus.path, "train"))
        if evaluates and not evaluation_paths:
            splits.append((config.corpus.path, "heldout"))
    for folder, split in splits:
        if split == "heldout" or not only_heldout:
            open_verified(folder, split)
    training_paths = [] if only_heldout else config.data.paths or []
    without_manifest = [*training_paths, *evaluation_paths]
    if without_manifest:
        TokenFiles(
            without_manifest, config.data.memmap_dtype, config.model.eos_token_id
        )  # each can be opened
    for path in without_manifest:
        check_ids(path, config.data.memmap_dtype, config.model.vocab_size)
