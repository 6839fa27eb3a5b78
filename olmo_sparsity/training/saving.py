"""The checkpoints of a run: one is written after a step, and those that are no longer kept are removed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.checkpoint import TrainState, checkpoints, save_checkpoint, step_folder, step_of
from olmo_sparsity.config.schema import Config
from olmo_sparsity.training.engine import Engine
from olmo_sparsity.util.files import remove


@dataclass(frozen=True)
class CheckpointSaver:
    """Saves what the engine trains."""

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

    def folder_of(self, step: int) -> Path:
        """The folder of the checkpoint after ``step``."""
        return step_folder(self.folder, step)

    def save(self, step: int, *, finished: bool) -> Path:
        """Write the checkpoint after ``step`` from rank 0 and drop those that are not kept. Collective.

        ``finished``: the run has reached its end.
        """
        state = TrainState(
            step=step,
            tokens=step * self.tokens_per_step,
            finished=finished,
            precision=self.engine.settings.precision,
            data=self.data_identity,
        )
        weights = self.engine.weights()
        optimizer = self.engine.optimizer_tensors()

        def write() -> None:
            save_checkpoint(
                self.folder,
                state,
                config=self.config,
                weights=weights,
                optimizer=optimizer,
                tokenizer=self.tokenizer,
            )
            for folder in self._no_longer_kept():
                remove(folder)

        self.engine.on_rank_zero(write)
        return self.folder_of(step)

    def _no_longer_kept(self) -> list[Path]:
        """Checkpoints of the run that are neither among the last ones nor at a step that is kept."""
        candidates = checkpoints(self.folder)[: -self.keep_last] if self.keep_last > 0 else []
        return [
            folder for folder in candidates if self.keep_every is None or step_of(folder) % self.keep_every
        ]
