"""Needles measured for models side by side: what `needle.json` and `needle.parquet` say (METHOD 2.6).

    needle.json     settings; per model and cell (k, L, depth) loss and exact match, with intervals, and the recall of
                    the needle by influence selectors
    needle.parquet  a row per (checkpoint, sample, cell)

Shapes: n samples, L tokens of context, k value tokens, C checkpoints, D documents. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.measure.comparison import ComparisonSettings, check_models, describe, load_model_of
from analysis.measure.needle_recall import RecallOptions, check_recall, recall_of_needles
from analysis.measure.needles import Cell, Needles, cells_of, draw_needles, measure_needles
from analysis.model.token_losses import TokenLosses
from analysis.records.results import NEEDLE
from analysis.stats.bootstrap import (
    BY_DOCUMENT_AND_SEED,
    ClusterBootstrap,
    Statistic,
    difference,
    draw_seeds,
    mean_over_seeds,
    ratio_of_sums,
)
from olmo_sparsity.data.tokens import MANIFEST_NAME
from olmo_sparsity.data.verify import Verified
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import atomic_path, sha256_file
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import current_commit, library_versions

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
