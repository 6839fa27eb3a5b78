"""Loss by position: does a model predict as well at contexts longer than those it was trained on (METHOD 2.5 d)?

The *position* of a token is how many tokens of its own document the model reads before it, all of them: the first token
of a window has position 0 and is not measured, for nothing predicts it. Windows have L tokens at position ids 0 … L-1
and lie inside one document; end-of-text is not predicted. All checkpoints read the same windows, hence their
differences are paired. [ours: the bins, and drawing windows evenly from documents]

    length.json     settings, and per model the mean of each bin and its difference to the first model
    length.parquet  a row per (checkpoint, document, bin): sum of losses and number of tokens

Shapes: n windows, L tokens of each, D documents, B bins of positions. Losses are in nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from analysis.measure.comparison import ComparisonSettings, check_models, describe, load_model_of
from analysis.model.token_losses import TokenLosses
from analysis.records.results import LENGTH
from analysis.stats.bootstrap import BY_DOCUMENT_AND_SEED
from analysis.stats.length import PositionSums, summarize_length
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.data.tokens import MANIFEST_NAME
from olmo_sparsity.data.verify import Verified
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit, library_versions

SUMS_NAME = "length.parquet"
BINS_PER_OCTAVE = 2
OCTAVES_BELOW = 3
"""Below the smallest length the bins go down so many octaves; the positions before them are one bin."""

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class LengthSettings(ComparisonSettings):
    """What is measured on what."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    """Every one is an edge of bins; the largest is L."""
    windows: int = 256
    """Windows to sample."""


def measure_length(settings: LengthSettings) -> Path:
    """Measure the checkpoints one after the other and write `length.json`; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    _check_settings(settings)
    verified = Verified(settings.out)
    tokens = verified.open_split(settings.corpus, settings.split)
    segments = sample_segments(
        tokens, settings.windows, length=settings.lengths[-1], seed=settings.seed, option="--lengths"
    )
    # Nobody waits for the first checkpoint to learn that the last one is refused.
    for checkpoint in settings.checkpoints[1:]:
        load_model_of(checkpoint, settings.corpus, settings.lengths[-1])
    windows, edges = segments.read(tokens), position_edges(settings.lengths)
    described, sums = zip(
        *(_measure_one(settings, number, segments, windows, edges) for number in range(len(settings.labels))),
        strict=True,
    )
    found = PositionSums(edges, np.unique(segments.document), _token_counts(segments, edges), np.stack(sums))
    path = _write(settings, segments, described, found)
    verified.save()
    return path


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


def _check_settings(settings: LengthSettings) -> None:
    lengths = settings.lengths
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
        raise UserError(f"the lengths must be ascending and at least 2, not {list(lengths)}; mend --lengths")
    check_models(settings.checkpoints, settings.labels)


def _measure_one(
    settings: LengthSettings, number: int, segments: Segments, windows: np.ndarray, edges: list[int]
) -> tuple[Json, np.ndarray]:
    """What one checkpoint is, and the sums of its losses per document and bin, (D, B), from ``windows`` (n, L)."""
    label = settings.labels[number]
    loaded, scaling = load_model_of(settings.checkpoints[number], settings.corpus, settings.lengths[-1])
    losses = TokenLosses(
        loaded, device=settings.device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )
    documents, document = np.unique(segments.document, return_inverse=True)
    sums = np.zeros((len(documents), len(edges) - 1))
    scored = segments.length - 1
    with progress(f"loss by position, {label}", len(segments), "windows") as advance:
        for rows in losses.batches(len(segments), scored, scored):
            by_position = losses.last_losses(windows[rows], scored)  # column c is position c + 1
            by_bin = np.add.reduceat(by_position, np.array(edges[:-1]) - 1, axis=1)
            np.add.at(sums, document[rows], by_bin)
            advance(len(rows))
    return {"label": label, **describe(loaded, scaling), "device": str(losses.device)}, sums


def _token_counts(segments: Segments, edges: list[int]) -> np.ndarray:
    """Number of measured tokens of each document and bin, (D, B)."""
    _, windows = np.unique(segments.document, return_counts=True)
    return windows[:, None] * np.diff(edges)


def _write(
    settings: LengthSettings, segments: Segments, described: Sequence[Json], sums: PositionSums
) -> Path:
    models, alone = (
        summarize_length(sums, labels, settings.lengths, resamples=settings.resamples, seed=settings.seed)
        for labels in (settings.labels, [str(number) for number in range(len(described))])
    )
    for one, own in zip(described, alone, strict=True):
        one["at_lengths"] = own["at_lengths"]
    for each in models:
        each["checkpoints"] = [one for one in described if one["label"] == each["label"]]
    found = {
        "settings": {
            **settings.told(),
            "lengths": list(settings.lengths),
            "corpus_manifest_sha256": sha256_file(Path(settings.corpus) / MANIFEST_NAME),
            "windows_measured": len(segments),
            "documents": len(sums.document),
            "documents_too_short": segments.documents_too_short,
            "interval": BY_DOCUMENT_AND_SEED,
        },
        "models": models,
        "provenance": {"commit": current_commit(), "versions": library_versions()},
    }
    folder = Path(settings.out)
    with atomic_path(folder / SUMS_NAME) as temporary:
        pq.write_table(sums.to_table(settings.labels), temporary, compression="zstd")
    LENGTH.save(folder / LENGTH.name, found)
    return folder / LENGTH.name
