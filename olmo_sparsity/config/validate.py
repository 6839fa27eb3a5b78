"""Configs that are refused: those that would silently train something else than they say, or lose a run's work.

Types, choices and unknown keys are OmegaConf's to refuse, shapes that do not fit OLMo's and PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations

from olmo.config import BlockType

from olmo_sparsity.attention import ATTENTIONS, SOFTMAX
from olmo_sparsity.config.durations import parse_duration, parse_steps
from olmo_sparsity.config.fields import ABOUT_TEXT, field_value, is_set
from olmo_sparsity.config.olmo_fields import REFUSED
from olmo_sparsity.config.rules import rule_of, rules
from olmo_sparsity.config.schema import Config, PositionsConfig
from olmo_sparsity.positions import COUPLED_SCHEMES, SCHEMES
from olmo_sparsity.tasks import Task, make_task
from olmo_sparsity.util.errors import UserError

_WITH_LOAD_PATH = ("restore_dataloader", "reset_optimizer_state", "reset_trainer_state")
_MOST_NEEDLES = 32  # an eighth of the keys are held out: of 32 drawn at once, none is in one draw of 72


def validate(config: Config) -> list[str]:
    """What is wrong with ``config``, a line each, which begins with the name of a field."""
    # Combinations are checked only of values that are possible by themselves.
    of_data = _of_text if config.task.name is None else _of_task
    checks = (_of_model, _of_positions, of_data, _of_training)
    return [*_of_values(config)] or [problem for check in checks for problem in check(config)]


def _of_values(config: Config) -> Iterator[str]:
    for name, value, rule in rules(config):
        if complaint := rule.complaint(value):
            yield f"{name}: {value} {complaint}"
        # It was written \${…}; the saved config would be another one.
        if not is_dataclass(value) and "${" in str(value):
            yield f"{name}: {value} still has ${{ in it when it is resolved; write it without"
    for name, remedy in REFUSED.items():
        if is_set(config, name) and not (name in _WITH_LOAD_PATH and config.load_path):
            yield f"{name}: {field_value(config, name)} is not supported: {remedy}"
    for name, choices in (
        ("model.attention", (SOFTMAX, *sorted(ATTENTIONS))),
        ("positions.scheme", (*SCHEMES, *COUPLED_SCHEMES)),
    ):
        if field_value(config, name) not in choices:
            yield f"{name}: {field_value(config, name)} is unknown; choose {', '.join(choices)}"


def _of_model(config: Config) -> Iterator[str]:
    model = config.model
    positions = config.positions
    for first, second in combinations(("model.rope", "model.alibi", "model.nope"), 2):
        if field_value(config, first) and field_value(config, second):
            yield f"{first}: excludes {second}; set one of them to false"
    if model.family != "olmo":
        yield from _of_other_family(config)
    if model.family != "tuples":
        yield from _of_heads(config)
    if model.embedding_rows < model.vocab_size:
        yield f"model.embedding_size: {model.embedding_size} is below vocab_size {model.vocab_size}; set it to null"
    learned = model.family == "olmo" and model.learns_positions
    if learned and (positions.scheme != "contiguous" or config.task.name):
        yield "model.rope: learned position embeddings have no rows for ids of schemes or tasks; set it to true"
    if not model.rope:
        for name in ("model.nope_layer_interval", "model.rope_window"):
            if field_value(config, name):
                yield f"{name}: is for layers of RoPE; set model.rope: true, or leave it out"
    if (model.nope_layer_interval or 0) > model.n_layers:
        yield f"model.nope_layer_interval: is above model.n_layers: all {model.n_layers} would have RoPE; lower it"
    if model.block_type != BlockType.sequential and (model.attention != SOFTMAX or model.rope_window):
        yield "model.block_type: must be sequential with model.attention or model.rope_window; set it to sequential"
    ids_are_positions = positions.rotate == "index" or (
        positions.rotate == "ids" and positions.scheme not in COUPLED_SCHEMES
    )
    needs_positions = model.attention != SOFTMAX and ATTENTIONS[model.attention].ids_are_positions
    if needs_positions and not ids_are_positions:
        yield f"model.attention: {model.attention} takes ids for positions in the text; set positions.rotate: index"
    if positions.scheme == "random_float" and model.attention == "dape-v2":
        yield "positions.scheme: dape-v2 convolves over ids 1 apart, which random_float does not have; choose pose"


def _of_heads(config: Config) -> Iterator[str]:
    model = config.model
    width, remainder = divmod(model.d_model, model.n_heads)
    if remainder:
        yield f"model.n_heads: {model.n_heads} heads cannot share model.d_model {model.d_model}; choose a divisor of it"
    elif model.rope and width % 2:
        yield f"model.n_heads: heads of width {width}, and RoPE rotates pairs; make model.d_model / n_heads even"
    if model.n_kv_heads is not None and model.n_heads % model.n_kv_heads:
        yield f"model.n_kv_heads: {model.n_kv_heads} is no divisor of model.n_heads {model.n_heads}; choose one"


def _of_other_family(config: Config) -> Iterator[str]:
    model = config.model
    default = type(config.model)()
    for item in fields(model):
        value = getattr(model, item.name)
        if not rule_of(item).is_read_by(model.family) and value != getattr(default, item.name):
            yield f"model.{item.name}: {value} means nothing to model.family: {model.family}; leave it out"
    if model.family == "tuples":
        for name in ("positions.rotate", "softmax_auxiliary_loss", "activation_checkpointing"):
            if is_set(config, name):
                yield f"{name}: means nothing to model.family: tuples; leave it out"
        if config.task.name is None:
            yield "model.family: tuples is for synthetic tasks; name a task, or choose olmo"
        if config.positions.scheme in ("predicted", "random_float"):
            yield "positions.scheme: tuples need integer ids that are not predicted; choose a scheme that has them"
    elif not model.rope:
        yield "model.rope: GPT-NeoX has rotary embedding: set it to true; positions.rotate: none turns it off"
    elif len({model.residual_dropout, model.attention_dropout, model.embedding_dropout}) > 1:
        yield "model.residual_dropout: GPT-NeoX has one probability of dropout; set the three to the same number"


def _of_positions(config: Config) -> Iterator[str]:
    positions = config.positions
    window_length = config.model.max_sequence_length
    scheme = positions.scheme
    shortest = window_length + 1 if scheme == "pose" else window_length
    if config.target_length < shortest:
        yield (
            f"positions.target_length: {positions.target_length} is too small for {scheme} of windows of "
            f"{window_length}; raise it"
        )
    for name, read_with in (
        ("positions.content", ("pose",)),
        ("positions.coupled_share", ("predicted",)),
        ("positions.id_noise", tuple(COUPLED_SCHEMES)),
    ):
        if is_set(config, name) and scheme not in read_with:
            yield f"{name}: is read with positions.scheme: {' or '.join(read_with)} alone, not with {scheme}"
    if scheme == "predicted" and config.softmax_auxiliary_loss:
        yield "softmax_auxiliary_loss: is for models of one head, and predicted has two; set it to false"
    if positions.rotate != "ids" and not (config.model.rope and config.task.name):
        yield f"positions.rotate: {positions.rotate} is for tasks, with model.rope; for text set model.nope"


def _of_text(config: Config) -> Iterator[str]:
    needles = config.needles
    scheme = config.positions.scheme
    window_length = config.model.max_sequence_length
    for name in ("task.parameters", "task.length_groups", "evaluation.until"):
        if is_set(config, name):
            yield f"{name}: is for synthetic tasks; set task.name, or leave it out"
    if scheme in COUPLED_SCHEMES:
        yield f"positions.scheme: {scheme} is for tasks, as text has no coupled tokens; set task.name"
    if config.corpus.path and config.data.paths:
        yield "corpus.path: excludes data.paths; set one of them to null"
    if config.data.paths and config.evaluation.interval is not None and not config.evaluation.paths:
        yield "evaluation.interval: data.paths are for training; set evaluation.paths to token files, or this to null"
    most_chunks = window_length // 2
    if scheme == "pose" and not 2 <= config.positions.chunks <= most_chunks:
        yield f"positions.chunks: {config.positions.chunks} is not in 2 … {most_chunks}, half of a window; 2 is usual"
    if not needles.value_tokens:
        yield "needles.value_tokens: [] is empty; give one number of tokens, or more"
    elif needles.share:
        tokens = needles.per_window * (needles.key_tokens + max(needles.value_tokens))
        if needles.per_window > _MOST_NEEDLES or 2 * tokens > 0.75 * window_length:
            yield f"needles.per_window: at most {_MOST_NEEDLES}, in 3/4 of a window; these have 2 x {tokens} tokens"


def _of_task(config: Config) -> Iterator[str]:
    model = config.model
    positions = config.positions
    assert config.task.name is not None
    try:
        task = make_task(config.task.name, config.task.parameters)
    except UserError as error:
        yield f"task: {error}"
        return
    for name in sorted(ABOUT_TEXT):
        if is_set(config, name):
            yield f"{name}: is about text, and task.name names a task; leave one of them out"
    if model.vocab_size != len(task.vocabulary):
        yield f"model.vocab_size: {model.vocab_size}, and {task.name} has {len(task.vocabulary)} tokens; set it to that"
    longest_training = task.train_length[1]
    longest = task.at_length(longest_training, *task.ks("train")[-1:]).max_tokens(longest_training)
    if model.max_sequence_length < longest:
        yield f"model.max_sequence_length: the longest sample of {task.name} has {longest} tokens; set it to that"
    most_chunks = task.fewest_tokens(task.train_length[0]) // 2
    if positions.scheme == "pose" and not 2 <= positions.chunks <= most_chunks:
        yield f"positions.chunks: {positions.chunks} is not in 2 … {most_chunks}, half of the shortest sample"
    if (
        config.evaluation.until is not None
        and not task.test_length[0] <= longest_training <= task.test_length[1]
    ):
        yield "evaluation.until: is about the longest training length, which test_length leaves out; change one of them"
    if positions.scheme in COUPLED_SCHEMES:
        yield from _of_coupling(config, task, longest)


def _of_coupling(config: Config, task: Task, training_tokens: int) -> Iterator[str]:
    """Of coupled ids: without this a table too small for the test samples would show only after the run.

    ``training_tokens``: the most that a training sample has.
    """
    positions = config.positions
    longest = task.test_length[1]
    second = task.largest_second_id()
    if task.largest_id(longest) is None:
        yield f"positions.scheme: {positions.scheme} needs coupled tokens, and {task.name} has none; choose contiguous"
        return
    for name, largest in small_tables(positions, task, longest):
        yield f"{name}: samples up to length {longest} need ids up to {largest}; set it to at least {largest + 1}"
    if positions.coupled_share < 1 and (positions.table_size or 0) < training_tokens:
        yield f"positions.table_size: with coupled_share a sample may have ids 0 … {training_tokens - 1}; raise it"
    if second is None and positions.second_table_size is not None:
        yield f"positions.second_table_size: {task.name} couples on one level; set it to null"
    if second is not None and positions.rotate == "ids":
        yield f"positions.rotate: ids is one number, and {task.name} couples on two levels; set it to index or none"
    if second is not None and (positions.id_noise or positions.coupled_share < 1):
        yield f"positions.id_noise and coupled_share: {task.name} couples on two levels; leave them out"


def small_tables(positions: PositionsConfig, task: Task, length: int) -> Iterator[tuple[str, int]]:
    """The tables that are too small for coupled samples of ``length``, and the largest id that each must hold."""
    largest_ids = {"table_size": task.largest_id(length), "second_table_size": task.largest_second_id()}
    for name, largest in largest_ids.items():
        if largest is not None and (getattr(positions, name) or 0) <= largest:
            yield f"positions.{name}", largest


def _of_training(config: Config) -> Iterator[str]:
    scheduler = config.scheduler
    evaluation = config.evaluation
    if evaluation.until is not None and evaluation.interval is None:
        yield "evaluation.until: needs evaluation.interval, the steps between two measurements; set it"
    if config.deepspeed.config is not None and scheduler.grad_clip_warmup_steps:
        yield "scheduler.grad_clip_warmup_steps: DeepSpeed has one clipping bound for all steps; set it to null"
    try:
        parse_steps(config.data.skip_steps)
        duration, unit = parse_duration(config.max_duration)
    except UserError as error:
        yield str(error)
        return
    if unit == "epochs" and config.task.name:
        yield f"max_duration: {config.max_duration}: a task has no epochs; give steps (10000) or tokens (2e9T)"
    if scheduler.name == "inverse_sqrt_with_warmup" and not scheduler.t_warmup:
        yield "scheduler.t_warmup: 0 makes every learning rate of inverse_sqrt_with_warmup 0; set it to 1 or more"
    if unit == "epochs" or scheduler.name == "constant":
        return
    tokens = duration * (config.tokens_per_step if unit == "steps" else 1)
    length = tokens if scheduler.units == "tokens" else tokens / config.tokens_per_step
    if scheduler.t_warmup > length:
        yield (
            f"scheduler.t_warmup: {scheduler.t_warmup:g} {scheduler.units} are longer than max_duration "
            f"{config.max_duration}; try --scheduler.t_warmup={length // 4:.0f}"
        )
