"""Which values of a config this engine can run, and which go together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from olmo_sparsity.config.check_tasks import check_coupling, check_family, check_task
from olmo_sparsity.config.check_values import check_ranges
from olmo_sparsity.config.fields import REFUSED, field_value
from olmo_sparsity.config.words import choose, show
from olmo_sparsity.positions import COUPLED_SCHEMES, SCHEMES
from olmo_sparsity.util.errors import UserError

if TYPE_CHECKING:
    from olmo_sparsity.config.schema import Config

Problem = tuple[tuple[str, ...], str]
"""The fields that were looked at, the one to name first, and what is wrong with it."""

_PRECISIONS = ("amp_bf16", "fp32")
_UNITS = {"": "steps", "T": "tokens", "ep": "epochs"}
_CONTENTS = ("contiguous", "skip")
_STREAM_SOURCES = ("c4", "text")


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
    defaults = type(config)()
    for name, remedy in REFUSED.items():
        value, default = field_value(config, name), field_value(defaults, name)
        if value != default and (value or default):
            yield (name,), f"{show(value)} is not supported: {remedy}"
    for check in (
        check_ranges,
        check_family,
        check_task,
        check_coupling,
        _check_model,
        _check_position_encoding,
        _check_positions,
        _check_documents,
        _check_data,
        _check_stream,
        _check_optimization,
        _check_evaluation,
    ):
        yield from check(config)


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
    if model.family == "olmo" and not (model.rope or model.alibi or model.nope) and scheme != "contiguous":
        yield (
            ("positions.scheme", "model.rope", "model.alibi", "model.nope"),
            f"{scheme} needs position ids past the table of learned position embeddings; "
            "set model.rope: true, or positions.scheme: contiguous",
        )


def _check_positions(config: Config) -> Iterator[Problem]:
    positions, length = config.positions, config.model.max_sequence_length
    scheme, target = positions.scheme, positions.target_length
    target_fields = ("positions.target_length", "positions.scheme", "model.max_sequence_length")
    schemes = (*SCHEMES, *COUPLED_SCHEMES)
    if scheme not in schemes:
        yield ("positions.scheme",), f"{show(scheme)} is no position scheme; {choose(scheme, schemes)}"
    if positions.content not in _CONTENTS:
        choices = choose(positions.content, _CONTENTS)
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


def _check_evaluation(config: Config) -> Iterator[Problem]:
    evaluation, model = config.evaluation, config.model
    length, window = evaluation.position_length, model.max_sequence_length
    lengths = ("evaluation.position_length", "model.max_sequence_length")
    if length is not None and 0 < length <= 1:
        yield lengths[:1], f"{length} leaves nothing to predict; give 2 or more"
    if length is not None and length > window and not (model.rope or model.alibi or model.nope):
        yield (
            (*lengths, "model.rope", "model.alibi", "model.nope"),
            f"{length} is past the table of {window} learned position embeddings; set it to null",
        )
    longest = length or config.positions.target_length or window
    if evaluation.position_bins >= longest > 1:
        yield (
            ("evaluation.position_bins", *lengths, "positions.target_length"),
            f"{evaluation.position_bins} bins are too many for {longest} positions; give fewer",
        )


def _check_data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.paths and data.datasets:
        yield ("data.datasets", "data.paths"), "excludes data.paths; keep one of them"
    given = next((name for name in ("data.paths", "data.datasets") if field_value(config, name)), None)
    if config.corpus.path is not None and given:
        yield ("corpus.path", given), f"excludes {given}; set it to null to train on those files"
    try:
        _ = data.effective_memmap_dtype
    except TypeError:
        yield ("data.memmap_dtype",), f"{show(data.memmap_dtype)} is no number type; uint16 is usual"


def _check_stream(config: Config) -> Iterator[Problem]:
    stream = config.corpus.stream
    if stream is None:
        return
    for name in ("corpus.path", "data.paths", "data.datasets"):
        if field_value(config, name):
            yield (
                ("corpus.stream", name),
                f"excludes {name}; set that to null to stream, or corpus.stream: null",
            )
    if stream.source not in _STREAM_SOURCES:
        choices = choose(stream.source, _STREAM_SOURCES)
        yield ("corpus.stream.source",), f"{show(stream.source)} is unknown; {choices}"
    elif (stream.source == "text") != bool(stream.files):
        remedy = "name them, or set source: c4" if not stream.files else "remove them, or set source: text"
        yield (
            ("corpus.stream.files", "corpus.stream.source"),
            f"{len(stream.files)} files with source: {stream.source}; {remedy}",
        )
    if stream.readers < 1:
        yield ("corpus.stream.readers",), f"{stream.readers} is not above 0; give a positive number"
    if config.tokenizer.identifier is None:
        yield (
            ("tokenizer.identifier", "corpus.stream"),
            "is missing, and corpus.stream needs a tokenizer; OLMo's is "
            "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json",
        )
    if str(config.max_duration).strip().endswith("ep"):
        yield (
            ("max_duration", "corpus.stream"),
            f"{config.max_duration}: a stream has no epochs of known length; give steps (10000) or tokens (2e9T)",
        )


def _check_optimization(config: Config) -> Iterator[Problem]:
    optimizer, scheduler, precision = config.optimizer, config.scheduler, config.precision
    rate, warmup = optimizer.learning_rate, scheduler.t_warmup
    if precision == "amp_fp16":
        yield ("precision",), "amp_fp16 is not supported: no loss scaling is implemented; set it to amp_bf16"
    elif precision is not None and precision not in _PRECISIONS:
        choices = choose(precision, _PRECISIONS)
        yield ("precision",), f"{show(precision)} is unknown; {choices}; null is the machine's best"
    if rate < 0:
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
