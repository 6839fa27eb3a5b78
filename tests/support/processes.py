"""Processes that a test starts: none of them outlives it, also where it fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

SECONDS = 240.0
"""Until what a test waits for counts as hanging; a busy machine takes a tenth."""


@contextmanager
def started(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process in a group of its own, with these ``options`` of `subprocess.Popen`.

    At the end of the block the group is killed, for a child that lives on holds the pipes, and whoever reads them waits
    for it.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
