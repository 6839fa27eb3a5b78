"""The Parquet files of a records folder, and `checksums.json`, by which every one is known before it is read.

`checksums.json` holds size and SHA-256 of `targets.parquet`, `examples.parquet` and every part of the selections. It is
written anew after each of them; a file without an entry was left by a killed writer, and nobody reads it. Records of
format 2 have no checksums: there, what stands in the folder is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.records.manifest import FORMAT_VERSION, Manifest
from analysis.records.schema import (
    EXAMPLES_SCHEMA,
    SELECTIONS_SCHEMA,
    TARGETS_SCHEMA,
    Examples,
    Targets,
    check_selections,
)
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import atomic_path, read_json, remove, write_json
from olmo_sparsity.util.result_files import Json, misfit

TARGETS_NAME = "targets.parquet"
SELECTIONS_NAME = "selections"
EXAMPLES_NAME = "examples.parquet"
CHECKSUMS_NAME = "checksums.json"

_PART = re.compile(rf"{SELECTIONS_NAME}/part-(\d{{5,9}})\.parquet")
_ANEW = "measure again with scripts/influence.py --overwrite"
_ELSEWHERE = "measure again into another --out, or with --overwrite"

_Rows = TypeVar("_Rows", Targets, Examples)


class RecordFiles:
    """The files of one records folder."""

    def __init__(self, folder: str | Path, manifest: Manifest):
        """Raises `UserError` where `checksums.json` is missing or damaged."""
        self.folder = Path(folder)
        self.manifest = manifest
        self.has_checksums = manifest.version >= FORMAT_VERSION
        self.listed = self._read_checksums() if self.has_checksums else {name: {} for name in self._present()}

    @classmethod
    def begin(cls, folder: Path, manifest: Manifest) -> RecordFiles:
        """Those of a folder that has none yet."""
        write_json(folder / CHECKSUMS_NAME, {})
        return cls(folder, manifest)

    @property
    def parts(self) -> list[str]:
        """Names of the parts, in the order in which they were written."""
        return sorted(filter(_PART.fullmatch, self.listed), key=_number)

    @property
    def lost(self) -> list[str]:
        """Names of the files that were removed since they were written."""
        return [name for name in self.listed if not (self.folder / name).exists()]

    def forget(self, names: Sequence[str]) -> None:
        """Take files that are gone off the list."""
        self._list({name: each for name, each in self.listed.items() if name not in names})

    def remove_unlisted(self) -> None:
        """Remove what a killed writer left."""
        for leftover in [*self.folder.glob(".*.tmp-*"), *(self.folder / SELECTIONS_NAME).glob(".*.tmp-*")]:
            remove(leftover)
        for name in self._present() - self.listed.keys():
            remove(self.folder / name)

    def read_targets(self) -> Targets | None:
        """The targets, or None where none were written yet. Raises `UserError` where they are damaged."""
        if TARGETS_NAME not in self.listed:
            return None
        table = self._read(TARGETS_NAME, TARGETS_SCHEMA)
        targets = self._rows_of(TARGETS_NAME, Targets, table)
        if not np.array_equal(
            table["gap_long_minus_short_nats"].to_numpy(), targets.gap_long_minus_short_nats
        ):
            raise self._damaged(TARGETS_NAME, "gap is not L_long - L_short")
        return targets

    def read_parts(self, targets: Targets) -> pa.Table:
        """The rows of all parts. Raises `UserError` where one is damaged or does not fit manifest and targets."""
        tables = []
        for name in self.parts:
            table = self._read(name, SELECTIONS_SCHEMA)
            try:
                check_selections(
                    table,
                    targets.target_id,
                    selectors=self.manifest.selectors,
                    ks=len(self.manifest.ks),
                    k_max=self.manifest.k_max,
                    n_far=self.manifest.n_far,
                )
            except ValueError as error:
                raise self._damaged(name, first_line(error)) from error
            tables.append(table)
        return pa.concat_tables(tables) if tables else SELECTIONS_SCHEMA.empty_table()

    def read_examples(self, targets: Targets) -> Examples | None:
        """The text of targets, or None where none was written. Raises `UserError` where it is damaged."""
        if EXAMPLES_NAME not in self.listed:
            return None
        examples = self._rows_of(EXAMPLES_NAME, Examples, self._read(EXAMPLES_NAME, EXAMPLES_SCHEMA))
        try:
            examples.check(targets.target_id, n_long=self.manifest.n_long, n_far=self.manifest.n_far)
        except ValueError as error:
            raise self._damaged(EXAMPLES_NAME, first_line(error)) from error
        return examples

    def write(self, name: str, table: pa.Table) -> None:
        """Write a file and list it: both or, if the process dies, neither as far as readers know."""
        assert self.has_checksums
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        with atomic_path(self.folder / name) as temporary:
            temporary.write_bytes(data)
        try:
            self._list({**self.listed, name: _identity(data)})
        except BaseException:
            remove(self.folder / name)
            raise

    def write_part(self, table: pa.Table) -> None:
        """Write rows of selections as one further part."""
        numbers = [_number(name) for name in {*self._present(), *self.listed} if _PART.fullmatch(name)]
        self.write(f"{SELECTIONS_NAME}/part-{max(numbers, default=-1) + 1:05d}.parquet", table)

    def remedy(self, name: str) -> str:
        """What to do where a file is damaged."""
        if not self.has_checksums:
            return _ELSEWHERE
        if name == TARGETS_NAME:
            return _ANEW
        return "remove that file and run the same scripts/influence.py command again"

    def _list(self, listed: dict[str, Json]) -> None:
        write_json(self.folder / CHECKSUMS_NAME, listed)
        self.listed = listed

    def _present(self) -> set[str]:
        """Names of the files of ours that stand in the folder, listed or not."""
        parts = {
            f"{SELECTIONS_NAME}/{path.name}"
            for path in (self.folder / SELECTIONS_NAME).glob("part-*.parquet")
        }
        single = {name for name in (TARGETS_NAME, EXAMPLES_NAME) if (self.folder / name).exists()}
        return {name for name in parts if _PART.fullmatch(name)} | single

    def _read_checksums(self) -> dict[str, Json]:
        path, remedy = self.folder / CHECKSUMS_NAME, f"restore it, or {_ANEW}"
        found: dict[str, Json] = read_json(path, remedy)
        unknown = [
            name for name in found if not (name in (TARGETS_NAME, EXAMPLES_NAME) or _PART.fullmatch(name))
        ]
        odd = f"it names {unknown[0]!r}" if unknown else misfit(found, {...: {"bytes": int, "sha256": str}})
        if not odd:
            # a kill leaves the last part without an entry, never one before it
            last = max((_number(name) for name in found if _PART.fullmatch(name)), default=-1)
            unlisted = filter(_PART.fullmatch, self._present() - found.keys())
            odd = next((f"it lacks {name}" for name in unlisted if _number(name) < last), None)
        if odd:
            raise UserError(f"{path} is damaged ({odd}); {remedy}")
        return found

    def _read(self, name: str, schema: pa.Schema) -> pa.Table:
        """The table of a file, whose bytes are checked before they are parsed."""
        path = self.folder / name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            again = _ANEW if name == TARGETS_NAME else "run the same scripts/influence.py command again"
            raise UserError(f"{path} is missing, though it was written; {again}") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}); {self.remedy(name)}") from error
        if self.has_checksums and _identity(data) != self.listed[name]:
            raise self._damaged(name, f"it does not fit {CHECKSUMS_NAME}")
        try:
            table = pq.ParquetFile(pa.BufferReader(data)).read()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path} cannot be read ({first_line(error)}); {self.remedy(name)}") from error
        if not table.schema.equals(schema):
            columns = ", ".join(table.column_names)
            raise UserError(f"{path} has columns {columns}, not those of a record; {self.remedy(name)}")
        return table

    def _rows_of(self, name: str, kind: type[_Rows], table: pa.Table) -> _Rows:
        try:
            return kind.from_table(table)
        except ValueError as error:
            raise self._damaged(name, first_line(error)) from error

    def _damaged(self, name: str, what: str) -> UserError:
        return UserError(f"{self.folder / name} is damaged ({what}); {self.remedy(name)}")


def _identity(data: bytes) -> Json:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _number(name: str) -> int:
    match = _PART.fullmatch(name)
    assert match
    return int(match[1])
