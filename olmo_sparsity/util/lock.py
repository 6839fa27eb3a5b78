"""One process at a time on a folder, by the kernel's own lock: it ends with its process, however that ends.

On a network file system it is as good as the system's flock there.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import gethostname

from olmo_sparsity.util.errors import UserError

log = logging.getLogger(__name__)

LOCK_NAME = ".lock"


@contextmanager
def folder_lock(folder: str | Path, *, part: str | None = None) -> Iterator[None]:
    """Hold ``folder`` while the block runs; an empty lock file stays. Raises `UserError` where another process does.

    ``part``: hold one part only, such as "3-of-8". Processes with different parts work side by side; one that holds the
    whole folder excludes them all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(_hold(folder / LOCK_NAME, fcntl.LOCK_EX if part is None else fcntl.LOCK_SH))
        if part is not None:
            held.enter_context(_hold(folder / f"{LOCK_NAME}-{part}", fcntl.LOCK_EX))
        yield


@contextmanager
def _hold(path: Path, how: int) -> Iterator[None]:
    with open(path, "a+", encoding="utf8") as file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{path.parent} is in use{file.read()}; wait for it or stop it, or give another folder"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): run one process at a time", path.parent, error.strerror)
        # Else a forked worker, which may outlive this process for a while, holds on to it.
        os.register_at_fork(after_in_child=file.close)
        if how == fcntl.LOCK_EX:
            file.truncate(0)
            file.write(f" by process {os.getpid()} on {gethostname()}")
            file.flush()
        try:
            yield
        finally:
            file.truncate(0)
