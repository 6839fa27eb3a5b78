"""Memory that is freed stays with the process."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


@cache
def keep_freed_memory() -> None:
    """Let glibc keep what is freed; other C libraries are left as they are.

    By default it gives large blocks back at once, so that every pass of a model on a CPU faults its pages in again,
    which took a third of a measurement of a small model.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_TOP_PAD, 1 << 26)
