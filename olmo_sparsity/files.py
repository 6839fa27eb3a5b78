"""Files that are either whole or absent, and their checksums."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` to write to (a file or a folder); rename it to ``path`` when whole.

    On any error, a full disk or Ctrl-C included, the temporary is removed and an earlier ``path`` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The machine is part of the name: tasks on several machines may write to one shared folder.
    temporary = path.with_name(f".{path.name}.tmp-{platform.node()}-{os.getpid()}")
    remove(temporary)
    try:
        yield temporary
        _flush(temporary)
        if path.is_dir():
            remove(path)  # os.replace cannot overwrite a folder that is not empty
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf8")


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; constant memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Force a file, or every file of a folder, to disk: a rename must not outlive its content in a power cut."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
