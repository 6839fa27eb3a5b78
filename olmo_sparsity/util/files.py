"""Files that are either whole or absent, their checksums, and JSON read with one clear line for what is wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError, first_line


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` to write to (a file or a folder); rename it to ``path`` when whole.

    On any error, a full disk or Ctrl-C included, the temporary is removed and an earlier ``path`` stays as it was. A
    folder takes the place of an earlier folder. Raises `IsADirectoryError` rather than put a file in the place of one.
    Where the caller removes the temporary, nothing is renamed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    replaced = temporary.with_name(f"{temporary.name}-replaced")
    remove(temporary)
    try:
        yield temporary
        if not temporary.exists():
            return
        _settle(temporary)
        if path.is_dir():
            if not temporary.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            path.rename(replaced)
        os.replace(temporary, path)
    except BaseException:
        remove(temporary)
        if replaced.is_dir() and not path.exists():
            replaced.rename(path)
        raise
    remove(replaced)


def file_in(path: str | Path, name: str) -> Path:
    """The file that an ``--out`` means: ``path``, or ``name`` inside it where ``path`` is a folder."""
    path = Path(path)
    return path / name if path.is_dir() else path


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf8")


def read_json(path: str | Path, remedy: str, *, expect: type | None = dict) -> Any:
    """The value of a JSON file. Raises `UserError`, which ends with ``remedy``, where it cannot be read.

    ``expect``: the type that the value must have, dict or list; None for any.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); {remedy}") from error
    if expect is not None and not isinstance(value, expect):
        raise UserError(f"{path} is damaged (it holds no {expect.__name__}); {remedy}")
    return value


def last_line(path: str | Path) -> str:
    """The last line of a text file that is not blank, stripped; empty where there is none."""
    return Path(path).read_text(encoding="utf8", errors="replace").rstrip().rpartition("\n")[2].strip()


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; constant memory.

    Computed once for a file that does not change: asked again, the same size and times of change answer.
    """
    stat = os.stat(path)
    return _sha256(os.path.abspath(path), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=1024)
def _sha256(path: str, inode: int, size: int, modified_ns: int, changed_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        if ".tmp-" not in path.name:  # a kill in the middle must not leave half a folder under its name
            path = path.rename(_temporary(path))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    # The machine is part of the name: tasks on several machines may write to one shared folder.
    return path.with_name(f".{path.name}.tmp-{platform.node()}-{os.getpid()}")


def _settle(path: Path) -> None:
    """Force a file, or every file of a folder, to disk: a rename must not outlive its content in a power cut.

    Files get the permissions of their folder: safetensors writes its own for the owner alone.
    """
    is_folder = path.is_dir()
    for file in path.rglob("*") if is_folder else [path]:
        if file.is_file():
            if is_folder:
                file.chmod(path.stat().st_mode & 0o666)
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
