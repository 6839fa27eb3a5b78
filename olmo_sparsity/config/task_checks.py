"""What a task needs of the rest of a config, and which options of coupled ids go together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from olmo_sparsity.config.messages import Problem, show
from olmo_sparsity.config.schema import Config, field_value
from olmo_sparsity.encodings import SWITCHES
from olmo_sparsity.positions import COUPLED_SCHEMES
from olmo_sparsity.tasks import Task, make_task
from olmo_sparsity.tasks.coupling import ENDS, Segment, found_ids
from olmo_sparsity.util.errors import UserError

_ABOUT_TEXT = (
    *("corpus.path", "data.paths", "data.datasets", "data.instance_filter"),
    *("positions.doc_mask", "data.generate_doc_lengths", "tokenizer.identifier"),
    *("evaluation.paths", "evaluation.position_length", "needles.share"),
)
_TASK = ("task.name", "task.parameters")
_SAMPLES = 64
"""Of which the prompts are looked at."""


def check_coupling(config: Config) -> Iterator[Problem]:
    """Options of coupled ids, and what they need of the task and the model."""
    positions = config.positions
    scheme, rotate = positions.scheme, positions.rotate
    if scheme in COUPLED_SCHEMES and config.task.name is None:
        yield (
            ("positions.scheme", "task.name"),
            f"{scheme} couples the tokens of a task, and text has no such coupling; choose contiguous, "
            "random_start or pose, or name a task",
        )
    if positions.coupled_share < 1 and scheme != "predicted":
        yield (
            ("positions.coupled_share", "positions.scheme"),
            f"is for positions.scheme: predicted, not {scheme}; leave it at 1",
        )
    elif positions.coupled_share < 1 and (positions.table_size or 0) < config.model.max_sequence_length:
        yield (
            ("positions.table_size", "positions.coupled_share", "model.max_sequence_length"),
            f"{show(positions.table_size)} is too small for contiguous ids of {config.model.max_sequence_length} "
            "tokens; raise it",
        )
    if positions.id_noise and scheme not in COUPLED_SCHEMES:
        yield (
            ("positions.id_noise", "positions.scheme"),
            f"is about coupled ids, and positions.scheme: {scheme} has none; leave it at 0",
        )
    yield from _check_found_rule(config)
    if scheme == "predicted" and config.softmax_auxiliary_loss:
        yield (
            ("softmax_auxiliary_loss", "positions.scheme"),
            "is for models of one head, and positions.scheme: predicted has two; set it to false",
        )
    if rotate != "ids" and not config.model.encoding.rotates:
        yield (
            ("positions.rotate", *SWITCHES),
            f"{rotate} is about RoPE, and model.rope is false; leave it out",
        )
    elif rotate != "ids" and config.task.name is None:
        yield (
            ("positions.rotate", "task.name"),
            f"{rotate} is for tasks; for text leave it out, or set model.rope: false and model.nope: true",
        )


def _check_found_rule(config: Config) -> Iterator[Problem]:
    """Whether the options of `positions.found` are whole, and read."""
    found, scheme = config.positions.found, config.positions.scheme
    if len(found.counted_from) != len(found.first_ids) or set(found.counted_from) - set(ENDS):
        yield (
            ("positions.found.counted_from", "positions.found.first_ids"),
            f"{show(found.counted_from)} is no start or end for each of positions.found.first_ids, "
            f"{show(found.first_ids)}; copy what results/synthetic/couple.py prints",
        )
    elif min(found.first_ids, default=0) < 0:
        yield (
            ("positions.found.first_ids",),
            f"{show(found.first_ids)} go below 0, which no id does; copy what results/synthetic/couple.py prints",
        )
    elif found.marks and not found.first_ids:
        yield (
            ("positions.found.marks", "positions.found.first_ids"),
            f"{show(found.marks)} are read with positions.found.first_ids alone; copy all that "
            "results/synthetic/couple.py prints",
        )
    elif found.first_ids and scheme not in COUPLED_SCHEMES:
        yield (
            ("positions.found.first_ids", "positions.scheme"),
            f"is about coupled ids, and positions.scheme: {scheme} has none; set the scheme to coupled or predicted",
        )


def check_task(config: Config) -> Iterator[Problem]:
    """The task, what it needs of the model and the ids, and what belongs to text."""
    if config.task.name is None:
        if config.task.parameters:
            yield ("task.parameters", "task.name"), "are given without task.name; name the task"
        for name in ("task.length_groups", "evaluation.until"):
            if field_value(config, name) is not None:
                yield (name, "task.name"), "is for synthetic tasks; name the task, or leave it out"
        return
    try:
        task = make_task(config.task.name, config.task.parameters)
    except UserError as error:
        yield _TASK, str(error)
        return
    yield from _check_sizes(config, task)
    for name in _ABOUT_TEXT:
        if field_value(config, name):
            yield (name, "task.name"), "is about text, and task.name asks for a task; take one of them away"
    if config.positions.content != "contiguous":
        yield ("positions.content", "task.name"), "is about text; set it to contiguous for a task"
    if config.positions.scheme in COUPLED_SCHEMES:
        yield from _check_table(config, task)
        yield from _check_found(config, task)
    elif config.positions.scheme == "pose":
        shortest = task.fewest_tokens(task.train_length[0])
        if not 2 <= config.positions.chunks <= shortest // 2:
            yield (
                ("positions.chunks", *_TASK),
                f"{config.positions.chunks} is not in 2 … {shortest // 2}, half of the shortest sample; 2 is usual",
            )


def _check_sizes(config: Config, task: Task) -> Iterator[Problem]:
    model, name = config.model, config.task.name
    if model.vocab_size != len(task.vocabulary):
        yield (
            ("model.vocab_size", *_TASK),
            f"{model.vocab_size}, and {name} has {len(task.vocabulary)} tokens; set it to {len(task.vocabulary)}",
        )
    most = task.train_length[1]
    longest = task.at_length(most, *task.ks("train")[-1:]).max_tokens(most)
    if model.max_sequence_length < longest:
        yield (
            ("model.max_sequence_length", *_TASK),
            f"{model.max_sequence_length} is too short: the longest training sample of {name} has {longest} tokens; "
            f"set it to {longest}",
        )
    shortest_test, longest_test = task.test_length
    if config.evaluation.until is not None and not shortest_test <= most <= longest_test:
        yield (
            ("evaluation.until", *_TASK),
            f"is about test samples of length {most}, the longest of training, which test_length "
            f"{list(task.test_length)} leaves out; change one of them",
        )
    if model.family == "olmo" and model.encoding.has_table:
        yield (
            (*SWITCHES, "task.name"),
            "a table of learned position embeddings ends before the test samples do; set model.rope: true",
        )


def _check_table(config: Config, task: Task) -> Iterator[Problem]:
    positions = config.positions
    size, scheme = positions.table_size, positions.scheme
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
            ("positions.table_size", "positions.scheme", *_TASK),
            f"{show(size)} is too small: test samples of length {longest} need ids up to {largest}; set it to at least "
            f"{largest + 1}, or shorten task.parameters.test_length",
        )
    if (second := task.largest_second_id()) is not None:
        size = positions.second_table_size
        if size is None or size <= second:
            yield (
                ("positions.second_table_size", "positions.scheme", *_TASK),
                f"{show(size)} is too small: {config.task.name} couples on two levels, and samples need ids up to "
                f"{second} on the second; set it to at least {second + 1}",
            )
        if positions.rotate == "ids":
            yield (
                ("positions.rotate", "task.name"),
                f"ids has RoPE rotate by one number, and {config.task.name} couples on two levels; set it to index or "
                "none",
            )
        if positions.id_noise or positions.coupled_share < 1 or positions.found.first_ids:
            yield (
                ("positions.id_noise", "positions.coupled_share", "positions.found.first_ids", "task.name"),
                f"are for tasks that couple on one level, and {config.task.name} does on two; leave them out",
            )
    elif positions.second_table_size is not None:
        yield (
            ("positions.second_table_size", "task.name"),
            f"is for tasks that couple on two levels, and {config.task.name} does on one; set it to null",
        )


def _check_found(config: Config, task: Task) -> Iterator[Problem]:
    """Whether prompts have the segments of the coupling that was found, and the table holds its ids."""
    found, size, longest = config.positions.found, config.positions.table_size, task.test_length[1]
    if not found.first_ids or len(found.counted_from) != len(found.first_ids):
        return
    segments = [Segment(*each) for each in zip(found.counted_from, found.first_ids, strict=True)]
    in_test = task.at_length(longest, *task.ks("test")[-1:]).sample("test", 0, [0])
    batches = task.sample("train", config.seed, np.arange(_SAMPLES)), in_test
    try:
        most = max(int(found_ids(batch, found.marks, segments, task.end_id).max()) for batch in batches)
    except UserError as error:
        yield ("positions.found", *_TASK), str(error).removeprefix("positions.found: ")
        return
    if size is not None and size <= most:
        yield (
            ("positions.table_size", "positions.found", *_TASK),
            f"{size} is too small for ids up to {most}, which positions.found gives to samples up to length {longest}; "
            f"set it to at least {most + 1}",
        )
