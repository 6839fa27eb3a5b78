"""How measurements are kept on disk: a JSON file that says what it is, and tables beside it, whole or not at all."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from analysis.parquet import stacked, write_frame
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import (
    atomic_path,
    folder_lock,
    read_json,
    remove,
    remove_leftovers,
    write_json,
)
from olmo_sparsity.util.provenance import provenance

Read = TypeVar("Read")
RecordT = TypeVar("RecordT", bound=Any)
"""A dataclass with ``settings`` (`Recorded`) and ``provenance``."""
SECONDS_BETWEEN_PARTS = 2.0
"""Rounds that take less time are kept together: a killed process loses what it did in this time, or one round."""


def write_saved(
    head: Path,
    about: Mapping[str, Any],
    frames: Mapping[str, pd.DataFrame | None],
    *,
    write: Callable[[Path, pd.DataFrame], None] = write_frame,
) -> None:
    """Write the JSON file ``head`` and the frames beside it, as Parquet files of these names.

    All are written under other names first, and ``head`` gets its own as the last: without it nothing is read. Of a
    frame that is None an older file is removed.
    """
    head.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:  # which gives names in the opposite order
        write_json(files.enter_context(atomic_path(head)), about)
        for name, frame in frames.items():
            if frame is not None:
                write(files.enter_context(atomic_path(head.parent / f"{name}.parquet")), frame)
        # without it the frames may be of two results, and are not read
        head.unlink(missing_ok=True)
        for name, frame in frames.items():
            if frame is None:
                (head.parent / f"{name}.parquet").unlink(missing_ok=True)


def without_folders(record: RecordT) -> RecordT:
    """The same measurement with the names of its model, texts and folders in place of their paths.

    So a record that is shown does not name the folders of the machine on which it was measured.
    """
    flat = record.settings.to_json()
    names = {name: last_part(name) for name in (flat["model"], flat["texts"])}
    changes: dict[str, Any] = {"model": names[flat["model"]], "texts": names[flat["texts"]]}
    for role in ("selected_by", "proposed_by"):
        if flat.get(role):
            changes[role] = flat[role] | {"model": last_part(flat[role]["model"])}
    provenance = dict(record.provenance)
    if "command" in provenance:
        command = str(provenance["command"])
        for path, name in names.items():
            command = command.replace(path, name)
        command = re.sub(r"(?<!\S)[/~]\S*/(?=[^\s/])", "", command)
        provenance["command"] = re.sub(r"(--out|--effects) \S*/(?=[^\s/])", r"\1 ", command)
    return replace(record, settings=record.settings.but(**changes), provenance=provenance)


def last_part(path: str) -> str:
    """The name of a file, folder or model on the hub, without the folders before it."""
    return Path(path).name or path


def read_head(head: Path, kind: str, version: int, remedy: str) -> dict[str, Any]:
    """The JSON file of something saved. Raises `UserError`, with the remedy, where there is none, and for another kind
    or version."""
    about = read_json(head, remedy)
    if (about.get("kind"), about.get("version")) != (kind, version):
        raise UserError(
            f"{head} is {about.get('kind') or 'a file'} of version {about.get('version')}, this code reads {kind} "
            f"{version}; measure again"
        )
    return about


@dataclass(frozen=True)
class Parts:
    """The finished parts of a measurement that is not finished: a folder with a folder for each, by name."""

    folder: Path
    head: str
    """The name of the JSON file that each part has: what a killed process left without one does not count."""

    def path(self, name: str) -> Path:
        """The JSON file of a part, to be written with `write_saved`."""
        return self.folder / name / self.head

    def finished(self) -> list[Path]:
        """The JSON files of all finished parts, by name."""
        return sorted(self.folder.glob(f"*/{self.head}"))

    def read(self, head: Path, load: Callable[[Path], Read]) -> Read:
        """What ``load`` makes of the folder of a finished part. Raises `UserError` where it cannot be read."""
        try:
            return load(head.parent)
        except UserError as error:
            raise UserError(
                f"{head.parent} is damaged; remove it, and the same call measures again what it held"
            ) from error

    def remove(self) -> None:
        """Remove all: the measurement is finished."""
        remove(self.folder)


@contextmanager
def open_parts(
    folder: Path,
    head: str,
    settings: Mapping[str, Any],
    *,
    differences: Callable[[dict[str, Any]], str],
    share: str | None = None,
) -> Iterator[Parts]:
    """The parts that an interrupted process left in a folder, to go on with; while it runs, no other process may.

    Args:
        folder: of the parts.
        head: see `Parts`.
        settings: as JSON, of the whole measurement.
        differences: says how other settings differ from these, as text; empty where they do not.
        share: what this process measures, such as "1-of-3": others of other shares may run beside it.

    Raises `UserError` where the parts were begun with other settings, or another process is at it.
    """
    with folder_lock(folder, part=share):
        remove_leftovers(folder.parent, [folder.name])
        begun = folder / "settings.json"
        if begun.is_file():
            there = read_json(
                begun, "remove this file, and the same call goes on with the parts that are finished"
            )
            if differing := differences(there):
                raise UserError(
                    f"{folder.parent} was begun with other settings, and is not finished: {differing}; give another "
                    f"folder, or remove {folder} to begin anew"
                )
        write_json(begun, settings)
        yield Parts(folder, head)


@dataclass
class Rounds:
    """Finished rounds of a measurement, which are kept together as parts."""

    write: Callable[[dict[str, pd.DataFrame], dict[str, Any]], None]
    """Is given the frames of a part by name, and what made it."""
    frames: list[dict[str, pd.DataFrame]] = field(default_factory=list)
    """Of the rounds that are not kept yet."""
    made: dict[str, Any] = field(default_factory=provenance)
    began: float = field(default_factory=time.monotonic)

    def add(self, frames: dict[str, pd.DataFrame]) -> None:
        """Another one; all are kept when the last time was `SECONDS_BETWEEN_PARTS` ago.

        A part has ``targets`` that follow one another: in the order of their first ones parts are the whole.
        """
        if self.frames and self.frames[-1]["targets"].index[-1] + 1 != frames["targets"].index[0]:
            self.keep()
        self.frames.append(frames)
        if time.monotonic() - self.began >= SECONDS_BETWEEN_PARTS:
            self.keep()

    def keep(self) -> None:
        """Have all kept now."""
        rounds = self.frames
        if not rounds:
            return
        self.frames = []
        now = time.monotonic()
        about = {**self.made, "seconds": now - self.began}
        about["created"] = about.pop("started")
        self.write({name: stacked([frames[name] for frames in rounds]) for name in rounds[0]}, about)
        self.began = now


def remove_finished_parts(folder: Path, *, differences: Callable[[dict[str, Any]], str]) -> None:
    """Remove the parts of a measurement that is saved as a whole, which a process left that was killed before it had.

    Parts that were begun with other settings stay, and those that another process is at. ``differences`` is as in
    `open_parts`.
    """
    begun = folder / "settings.json"
    with suppress(
        OSError, UserError
    ):  # in use, damaged, or nobody may write there: the result is whole all the same
        remove_leftovers(folder.parent, [folder.name])
        if begun.is_file() and not differences(read_json(begun, "remove it")):
            with folder_lock(folder):
                remove(folder)
