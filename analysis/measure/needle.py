"""Needles measured for models side by side: what `needle.json` and `needle.parquet` say (METHOD 2.6).

    needle.json     settings; per model and cell (k, L, depth) loss and exact match, with intervals, and the recall of
                    the needle by influence selectors
    needle.parquet  a row per (checkpoint, sample, cell)

Shapes: n samples, L tokens of context, k value tokens, C checkpoints, D documents. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.measure.comparison import ComparisonSettings, check_models, describe, load_model_of
from analysis.measure.planted import KS, chance_recall, found_at
from analysis.measure.selectors import Question, check_selector, find_selector
from analysis.model.load import LoadedModel
from analysis.model.scorer import Scorer
from analysis.model.token_losses import TokenLosses
from analysis.records.results import NEEDLE
from analysis.stats.bootstrap import (
    BY_DOCUMENT_AND_SEED,
    DEFAULT_RESAMPLES,
    ClusterBootstrap,
    Statistic,
    difference,
    draw_seeds,
    mean_over_seeds,
    ratio_of_sums,
)
from analysis.text.contexts import Contexts
from analysis.text.segments import Segments, sample_segments
from olmo_sparsity.data.tokens import MANIFEST_NAME, TokenFiles, Verified
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit, library_versions
from olmo_sparsity.util.streams import Stream

ROWS_NAME = "needle.parquet"

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class NeedleSettings(ComparisonSettings):
    """What is measured on what."""

    lengths: tuple[int, ...] = (64, 128, 256, 512)
    """L."""
    ks: tuple[int, ...] = (1, 2, 4, 8)
    """k."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 100
    """n."""
    key_tokens: int = 2
    """q."""
    recall: RecallOptions | None = None
    """None: selectors are not asked for the needle."""


def measure_needle(settings: NeedleSettings) -> Path:
    """Measure the checkpoints one after the other and write `needle.json`; returns its path.

    Raises `UserError` for bad input, before anything is measured.
    """
    _check_settings(settings)
    verified = Verified(settings.out)
    tokens = verified.open_split(settings.corpus, settings.split)
    needles = draw_needles(
        tokens,
        settings.samples,
        lengths=settings.lengths,
        ks=settings.ks,
        key_tokens=settings.key_tokens,
        seed=settings.seed,
    )
    # Nobody waits for the first checkpoint to learn that the last one is refused.
    for checkpoint in settings.checkpoints[1:]:
        load_model_of(checkpoint, settings.corpus, settings.lengths[-1] + max(settings.ks))
    cells = cells_of(settings.ks, settings.lengths, settings.depths)
    described, losses, exact, recalls = zip(
        *(_measure_one(settings, number, needles, cells) for number in range(len(settings.labels))),
        strict=True,
    )
    found = _Measured(settings, needles, cells, np.stack(losses), np.stack(exact))
    models = found.summarize()
    for each in models:
        own = [number for number, label in enumerate(settings.labels) if label == each["label"]]
        each["checkpoints"] = [{**described[number], "recall": recalls[number]} for number in own]
    path = _write(found, models)
    verified.save()
    return path


def _check_settings(settings: NeedleSettings) -> None:
    check_models(settings.checkpoints, settings.labels)
    if not all(0 <= depth <= 1 for depth in settings.depths):
        raise UserError(f"--depths are from 0 (first) to 1 (last), not {list(settings.depths)}")
    if settings.recall is not None:
        check_recall(settings.recall, settings.key_tokens)


def _measure_one(
    settings: NeedleSettings, number: int, needles: Needles, cells: Sequence[Cell]
) -> tuple[Json, np.ndarray, np.ndarray, Json | None]:
    """What a checkpoint is, its loss and exact match of every cell and sample, (cells, n), and selectors' recall."""
    label = settings.labels[number]
    length = settings.lengths[-1] + max(settings.ks)
    loaded, scaling = load_model_of(settings.checkpoints[number], settings.corpus, length)
    scorer = TokenLosses(
        loaded, device=settings.device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )
    losses, exact = [], []
    with progress(f"needles, {label}", len(cells), "cells") as advance:
        for _, of_value, right in measure_needles(scorer, needles, cells):
            losses.append(of_value)
            exact.append(right)
            advance(1)
    recall = None
    if settings.recall is not None:
        recall = recall_of_needles(
            loaded, needles, settings.recall, device=str(scorer.device), label=label, seed=settings.seed
        )
    return (
        {**describe(loaded, scaling), "device": str(scorer.device)},
        np.stack(losses),
        np.stack(exact),
        recall,
    )


@dataclass(frozen=True)
class _Measured:
    settings: NeedleSettings
    needles: Needles
    cells: Sequence[Cell]
    loss_nats: np.ndarray
    """(C, cells, n)."""
    exact: np.ndarray
    """(C, cells, n) bool."""

    def summarize(self) -> list[Json]:
        """Of each model the means of every cell that has a needle, beside those without it, over samples and seeds."""
        settings, count = self.settings, len(self.cells)
        labels = list(dict.fromkeys(settings.labels))
        samples = np.ones((len(self.needles), 1))
        flat = [
            each.transpose(2, 0, 1).reshape(len(self.needles), -1) for each in (self.loss_nats, self.exact)
        ]
        columns = np.concatenate([samples, *flat], axis=1)
        bootstrap = ClusterBootstrap(
            columns, self.needles.segments.document, resamples=settings.resamples, seed=settings.seed
        )

        def mean(number: int, cell: int, of_exact: bool) -> Statistic:
            seeds = [c for c, label in enumerate(settings.labels) if label == labels[number]]
            drawn = draw_seeds(len(seeds), settings.resamples, settings.seed, number)
            first = 1 + of_exact * len(settings.labels) * count
            return mean_over_seeds([ratio_of_sums(first + c * count + cell, 0) for c in seeds], drawn)

        place = {cell: number for number, cell in enumerate(self.cells)}
        return [
            {"label": label, "cells": [
                self._of_cell(cell, bootstrap, *(
                    mean(number, place[which], of_exact)
                    for of_exact in (False, True)
                    for which in (cell, Cell(cell.value_tokens, cell.length, None))
                ))
                for cell in self.cells if cell.depth is not None
            ]}
            for number, label in enumerate(labels)
        ]  # fmt: skip

    def _of_cell(
        self,
        cell: Cell,
        bootstrap: ClusterBootstrap,
        loss: Statistic,
        absent_loss: Statistic,
        exact: Statistic,
        absent_exact: Statistic,
    ) -> Json:
        q, k = self.settings.key_tokens, cell.value_tokens
        return {
            "value_tokens": k,
            "length": cell.length,
            "depth": cell.depth,
            "distance": cell.length - self.needles.start(cell) - q,
            "loss_nats": bootstrap.interval(loss).as_dict(),
            "absent_loss_nats": bootstrap.interval(absent_loss).as_dict(),
            "gain_nats": bootstrap.interval(difference(absent_loss, loss)).as_dict(),
            "exact": bootstrap.interval(exact).as_dict(),
            "absent_exact": bootstrap.interval(absent_exact).as_dict(),
        }

    def to_table(self) -> pa.Table:
        """The rows of `needle.parquet`; ``checkpoint`` counts from 0, ``depth`` is null where the needle is absent."""
        checkpoint, cell, sample = (index.ravel() for index in np.indices(self.loss_nats.shape))
        of_cells = {
            name: [getattr(each, name) for each in self.cells] for name in ("value_tokens", "length", "depth")
        }
        return pa.table(
            {
                "label": pa.array(np.array(self.settings.labels, dtype=object)[checkpoint], pa.string()),
                "checkpoint": checkpoint,
                "document": self.needles.segments.document[sample],
                "sample": sample,
                "value_tokens": np.array(of_cells["value_tokens"])[cell],
                "length": np.array(of_cells["length"])[cell],
                "depth": pa.array(np.array(of_cells["depth"], dtype=object)[cell], pa.float64()),
                "loss_nats": self.loss_nats.ravel(),
                "exact": self.exact.ravel(),
            }
        )


def _write(measured: _Measured, models: list[Json]) -> Path:
    settings = measured.settings
    found = {
        "settings": {
            **settings.told(),
            "corpus_manifest_sha256": sha256_file(Path(settings.corpus) / MANIFEST_NAME),
            "samples_measured": len(measured.needles),
            "documents": len(np.unique(measured.needles.segments.document)),
            "tokens_to_draw_from": measured.needles.vocabulary,
            "interval": BY_DOCUMENT_AND_SEED,
        },
        "models": models,
        "provenance": {"commit": current_commit(), "versions": library_versions()},
    }
    folder = Path(settings.out)
    with atomic_path(folder / ROWS_NAME) as temporary:
        pq.write_table(measured.to_table(), temporary, compression="zstd")
    NEEDLE.save(folder / NEEDLE.name, found)
    return folder / NEEDLE.name


@dataclass(frozen=True)
class Cell:
    """What kind of context is measured."""

    value_tokens: int
    """k."""
    length: int
    """L."""
    depth: float | None
    """0 … 1; None: the needle is absent."""


@dataclass(frozen=True)
class Needles:
    """n stretches of text with a needle for each."""

    segments: Segments
    """Where the stretches stand; as long as the largest context."""
    text: np.ndarray
    """(n, largest L) token ids."""
    key: np.ndarray
    """(n, q) token ids."""
    value: np.ndarray
    """(n, largest k) token ids; a needle of fewer tokens has the first of them."""
    vocabulary: int
    """Different tokens of the split, of which those are drawn that a stretch does not have."""

    def __len__(self) -> int:
        return len(self.text)

    def start(self, cell: Cell) -> int:
        """p: column of the needle's first token."""
        assert cell.depth is not None
        room = cell.length - 2 * self.key.shape[1] - cell.value_tokens
        return round(cell.depth * room)

    def contexts(self, cell: Cell) -> np.ndarray:
        """Context and value of every sample, (n, L + k)."""
        q, value = self.key.shape[1], self.value[:, : cell.value_tokens]
        if cell.depth is None:
            return np.concatenate([self.text[:, : cell.length - q], self.key, value], axis=1)
        place = self.start(cell)
        text = self.text[:, : cell.length - 2 * q - cell.value_tokens]
        return np.concatenate([text[:, :place], self.key, value, text[:, place:], self.key, value], axis=1)


def draw_needles(
    tokens: TokenFiles, count: int, *, lengths: Sequence[int], ks: Sequence[int], key_tokens: int, seed: int
) -> Needles:
    """Up to ``count`` stretches and needles, a pure function of the arguments and the split.

    Raises `UserError` where a context does not hold its needle, no document is long enough, or the split has too few
    different tokens.
    """
    needed = 2 * key_tokens + max(ks) + 1
    if min(key_tokens, *ks) < 1:
        raise UserError("--key-tokens and --ks take 1 or more")
    if lengths[0] < needed:
        raise UserError(
            f"a context of {lengths[0]} tokens does not hold a needle of {max(ks)} with its key of {key_tokens} twice "
            f"and text; raise --lengths to at least {needed}"
        )
    segments = sample_segments(tokens, count, length=lengths[-1], seed=seed, option="--lengths")
    text = segments.read(tokens).astype(np.int64)
    vocabulary = _tokens_that_occur(tokens)
    needles = []
    for number, row in enumerate(text):
        others = np.setdiff1d(vocabulary, row)
        if len(others) < key_tokens + max(ks):
            raise UserError(
                f"only {len(others)} tokens of the split do not occur in a stretch of {lengths[-1]:,} tokens; lower "
                "--ks or --lengths"
            )
        generator = np.random.default_rng([Stream.NEEDLES, seed, number])
        needles.append(generator.choice(others, key_tokens + max(ks), replace=False))
    drawn = np.array(needles)
    return Needles(segments, text, drawn[:, :key_tokens], drawn[:, key_tokens:], len(vocabulary))


def _tokens_that_occur(tokens: TokenFiles) -> np.ndarray:
    """Ids of the split, ascending, without end-of-text."""
    found = np.unique(np.concatenate([np.unique(np.asarray(array)) for array in tokens.arrays]))
    return found[found != tokens.eos_token_id].astype(np.int64)


def cells_of(ks: Sequence[int], lengths: Sequence[int], depths: Sequence[float]) -> list[Cell]:
    """Every kind of context, the control last for each k and length."""
    return [Cell(k, length, depth) for k in ks for length in lengths for depth in (*depths, None)]


def measure_needles(
    losses: TokenLosses, needles: Needles, cells: Sequence[Cell]
) -> Iterator[tuple[Cell, np.ndarray, np.ndarray]]:
    """Of each cell the mean loss of the k value tokens [nats per token], and whether all are likeliest, both (n,)."""
    for cell in cells:
        rows = needles.contexts(cell)
        k = cell.value_tokens
        loss, exact = np.empty(len(rows)), np.empty(len(rows), dtype=bool)
        for some in losses.batches(len(rows), rows.shape[1] - 1, k):
            of_tokens, likeliest = losses.last_losses_and_likeliest(rows[some], k)
            loss[some] = of_tokens.mean(axis=1)
            exact[some] = (likeliest == rows[some, -k:]).all(axis=1)
        yield cell, loss, exact


@dataclass(frozen=True)
class RecallOptions:
    """Which selectors are asked, of how many needles."""

    selectors: tuple[str, ...]
    length: int
    """N."""
    depth: float
    samples: int


def check_recall(options: RecallOptions, key_tokens: int) -> None:
    """Raise `UserError` for a selector that there is not, or a placebo that nobody could give."""
    if options.samples < 2:
        raise UserError("--recall-samples must be 2 or more: the placebo is another sample")
    if options.length < 2 * key_tokens + 2:
        raise UserError(
            f"--recall-length {options.length} does not hold a needle of 1 with its key of {key_tokens} twice and "
            f"text; raise it to at least {2 * key_tokens + 2}"
        )
    for name in options.selectors:
        check_selector(name, k_max=max(KS), n_far=options.length - key_tokens)


def needle_contexts(needles: Needles, options: RecallOptions) -> tuple[Contexts, Contexts, np.ndarray]:
    """True and placebo contexts of the first n samples, and the needle's far columns, (q + 1,)."""
    q, cell = needles.key.shape[1], Cell(1, options.length, options.depth)
    rows = needles.contexts(cell)[: options.samples]
    contexts = Contexts(rows[:, :-1], rows[:, -1], np.arange(len(rows)), q)
    donors = np.roll(np.arange(len(rows)), 1)
    columns = needles.start(cell) + np.arange(q + 1)
    return contexts, contexts.with_far(contexts.tokens[donors, : contexts.n_far]), columns


def recall_of_needles(
    loaded: LoadedModel, needles: Needles, options: RecallOptions, *, device: str, label: str, seed: int
) -> Json:
    """Recall of the needle's q + 1 tokens by selector and k, true and placebo, with intervals over documents."""
    contexts, placebos, columns = needle_contexts(needles, options)
    loaded.check_context(options.length)
    scorer = Scorer(loaded.model.to(device), device=device)
    planted = np.tile(columns, (len(contexts), 1))
    ks = [k for k in KS if k <= contexts.n_far]
    document = needles.segments.document[: len(contexts)]
    found: Json = {}
    with progress(f"recall, {label}", 2 * len(options.selectors), "selectors") as advance:
        for name in options.selectors:
            shares = []
            for some in (contexts, placebos):
                selected = find_selector(name)(Question(scorer, some, seed, max(ks))).columns
                shares.append(found_at(selected, planted, ks).mean(axis=2))
                advance(1)
            found[name] = _intervals(shares, ks, document, seed)
    chance = {str(k): chance_recall(k, contexts.n_far) for k in ks}
    return {
        "ks": ks,
        "needle_columns": len(columns),
        "samples": len(contexts),
        "chance": chance,
        "selectors": found,
    }


def _intervals(shares: list[np.ndarray], ks: list[int], document: np.ndarray, seed: int) -> Json:
    """Mean true and placebo recall (n, K) of every k."""
    columns = np.concatenate([np.ones((len(document), 1)), *shares], axis=1)
    bootstrap = ClusterBootstrap(columns, document, resamples=DEFAULT_RESAMPLES, seed=seed)
    return {
        str(k): {
            name: bootstrap.interval(ratio_of_sums(1 + which * len(ks) + place, 0)).as_dict()
            for which, name in enumerate(("recall", "placebo_recall"))
        }
        for place, k in enumerate(ks)
    }
