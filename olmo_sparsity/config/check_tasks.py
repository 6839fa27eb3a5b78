"""Which values of a config go together with GPT-NeoX, with a task, and with coupled ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from olmo_sparsity.config.fields import field_value
from olmo_sparsity.config.words import choose, show
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config
    from olmo_sparsity.tasks import Task

FAMILIES = ("olmo", "gpt_neox")
_ROTATIONS = ("ids", "index", "none")
_READ_BY_NEOX = (
    *("family", "d_model", "n_heads", "n_layers", "rope", "rope_theta", "max_sequence_length"),
    *("vocab_size", "embedding_size", "attention_dropout", "residual_dropout", "embedding_dropout"),
    *("eos_token_id", "pad_token_id", "init_device", "precision"),
)
_DROPOUTS = ("model.residual_dropout", "model.attention_dropout", "model.embedding_dropout")

Problem = tuple[tuple[str, ...], str]


def check_family(config: Config) -> Iterator[Problem]:
    """The architecture, and what it cannot do."""
    model = config.model
    if model.family not in FAMILIES:
        yield ("model.family",), f"{show(model.family)} is no architecture; {choose(model.family, FAMILIES)}"
    if model.family != "gpt_neox":
        return
    if not model.rope:
        yield (
            ("model.rope", "model.family"),
            "GPT-NeoX has rotary embedding: set it to true; positions.rotate: none turns it off",
        )
    defaults = type(model)()
    for item in fields(model):
        value, default = getattr(model, item.name), getattr(defaults, item.name)
        if item.name not in _READ_BY_NEOX and value != default:
            yield (
                (f"model.{item.name}", "model.family"),
                f"{show(value)} means nothing to model.family: gpt_neox; leave it at {show(default)}",
            )
    if len({field_value(config, name) for name in _DROPOUTS}) > 1:
        yield _DROPOUTS, "GPT-NeoX has one probability of dropout; set the three to the same number"
    for name in ("activation_checkpointing", "positions.doc_mask", "data.generate_doc_lengths"):
        if field_value(config, name):
            yield (name, "model.family"), "is for model.family: olmo; turn it off"


def check_task(config: Config) -> Iterator[Problem]:
    """The task, what it needs of the model and the ids, and what belongs to text."""
    if config.task.name is None:
        if config.task.parameters:
            yield ("task.parameters", "task.name"), "are given without task.name; name the task"
        return
    from olmo_sparsity.tasks import make_task

    given = ("task.name", "task.parameters")
    try:
        task = make_task(config.task.name, config.task.parameters)
    except UserError as error:
        yield given, str(error)
        return
    yield from _check_sizes(config, task)
    yield from _check_text_only(config)
    if config.positions.scheme in COUPLED_SCHEMES:
        yield from _check_table(config, task)
    elif config.positions.scheme == "pose":
        shortest = task.max_tokens(task.train_length[0])
        if not 2 <= config.positions.chunks <= shortest // 2:
            yield (
                ("positions.chunks", *given),
                f"{config.positions.chunks} is not in 2 … {shortest // 2}, half of the shortest sample; 2 is usual",
            )


def _check_sizes(config: Config, task: Task) -> Iterator[Problem]:
    model, name = config.model, config.task.name
    if model.vocab_size != len(task.vocabulary):
        yield (
            ("model.vocab_size", "task.name", "task.parameters"),
            f"{model.vocab_size}, and {name} has {len(task.vocabulary)} tokens; set it to {len(task.vocabulary)}",
        )
    longest = task.max_tokens(task.train_length[1])
    if model.max_sequence_length < longest:
        yield (
            ("model.max_sequence_length", "task.name", "task.parameters"),
            f"{model.max_sequence_length} is too short: the longest training sample of {name} has {longest} tokens; "
            f"set it to {longest}",
        )
    if model.family == "olmo" and not (model.rope or model.alibi or model.nope):
        yield (
            ("model.rope", "model.nope", "task.name"),
            "a table of learned position embeddings ends before the test samples do; set model.rope: true",
        )


def _check_text_only(config: Config) -> Iterator[Problem]:
    for name in (
        "corpus.path",
        "corpus.stream",
        "data.paths",
        "data.datasets",
        "data.instance_filter",
        "positions.doc_mask",
        "data.generate_doc_lengths",
        "evaluation.paths",
        "evaluation.position_length",
        "tokenizer.identifier",
    ):
        if field_value(config, name):
            yield (name, "task.name"), "is about text, and task.name asks for a task; take one of them away"
    if config.positions.content != "contiguous":
        yield ("positions.content", "task.name"), "is about text; set it to contiguous for a task"
    if str(config.max_duration).strip().endswith("ep"):
        yield (
            ("max_duration", "task.name"),
            f"{config.max_duration}: a task has no epochs; give steps (10000) or tokens (2e9T)",
        )


def _check_table(config: Config, task: Task) -> Iterator[Problem]:
    size, scheme = config.positions.table_size, config.positions.scheme
    names = ("positions.table_size", "positions.scheme", "task.name", "task.parameters")
    longest = task.test_length[1]
    largest = task.largest_id(longest)
    if largest is None:
        yield (
            ("positions.scheme", "task.name"),
            f"{scheme} needs a task with coupled tokens, and {config.task.name} has none; choose contiguous, "
            "random_start or pose",
        )
    elif size is None or size <= largest:
        yield (
            names,
            f"{show(size)} is too small: test samples of length {longest} need ids up to {largest}; set it to at least "
            f"{largest + 1}, or shorten task.parameters.test_length",
        )


def check_coupling(config: Config) -> Iterator[Problem]:
    """The options of coupled ids, whatever the task."""
    positions = config.positions
    if positions.scheme in COUPLED_SCHEMES and config.task.name is None:
        yield (
            ("positions.scheme", "task.name"),
            f"{positions.scheme} couples the tokens of a task, and text has no such coupling; choose contiguous, "
            "random_start or pose, or name a task",
        )
    rotate = positions.rotate
    if rotate not in _ROTATIONS:
        yield ("positions.rotate",), f"{show(rotate)} is unknown; {choose(rotate, _ROTATIONS)}"
    elif rotate != "ids" and not config.model.rope:
        yield (
            ("positions.rotate", "model.rope"),
            f"{rotate} is about RoPE, and model.rope is false; leave it out",
        )
    elif rotate != "ids" and config.task.name is None:
        yield (
            ("positions.rotate", "task.name"),
            f"{rotate} is for tasks; for text leave it out, or set model.rope: false and model.nope: true",
        )
