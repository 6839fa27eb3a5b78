"""The evaluation of a run while it trains, as its config has it."""

from __future__ import annotations

from olmo_sparsity.config.schema import Config
from olmo_sparsity.data.build import open_heldout_tokens, task_of, task_positions
from olmo_sparsity.evaluate.exact_match import TaskEvaluation
from olmo_sparsity.evaluate.heldout import HeldoutEvaluation


def open_evaluation(
    config: Config, *, rank: int = 0, world_size: int = 1
) -> HeldoutEvaluation | TaskEvaluation:
    """The loss of held-out text, or exact match on test samples of the run's task.

    Raises `UserError` where there is no held-out text, or too little for one window, and for lengths that the task
    refuses.
    """
    settings = config.evaluation
    if config.task.name is None:
        return HeldoutEvaluation(
            open_heldout_tokens(config),
            window_length=config.model.max_sequence_length,
            windows=settings.windows,
            seed=settings.seed,
            batch_size=config.device_train_microbatch_size,
            rank=rank,
            world_size=world_size,
        )
    return TaskEvaluation(
        task_of(config),
        task_positions(config),
        samples=settings.windows,
        seed=settings.seed,
        rank=rank,
        world_size=world_size,
    )
