"""Files that are either whole or absent, their checksums, JSON read with one clear line for what is wrong, and folders
that one process at a time writes to."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import filelock

from olmo_sparsity.util.errors import UserError, first_line

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parents[1]
LOCK_NAME = ".lock"
SECONDS_FOR_PARTS = 5.0
"""How long a part waits for others that start beside it."""
EXACT_MATCH_NAME = "exact_match.json"
EXACT_MATCH = {"kind": "olmo-sparsity exact match", "version": 2}
"""The first fields of such a file; `olmo_sparsity.evaluate.exact_match_record` writes it."""


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path that a user gave, where ``~`` is the home folder, as in ``--out=~/runs``, which no shell expands.

    Raises `UserError` for an empty one, which else were the current folder.
    """
    if not str(path):
        raise UserError("a path is empty, as that of a variable which is not set; name a file or a folder")
    return Path(os.path.expanduser(path))


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path`` to write to (a file or a folder); rename it to ``path`` when whole.

    On any error, a full disk or Ctrl-C included, the temporary is removed and an earlier ``path`` stays as it was. A
    folder takes the place of an earlier folder. Raises `IsADirectoryError` rather than put a file in the place of one.
    Where the caller removes the temporary, nothing is renamed.
    """
    path = user_path(path)
    temporary = begin_path(path)
    try:
        yield temporary
        if temporary.exists():
            put_in_place(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def begin_path(path: Path) -> Path:
    """A temporary sibling of ``path``, not made yet, for what `put_in_place` renames to it when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    remove(temporary)
    return temporary


def put_in_place(temporary: Path, path: Path) -> None:
    """Force a whole file or folder to disk and rename it to ``path``, as `atomic_path` says; on an error both stay."""
    _settle(temporary)
    replaced = temporary.with_name(f"{temporary.name}-replaced")
    if path.is_dir() and not temporary.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        if path.is_dir():
            path.rename(replaced)
        os.replace(temporary, path)
    except BaseException:
        if replaced.is_dir() and not path.exists():
            replaced.rename(path)
        raise
    remove(replaced)


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


def shard_names(index: Path, remedy: str) -> list[str]:
    """The files that an index of shards (``*.safetensors.index.json``) names, in order.

    Raises `UserError`, which ends with ``remedy``, for an index that is missing or damaged.
    """
    weight_map = read_json(index, remedy).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} is damaged (its weight_map names no files); {remedy}")
    return sorted(set(weight_map.values()))


def last_line(path: str | Path) -> str:
    """The last line of a text file that is not blank, stripped; empty where there is none."""
    return Path(path).read_text(encoding="utf8", errors="replace").rstrip().rpartition("\n")[2].strip()


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal; constant memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        if ".tmp-" not in path.name:  # a kill in the middle must not leave half a folder under its name
            path = path.rename(_temporary(path))
        with suppress(FileNotFoundError):  # another process removes it, too, see `remove_leftovers`
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove what killed processes left in ``folder`` of writing or removing these files and folders.

    Call it while no other process writes them.
    """
    for name in names:
        for path in folder.glob(f".{glob.escape(name)}.tmp-*"):
            if re.search(r"-\d+$", path.name):  # the number of a process, as in `_temporary`
                remove(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that a new one can take its place; returns its new name, which no file had."""
    names = (f"{path.name}.damaged{suffix}" for suffix in chain([""], count(2)))
    aside = next(renamed for name in names if not (renamed := path.with_name(name)).exists())
    return path.rename(aside)


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


@contextmanager
def folder_lock(folder: str | Path, *, part: str | None = None) -> Iterator[None]:
    """Hold ``folder`` while the block runs. Raises `UserError` where another process does.

    The lock is the kernel's own, and ends with its process, however that ends; on a network file system it is as good
    as flock is there.

    ``part``: hold one part only, such as "3-of-8". Processes with different parts work side by side; one that holds the
    whole folder excludes them all.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    folder_lock_path = folder / LOCK_NAME
    try:
        with ExitStack() as held:
            if part is None:
                held.enter_context(_hold(folder_lock_path))
                for path in folder.glob(f"{LOCK_NAME}-*"):
                    held.enter_context(_hold(path))
            else:
                held.enter_context(_hold(folder / f"{LOCK_NAME}-{part}"))
                # all parts that start now hold it for a moment
                with _hold(folder_lock_path, SECONDS_FOR_PARTS):
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


def shipped(name: str | Path) -> Path:
    """Where ``configs/…``, ``slurm/…`` or ``docs/….md``, which come with the code, stands; the path need not exist.

    In a checkout they are in its own folders; a wheel has copies of them within this package (`setup.py`).
    """
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


def read_exact_match(path: str | Path) -> dict[str, Any]:
    """The record in a file. Raises `UserError` where it is none, damaged, or of another version; needs no torch."""
    record: dict[str, Any] = read_json(path, remedy := "make it with olmo-sparsity exact_match")
    if not EXACT_MATCH.items() <= record.items():
        raise UserError(f"{path} holds no exact match of format version {EXACT_MATCH['version']}; {remedy}")
    return record
