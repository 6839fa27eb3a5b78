"""The whole measurement: sample targets, find their gaps, let every selector choose, write records."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from analysis.contexts import Contexts, SampledTargets, long_contexts, placebo_contexts, sample_targets
from analysis.manifest import Manifest
from analysis.models import LoadedModel, find_model, load_for_analysis
from analysis.records import RecordWriter, SelectionRow, Targets
from analysis.recovery import selected_losses
from analysis.scorer import Scorer, long_and_short_losses
from analysis.selectors import Question, find_selector, most_influential
from analysis.shard import MeasurementShard
from olmo_sparsity.data.tokens import MANIFEST_NAME, TokenFiles
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import sha256_file
from olmo_sparsity.progress import progress
from olmo_sparsity.provenance import current_commit

log = logging.getLogger(__name__)

TARGETS_PER_BLOCK = 64
"""Targets whose gaps are one batch. Shards take whole blocks, so that every forward pass of a shard is one of the
unsharded measurement: a batch of another size could differ in the last bits of a loss."""
TARGETS_PER_ROUND = 4
SECONDS_BETWEEN_PARTS = 20.0


@dataclass(frozen=True)
class InfluenceSettings:
    """What is measured on what."""

    checkpoint: str
    """Checkpoint folder, a run (then its last), or a directory of a causal language model of transformers."""
    corpus: str
    """Prepared corpus."""
    out: str
    """Folder of the records."""
    split: str = "heldout"
    n_long: int = 128
    """N."""
    n_short: int = 16
    """M."""
    tau_nats: float = 1.0
    """Selectors run on targets with L_short - L_long > tau."""
    ks: tuple[int, ...] = (1, 2, 4, 8)
    selectors: tuple[str, ...] = ("leave-one-out", "leave-one-in", "random", "nearest")
    targets: int = 1000
    """Targets to sample."""
    seed: int = 0
    bf16: bool = False
    """Score in bf16: about twice as fast where the machine has it, but influences below 0.01 nats are noise."""
    device: str | None = None
    """cpu, cuda, or None for a GPU where there is one."""
    tokens_per_batch: int | None = None
    """Tokens of one forward pass; None chooses. Results do not depend on it but for rounding."""
    overwrite: bool = False
    shard: MeasurementShard | None = None
    """The part of the targets to measure, into a folder of its own beneath ``out``; None for all of them."""

    @property
    def folder(self) -> Path:
        """Where this measurement's records go."""
        return self.shard.folder(self.out) if self.shard else Path(self.out)


def measure_influence(settings: InfluenceSettings) -> Path:
    """Measure, writing records as they are finished; returns their folder.

    Run again with the same settings, it goes on where an interrupted run stopped. Raises `UserError` for bad input.
    """
    for name in settings.selectors:
        find_selector(name)
    folder = find_model(settings.checkpoint)
    tokens = TokenFiles.of_split(settings.corpus, settings.split)
    sampled = sample_targets(
        tokens, settings.targets, n_long=settings.n_long, n_short=settings.n_short, seed=settings.seed
    )
    loaded = load_for_analysis(folder)  # the slowest check comes last
    loaded.check_corpus(settings.corpus)
    loaded.check_context(settings.n_long)
    manifest, scorer = _manifest(settings, loaded), _build_scorer(settings, loaded)
    if settings.shard:
        settings.shard.check(len(sampled.document), TARGETS_PER_BLOCK)
        manifest = replace(manifest, options={**manifest.options, **settings.shard.options})
    # all input is checked by now
    writer = RecordWriter(settings.folder, manifest, overwrite=settings.overwrite)
    if writer.manifest.complete:
        log.info("%s is complete already", settings.folder)
    else:
        _Measurement(settings, tokens, scorer, writer).run(sampled)
    return settings.folder


def _build_scorer(settings: InfluenceSettings, loaded: LoadedModel) -> Scorer:
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Scorer(
        loaded.model.to(device), device=device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )


def _manifest(settings: InfluenceSettings, loaded: LoadedModel) -> Manifest:
    return Manifest(
        checkpoint=str(loaded.checkpoint),
        checkpoint_sha256=loaded.weights_sha256,
        training_seed=loaded.training_seed,
        tokenizer_sha256=sha256_file(loaded.tokenizer_file),
        corpus=settings.corpus,
        corpus_manifest_sha256=sha256_file(Path(settings.corpus) / MANIFEST_NAME),
        split=settings.split,
        n_long=settings.n_long,
        n_short=settings.n_short,
        tau_nats=settings.tau_nats,
        ks=list(settings.ks),
        selectors=list(settings.selectors),
        seed=settings.seed,
        targets_asked=settings.targets,
        dtype="bf16" if settings.bf16 else "fp32",
        device=settings.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        commit=current_commit(),
    )


class _Measurement:
    """One run over the targets of a records folder."""

    def __init__(self, settings: InfluenceSettings, tokens: TokenFiles, scorer: Scorer, writer: RecordWriter):
        self.settings, self.tokens, self.scorer, self.writer = settings, tokens, scorer, writer

    def run(self, sampled: SampledTargets) -> None:
        """Targets first, then the selections of those over tau that are not finished yet."""
        targets = self.writer.targets or self._measure_gaps(sampled)
        over = targets.over(self.settings.tau_nats)
        if len(over) == 0 and not self.settings.shard:  # another shard may hold some
            self.writer.discard()
            largest = -targets.gap_long_minus_short_nats.min()
            raise UserError(
                f"none of {len(targets):,} targets gains more than tau = {self.settings.tau_nats} nats from the long "
                f"context (the most is {largest:.2f}); lower --tau, raise --targets, or train the model for longer"
            )
        self._select(targets, over)
        self.writer.finish()

    def _measure_gaps(self, sampled: SampledTargets) -> Targets:
        mine = list(self._blocks(len(sampled.document)))
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        target_id = np.concatenate(mine)
        with progress("long and short losses", len(target_id), "targets") as advance:
            for rows in mine:
                contexts = self._contexts(sampled, rows, rows)
                parts.append((contexts.targets, *long_and_short_losses(self.scorer, contexts)))
                advance(len(rows))
        token, long, short = (np.concatenate(column) for column in zip(*parts, strict=True))
        targets = Targets(
            target_id=target_id,
            document=sampled.document[target_id],
            position=sampled.position[target_id],
            token=token,
            loss_long_nats=long,
            loss_short_nats=short,
            placebo_document=sampled.placebo_document[target_id],
            placebo_start=sampled.placebo_start[target_id],
        )
        self.writer.write_targets(targets)
        return targets

    def _blocks(self, count: int) -> Iterator[np.ndarray]:
        """Target ids of each block that is measured here: every block, or this shard's."""
        for number, start in enumerate(range(0, count, TARGETS_PER_BLOCK)):
            if self.settings.shard is None or self.settings.shard.has(number):
                yield np.arange(start, min(start + TARGETS_PER_BLOCK, count))

    def _rounds(self, targets: Targets, over: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of the unfinished targets over tau, a few of one block at a time."""
        finished = self.writer.finished_targets()
        block = targets.target_id[over] // TARGETS_PER_BLOCK
        for number in np.unique(block):
            rows = over[block == number]
            for start in range(0, len(rows), TARGETS_PER_ROUND):
                together = rows[start : start + TARGETS_PER_ROUND]
                if not finished.issuperset(targets.target_id[together].tolist()):
                    yield together

    def _contexts(self, at: SampledTargets | Targets, rows: np.ndarray, target_id: np.ndarray) -> Contexts:
        return long_contexts(
            self.tokens,
            at.document[rows],
            at.position[rows],
            target_id,
            n_long=self.settings.n_long,
            n_short=self.settings.n_short,
        )

    def _select(self, targets: Targets, over: np.ndarray) -> None:
        """Run every selector on the true and the placebo far context, a few targets at a time."""
        rounds = list(self._rounds(targets, over))
        done = len(over) - sum(map(len, rounds))
        pending: list[SelectionRow] = []
        written = time.monotonic()
        with progress("selecting tokens", len(over), "targets", done=done) as advance:
            try:
                for rows in rounds:
                    contexts = self._contexts(targets, rows, targets.target_id[rows])
                    placebo = placebo_contexts(
                        self.tokens, contexts, targets.placebo_document[rows], targets.placebo_start[rows]
                    )
                    pending += self._selections(contexts, "true") + self._selections(placebo, "placebo")
                    advance(len(rows))
                    if time.monotonic() - written > SECONDS_BETWEEN_PARTS:
                        self.writer.append(pending)
                        pending, written = [], time.monotonic()
            finally:  # on Ctrl-C too: what is finished stays
                self.writer.append(pending)

    def _selections(self, contexts: Contexts, far_context: str) -> list[SelectionRow]:
        ks: Sequence[int] = self.settings.ks
        rows = []
        for name in self.settings.selectors:
            influence = find_selector(name)(Question(self.scorer, contexts, self.settings.seed))
            selected = most_influential(influence, max(ks))
            losses = selected_losses(self.scorer, contexts, selected, ks)
            chosen = np.take_along_axis(influence, selected, axis=1)
            rows += [
                SelectionRow(int(contexts.target_id[i]), name, far_context, selected[i], chosen[i], losses[i])
                for i in range(len(contexts))
            ]
        return rows
