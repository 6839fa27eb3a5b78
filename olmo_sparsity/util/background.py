"""Work in the background; it is dropped where the process ends before it is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")

WANDB_THREAD = "wandb"
"""Name of the thread that calls Weights & Biases; a command that ends meanwhile does not wait for it."""


def in_background(action: Callable[[], Result]) -> Future[Result]:
    """Call ``action`` in a new thread; the future has what it returns or raises.

    The thread is a daemon: an executor's would keep a process that failed meanwhile from ending.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future
