"""Work spread over processes: results in the order of the jobs, live progress, nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.progress import Advance, progress
from olmo_sparsity.util.provenance import available_cores

Job = TypeVar("Job")
Result = TypeVar("Result")

SECONDS_BETWEEN_LOOKS = 0.5


class StoppedEarly(UserError):
    """Work stopped for a reason outside its input (network, memory): what is finished is kept."""


# What `report` does in this process. Process-wide, because a job is a plain function that runs in whichever
# process it is given to, and a shared counter can be handed to a worker only when that worker starts.
_on_report: Callable[[int, int], None] = lambda documents, tokens: None  # noqa: E731


def report(documents: int, tokens: int = 0) -> None:
    """Tell the progress display what the current job has done since its last report."""
    _on_report(documents, tokens)


def run_jobs(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int,
    description: str,
    unit: str,
    done: int = 0,
) -> list[Result]:
    """``[function(job) for job in jobs]`` over ``workers`` processes, or in this one where one is enough.

    ``function`` must be importable (top level of a module), ``job`` and result must pickle. An exception
    of a job stops the others at once and is raised here; a Ctrl-C too. ``done`` is how many jobs an earlier
    run finished, for the display.
    """
    if not jobs:
        return []
    with progress(description, done + len(jobs), unit, done=done) as advance:
        if min(workers, len(jobs)) > 1:
            return _run_in_pool(function, jobs, min(workers, len(jobs)), advance)
        return _run_here(function, jobs, advance)


def _run_here(function: Callable[[Job], Result], jobs: Sequence[Job], advance: Advance) -> list[Result]:
    global _on_report
    counts = [0, 0]

    def show(documents: int, tokens: int) -> None:
        counts[0] += documents
        counts[1] += tokens
        advance(0, note=_note(counts))

    before, _on_report = _on_report, show
    try:
        results = []
        for job in jobs:
            results.append(function(job))
            advance(1, note=_note(counts))
        return results
    finally:
        _on_report = before


def _run_in_pool(
    function: Callable[[Job], Result], jobs: Sequence[Job], workers: int, advance: Advance
) -> list[Result]:
    # A fork server starts clean: a fork of this process would copy the running threads of `tokenizers`.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    counts = context.Array("q", 2)
    threads = max(1, available_cores() // workers)
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(counts, threads))
    try:
        futures = [executor.submit(function, job) for job in jobs]
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, SECONDS_BETWEEN_LOOKS, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
            advance(len(finished), note=_note(counts))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise StoppedEarly(
            "a worker process was killed, most likely for want of memory; run the same command again with "
            "fewer --workers: what is finished is kept"
        ) from error
    except BaseException:
        # Jobs under way could take minutes more; what they have half written is for the caller to remove.
        for process in list((executor._processes or {}).values()):
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker(counts: Any, threads: int) -> None:
    """Prepare a fresh worker process; ``threads`` is its share of the cores."""
    global _on_report
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the parent answers it
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)  # the thread pool of `tokenizers`
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def add(documents: int, tokens: int) -> None:
        with counts.get_lock():
            counts[0] += documents
            counts[1] += tokens

    _on_report = add


def _exit_with_parent() -> None:
    """A parent that was killed outright cannot stop its workers, so each of them watches it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _note(counts: Any) -> str:
    documents, tokens = counts[0], counts[1]
    return f"{documents:,} documents" * bool(documents) + f", {tokens / 1e6:,.1f}M tokens" * bool(tokens)
