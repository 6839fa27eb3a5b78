"""Work spread over processes: results in the order of the jobs, progress, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from operator import call
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores


def run_jobs(jobs: Sequence[Callable[[], Any]], workers: int, description: str) -> list[Any]:
    """``[job() for job in jobs]`` over ``workers`` processes, or in this one where one is enough.

    A job and its result must pickle. An exception of a job, or a Ctrl-C, is raised here and ends the others. Raises
    `UserError` where a process was killed.
    """
    results, workers = [], min(workers, len(jobs))
    with progress(description, len(jobs), "jobs") as advance, ExitStack() as stack:
        done: Iterator[Any] = map(call, jobs)
        if workers > 1:
            done = _results(stack.enter_context(_pool(workers)), jobs)
        for result in done:
            results.append(result)
            advance()
    return results


def _results(pool: ProcessPoolExecutor, jobs: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """What the jobs return, in their order.

    Not by `pool.map`, which cancels jobs itself where it is left early. Where a worker has just died (Ctrl-C reaches
    one that does not ignore it yet), the pool's thread meets a cancelled job before it is told of the end, fails, and
    leaves a pipe full that nobody reads any more: the process would wait for ever as it ends (Python 3.11.7).
    """
    size = 1 + len(jobs) // 2000  # thousands of small jobs are sent some at a time
    futures = [pool.submit(_call_each, jobs[start : start + size]) for start in range(0, len(jobs), size)]
    for future in futures:
        yield from future.result()


def _call_each(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    return [job() for job in jobs]


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # A fork server starts clean: a fork of this process would copy the running threads of `tokenizers`.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["olmo_sparsity.data.prepare"])
    with ProcessPoolExecutor(workers, context, _start, (max(1, available_cores() // workers),)) as pool:
        try:
            yield pool
        except BaseException as error:  # jobs under way could take minutes more
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            if not isinstance(error, BrokenProcessPool):
                raise
            remedy = "run the same command again with fewer --workers: what is finished is kept"
            raise UserError(f"a process was killed, most likely because memory ran out; {remedy}") from error


def _start(threads: int) -> None:
    """Prepare a fresh worker process; ``threads`` is its share of the cores, for the thread pool of `tokenizers`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the parent answers it
    os.environ["RAYON_NUM_THREADS"] = str(threads)

    def exit_with_parent() -> None:  # one that was killed outright cannot stop its workers
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
