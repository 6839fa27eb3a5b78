"""Loss by position: does a model predict as well at contexts longer than those it was trained on?

The *position* of a token is the number of tokens that the model reads before it, all of its own document: the first
token of a window has position 0 and is not measured, for nothing predicts it. Windows have L tokens at position ids
0 … L-1 and lie inside one document; end-of-text is not predicted. All checkpoints read the same windows, hence their
differences are paired. [ours: the bins, and drawing windows evenly from documents]

    length.json     settings, and per model the mean of each bin and its difference to the first model; with --attention
                    the entropy of the attention at the end of each length, and the share of its weights that are
                    exactly 0 in float32, means over heads and layers
    length.parquet  a row per (checkpoint, document, bin): sum of losses and number of tokens

Shapes: n windows, L tokens of each, D documents, B bins of positions. Losses are in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from analysis.measure.measurement import (
    Json,
    MeasuredText,
    check_models,
    measure_models,
    open_text,
    write_result,
)
from analysis.measure.settings import LengthSettings
from analysis.model.rope_scaling import split_checkpoint
from analysis.model.token_losses import TokenLosses
from analysis.records.results import LENGTH
from analysis.stats.bootstrap import count_clusters, interval_words
from analysis.stats.length import PositionSums, summarize_attention, summarize_length
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.corpus.tokens import TOKENIZER_NAME
from olmo_sparsity.data.tokenizers import load_tokenizer
from olmo_sparsity.model.rope_scaling import MESA
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress

BINS_PER_OCTAVE = 2
OCTAVES_BELOW = 3
"""Below the smallest length the bins go down so many octaves; the positions before them are one bin."""
ATTENTION_QUERIES = 16
"""Last tokens of each length whose attention is measured."""
ATTENTION_MEMORY = 4
"""Memory of a forward pass that returns its attention, in multiples of one that does not."""


def measure_length(settings: LengthSettings) -> Path:
    """Measure the checkpoints one after the other and write `length.json`; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    lengths = settings.lengths
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
        raise UserError(f"the lengths must be ascending and at least 2, not {list(lengths)}; mend --lengths")
    check_models(settings)
    for checkpoint in settings.checkpoints if settings.attention else ():
        if (split_checkpoint(checkpoint)[1] or ("",))[0] == MESA:
            raise UserError(
                f"{checkpoint} is read in chunks, and its attention is no single row; leave --attention out"
            )
    text = open_text(settings, settings.checkpoints[0])
    segments = sample_segments(
        text.tokens, settings.windows, length=lengths[-1], seed=settings.seed, option="--lengths"
    )
    windows, edges = segments.read(text.tokens), position_edges(lengths)

    def measure(losses: TokenLosses, label: str) -> Json:
        found = {"sums": _sum_losses(losses, segments, windows, edges, label)}
        if settings.attention:
            found["attention"] = _attention(losses, segments, windows, lengths, label)
        return {name: values.tolist() for name, values in found.items()}

    described = measure_models(settings, text, lambda loaded: loaded.check_reach(lengths[-1]), measure)
    loss_nats = np.array([one.pop("sums") for one in described])
    documents, windows_of = np.unique(segments.document, return_counts=True)
    groups = text.tokens.groups_of(documents)
    sums = PositionSums(edges, documents, windows_of[:, None] * np.diff(edges), loss_nats, groups)
    models = _models(settings, described, sums)
    if settings.attention:
        values = np.array([one.pop("attention") for one in described])
        for told, labels in ((models, settings.labels), (described, _numbered(described))):
            of_all = summarize_attention(
                values, segments.document, labels, segments.group,
                resamples=settings.resamples, seed=settings.seed,
            )  # fmt: skip
            for each, found in zip(told, of_all, strict=True):
                for one, statistics in zip(each["at_lengths"], found, strict=True):
                    one["attention"] = statistics
    return write_result(
        LENGTH,
        settings,
        text,
        found={"models": models},
        measured={
            "windows_measured": len(segments),
            **count_clusters(documents, groups),
            "documents_too_short": segments.documents_too_short,
            "bytes_per_token": _bytes_per_token(text, documents),
            "interval": f"{interval_words(groups)}, and by seed where a model has several",
        },
        rows=sums.to_table(settings.labels),
    )


def _bytes_per_token(text: MeasuredText, documents: np.ndarray) -> float:
    """UTF-8 bytes per token of the documents that are measured, as the corpus's tokenizer writes them."""
    tokenizer = load_tokenizer(Path(text.corpus) / TOKENIZER_NAME)
    ids = [text.tokens.document(number).tolist() for number in documents.tolist()]
    texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
    return sum(len(each.encode()) for each in texts) / sum(map(len, ids))


def position_edges(lengths: Sequence[int]) -> list[int]:
    """Edges of the bins of positions, ascending, from 1 to the largest length [ours].

    Every length is an edge, so that no bin lies on both sides of it. From an eighth of the smallest length on, a bin
    spans half an octave or less; the positions before are one bin.
    """
    edges = {1, *lengths}
    for low, high in pairwise([max(1, lengths[0] >> OCTAVES_BELOW), *lengths]):
        steps = math.ceil(BINS_PER_OCTAVE * math.log2(high / low) - 1e-9)
        edges |= set(np.geomspace(low, high, steps + 1).round().astype(int).tolist())
    return sorted(edges)


def _sum_losses(
    losses: TokenLosses, segments: Segments, windows: np.ndarray, edges: list[int], label: str
) -> np.ndarray:
    """Sums of the losses per document and bin, (D, B), from ``windows`` (n, L)."""
    documents, document = np.unique(segments.document, return_inverse=True)
    sums = np.zeros((len(documents), len(edges) - 1))
    scored = segments.length - 1
    with progress(f"loss by position, {label}", len(segments), "windows") as advance:
        for rows in losses.batches(len(segments), scored, scored):
            by_position = losses.last_losses(windows[rows], scored)  # column c is position c + 1
            by_bin = np.add.reduceat(by_position, np.array(edges[:-1]) - 1, axis=1)
            np.add.at(sums, document[rows], by_bin)
            advance(len(rows))
    return sums


def _attention(
    losses: TokenLosses, segments: Segments, windows: np.ndarray, lengths: Sequence[int], label: str
) -> np.ndarray:
    """Entropy and share of zeros of the attention at the end of the first L tokens of each window, (n, lengths, 2)."""
    found = np.empty((len(segments), len(lengths), 2))
    with progress(f"attention, {label}", len(lengths), "lengths") as advance:
        for number, length in enumerate(lengths):
            queries = min(ATTENTION_QUERIES, length)
            for rows in losses.batches(len(segments), ATTENTION_MEMORY * length, queries):
                found[rows, number] = losses.attention_statistics(windows[rows, :length], queries)
            advance(1)
    return found


def _models(settings: LengthSettings, described: Sequence[Json], sums: PositionSums) -> list[Json]:
    """The numbers of every model, and those of each of its checkpoints."""
    models, alone = (
        summarize_length(sums, labels, settings.lengths, resamples=settings.resamples, seed=settings.seed)
        for labels in (settings.labels, _numbered(described))
    )
    for one, own in zip(described, alone, strict=True):
        one["at_lengths"] = own["at_lengths"]
    for each in models:
        each["checkpoints"] = [one for one in described if one["label"] == each["label"]]
    return models


def _numbered(described: Sequence[Json]) -> list[str]:
    """Labels by which every checkpoint is a model of its own."""
    return [str(number) for number in range(len(described))]
