"""Synthetic tasks, generated on the fly (METHOD 3). `make_task` finds one by name; `Task` says what each can do."""

from olmo_sparsity.tasks import (  # noqa: F401  each registers what it defines
    addition,
    planted,
    scratchpads,
    sparse,
    variable_assignment,
)
from olmo_sparsity.tasks.samples import TaskBatch
from olmo_sparsity.tasks.task import SPLITS, TASKS, Task, find_task, make_task

__all__ = ["SPLITS", "TASKS", "Task", "TaskBatch", "find_task", "make_task"]
