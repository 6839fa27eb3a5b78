"""Records of one measurement: the rows that `scripts/influence.py` writes and every figure is made from.

A records folder is self-contained; nothing here needs the model or torch:

    manifest.json                  what was measured on what, with which settings (`Manifest`)
    targets.parquet                a row per sampled target (`Targets`)
    examples.parquet               the text of targets over tau (`Examples`), for people to read
    selections/part-00000.parquet  a row per (target over tau, selector, far context) (`SelectionRow`)

Parts are written whole and never changed, so a killed run loses at most its last part.
Shapes: n sampled targets, m targets over tau whose selections are finished, K values of k,
k_max the largest of them, N long and M short context length. Losses are in nats.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from analysis.manifest import MANIFEST_NAME, Manifest, read_manifest, setting_differences
from analysis.rows import (
    EXAMPLES_SCHEMA,
    FAR_CONTEXTS,
    SELECTIONS_SCHEMA,
    TARGETS_SCHEMA,
    Examples,
    SelectionRow,
    Targets,
)
from olmo_sparsity.errors import UserError
from olmo_sparsity.files import atomic_path, remove

log = logging.getLogger(__name__)

TARGETS_NAME = "targets.parquet"
SELECTIONS_NAME = "selections"
EXAMPLES_NAME = "examples.parquet"


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
        self.selections = self.folder / SELECTIONS_NAME
        path = self.folder / MANIFEST_NAME
        if overwrite and path.exists():
            read_manifest(path)  # refuses: that folder is something else, and nothing of it is deleted
            remove(self.selections)
            remove(self.folder / EXAMPLES_NAME)
            remove(self.folder / TARGETS_NAME)
            remove(path)
        self.manifest = self._continue(manifest) if path.exists() else self._begin(manifest)
        for leftover in [*self.folder.glob(".*.tmp-*"), *self.selections.glob(".*.tmp-*")]:
            remove(leftover)  # of a killed writer

    def _begin(self, manifest: Manifest) -> Manifest:
        if self.selections.exists() or (self.folder / TARGETS_NAME).exists():
            raise UserError(
                f"{self.folder} has records but no {MANIFEST_NAME}; give another --out or remove it"
            )
        manifest = replace(manifest, complete=False)
        manifest.save(self.folder)
        return manifest

    def _continue(self, manifest: Manifest) -> Manifest:
        old = Manifest.load(self.folder)
        if old.fingerprint != manifest.fingerprint:
            raise UserError(
                f"{self.folder} was measured with other settings: {setting_differences(old, manifest)}; "
                "give another --out, or --overwrite to start anew"
            )
        if (old.commit, old.versions) != (manifest.commit, manifest.versions):
            log.warning("%s was begun with another commit or other library versions", self.folder)
        # a part may have been removed since, as the remedy for a damaged one says
        return replace(old, complete=old.complete and not _missing(self.folder, old))

    @property
    def targets(self) -> Targets | None:
        """The targets that an earlier run wrote, or None: nothing needs to be sampled or scored again."""
        return _read_targets(self.folder) if (self.folder / TARGETS_NAME).exists() else None

    def write_targets(self, targets: Targets) -> None:
        """Write `targets.parquet`; where it is there already it must hold the same targets, and is kept."""
        written = self.targets
        if written is None:
            _write_table(targets.to_table(), self.folder / TARGETS_NAME)
            return
        for name in ("target_id", "document", "position", "token", "placebo_document", "placebo_start"):
            if not np.array_equal(getattr(written, name), getattr(targets, name)):
                raise UserError(
                    f"{self.folder} has other targets than this run sampled ({name} differs); "
                    "give another --out, or --overwrite to start anew"
                )

    @property
    def has_examples(self) -> bool:
        """Whether an earlier run wrote `examples.parquet`."""
        return (self.folder / EXAMPLES_NAME).exists()

    def write_examples(self, examples: Examples) -> None:
        """Write `examples.parquet`, unless it is there."""
        if not self.has_examples:
            _write_table(examples.to_table(), self.folder / EXAMPLES_NAME)

    def finished_targets(self) -> set[int]:
        """Ids of the targets that have a row for every selector and far context."""
        return _finished(_read_parts(self.folder, ["target_id", "selector", "far_context"]), self.manifest)

    def append(self, rows: Sequence[SelectionRow]) -> None:
        """Write ``rows`` as one further part: all of them or, if the process dies, none."""
        if not rows:
            return
        for row in rows:
            self._check(row)
        columns = {name: [getattr(row, name) for row in rows] for name in SELECTIONS_SCHEMA.names}
        table = pa.Table.from_pydict(columns, schema=SELECTIONS_SCHEMA)
        numbers = [int(path.stem.rpartition("-")[2]) for path in _part_paths(self.folder)]
        _write_table(table, self.selections / f"part-{max(numbers, default=-1) + 1:05d}.parquet")

    def _check(self, row: SelectionRow) -> None:
        what = f"row of target {row.target_id}, {row.selector}, {row.far_context}"
        if row.selector not in self.manifest.selectors or row.far_context not in FAR_CONTEXTS:
            raise ValueError(f"{what}: not among {self.manifest.selectors} and {FAR_CONTEXTS}")
        selected = np.asarray(row.selected)
        if selected.shape != (self.manifest.k_max,) or len(np.unique(selected)) != len(selected):
            raise ValueError(
                f"{what}: {self.manifest.k_max} different tokens must be selected, not {row.selected}"
            )
        if selected.min() < 0 or selected.max() >= self.manifest.n_long - self.manifest.n_short:
            raise ValueError(f"{what}: a selected token is not in the far context: {row.selected}")
        if np.shape(row.influence) != selected.shape or np.shape(row.loss_nats) != (len(self.manifest.ks),):
            raise ValueError(f"{what}: one influence per selected token and one loss per k are needed")
        if not np.isfinite(row.loss_nats).all():
            raise ValueError(f"{what}: a loss is not finite: {row.loss_nats}")

    def discard(self) -> None:
        """Remove a folder in which nothing was selected, so that the next try may have other settings."""
        assert not _part_paths(self.folder), "finished selections are never discarded"
        for name in (EXAMPLES_NAME, TARGETS_NAME, MANIFEST_NAME):
            remove(self.folder / name)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def finish(self) -> None:
        """Mark the folder complete. Raises `ValueError` while a target over tau lacks rows."""
        if missing := _missing(self.folder, self.manifest):
            raise ValueError(
                f"{len(missing)} targets over tau lack rows in {self.folder}, e.g. {min(missing)}"
            )
        self.manifest = replace(self.manifest, complete=True)
        self.manifest.save(self.folder)


@dataclass(frozen=True)
class Records:
    """One records folder in memory. Dictionaries are keyed by selector, then by one of `FAR_CONTEXTS`."""

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


def load_records(folder: str | Path) -> Records:
    """Read a records folder.

    An unfinished one is read as far as it goes, with a warning. Raises `UserError` where nothing can be read
    or something is damaged.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    again = "run the same scripts/influence.py command again to finish it"
    if not (folder / TARGETS_NAME).exists():
        raise UserError(f"{folder} has no targets yet ({TARGETS_NAME} is missing); {again}")
    targets = _read_targets(folder)
    parts = _read_parts(folder, SELECTIONS_SCHEMA.names)
    wanted = targets.over(manifest.tau_nats)
    finished = np.fromiter(_finished(parts, manifest), dtype=np.int64)
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
    arrays = _arrange(parts, manifest, targets.target_id[over], folder)
    return Records(folder, manifest, targets, over, **arrays, examples=_read_examples(folder))


def _arrange(parts: pa.Table, manifest: Manifest, ids: np.ndarray, folder: Path) -> dict[str, dict]:
    """Rows of all parts as arrays in the order of ``ids``; of rows written twice the later one counts."""
    widths = {"loss_nats": len(manifest.ks), "selected": manifest.k_max, "influence": manifest.k_max}
    flat = {}
    for name, width in widths.items():
        if not pc.all(pc.equal(pc.list_value_length(parts[name]), width)).as_py() and len(parts):
            raise UserError(f"{folder}/{SELECTIONS_NAME} is damaged: {name} is not {width} long in every row")
        flat[name] = pc.list_flatten(parts[name]).to_numpy().reshape(-1, width)
    row_ids = parts["target_id"].to_numpy()
    order = np.argsort(ids, kind="stable")
    result: dict[str, dict] = {name: {} for name in widths}
    for selector in manifest.selectors:
        for name in widths:
            result[name][selector] = {}
        for context in FAR_CONTEXTS:
            mask = pc.and_(pc.equal(parts["selector"], selector), pc.equal(parts["far_context"], context))
            rows = np.flatnonzero(mask.to_numpy())
            rows = rows[np.isin(row_ids[rows], ids)]
            row_of = np.zeros(len(ids), dtype=np.int64)
            row_of[order[np.searchsorted(ids[order], row_ids[rows])]] = rows  # the last assignment stays
            for name in widths:
                result[name][selector][context] = flat[name][row_of]
    return result


def _finished(parts: pa.Table, manifest: Manifest) -> set[int]:
    keys = parts.select(["target_id", "selector", "far_context"])
    keys = keys.filter(pc.is_in(keys["selector"], pa.array(manifest.selectors)))
    unique = keys.group_by(keys.column_names).aggregate([])
    counts = unique.group_by("target_id").aggregate([([], "count_all")])
    whole = pc.equal(counts["count_all"], len(manifest.selectors) * len(FAR_CONTEXTS))
    return set(counts.filter(whole)["target_id"].to_pylist())


def _missing(folder: Path, manifest: Manifest) -> set[int]:
    """Ids of the targets over tau that lack rows."""
    targets = _read_targets(folder)
    keys = _read_parts(folder, ["target_id", "selector", "far_context"])
    return set(targets.target_id[targets.over(manifest.tau_nats)].tolist()) - _finished(keys, manifest)


def _part_paths(folder: Path) -> list[Path]:
    return sorted((folder / SELECTIONS_NAME).glob("part-*.parquet"))


def _read_parts(folder: Path, columns: list[str]) -> pa.Table:
    schema = pa.schema([SELECTIONS_SCHEMA.field(name) for name in columns])
    remedy = "remove that file and run the same scripts/influence.py command again"
    tables = [_read_table(path, SELECTIONS_SCHEMA, remedy).select(columns) for path in _part_paths(folder)]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _read_targets(folder: Path) -> Targets:
    path = folder / TARGETS_NAME
    remedy = "measure again with scripts/influence.py --overwrite"
    table = _read_table(path, TARGETS_SCHEMA, remedy)
    try:
        targets = Targets.from_table(table)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}") from error
    if not np.array_equal(table["gap_long_minus_short_nats"].to_numpy(), targets.gap_long_minus_short_nats):
        raise UserError(f"{path} is damaged (gap is not L_long - L_short); {remedy}")
    return targets


def _read_examples(folder: Path) -> Examples | None:
    path = folder / EXAMPLES_NAME
    if not path.exists():
        return None
    remedy = "remove that file and run the same scripts/influence.py command again"
    return Examples.from_table(_read_table(path, EXAMPLES_SCHEMA, remedy))


def _read_table(path: Path, schema: pa.Schema, remedy: str) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}); {remedy}") from error
    if not table.schema.equals(schema):
        raise UserError(
            f"{path} has columns {', '.join(table.column_names)}, not those of a record; {remedy}"
        )
    return table


def _write_table(table: pa.Table, path: Path) -> None:
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
