"""The whole measurement: sample targets, find their gaps, let every selector choose, write records."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.contexts import Contexts, SampledTargets, long_contexts, placebo_contexts, sample_targets
from analysis.manifest import Manifest
from analysis.records import RecordWriter, SelectionRow, Targets
from analysis.recovery import selected_losses
from analysis.scorer import Scorer, long_and_short_losses
from analysis.selectors import Question, find_selector, most_influential
from olmo_sparsity.checkpoint import TOKENIZER, load_model, resolve_checkpoint, weights_sha256
from olmo_sparsity.data.tokens import MANIFEST_NAME, CorpusManifest, TokenFiles
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import sha256_file
from olmo_sparsity.progress import progress
from olmo_sparsity.provenance import current_commit

log = logging.getLogger(__name__)

TARGETS_PER_GAP_BATCH = 64
TARGETS_PER_ROUND = 4
SECONDS_BETWEEN_PARTS = 20.0


@dataclass(frozen=True)
class InfluenceSettings:
    """What is measured on what."""

    checkpoint: str
    """Checkpoint folder, or a run (then its last)."""
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


def measure_influence(settings: InfluenceSettings) -> Path:
    """Measure, writing records as they are finished; returns their folder.

    Run again with the same settings, it goes on where an interrupted run stopped. Raises `UserError` for bad input.
    """
    for name in settings.selectors:
        find_selector(name)
    tokens = _open_heldout(settings)
    sampled = sample_targets(
        tokens, settings.targets, n_long=settings.n_long, n_short=settings.n_short, seed=settings.seed
    )
    manifest, scorer = _manifest(settings), _build_scorer(settings)
    writer = RecordWriter(settings.out, manifest, overwrite=settings.overwrite)  # all input is checked by now
    if writer.manifest.complete:
        log.info("%s is complete already", settings.out)
    else:
        _Measurement(settings, tokens, scorer, writer).run(sampled)
    return Path(settings.out)


def _build_scorer(settings: InfluenceSettings) -> Scorer:
    model, _ = load_model(settings.checkpoint)
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Scorer(
        model.to(device), device=device, bf16=settings.bf16, tokens_per_batch=settings.tokens_per_batch
    )


def _open_heldout(settings: InfluenceSettings) -> TokenFiles:
    """The held-out split, refused where another tokenizer made it than the checkpoint's."""
    checkpoint = resolve_checkpoint(settings.checkpoint)
    manifest = CorpusManifest.load(settings.corpus)
    own = checkpoint / TOKENIZER
    if not own.is_file() or sha256_file(own) != manifest.tokenizer_sha256:
        raise UserError(
            f"{settings.corpus} was made with another tokenizer than {checkpoint} was trained with; prepare the text "
            f"with --tokenizer {own}"
        )
    return TokenFiles.of_split(settings.corpus, settings.split)


def _manifest(settings: InfluenceSettings) -> Manifest:
    checkpoint = resolve_checkpoint(settings.checkpoint)
    _, config = load_model(checkpoint)
    return Manifest(
        checkpoint=str(checkpoint),
        checkpoint_sha256=weights_sha256(checkpoint),
        training_seed=config.seed,
        tokenizer_sha256=sha256_file(checkpoint / TOKENIZER),
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
        if len(over) == 0:
            self.writer.discard()
            largest = -targets.gap_long_minus_short_nats.min()
            raise UserError(
                f"none of {len(targets):,} targets gains more than tau = {self.settings.tau_nats} nats from the long "
                f"context (the most is {largest:.2f}); lower --tau, raise --targets, or train the model for longer"
            )
        self._select(targets, over)
        self.writer.finish()

    def _measure_gaps(self, sampled: SampledTargets) -> Targets:
        count = len(sampled.document)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        with progress("long and short losses", count, "targets") as advance:
            for start in range(0, count, TARGETS_PER_GAP_BATCH):
                rows = np.arange(start, min(start + TARGETS_PER_GAP_BATCH, count))
                contexts = self._contexts(sampled, rows, rows)
                parts.append((contexts.targets, *long_and_short_losses(self.scorer, contexts)))
                advance(len(rows))
        token, long, short = (np.concatenate(column) for column in zip(*parts, strict=True))
        targets = Targets(
            target_id=np.arange(count),
            document=sampled.document,
            position=sampled.position,
            token=token,
            loss_long_nats=long,
            loss_short_nats=short,
            placebo_document=sampled.placebo_document,
            placebo_start=sampled.placebo_start,
        )
        self.writer.write_targets(targets)
        return targets

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
        finished = self.writer.finished_targets()
        todo = over[[int(targets.target_id[row]) not in finished for row in over]]
        pending: list[SelectionRow] = []
        written = time.monotonic()
        with progress("selecting tokens", len(over), "targets", done=len(over) - len(todo)) as advance:
            try:
                for start in range(0, len(todo), TARGETS_PER_ROUND):
                    rows = todo[start : start + TARGETS_PER_ROUND]
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
