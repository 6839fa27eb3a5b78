"""Which values of a config this engine can run, and which go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import combinations
from typing import Any

from olmo.config import (
    ActivationCheckpointingStrategy,
    BlockType,
    OptimizerType,
    SchedulerType,
    SchedulerUnits,
)

from olmo_sparsity.attention import ATTENTIONS, SOFTMAX
from olmo_sparsity.config.messages import Problem, choose, show
from olmo_sparsity.config.schema import (
    ABOVE_0,
    NEOX_HAS,
    Config,
    PositionsConfig,
    changed_fields,
    each_field,
    field_value,
)
from olmo_sparsity.config.task_checks import check_coupling, check_task
from olmo_sparsity.encodings import SWITCHES
from olmo_sparsity.positions import COUPLED_SCHEMES, SCHEMES
from olmo_sparsity.util.errors import UserError

_PRECISIONS = ("amp_bf16", "fp32")
_MOST_NEEDLES = 32  # an eighth of the keys are held out: of 32 drawn at once, none is in one draw of 72
_UNITS = {"": "steps", "T": "tokens", "ep": "epochs"}
_INTEGER_LIMIT = 1 << 63
_READ_BY_NEOX = {
    *("family", "d_model", "n_heads", "n_layers", "rope", "rope_theta", "max_sequence_length"),
    *("vocab_size", "embedding_size", "attention_dropout", "residual_dropout", "embedding_dropout"),
    *("eos_token_id", "pad_token_id", "init_device", "precision", "layer_norm_eps", "init_std"),
}
_READ_BY = {"gpt_neox": {*_READ_BY_NEOX, *NEOX_HAS}, "tuples": {*_READ_BY_NEOX, "tuples"}}
_MOST_TABLE_ENTRIES = 1 << 26
_DROPOUTS = ("model.residual_dropout", "model.attention_dropout", "model.embedding_dropout")
_EXCLUSIVE = (
    *combinations(reversed(SWITCHES), 2),
    ("model.alibi", "model.flash_attention"),
    *combinations(("corpus.path", "data.datasets", "data.paths"), 2),
)
"""Fields of which at most one may be set."""


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


def find_problems(config: Config) -> Iterator[Problem]:
    """Everything about the values of ``config`` that this engine cannot or must not run."""
    yield from _check_each_field(config)
    yield from _check_exclusive(config)
    yield from _check_shape(config)
    yield from _check_family(config)
    yield from _check_position_encoding(config)
    yield from _check_attention(config)
    yield from _check_positions(config)
    yield from check_coupling(config)
    yield from _check_documents(config)
    yield from _check_data(config)
    yield from _check_needles(config)
    yield from check_task(config)
    yield from _check_optimization(config)
    yield from _check_warm_up(config)
    yield from _check_evaluation(config)


def unusable_values(config: Config) -> Iterator[tuple[str, str]]:
    """The name of each number that is not finite or too long, and of each text that cannot be saved, and why."""
    for name, value in _leaves(config):
        if text := _why_unusable(value):
            yield name, text


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every scalar value and every key of a mapping, with its dotted name."""
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


def _check_each_field(config: Config) -> Iterator[Problem]:
    """Each field by itself, by what `schema` knows of it."""
    for name, value, known in changed_fields(config):
        if known.refused:
            yield (name,), f"{show(value)} is not supported: {known.refused}"
    for name, value, known in each_field(config):
        if known.bound and value is not None and not known.bound.holds(value):
            yield (name,), f"{show(value)} {known.bound.otherwise}"
        if known.choices and value not in known.choices:
            yield (name,), f"{show(value)} is unknown; {choose(value, known.choices)}"


def _check_exclusive(config: Config) -> Iterator[Problem]:
    for first, second in _EXCLUSIVE:
        if field_value(config, first) and field_value(config, second):
            off = "false" if field_value(config, first) is True else "null"
            yield (first, second), f"excludes {second}; set one of them to {off}"


def _check_shape(config: Config) -> Iterator[Problem]:
    model, heads = config.model, config.model.n_heads
    shape = ("model.d_model", "model.n_heads", *SWITCHES)
    if min(model.d_model, heads) > 0:
        if model.d_model % heads:
            yield shape[:2], f"{model.d_model} is no multiple of model.n_heads {heads}; make it one"
        elif model.encoding.rotates and model.d_model // heads % 2:
            yield shape, f"RoPE needs an even d_model / n_heads, not {model.d_model // heads}; double it"
    if model.n_kv_heads and min(model.n_kv_heads, heads) > 0 and heads % model.n_kv_heads:
        yield (
            ("model.n_kv_heads", "model.n_heads"),
            f"{model.n_kv_heads} does not divide model.n_heads {heads}; choose a divisor of it",
        )
    shared = model.multi_query_attention
    if model.n_kv_heads and shared is not None and model.n_kv_heads != (1 if shared else heads):
        yield (
            ("model.n_kv_heads", "model.multi_query_attention"),
            f"{model.n_kv_heads} contradicts model.multi_query_attention {show(shared)}; set one of them to null",
        )
    if model.block_type == BlockType.llama and not shared and model.n_kv_heads not in (None, heads):
        yield (
            ("model.n_kv_heads", "model.block_type", "model.n_heads", "model.multi_query_attention"),
            f"{model.n_kv_heads} is for model.block_type: sequential; set that, or leave it out",
        )
    if min(model.block_group_size, model.n_layers) > 0 and model.n_layers % model.block_group_size:
        yield (
            ("model.block_group_size", "model.n_layers"),
            f"{model.block_group_size} does not divide model.n_layers {model.n_layers}; choose a divisor of it",
        )
    hidden = model.mlp_hidden_size or model.mlp_ratio * model.d_model
    if model.family == "olmo" and model.activation_type == "swiglu" and hidden % 2:
        yield (
            ("model.mlp_hidden_size", "model.mlp_ratio", "model.d_model", "model.activation_type"),
            f"swiglu halves the hidden size of the MLP, {hidden}; give an even one",
        )
    if model.embedding_size is not None and model.embedding_size < model.vocab_size:
        yield (
            ("model.embedding_size", "model.vocab_size"),
            f"{model.embedding_size} is below model.vocab_size {model.vocab_size}; "
            "raise it to a multiple of 128 that is not smaller, or set it to null",
        )


def _check_family(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.family not in _READ_BY:
        return
    if model.family == "tuples":
        yield from _check_tuples(config)
    elif not model.rope:
        yield (
            ("model.rope", "model.family"),
            "GPT-NeoX has rotary embedding: set it to true; positions.rotate: none turns it off",
        )
    defaults = type(model)()
    for item in fields(model):
        value, default = getattr(model, item.name), getattr(defaults, item.name)
        if item.name not in _READ_BY[model.family] and value != default:
            yield (
                (f"model.{item.name}", "model.family"),
                f"{show(value)} means nothing to model.family: {model.family}; leave it at {show(default)}",
            )
    if model.family == "gpt_neox" and len({field_value(config, name) for name in _DROPOUTS}) > 1:
        yield _DROPOUTS, "GPT-NeoX has one probability of dropout; set the three to the same number"
    for name in ("positions.doc_mask", "data.generate_doc_lengths"):
        if field_value(config, name):
            yield (name, "model.family"), "is for model.family: olmo; turn it off"
    name, strategy = "activation_checkpointing", config.activation_checkpointing
    if model.family == "tuples" and strategy:
        yield (name, "model.family"), "is for models with layers; turn it off"
    elif strategy == ActivationCheckpointingStrategy.fine_grained:
        yield (name, "model.family"), "fine_grained is for model.family: olmo; choose whole_layer"


def _check_tuples(config: Config) -> Iterator[Problem]:
    model, scheme = config.model, config.positions.scheme
    if config.task.name is None:
        yield ("model.family", "task.name"), "tuples is for synthetic tasks; name a task, or choose olmo"
    vocabulary, size = model.embedding_rows, model.tuples.size
    if size <= 3 and vocabulary ** (size + 1) > _MOST_TABLE_ENTRIES:
        yield (
            ("model.tuples.size", "model.vocab_size"),
            f"tuples of {size} among {vocabulary} tokens need {vocabulary ** (size + 1):,} entries; lower it",
        )
    reach = config.tuple_reach
    arrangements = (2 * (model.tuples.locality or reach - 1) + 1) ** (size - 1)
    if size <= 3 and arrangements * (1 if model.tuples.relative else reach) > _MOST_TABLE_ENTRIES:
        yield (
            ("model.tuples.size", "model.tuples.locality", "positions.target_length"),
            f"tuples of {size} among {reach:,} ids have too many arrangements for a table; set model.tuples.locality, "
            "or lower it",
        )
    if scheme in ("predicted", "random_float"):
        yield (
            ("positions.scheme", "model.family"),
            f"{scheme} is not for model.family: tuples, which looks up whole differences of given ids; choose "
            "contiguous, random_start, pose or coupled",
        )
    if config.positions.rotate != "ids":
        yield (
            ("positions.rotate", "model.family"),
            "is about RoPE, which model.family: tuples has not; leave it out",
        )
    if config.softmax_auxiliary_loss:
        yield (
            ("softmax_auxiliary_loss", "model.family"),
            "is about logits, and model.family: tuples gives probabilities; set it to false",
        )


def _check_position_encoding(config: Config) -> Iterator[Problem]:
    model, scheme = config.model, config.positions.scheme
    if model.family == "olmo" and model.encoding.has_table and scheme != "contiguous":
        yield (
            ("positions.scheme", *SWITCHES),
            f"{scheme} needs position ids past the table of learned position embeddings; "
            "set model.rope: true, or positions.scheme: contiguous",
        )


def _check_attention(config: Config) -> Iterator[Problem]:
    model, names = config.model, (SOFTMAX, *sorted(ATTENTIONS))
    if model.nope_layer_interval and not model.rope:
        yield (
            ("model.nope_layer_interval", "model.rope"),
            "is for layers of RoPE and NoPE in turn; set model.rope: true, or leave it out",
        )
    elif model.nope_layer_interval and model.nope_layer_interval > model.n_layers:
        yield (
            ("model.nope_layer_interval", "model.n_layers"),
            f"{model.nope_layer_interval} is above model.n_layers {model.n_layers}: no layer would be without RoPE; "
            "lower it, or leave it out",
        )
    if model.rope_window and not model.rope:
        yield (
            ("model.rope_window", "model.rope"),
            "is for layers of RoPE; set model.rope: true, or leave it out",
        )
    if model.attention not in names:
        yield (
            ("model.attention",),
            f"{show(model.attention)} is no attention; {choose(model.attention, names)}",
        )
    if model.attention != SOFTMAX:
        own, name = "model.attention", model.attention
    elif model.rope_window:
        own, name = "model.rope_window", "a window"
    else:
        return
    if name in ATTENTIONS and ATTENTIONS[name].reads_ids and not _ids_count_tokens(config.positions):
        yield (
            ("model.attention", "positions.scheme", "positions.rotate"),
            f"{name} takes ids for places in the text, which coupled ids and rotate: none are not; choose softmax, "
            "entmax or fox, or set positions.rotate: index",
        )
    if model.block_type != BlockType.sequential:
        yield ((own, "model.block_type"), f"{name} is for model.block_type: sequential; set it so")
    if config.activation_checkpointing == ActivationCheckpointingStrategy.fine_grained:
        yield (
            ("activation_checkpointing", own),
            f"fine_grained is for model.attention: softmax without a window; with {name} choose whole_layer",
        )


def _ids_count_tokens(positions: PositionsConfig) -> bool:
    """Whether the ids that the decoder sees grow with every token."""
    return positions.rotate == "index" or (
        positions.rotate == "ids" and positions.scheme not in COUPLED_SCHEMES
    )


def _check_positions(config: Config) -> Iterator[Problem]:
    positions, length = config.positions, config.model.max_sequence_length
    scheme, target = positions.scheme, positions.target_length
    target_fields = ("positions.target_length", "positions.scheme", "model.max_sequence_length")
    schemes = (*SCHEMES, *COUPLED_SCHEMES)
    if scheme not in schemes:
        yield ("positions.scheme",), f"{show(scheme)} is no position scheme; {choose(scheme, schemes)}"
    if positions.content == "skip" and scheme != "pose":
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
    if scheme == "random_float" and config.model.attention == "dape-v2":
        yield (
            ("positions.scheme", "model.attention"),
            "random_float leaves no ids that are 1 apart, and dape-v2 convolves over those; choose pose",
        )
    if scheme == "pose" and not 2 <= positions.chunks <= length // 2:
        yield (
            ("positions.chunks", "positions.scheme", "model.max_sequence_length"),
            f"{positions.chunks} is not in 2 … {length // 2}, half of model.max_sequence_length; 2 is usual",
        )


def _check_documents(config: Config) -> Iterator[Problem]:
    if not config.positions.restart_at_documents:
        return
    name, scheme = "positions.restart_at_documents", config.positions.scheme
    if not config.masks_documents:
        yield (
            (name, "positions.doc_mask", "data.generate_doc_lengths"),
            "needs positions.doc_mask: true: else a token sees those of other documents at the ids of its own",
        )
    if scheme != "contiguous":
        yield (
            (name, "positions.scheme"),
            f"needs positions.scheme: contiguous, not {scheme}: the ids that {scheme} draws would be lost at every "
            "document; set it to false, positions.doc_mask works with every scheme",
        )


def _check_data(config: Config) -> Iterator[Problem]:
    dtype = config.data.memmap_dtype
    try:
        _ = config.data.effective_memmap_dtype
    except TypeError:
        yield ("data.memmap_dtype",), f"{show(dtype)} is no number type; uint16 is usual"
    vocabulary, evaluation = config.model.vocab_size, config.evaluation
    reads_bare = config.data.paths or config.data.datasets or (evaluation.interval and evaluation.paths)
    if dtype == "uint16" and vocabulary > 1 << 16 and reads_bare:
        yield (
            ("data.memmap_dtype", "model.vocab_size"),
            f"uint16 holds ids below 65,536 only, and model.vocab_size is {vocabulary}; set it to uint32",
        )
    repeated = config.data.instance_filter
    if repeated is not None and not ABOVE_0.holds(repeated.repetition_min_period):
        yield (
            ("data.instance_filter.repetition_min_period",),
            f"{repeated.repetition_min_period} {ABOVE_0.otherwise}",
        )
    if config.task.name is None and config.model.max_sequence_length == 1:
        yield ("model.max_sequence_length",), "1 leaves nothing to predict; give 2 or more"


def _check_needles(config: Config) -> Iterator[Problem]:
    needles, window = config.needles, config.model.max_sequence_length
    if not needles.value_tokens or min(needles.value_tokens) < 1:
        yield (
            ("needles.value_tokens",),
            f"{show(needles.value_tokens)} are not 1 or more; give one number or several",
        )
        return
    if needles.share == 0:
        return
    if needles.per_window > _MOST_NEEDLES:
        yield (
            ("needles.per_window",),
            f"{needles.per_window} is above {_MOST_NEEDLES}, of which none may have a key that is held out; give fewer",
        )
        return
    tokens = needles.per_window * (needles.key_tokens + max(needles.value_tokens))
    fields = ("needles.per_window", "needles.key_tokens", "needles.value_tokens")
    if 2 * tokens > 0.75 * window:
        yield (
            (*fields, "model.max_sequence_length"),
            f"needles of {tokens} tokens, twice each, take more than three quarters of a window of {window}; "
            "give fewer or shorter ones",
        )
    elif window + 8 * tokens > config.model.vocab_size:
        yield (
            (*fields, "model.vocab_size"),
            f"{config.model.vocab_size} different tokens are too few for needles whose tokens do not occur in a window "
            f"of {window}; set needles.share: 0",
        )


def _check_optimization(config: Config) -> Iterator[Problem]:
    optimizer, scheduler, precision = config.optimizer, config.scheduler, config.precision
    if config.deepspeed.config is not None and scheduler.grad_clip_warmup_steps:
        yield (
            ("scheduler.grad_clip_warmup_steps", "deepspeed.config"),
            "DeepSpeed clips by max_grad_norm at every step; set it to null, or train without deepspeed.config",
        )
    if config.wandb is not None and config.wandb.log_interval < 1:
        yield ("wandb.log_interval",), f"{config.wandb.log_interval} is below 1; set it to 1 or more"
    if precision == "amp_fp16":
        yield ("precision",), "amp_fp16 is not supported: no loss scaling is implemented; set it to amp_bf16"
    elif precision is not None and precision not in _PRECISIONS:
        choices = choose(precision, _PRECISIONS)
        yield ("precision",), f"{show(precision)} is unknown; {choices}; null is the machine's best"
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield ("optimizer.betas",), f"{list(optimizer.betas)} are not in 0 … 1; [0.9, 0.95] is usual"
    if optimizer.name == OptimizerType.lionw and optimizer.learning_rate == 0:
        yield (
            ("optimizer.learning_rate", "optimizer.name"),
            f"{optimizer.learning_rate} is not above 0, as lionw needs it; give a positive number",
        )
    try:
        duration, unit = parse_duration(config.max_duration)
    except UserError as error:
        yield ("max_duration",), str(error)
        return
    if unit == "epochs" and config.task.name:
        yield (
            ("max_duration", "task.name"),
            f"{config.max_duration}: a task has no epochs; give steps (10000) or tokens (2e9T)",
        )
    warmup, ramps = scheduler.t_warmup, scheduler.name != "constant"
    if scheduler.name == "inverse_sqrt_with_warmup" and not warmup:
        yield (
            ("scheduler.t_warmup", "scheduler.name"),
            "0 makes every learning rate of inverse_sqrt_with_warmup 0; set it to 1 or more",
        )
    if unit == scheduler.units and ramps and warmup > duration:
        yield (
            ("scheduler.t_warmup", "scheduler.units", "scheduler.name", "max_duration"),
            f"a warm-up of {warmup:,} {unit} is longer than max_duration, {duration:,.0f}; shorten it, as "
            f"--scheduler.t_warmup={duration // 4:.0f} does, or train longer",
        )


def _check_warm_up(config: Config) -> Iterator[Problem]:
    """Whether it rises, as OLMo asserts at every step of it."""
    scheduler, rate = config.scheduler, config.optimizer.learning_rate
    first = config.tokens_per_step if scheduler.units == SchedulerUnits.tokens else 1
    lowest = 0.1 * rate if scheduler.warmup_min_lr is None else scheduler.warmup_min_lr
    if scheduler.name != SchedulerType.constant and first < scheduler.t_warmup and lowest >= rate >= 0:
        yield (
            ("scheduler.warmup_min_lr", "optimizer.learning_rate", "scheduler.t_warmup", "scheduler.name"),
            f"{show(scheduler.warmup_min_lr)} is not below optimizer.learning_rate {rate}, to which the warm-up rises; "
            "lower it, or set scheduler.t_warmup: 0",
        )


def _check_evaluation(config: Config) -> Iterator[Problem]:
    evaluation, model = config.evaluation, config.model
    length, window = evaluation.position_length, model.max_sequence_length
    lengths = ("evaluation.position_length", "model.max_sequence_length")
    if evaluation.until is not None and evaluation.interval is None:
        yield (
            ("evaluation.until", "evaluation.interval"),
            "needs evaluation.interval: steps between two looks; set it",
        )
    if length == 1:
        yield lengths[:1], "1 leaves nothing to predict; give 2 or more"
    longest = length or config.target_length
    measures = length is not None or evaluation.interval is not None
    if measures and longest > window and model.encoding.has_table:
        yield (
            (*lengths, "positions.target_length", *SWITCHES),
            f"{longest} is past the table of {window} learned position embeddings; set it to {window}",
        )
    if config.task.name is None and evaluation.position_bins >= longest > 1:
        yield (
            ("evaluation.position_bins", *lengths, "positions.target_length"),
            f"{evaluation.position_bins} bins are too many for {longest} positions; give fewer",
        )
