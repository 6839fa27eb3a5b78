"""Synthetic tasks, generated on the fly (docs/method.md 3). `make_task` finds one by name.

Every module of this folder is imported here, so that a new task is one new file, which registers what it defines.
"""

from importlib import import_module
from pkgutil import iter_modules

from olmo_sparsity.tasks.batch import TaskBatch
from olmo_sparsity.tasks.task import SPLITS, TASKS, Task, make_task

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["SPLITS", "TASKS", "Task", "TaskBatch", "make_task"]
