"""One run over the targets of a records folder: gaps first, then what every selector chooses and what it is worth.

Shapes: n sampled targets, m of them over tau.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from analysis.measure.crossfit import Chooser
from analysis.measure.readable import Reader
from analysis.measure.recovery import selected_losses
from analysis.measure.settings import InfluenceSettings
from analysis.model.scorer import Scorer, long_and_short_losses
from analysis.records.schema import Examples, SelectionRow, Targets
from analysis.records.store import RecordWriter
from analysis.text.contexts import Contexts, SampledTargets, long_contexts, placebo_contexts
from olmo_sparsity.data.tokens import TokenFiles
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.streams import Stream

log = logging.getLogger(__name__)

TARGETS_PER_BLOCK = 64
"""Targets whose gaps are one batch. Shards take whole blocks, so that every forward pass of a shard is one of the
unsharded measurement: a batch of another size could differ in the last bits of a loss."""
TARGETS_PER_ROUND = 4
SECONDS_BETWEEN_PARTS = 20.0
EXAMPLES_FROM_TARGETS = 20_000
"""With more targets than these, only such a share of those over tau keeps its text: it is for people to read."""


@dataclass(frozen=True)
class Measurement:
    """Measures the targets of one records folder, or of one shard of it."""

    settings: InfluenceSettings
    tokens: TokenFiles
    reader: Reader
    evaluator: Scorer
    """Computes L_long, L_short and L_k."""
    chooser: Chooser
    """Chooses targets and tokens."""
    crossfit: bool
    """Whether that is another model than the one that evaluates."""
    writer: RecordWriter

    def run(self, sampled: SampledTargets) -> bool:
        """Targets first, then the selections of those over tau that are not finished yet; True when all are."""
        targets = self.writer.targets or self._measure_gaps(sampled)
        over = targets.over(self.settings.tau_nats)
        if len(over) == 0 and not self.settings.shard:  # another shard may hold some
            self.writer.discard()
            raise UserError(
                f"none of {len(targets):,} targets gains more than tau = {self.settings.tau_nats} nats from the long "
                f"context (the most is {targets.selecting_gain_nats.max():.2f}); lower --tau, raise --targets, or "
                "train the model for longer"
            )
        if not self.writer.has_examples:
            self.writer.write_examples(self._examples(targets, over))
        if not self._select(targets, over):
            return False
        self.writer.finish()
        return True

    def _measure_gaps(self, sampled: SampledTargets) -> Targets:
        mine = list(self._blocks(len(sampled.document)))
        parts: list[tuple[np.ndarray, ...]] = []
        target_id = np.concatenate(mine)
        with progress("long and short losses", len(target_id), "targets") as advance:
            for rows in mine:
                contexts = self._contexts(sampled, rows, rows)
                long, short = long_and_short_losses(self.evaluator, contexts)
                gain = self.chooser.gains_nats(contexts) if self.crossfit else short - long
                _check_finite(long, short, gain)
                kind = self.reader.kinds(contexts, sampled.document[rows], sampled.position[rows])
                parts.append((contexts.targets, long, short, gain, kind))
                advance(len(rows))
        token, long, short, gain, kind = (np.concatenate(column) for column in zip(*parts, strict=True))
        targets = Targets(
            target_id=target_id,
            document=sampled.document[target_id],
            position=sampled.position[target_id],
            token=token,
            loss_long_nats=long,
            loss_short_nats=short,
            selecting_gain_nats=gain,
            kind=kind,
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

    def _both_contexts(self, targets: Targets, rows: np.ndarray) -> tuple[Contexts, Contexts]:
        """The true contexts of some targets, and the placebo ones."""
        contexts = self._contexts(targets, rows, targets.target_id[rows])
        placebo = placebo_contexts(
            self.tokens, contexts, targets.placebo_document[rows], targets.placebo_start[rows]
        )
        return contexts, placebo

    def _examples(self, targets: Targets, over: np.ndarray) -> Examples:
        """Text of the targets over tau; of a large measurement, of a random part of them.

        Whether a target is shown depends on itself alone, so that shards show what the whole run does.
        """
        share = EXAMPLES_FROM_TARGETS / self.settings.targets
        seed = self.settings.seed
        ids = targets.target_id[over].tolist()
        over = over[[np.random.default_rng([Stream.EXAMPLES, seed, each]).random() < share for each in ids]]
        if len(over) == 0:
            return Examples(np.empty(0, np.int64), [], [], [], [])
        contexts, placebo = self._both_contexts(targets, over)
        return self.reader.examples(contexts, placebo, targets.document[over], targets.position[over])

    def _select(self, targets: Targets, over: np.ndarray) -> bool:
        """Run every selector on the true and the placebo far context, a few targets at a time; True if all are."""
        rounds = list(self._rounds(targets, over))
        left = sum(map(len, rounds))
        if self.settings.limit is not None:
            sizes = np.cumsum([len(rows) for rows in rounds])
            rounds = rounds[: int(np.searchsorted(sizes, self.settings.limit)) + 1]
        now = sum(map(len, rounds))
        pending: list[SelectionRow] = []
        written = time.monotonic()
        with progress(
            "selecting tokens", len(over) - left + now, "targets", done=len(over) - left
        ) as advance:
            try:
                for rows in rounds:
                    contexts, placebo = self._both_contexts(targets, rows)
                    pending += self._selections(contexts, "true") + self._selections(placebo, "placebo")
                    advance(len(rows))
                    if time.monotonic() - written > SECONDS_BETWEEN_PARTS:
                        self.writer.append(pending)
                        pending, written = [], time.monotonic()
            finally:  # on Ctrl-C too: what is finished stays
                self.writer.append(pending)
        if now < left:
            log.info(
                "%d of %d targets over tau are left; the same command goes on with them",
                left - now,
                len(over),
            )
        return now == left

    def _selections(self, contexts: Contexts, far_context: str) -> list[SelectionRow]:
        ks = self.settings.ks
        rows = []
        for name in self.settings.selectors:
            chosen = self.chooser.select(name, contexts, far_context)
            columns, influence = chosen.columns[:, : max(ks)], chosen.influence[:, : max(ks)]
            losses = selected_losses(self.evaluator, contexts, columns, ks)
            _check_finite(losses)
            rows += [
                SelectionRow(
                    int(contexts.target_id[i]), name, far_context, columns[i], influence[i], losses[i]
                )
                for i in range(len(contexts))
            ]
        return rows


def _check_finite(*losses: np.ndarray) -> None:
    if not all(np.isfinite(each).all() for each in losses):
        raise UserError(
            "a loss of the model is not finite; measure in fp32 (without --bf16), or another checkpoint"
        )
