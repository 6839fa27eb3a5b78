"""Files that come with the code: configurations and the job scripts of SLURM.

In a checkout they are in its `configs/` and `slurm/`; a wheel has a copy of both within this package (`setup.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(name: str | Path) -> Path:
    """Where ``configs/…`` or ``slurm/…`` stands; the path need not exist."""
    copy = PACKAGE / "shipped"
    return (copy if copy.is_dir() else PACKAGE.parent) / name


def find_shipped(path: str | Path, name: str | Path | None = None) -> Path:
    """``path``, or, where no such file exists, the one of this name that comes with the code.

    ``name``: where it differs from the path, such as a base that is named relative to another file.
    """
    copy = Path(path if name is None else name)
    if copy.parts[:1] != ("configs",) or os.path.exists(path) or not os.path.isfile(shipped(copy)):
        return Path(path)
    return shipped(copy)
