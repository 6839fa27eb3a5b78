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
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from analysis.length_plots import LENGTH_KIND, LENGTH_NAME, LENGTH_VERSION
from analysis.length_summary import INTERVAL, PositionSums, summarize_length
from analysis.models import OWN_FAMILY, LoadedModel
from analysis.rope_scaling import load_scaled, split_checkpoint
from analysis.segments import Segments, sample_segments
from analysis.statistics import DEFAULT_RESAMPLES
from analysis.token_losses import TokenLosses
from olmo_sparsity.checkpoint import CONFIG
from olmo_sparsity.config import load_config
from olmo_sparsity.data.tokens import MANIFEST_NAME, TokenFiles
from olmo_sparsity.errors import UserError
from olmo_sparsity.export import position_reach
from olmo_sparsity.files import atomic_path, sha256_file, write_json
from olmo_sparsity.progress import progress
from olmo_sparsity.provenance import current_commit, library_versions
from olmo_sparsity.rope_scaling import RopeScaling

SUMS_NAME = "length.parquet"
BINS_PER_OCTAVE = 2
OCTAVES_BELOW = 3
"""Below the smallest length the bins go down so many octaves; the positions before them are one bin."""

Json = dict[str, Any]


@dataclass(frozen=True)
class LengthSettings:
    """What is measured on what."""

    checkpoints: tuple[str, ...]
    """Checkpoint folders, runs (then their last ones), or directories of causal language models of transformers; with
    ``@scheme:factor`` behind it RoPE is scaled (`olmo_sparsity.rope_scaling`)."""
    labels: tuple[str, ...]
    """A name for each, in figures and tables; checkpoints that share one are seeds of one model."""
    corpus: str
    """Prepared corpus."""
    out: str
    """Folder of the results."""
    lengths: tuple[int, ...] = (128, 256, 512, 1024)
    """Every one is an edge of bins; the largest is L."""
    windows: int = 256
    """Windows to sample."""
    split: str = "heldout"
    seed: int = 0
    """Seed of the windows and of the bootstrap."""
    bf16: bool = False
    device: str | None = None
    """cpu, cuda, or None for a GPU where there is one."""
    tokens_per_batch: int | None = None
    """Tokens of one forward pass; None chooses. Results do not depend on it but for rounding."""
    resamples: int = DEFAULT_RESAMPLES


def measure_length(settings: LengthSettings) -> Path:
    """Measure the checkpoints one after the other and write `length.json`; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    _check_settings(settings)
    _check_seeds(settings)
    tokens = TokenFiles.of_split(settings.corpus, settings.split)
    segments = sample_segments(
        tokens, settings.windows, length=settings.lengths[-1], seed=settings.seed, option="--lengths"
    )
    # Nobody waits for the first checkpoint to learn that the last one is refused.
    for checkpoint in settings.checkpoints[1:]:
        _load(settings, checkpoint)
    windows, edges = segments.read(tokens), position_edges(settings.lengths)
    described, sums = zip(
        *(_measure_one(settings, number, segments, windows, edges) for number in range(len(settings.labels))),
        strict=True,
    )
    found = PositionSums(edges, np.unique(segments.document), _token_counts(segments, edges), np.stack(sums))
    return _write(settings, segments, described, found)


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


def check_reach(loaded: LoadedModel, length: int) -> None:
    """Raise `UserError` where the model has no position embedding for ids up to L - 1.

    A rotary model is measured past the length that its configuration names: that is what is asked. Only a table of
    learned positions has an end, as one token at the last id shows.
    """
    if loaded.max_positions is None or length <= loaded.max_positions:
        return
    last = torch.tensor([[length - 1]])
    try:
        with torch.inference_mode():
            loaded.model(torch.zeros_like(last), position_ids=last)
    except (IndexError, RuntimeError) as error:
        raise UserError(
            f"{length:,} tokens are beyond the {loaded.max_positions:,} learned positions of {loaded.checkpoint} "
            f"({loaded.family}); lower --lengths to at most {loaded.max_positions:,}"
        ) from error


def _check_settings(settings: LengthSettings) -> None:
    lengths, labels = settings.lengths, settings.labels
    if list(lengths) != sorted(set(lengths)) or lengths[0] < 2:
        raise UserError(f"the lengths must be ascending and at least 2, not {list(lengths)}; mend --lengths")
    if len(labels) != len(settings.checkpoints):
        raise UserError(
            f"{len(settings.checkpoints)} checkpoints need as many labels, not {', '.join(labels)}; mend --labels"
        )


def _check_seeds(settings: LengthSettings) -> None:
    """Raise `UserError` where a checkpoint is none, or one of two that count as two seeds is the other."""
    seen = set()
    for label, checkpoint in zip(settings.labels, settings.checkpoints, strict=True):
        meant = label, *split_checkpoint(checkpoint)
        if meant in seen:
            raise UserError(f"{checkpoint} is given twice as {label}; give each seed once")
        seen.add(meant)


def _load(settings: LengthSettings, checkpoint: str) -> tuple[LoadedModel, RopeScaling | None]:
    loaded, scaling = load_scaled(checkpoint)
    loaded.check_corpus(settings.corpus)
    check_reach(loaded, settings.lengths[-1])
    return loaded, scaling


def _describe(loaded: LoadedModel, scaling: RopeScaling | None) -> Json:
    """What identifies a checkpoint, and what lengths it was trained on, where it is one of this project."""
    described: Json = {
        "checkpoint": str(loaded.checkpoint),
        "checkpoint_sha256": loaded.weights_sha256,
        "family": loaded.family,
        "rope_scaling": None if scaling is None else asdict(scaling),
        "training_seed": loaded.training_seed,
        "training_length": None,
        "position_scheme": None,
        "position_target": None,
    }
    if loaded.family == OWN_FAMILY:
        config = load_config(loaded.checkpoint / CONFIG, warn=False)
        window, reach = config.model.max_sequence_length, position_reach(config)
        described["training_length"] = window
        described["position_scheme"] = config.positions.scheme
        described["position_target"] = reach if reach > window else None
    return described


def _measure_one(
    settings: LengthSettings, number: int, segments: Segments, windows: np.ndarray, edges: list[int]
) -> tuple[Json, np.ndarray]:
    """What one checkpoint is, and the sums of its losses per document and bin, (D, B), from ``windows`` (n, L)."""
    label = settings.labels[number]
    loaded, scaling = _load(settings, settings.checkpoints[number])
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
    return {"label": label, **_describe(loaded, scaling), "device": str(losses.device)}, sums


def _token_counts(segments: Segments, edges: list[int]) -> np.ndarray:
    """Number of measured tokens of each document and bin, (D, B)."""
    _, windows = np.unique(segments.document, return_counts=True)
    return windows[:, None] * np.diff(edges)


def _write(
    settings: LengthSettings, segments: Segments, described: Sequence[Json], sums: PositionSums
) -> Path:
    models = summarize_length(
        sums, settings.labels, settings.lengths, resamples=settings.resamples, seed=settings.seed
    )
    for each in models:
        each["checkpoints"] = [one for one in described if one["label"] == each["label"]]
    kept = asdict(settings)
    for name in (
        "checkpoints",
        "labels",
        "out",
        "device",
        "tokens_per_batch",
    ):  # told elsewhere, or without effect
        del kept[name]
    found = {
        "kind": LENGTH_KIND,
        "version": LENGTH_VERSION,
        "settings": {
            **kept,
            "lengths": list(settings.lengths),
            "corpus_manifest_sha256": sha256_file(Path(settings.corpus) / MANIFEST_NAME),
            "windows_measured": len(segments),
            "documents": len(sums.document),
            "documents_too_short": segments.documents_too_short,
            "interval": INTERVAL,
        },
        "models": models,
        "provenance": {"commit": current_commit(), "versions": library_versions()},
    }
    folder = Path(settings.out)
    with atomic_path(folder / SUMS_NAME) as temporary:
        pq.write_table(sums.to_table(settings.labels), temporary, compression="zstd")
    write_json(folder / LENGTH_NAME, found)
    return folder / LENGTH_NAME
