"""The checkpoints of a run: written by all ranks while training goes on; those that are no longer kept are removed.

A save copies this rank's share of the tensors to the CPU, and a thread writes it. The loop goes on; when no rank is
writing any more, which every step asks, rank 0 puts the folder in its place.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from olmo_sparsity.checkpoint import TrainState, checkpoints, step_folder, step_of
from olmo_sparsity.config.schema import Config
from olmo_sparsity.new_checkpoint import NewCheckpoint, Share, TensorFile
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.background import in_background
from olmo_sparsity.util.errors import NotFinite, first_line
from olmo_sparsity.util.files import remove

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written."""

    checkpoint: NewCheckpoint
    state: TrainState
    writing: Future[list[TensorFile]]
    """The work of this rank."""


@dataclass
class CheckpointSaver:
    """Saves what the engine trains, one checkpoint at a time. Leaving its context finishes the last one."""

    engine: Engine
    folder: Path
    """The run's."""
    config: Config
    """Written as it is into every checkpoint."""
    data_identity: str | None
    """Of the text that is trained on; None for a task without one."""
    tokenizer: bytes | None
    """Its tokenizer.json, in rank 0; None where it is not known."""
    tokens_per_step: int
    keep_last: int
    """How many of the last checkpoints are kept; below 1: all."""
    keep_every: int | None
    """Every checkpoint is kept whose step is a multiple of this. None: no further one."""
    pending: PendingSave | None = field(default=None, init=False)
    """The same one in every rank."""

    def folder_of(self, step: int) -> Path:
        """The folder of the checkpoint after ``step``."""
        return step_folder(self.folder, step)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes its share of a checkpoint."""
        return self.pending is not None and not self.pending.writing.done()

    def save(self, step: int, *, finished: bool, evaluation_due: bool = False) -> Path:
        """Begin the checkpoint after ``step``, once the one before is finished; returns its folder. Collective.

        ``finished``: the run has reached its end. ``evaluation_due``: it is stopped before the evaluation after this
        step. Raises `UserError` where the disk is full.
        """
        self.finish()
        share = Share(
            weights=self.engine.weights(),
            optimizer=self.engine.optimizer_tensors(),
            rank=self.engine.rank,
            count=self.engine.world_size,
        )
        folder = self.folder_of(step)
        checkpoint = self.engine.on_rank_zero(lambda: NewCheckpoint.begin(folder))
        state = TrainState(
            step=step,
            tokens=step * self.tokens_per_step,
            finished=finished,
            evaluation_due=evaluation_due,
            precision=self.engine.settings.precision,
            data=self.data_identity,
        )
        self.pending = PendingSave(checkpoint, state, in_background(lambda: checkpoint.write(share)))
        return folder

    def finish(self) -> None:
        """Wait until all ranks have written the checkpoint, put it in its place, drop those not kept. Collective.

        Raises `UserError` in all ranks where the disk of one is full; nothing is left of the checkpoint then.
        """
        if self.pending is None:
            return
        pending = self.pending
        try:
            shares = self.engine.results_of_all_ranks(pending.writing)
            files = [file for share in shares for file in share]

            def complete() -> None:
                pending.checkpoint.finish(files, pending.state, self.config, self.tokenizer)
                for folder in self._no_longer_kept():
                    remove(folder)

            self.engine.on_rank_zero(complete)
        except BaseException:
            self._drop()
            raise
        self.pending = None

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the checkpoint that is being written, also before an error ends the run.

        But not before one that may be of this rank alone, such as that of a sample which only it reads: what ranks
        exchange to finish would meet what the others exchange in their next step.
        """
        if kind is None:
            self.finish()
        elif issubclass(kind, NotFinite) or (issubclass(kind, Exception) and self.engine.world_size == 1):
            try:
                self.finish()
            except Exception as error:  # the one that ends the run is shown
                log.warning("%s", first_line(error))
        else:
            self._drop()

    def _drop(self) -> None:
        """Give up the checkpoint that is being written. What cannot be removed now, the next start removes."""
        if self.pending is not None and self.engine.is_rank_zero:
            with suppress(OSError):
                self.pending.checkpoint.drop()
        self.pending = None

    def _no_longer_kept(self) -> list[Path]:
        """Checkpoints of the run that are neither among the last ones nor at a step that is kept."""
        candidates = checkpoints(self.folder)[: -self.keep_last] if self.keep_last > 0 else []
        return [
            folder for folder in candidates if self.keep_every is None or step_of(folder) % self.keep_every
        ]
