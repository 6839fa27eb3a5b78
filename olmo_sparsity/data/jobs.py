"""Work spread over processes: results in the order of the jobs, progress, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores


def run_jobs(
    function: Callable[[Any], Any], jobs: Sequence[Any], workers: int, description: str
) -> list[Any]:
    """``[function(job) for job in jobs]`` over ``workers`` processes, or in this one where one is enough.

    ``function`` must be importable, a job and its result must pickle. An exception of a job is raised here and ends
    the others; a Ctrl-C too.
    """
    results = []
    workers = min(workers, len(jobs))
    with progress(description, len(jobs), "jobs") as advance, ExitStack() as pool:
        done: Iterator[Any] = map(function, jobs)
        if workers > 1:  # thousands of small jobs are sent some at a time
            done = pool.enter_context(_Pool(workers)).map(function, jobs, chunksize=1 + len(jobs) // 2000)
        for result in done:
            results.append(result)
            advance()
    return results


class _Pool(ProcessPoolExecutor):
    """Of processes that an error ends at once: jobs under way could take minutes more."""

    def __init__(self, workers: int):
        # A fork server starts clean: a fork of this process would copy the running threads of `tokenizers`.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["olmo_sparsity.data.prepare"])
        super().__init__(workers, context, _start_worker, (max(1, available_cores() // workers),))

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
        super().__exit__(kind, *error)
        if kind is BrokenProcessPool:
            remedy = "run the same command again with fewer --workers: what is finished is kept"
            raise UserError(f"a worker process was killed, most likely for want of memory; {remedy}")


def _start_worker(threads: int) -> None:
    """Prepare a fresh worker process; ``threads`` is its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the parent answers it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # the thread pool of `tokenizers`
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


def _exit_with_parent() -> None:
    """A parent that was killed outright cannot stop its workers, so each of them watches it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
