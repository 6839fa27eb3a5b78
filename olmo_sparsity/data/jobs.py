"""Work spread over processes: results in the order of the jobs, progress, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance, progress
from olmo_sparsity.util.provenance import available_cores

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int, description: str, unit: str
) -> list[Result]:
    """``[function(job) for job in jobs]`` over ``workers`` processes, or in this one where one is enough.

    ``function`` must be importable, ``job`` and result must pickle. An exception of a job stops the others at once
    and is raised here; a Ctrl-C too.
    """
    if not jobs:
        return []
    with progress(description, len(jobs), unit) as advance:
        if min(workers, len(jobs)) > 1:
            return _run_in_pool(function, jobs, min(workers, len(jobs)), advance)
        results = []
        for job in jobs:
            results.append(function(job))
            advance()
        return results


def _run_in_pool(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, advance: Advance
) -> list[Result]:
    # A fork server starts clean: a fork of this process would copy the running threads of `tokenizers`.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    threads = max(1, available_cores() // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (threads,)) as pool:
        try:
            futures = [pool.submit(function, job) for job in jobs]
            for future in as_completed(futures):
                future.result()
                advance()
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, most likely for want of memory; run the same command again with fewer "
                "--workers: what is finished is kept"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # jobs under way could take minutes more
                process.terminate()
            raise


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
