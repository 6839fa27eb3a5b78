"""One process at a time on a folder, also on network file systems.

A lock is a file in the folder that names host and process. Its holder renews it while it lives; a lock whose process is
gone on this machine is free at once, one of another machine when it was not renewed for `LEASE_SECONDS`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socket import gethostname

from filelock import LeaseCompromise, SoftFileLease, Timeout

from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"
LEASE_SECONDS = 60.0
_SECONDS_BETWEEN_LOOKS = 0.5


@contextmanager
def folder_lock(folder: str | Path, *, part: str | None = None) -> Iterator[None]:
    """Hold ``folder`` while the block runs. Raises `UserError` that names who holds it.

    ``part``: hold one part only, such as "3-of-8". Processes with different parts work side by side; one that holds the
    whole folder excludes them all. After a kill on another machine this waits until that lease has ended.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as held:
            held.enter_context(_hold(folder / (LOCK_NAME if part is None else f"{LOCK_NAME}-{part}")))
            if part is None:
                for other in sorted(folder.glob(f"{LOCK_NAME}-*-of-*")):
                    held.enter_context(_hold(other))
            else:
                with _hold(folder / LOCK_NAME, patience=5.0):  # shards look at it too, for a moment each
                    pass
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def _hold(path: Path, patience: float = 0.2) -> Iterator[None]:
    lost: list[LeaseCompromise] = []

    def give_up(how: LeaseCompromise) -> None:
        lost.append(how)
        os.kill(os.getpid(), signal.SIGINT)  # wakes the main thread, whatever it waits for

    # Not of one thread: a run of several processes takes it in a thread and releases it in the main one.
    lock = SoftFileLease(path, lease_duration=LEASE_SECONDS, on_compromise=give_up, thread_local=False)
    try:
        # The first try only breaks the lock of a dead process.
        lock.acquire(timeout=patience, poll_interval=0.02)
    except Timeout:
        _wait_for_lease(lock, path)
    try:
        yield
    except KeyboardInterrupt:
        if not lost:
            raise
        raise UserError(
            f"{path} was taken over ({lost[0].reason}), as if this process had stopped; nothing more was written here: "
            "see that one process at a time works there, and run the same command again"
        ) from None
    finally:
        lock.release()


def _wait_for_lease(lock: SoftFileLease, path: Path) -> None:
    """Take the lock when its lease ends. Raises `UserError` as soon as its holder renews it."""
    renewed, warned = _renewed(path), False
    while True:
        owner = lock.owner
        if owner is not None and (owner.hostname == gethostname() or _renewed(path) not in (renewed, None)):
            held = f"process {owner.pid} on {owner.hostname}, last seen {_last_seen(path)}"
            raise UserError(
                f"{path.parent} is in use by {held}; wait for it or stop it, or give another folder"
            )
        if owner is not None and not warned:
            log.warning("%s was in use on another machine; waiting until its lease ends", path.parent)
            warned = True
        try:
            lock.acquire(timeout=_SECONDS_BETWEEN_LOOKS)
            return
        except Timeout:
            continue


def _renewed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _last_seen(path: Path) -> str:
    """When the lock was last renewed, local time."""
    with suppress(OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.stat(path).st_mtime))
    return "a moment ago"
