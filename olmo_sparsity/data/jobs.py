"""Work spread over processes: results in the order of the jobs, progress, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import progress
from olmo_sparsity.util.provenance import available_cores

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(
    function: Callable[[Job], Result], jobs: Sequence[Job], *, workers: int, description: str, unit: str
) -> list[Result]:
    """``[function(job) for job in jobs]`` over ``workers`` processes, or in this one where one is enough.

    ``function`` must be importable, ``job`` and result must pickle. An exception of a job is raised here and ends the
    others; a Ctrl-C too.
    """
    results = []
    workers = min(workers, len(jobs))
    with progress(description, len(jobs), unit) as advance, _mapping(workers) as apply:
        for result in apply(function, jobs):
            results.append(result)
            advance()
    return results


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, or the same over several processes."""
    if workers < 2:
        yield map
        return
    # A fork server starts clean: a fork of this process would copy the running threads of `tokenizers`.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["olmo_sparsity.data.prepare"])
    threads = max(1, available_cores() // workers)
    with ProcessPoolExecutor(workers, context, _start_worker, (threads,)) as pool:
        try:
            yield pool.map
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
