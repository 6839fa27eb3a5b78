"""One process at a time on a folder, by the kernel's own lock: it ends with its process, however that ends.

On a network file system it is as good as the system's flock there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from socket import gethostname

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
    try:
        with ExitStack() as held:
            held.enter_context(_hold(folder / LOCK_NAME, fcntl.LOCK_EX if part is None else fcntl.LOCK_SH))
            if part is not None:
                held.enter_context(_hold(folder / f"{LOCK_NAME}-{part}", fcntl.LOCK_EX))
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


@contextmanager
def _hold(path: Path, how: int) -> Iterator[None]:
    with _locked(path, how) as file:
        # Else a forked worker, which may outlive this process for a while, holds on to it.
        os.register_at_fork(after_in_child=file.close)
        file.truncate(0)
        if how == fcntl.LOCK_EX:
            file.write(f" by process {os.getpid()} on {gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError, ValueError):  # it is shared, or gone; closed, in a fork
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samefile(path, file.fileno()):
                    path.unlink()


def _locked(path: Path, how: int) -> FileIO:
    deadline = time.monotonic() + 0.2  # a part that ends has the whole for a moment
    while True:
        file = FileIO(path, "a+")
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # else its holder has just removed it
                if os.path.samefile(path, file.fileno()):
                    return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().decode(errors="replace")  # nothing where it is parts that are held
                raise UserError(
                    f"{path.parent} is in use{holder}; wait for it or stop it, or give another folder"
                ) from None
            time.sleep(0.01)
        except OSError as error:
            log.warning("%s cannot be locked (%s): run one process at a time", path.parent, error.strerror)
            return file
        file.close()
