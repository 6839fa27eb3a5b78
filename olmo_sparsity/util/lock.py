"""One process at a time on a folder, by the kernel's own lock: it ends with its process, however that ends.

On a network file system it is as good as the system's flock there.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import filelock

from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"


@contextmanager
def folder_lock(folder: str | Path, *, part: str | None = None) -> Iterator[None]:
    """Hold ``folder`` while the block runs. Raises `UserError` where another process does.

    ``part``: hold one part only, such as "3-of-8". Processes with different parts work side by side; one that holds the
    whole folder excludes them all.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / LOCK_NAME
    try:
        with ExitStack() as held:
            if part is None:
                held.enter_context(_hold(whole))
                for path in folder.glob(f"{LOCK_NAME}-*"):
                    held.enter_context(_hold(path))
            else:
                held.enter_context(_hold(folder / f"{LOCK_NAME}-{part}"))
                with _hold(whole, seconds=5):  # all parts that start now want it for a moment
                    pass
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def _hold(path: Path, seconds: float = 0.2) -> Iterator[None]:
    lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=seconds, poll_interval=0.01)
    except filelock.Timeout:
        remedy = "wait for it or stop it, or give another folder"
        raise UserError(f"{path.parent} is in use by another process; {remedy}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        # a lock by the existence of a file would outlive a job that was killed
        log.warning("%s cannot be locked (%s): run one process at a time", path.parent, error.strerror)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release, so that no other process has locked it
        lock.release()
