"""Records of one measurement: the rows that `scripts/influence.py` writes and every figure is made from.

A records folder is self-contained; nothing here needs the model or torch:

    manifest.json                  what was measured on what, with which settings (`Manifest`)
    targets.parquet                a row per sampled target (`Targets`)
    examples.parquet               the text of targets over tau (`Examples`), for people to read
    selections/part-00000.parquet  a row per (target over tau, selector, far context) (`SelectionRow`)
    checksums.json                 size and SHA-256 of the three above (`analysis.records.files`)

Parts are written whole and never changed, so a killed run loses at most its last part. Whoever writes holds the lock of
the folder (`olmo_sparsity.util.lock`); readers need none.
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

from analysis.records.files import CHECKSUMS_NAME, EXAMPLES_NAME, SELECTIONS_NAME, TARGETS_NAME, RecordFiles
from analysis.records.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    setting_differences,
)
from analysis.records.schema import FAR_CONTEXTS, SELECTIONS_SCHEMA, Examples, SelectionRow, Targets
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import remove

log = logging.getLogger(__name__)

FILES = (SELECTIONS_NAME, EXAMPLES_NAME, TARGETS_NAME, MANIFEST_NAME, CHECKSUMS_NAME)
"""All of a records folder, in the order in which they are removed: what a kill leaves of them is understood."""


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

    def _remove(self) -> None:
        for name in FILES:
            remove(self.folder / name)

    def _begin(self, manifest: Manifest) -> tuple[Manifest, RecordFiles]:
        if (self.folder / SELECTIONS_NAME).exists() or (self.folder / TARGETS_NAME).exists():
            raise UserError(
                f"{self.folder} has records but no {MANIFEST_NAME}; give another --out or remove it"
            )
        manifest = replace(manifest, complete=False, version=FORMAT_VERSION)
        files = RecordFiles.begin(self.folder, manifest)
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
        if not files.has_checksums:
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

    @property
    def targets(self) -> Targets | None:
        """The targets that an earlier run wrote, or None: nothing needs to be sampled or scored again."""
        return self.files.read_targets()

    def write_targets(self, targets: Targets) -> None:
        """Write `targets.parquet`; where it is there already it must hold the same targets, and is kept."""
        written = self.targets
        if written is None:
            self.files.write(TARGETS_NAME, targets.to_table())
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
        return EXAMPLES_NAME in self.files.listed

    def write_examples(self, examples: Examples) -> None:
        """Write `examples.parquet`, unless it is there."""
        if not self.has_examples:
            self.files.write(EXAMPLES_NAME, examples.to_table())

    def finished_targets(self) -> set[int]:
        """Ids of the targets that have a row for every selector and far context."""
        targets = self.targets
        return set() if targets is None else _finished(self.files.read_parts(targets), self.manifest)

    def append(self, rows: Sequence[SelectionRow]) -> None:
        """Write ``rows`` as one further part: all of them or, if the process dies, none."""
        if not rows:
            return
        for row in rows:
            self._check(row)
        columns = {name: [getattr(row, name) for row in rows] for name in SELECTIONS_SCHEMA.names}
        self.files.write_part(pa.Table.from_pydict(columns, schema=SELECTIONS_SCHEMA))

    def _check(self, row: SelectionRow) -> None:
        what = f"row of target {row.target_id}, {row.selector}, {row.far_context}"
        if row.selector not in self.manifest.selectors or row.far_context not in FAR_CONTEXTS:
            raise ValueError(f"{what}: not among {self.manifest.selectors} and {FAR_CONTEXTS}")
        selected = np.asarray(row.selected)
        if selected.shape != (self.manifest.k_max,) or len(np.unique(selected)) != len(selected):
            raise ValueError(
                f"{what}: {self.manifest.k_max} different tokens must be selected, not {row.selected}"
            )
        if selected.min() < 0 or selected.max() >= self.manifest.n_far:
            raise ValueError(f"{what}: a selected token is not in the far context: {row.selected}")
        if np.shape(row.influence) != selected.shape or np.shape(row.loss_nats) != (len(self.manifest.ks),):
            raise ValueError(f"{what}: one influence per selected token and one loss per k are needed")
        if not np.isfinite(row.loss_nats).all():
            raise ValueError(f"{what}: a loss is not finite: {row.loss_nats}")

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
    files = RecordFiles(folder, manifest)
    again = (
        "run the same scripts/influence.py command again to finish it"
        if files.has_checksums
        else "measure again into another --out"
    )
    targets = files.read_targets()
    if targets is None:
        raise UserError(f"{folder} has no targets yet ({TARGETS_NAME} is missing); {again}")
    parts = files.read_parts(targets)
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
    arrays = _arrange(parts, manifest, targets.target_id[over])
    return Records(folder, manifest, targets, over, **arrays, examples=files.read_examples(targets))


def _arrange(parts: pa.Table, manifest: Manifest, ids: np.ndarray) -> dict[str, dict]:
    """Rows of all parts as arrays in the order of ``ids``; of rows written twice the later one counts."""
    widths = {"loss_nats": len(manifest.ks), "selected": manifest.k_max, "influence": manifest.k_max}
    flat = {
        name: pc.list_flatten(parts[name]).to_numpy().reshape(-1, width) for name, width in widths.items()
    }
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
    unique = keys.group_by(keys.column_names).aggregate([])
    counts = unique.group_by("target_id").aggregate([([], "count_all")])
    whole = pc.equal(counts["count_all"], len(manifest.selectors) * len(FAR_CONTEXTS))
    return set(counts.filter(whole)["target_id"].to_pylist())


def _missing(files: RecordFiles) -> set[int]:
    """Ids of the targets over tau that lack rows. Raises `UserError` where any file is damaged."""
    targets = files.read_targets()
    assert targets is not None, "targets are written before anything is finished"
    files.read_examples(targets)
    over = targets.target_id[targets.over(files.manifest.tau_nats)]
    return set(over.tolist()) - _finished(files.read_parts(targets), files.manifest)
