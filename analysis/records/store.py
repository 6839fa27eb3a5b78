"""Records of one measurement: the rows that `scripts/influence.py` writes and every figure is made from.

A records folder is self-contained; nothing here needs the model or torch:

    manifest.json                  what was measured on what, with which settings (`Manifest`)
    targets.parquet                a row per sampled target (`Targets`)
    examples.parquet               the text of targets over tau (`Examples`), for people to read
    selections/part-00000.parquet  a row per (target over tau, selector, far context) (`SelectionRow`)
    checksums.json                 size and SHA-256 of the three above

Parts are written whole and never changed, so a killed run loses at most its last part. `checksums.json` is written
anew after each file; a file without an entry was left by a killed writer and is ignored. Records of format 2 have
no checksums: there, what stands in the folder is read. Whoever writes holds the lock of the folder
(`olmo_sparsity.util.lock`); readers need none.
Shapes: n sampled targets, m targets over tau whose selections are finished, K values of k, k_max the largest of them.
Losses are in nats.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.records.schema import (
    EXAMPLES_SCHEMA,
    FORMAT_VERSION,
    FURTHER_SELECTIONS,
    FURTHER_TARGETS,
    MANIFEST_NAME,
    SAME_GROUP,
    SELECTIONS_SCHEMA,
    WITHOUT_CHECKSUMS,
    WITHOUT_FURTHER,
    Examples,
    Manifest,
    SelectionRow,
    Targets,
    check_selections,
    read_manifest,
    selection_widths,
    setting_differences,
    targets_schema,
)
from olmo_sparsity.util.errors import UserError, first_line
from olmo_sparsity.util.files import atomic_path, read_json, remove, write_json
from olmo_sparsity.util.result_files import Json, misfit

log = logging.getLogger(__name__)

TARGETS_NAME = "targets.parquet"
SELECTIONS_NAME = "selections"
EXAMPLES_NAME = "examples.parquet"
CHECKSUMS_NAME = "checksums.json"

_PART = re.compile(rf"{SELECTIONS_NAME}/part-(\d{{5,9}})\.parquet")
_ANEW = "measure again with scripts/influence.py --overwrite"
_ELSEWHERE = "measure again into another --out, or with --overwrite"


class RecordFiles:
    """The files of one records folder."""

    def __init__(self, folder: str | Path, manifest: Manifest):
        """Raises `UserError` where `checksums.json` is missing or damaged."""
        self.folder = Path(folder)
        self.manifest = manifest
        self.has_checksums = manifest.version > WITHOUT_CHECKSUMS
        self.can_be_gone_on_with = manifest.version == FORMAT_VERSION
        self.listed = self._read_checksums() if self.has_checksums else {name: {} for name in self._present()}

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
        table = self._read(TARGETS_NAME, targets_schema(self.manifest.version), FURTHER_TARGETS)
        with self._damage_of(TARGETS_NAME):
            targets = Targets.from_table(table)
        if SAME_GROUP in self.manifest.far_contexts and targets.same_group_document is None:
            raise self._damaged(TARGETS_NAME, "it lacks same_group_document")
        return targets

    def read_parts(self, targets: Targets) -> pa.Table:
        """The rows of all parts. Raises `UserError` where one is damaged or does not fit manifest and targets."""
        tables: list[pa.Table] = []
        for name in self.parts:
            table = self._read(name, SELECTIONS_SCHEMA, FURTHER_SELECTIONS)
            with self._damage_of(name):
                check_selections(table, targets.target_id, self.manifest)
            if tables and table.column_names != tables[0].column_names:
                raise self._damaged(name, f"it has other columns than {self.parts[0]}")
            tables.append(table)
        return pa.concat_tables(tables) if tables else SELECTIONS_SCHEMA.empty_table()

    def read_examples(self, targets: Targets) -> Examples | None:
        """The text of targets, or None where none was written. Raises `UserError` where it is damaged."""
        if EXAMPLES_NAME not in self.listed:
            return None
        table = self._read(EXAMPLES_NAME, EXAMPLES_SCHEMA)
        with self._damage_of(EXAMPLES_NAME):
            examples = Examples.from_table(table)
            examples.check(targets.target_id, self.manifest)
        return examples

    def write(self, name: str, table: pa.Table) -> None:
        """Write a file and list it: both or, if the process dies, neither as far as readers know."""
        assert self.can_be_gone_on_with
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
        if not self.can_be_gone_on_with:
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

    def _read(self, name: str, schema: pa.Schema, further: Sequence[pa.Field] = ()) -> pa.Table:
        """The table of a file, whose bytes are checked before they are parsed; it may have ``further`` columns."""
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
        if self.manifest.version > WITHOUT_FURTHER:
            schema = pa.schema([*schema, *(each for each in further if each.name in table.column_names)])
        if not table.schema.equals(schema):
            columns = ", ".join(table.column_names)
            raise UserError(f"{path} has columns {columns}, not those of a record; {self.remedy(name)}")
        return table

    @contextmanager
    def _damage_of(self, name: str) -> Iterator[None]:
        """What does not fit in a file, a `ValueError`, is damage of that file."""
        try:
            yield
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


FILES = (SELECTIONS_NAME, EXAMPLES_NAME, TARGETS_NAME, MANIFEST_NAME, CHECKSUMS_NAME)
"""All of a records folder, in the order in which they are removed, so that what a kill leaves is understood."""


def refuse_other_checksums(folder: Path) -> None:
    """Raise `UserError` for a folder whose checksums are of other files than records, as a checkpoint's are."""
    path = folder / CHECKSUMS_NAME
    listed = read_json(path, "give another --out") if path.exists() else {}
    if odd := [name for name in listed if name.partition("/")[0] not in FILES]:
        raise UserError(
            f"{folder} is no place for records: its {path.name} is that of {odd[0]}; give another --out"
        )


class RecordWriter:
    """Writes one records folder, or goes on with one that an earlier run left unfinished.

    Args:
        folder: where the records go.
        manifest: what is about to be measured; ``writer.manifest`` is what stands in the folder.
        overwrite: remove records that are already there, whatever their settings.

    Raises `UserError` if the folder has records of other settings or an older format, or is something else.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, overwrite: bool = False):
        self.folder = Path(folder)
        path = self.folder / MANIFEST_NAME
        if overwrite and path.exists():
            read_manifest(path)  # refuses: that folder is something else, and nothing of it is deleted
            self._remove()
        self.manifest, self.files = self._continue(manifest) if path.exists() else self._begin(manifest)
        self.files.remove_unlisted()
        self.targets = self.files.read_targets()
        """Those that an earlier run wrote, or None: nothing needs to be sampled or scored again."""

    def _remove(self) -> None:
        for name in FILES:
            remove(self.folder / name)

    def _begin(self, manifest: Manifest) -> tuple[Manifest, RecordFiles]:
        if (self.folder / SELECTIONS_NAME).exists() or (self.folder / TARGETS_NAME).exists():
            raise UserError(
                f"{self.folder} has records but no {MANIFEST_NAME}; give another --out or remove it"
            )
        refuse_other_checksums(self.folder)
        manifest = replace(manifest, complete=False, version=FORMAT_VERSION)
        write_json(self.folder / CHECKSUMS_NAME, {})
        files = RecordFiles(self.folder, manifest)
        manifest.save(self.folder)
        return manifest, files

    def _continue(self, manifest: Manifest) -> tuple[Manifest, RecordFiles]:
        old = Manifest.load(self.folder)
        if old.fingerprint != manifest.fingerprint:
            raise UserError(
                f"{self.folder} was measured with other settings: {setting_differences(old, manifest)}; "
                "give another --out, or --overwrite to start anew"
            )
        if (old.commit, old.versions) != (manifest.commit, manifest.versions):
            log.warning("%s was begun with another commit or other library versions", self.folder)
        files = RecordFiles(self.folder, old)
        lost = files.lost
        if TARGETS_NAME in lost and files.parts:
            files.read_targets()  # refuses
        # a part may have been removed since, as the remedy for a damaged one says
        if old.complete and not lost and TARGETS_NAME in files.listed and not _missing(files):
            return old, files
        if not files.can_be_gone_on_with:
            raise UserError(
                f"{self.folder} has unfinished records of format version {old.version}, which this code reads but does "
                "not go on with; measure into another --out, or with --overwrite"
            )
        if old.complete:
            old = replace(old, complete=False)
            old.save(self.folder)
        if lost:
            files.forget(lost)
        return old, files

    def write_targets(self, targets: Targets) -> None:
        """Write `targets.parquet`."""
        assert self.targets is None
        self.files.write(TARGETS_NAME, targets.to_table())
        self.targets = targets

    @property
    def has_examples(self) -> bool:
        """Whether an earlier run wrote `examples.parquet`."""
        return EXAMPLES_NAME in self.files.listed

    def write_examples(self, examples: Examples) -> None:
        """Write `examples.parquet`."""
        self.files.write(EXAMPLES_NAME, examples.to_table())

    def finished_targets(self) -> set[int]:
        """Ids of the targets that have a row for every selector and each of their far contexts."""
        if self.targets is None:
            return set()
        return _finished(self.files.read_parts(self.targets), self.manifest, self.targets)

    def append(self, rows: Sequence[SelectionRow]) -> None:
        """Write ``rows`` as one further part: all of them or, if the process dies, none.

        Raises `ValueError` for rows that are not of this measurement, see `check_selections`.
        """
        if not rows:
            return
        assert self.targets is not None, "targets are written before selections"
        columns = {name: [getattr(row, name) for row in rows] for name in SELECTIONS_SCHEMA.names}
        further = [each for each in FURTHER_SELECTIONS if each.name in rows[0].further]
        columns |= {each.name: [row.further[each.name] for row in rows] for each in further}
        table = pa.Table.from_pydict(columns, schema=pa.schema([*SELECTIONS_SCHEMA, *further]))
        check_selections(table, self.targets.target_id, self.manifest)
        self.files.write_part(table)

    def discard(self) -> None:
        """Remove records in which nothing was selected, so that the next try may have other settings."""
        assert not self.files.parts, "finished selections are never discarded"
        self._remove()

    def finish(self) -> None:
        """Mark the folder complete. Raises `ValueError` while a target over tau lacks rows."""
        if missing := _missing(self.files):
            raise ValueError(
                f"{len(missing)} targets over tau lack rows in {self.folder}, e.g. {min(missing)}"
            )
        finished = replace(self.manifest, complete=True)
        finished.save(self.folder)
        self.manifest = finished


@dataclass(frozen=True)
class Records:
    """One records folder in memory. Dictionaries are keyed by selector, then by one of the manifest's far contexts.

    Where a target has no such far context there are no tokens (-1), and all numbers are NaN.
    """

    folder: Path
    manifest: Manifest
    targets: Targets
    """All sampled targets."""
    over: np.ndarray
    """Indices into ``targets``, ascending, of those over tau with finished selections, (m,)."""
    loss_nats: dict[str, dict[str, np.ndarray]]
    """L_k, float64 (m, K); row i belongs to target ``over[i]``."""
    selected: dict[str, dict[str, np.ndarray]]
    """Position ids of the selected tokens, most influential first, int32 (m, k_max)."""
    influence: dict[str, dict[str, np.ndarray]]
    """Their influence, float32 (m, k_max), in nats but for the selector attention (share of the attention)."""
    examples: Examples | None = None
    """Text of targets over tau, finished or not, for people to read; None where none was written."""
    further: dict[str, dict[str, dict[str, np.ndarray]]] = field(default_factory=dict)
    """Columns of `FURTHER_SELECTIONS` that were measured, by name: arrays (m, …) as those above."""
    trainings: tuple[Records, ...] = ()
    """What this was joined from (`analysis.records.trainings`); nothing where it is of one training."""

    @property
    def over_tau(self) -> np.ndarray:
        """Indices into ``targets``, ascending, of all over tau, finished or not."""
        return self.targets.over(self.manifest.tau_nats)

    @property
    def training(self) -> np.ndarray | None:
        """Number of each target's training, (n,); None where there is one."""
        sizes = [len(each.targets) for each in self.trainings]
        return np.repeat(np.arange(len(sizes)), sizes) if sizes else None


def load_records(folder: str | Path) -> Records:
    """Read a records folder.

    An unfinished one is read as far as it goes, with a warning. Raises `UserError` where nothing can be read
    or something is damaged.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    files = RecordFiles(folder, manifest)
    again = (
        "run the same scripts/influence.py command again to finish it"
        if files.can_be_gone_on_with
        else "measure again into another --out"
    )
    targets = files.read_targets()
    if targets is None:
        raise UserError(f"{folder} has no targets yet ({TARGETS_NAME} is missing); {again}")
    parts = files.read_parts(targets)
    wanted = targets.over(manifest.tau_nats)
    finished = np.fromiter(_finished(parts, manifest, targets), dtype=np.int64)
    over = wanted[np.isin(targets.target_id[wanted], finished)]
    if len(over) < len(wanted):
        if manifest.complete:
            raise UserError(
                f"{folder} is damaged: {len(wanted) - len(over)} of {len(wanted)} targets over tau lack "
                f"rows, though it was finished; {again}"
            )
        if len(over) == 0:
            raise UserError(f"no target of {folder} is finished yet; {again}")
    if not manifest.complete:
        log.warning("%s is unfinished: %d of %d targets over tau; %s", folder, len(over), len(wanted), again)
    arrays = _arrange(parts, manifest, targets.target_id[over])
    return Records(folder, manifest, targets, over, **arrays, examples=files.read_examples(targets))


def _arrange(parts: pa.Table, manifest: Manifest, ids: np.ndarray) -> dict[str, Any]:
    """Rows of all parts as arrays in the order of ``ids``; of rows written twice the later one counts."""
    widths = selection_widths(manifest)
    further = [name for name in FURTHER_SELECTIONS.names if name in parts.column_names]
    flat = {
        name: pc.list_flatten(parts[name]).to_numpy().reshape(len(parts), widths[name])
        if name in widths
        else parts[name].to_numpy()
        for name in ("loss_nats", "selected", "influence", *further)
    }
    row_ids = parts["target_id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    result: dict[str, Any] = {name: {selector: {} for selector in manifest.selectors} for name in flat}
    for selector in manifest.selectors:
        for context in manifest.far_contexts:
            mask = pc.and_(pc.equal(parts["selector"], selector), pc.equal(parts["far_context"], context))
            rows = np.flatnonzero(mask.to_numpy())
            rows = rows[np.isin(row_ids[rows], ids)]
            row_of = np.full(len(ids), -1)
            row_of[order[np.searchsorted(ids[order], row_ids[rows])]] = rows  # the last assignment stays
            for name in flat:
                values = flat[name][row_of]
                values[row_of < 0] = -1 if name == "selected" else np.nan
                result[name][selector][context] = values
    result["further"] = {name: result.pop(name) for name in further}
    return result


def _finished(parts: pa.Table, manifest: Manifest, targets: Targets) -> set[int]:
    keys = parts.select(["target_id", "selector", "far_context"])
    unique = keys.group_by(keys.column_names).aggregate([])
    counts = unique.group_by("target_id").aggregate([([], "count_all")])
    has = np.sum([targets.having(context) for context in manifest.far_contexts], axis=0)
    due = dict(zip(targets.target_id.tolist(), (has * len(manifest.selectors)).tolist(), strict=True))
    rows = zip(counts["target_id"].to_pylist(), counts["count_all"].to_pylist(), strict=True)
    return {target for target, count in rows if count == due[target]}


def _missing(files: RecordFiles) -> set[int]:
    """Ids of the targets over tau that lack rows. Raises `UserError` where any file is damaged."""
    targets = files.read_targets()
    assert targets is not None, "targets are written before anything is finished"
    files.read_examples(targets)
    over = targets.target_id[targets.over(files.manifest.tau_nats)]
    return set(over.tolist()) - _finished(files.read_parts(targets), files.manifest, targets)
