"""Shards of one measurement, so that n jobs can share it, and how they are put together as one ordinary folder."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.records.schema import (
    MANIFEST_NAME,
    Examples,
    Manifest,
    Targets,
    setting_differences,
)
from analysis.records.store import (
    FILES,
    RecordFiles,
    Records,
    RecordWriter,
    load_records,
    refuse_other_checksums,
)
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import remove
from olmo_sparsity.util.lock import folder_lock
from olmo_sparsity.util.shard import Shard

log = logging.getLogger(__name__)


def merge_records(out: str | Path) -> Path:
    """Merge the shards beneath ``out`` into ``out`` itself and return it; the shards stay.

    ``out`` is a records folder from the moment its manifest is renamed into place, which comes last: a killed merge
    leaves none, and the same call does it again. A merged folder is left as it is. Raises `UserError` that names every
    shard which is missing or unfinished, and where settings differ or another process writes to ``out``.
    """
    out = Path(out)
    shards = [_load_shard(shard, out) for shard in _all_shards(out)]
    manifest = _common_manifest(shards)
    with folder_lock(out):
        if (out / MANIFEST_NAME).exists():
            return _leave_as_it_is(out, manifest)
        return _merge(out, shards, manifest)


def _merge(out: Path, shards: list[Records], manifest: Manifest) -> Path:
    targets = _merged_targets(out, shards)
    if len(targets.over(manifest.tau_nats)) == 0:
        raise UserError(
            f"none of {len(targets):,} targets gains more than tau = {manifest.tau_nats} nats from the long context; "
            "measure again with a lower --tau, more --targets, or a model trained for longer"
        )
    refuse_other_checksums(out)
    temporary = out / ".merging"
    remove(temporary)  # of a killed merge
    writer = RecordWriter(temporary, manifest)
    writer.write_targets(targets)
    writer.write_examples(_merged_examples(shards))
    parts = [RecordFiles(each.folder, each.manifest).read_parts(each.targets) for each in shards]
    writer.files.write_part(pa.concat_tables([part for part in parts if len(part)]))
    writer.finish()  # refuses while a target over tau lacks rows
    # the manifest last: without it beside them nobody reads the others
    for name in sorted(FILES, key=MANIFEST_NAME.__eq__):
        remove(out / name)
        os.replace(temporary / name, out / name)
    temporary.rmdir()
    return out


def _all_shards(out: Path) -> list[MeasurementShard]:
    """The shards that ``out`` should hold, by what their folders say about their number."""
    found = {shard for path in out.glob("shard-*-of-*") if (shard := MeasurementShard.of_folder(path))}
    counts = sorted({shard.count for shard in found})
    if not counts:
        raise UserError(
            f"{out} has no shards to merge; measure them with scripts/influence.py --shard 1/n … n/n"
        )
    if len(counts) > 1:
        raise UserError(
            f"{out} has shards of {' and of '.join(map(str, counts))}; remove the folders of all but one division"
        )
    shards = [MeasurementShard(number, counts[0]) for number in range(1, counts[0] + 1)]
    absent = [shard for shard in shards if not (shard.folder(out) / MANIFEST_NAME).is_file()]
    unfinished = [
        shard for shard in shards if shard not in absent and not Manifest.load(shard.folder(out)).complete
    ]
    if absent or unfinished:
        parts = [
            f"{what} {'shards' if len(some) > 1 else 'shard'} {', '.join(map(str, some))}"
            for what, some in (("missing", absent), ("unfinished", unfinished))
            if some
        ]
        raise UserError(
            f"{out} cannot be merged yet: {'; '.join(parts)}; run the same scripts/influence.py command with "
            f"--shard {min(absent + unfinished)}, and so on"
        )
    return shards


def _load_shard(shard: MeasurementShard, out: Path) -> Records:
    records = load_records(shard.folder(out))
    if records.manifest.options.get("shard") != str(shard):
        raise UserError(
            f"{records.folder} holds shard {records.manifest.options.get('shard')}, not {shard}; was it renamed?"
        )
    if not records.manifest.complete:
        raise UserError(f"{records.folder} is being measured again; merge when that is finished")
    return records


def _common_manifest(shards: list[Records]) -> Manifest:
    """The manifest that an unsharded run would have; refused where settings differ in more than the shard."""
    manifests = [
        replace(
            records.manifest,
            options={name: value for name, value in records.manifest.options.items() if name != "shard"},
        )
        for records in shards
    ]
    first = manifests[0]
    for records, other in zip(shards, manifests, strict=True):
        if other.fingerprint != first.fingerprint:
            raise UserError(
                f"{records.folder} was measured with other settings than {shards[0].folder}: "
                f"{setting_differences(first, other)}; measure one of them again with --overwrite"
            )
        if (other.commit, other.versions) != (first.commit, first.versions):
            log.warning("%s was measured with another commit or other library versions", records.folder)
    return replace(first, complete=False)


def _leave_as_it_is(out: Path, manifest: Manifest) -> Path:
    """``out`` has records: those of this measurement, complete, or it is not for us to touch."""
    there = Manifest.load(out)
    if there.fingerprint != manifest.fingerprint:
        raise UserError(
            f"{out} has records of another measurement than its shards: {setting_differences(there, manifest)}; "
            f"remove {out / MANIFEST_NAME} to merge anew"
        )
    if not there.complete:
        raise UserError(
            f"{out} has unfinished records of a run without --shard; finish that, or remove {out / MANIFEST_NAME}"
        )
    load_records(out)  # refuses a damaged one
    log.info("%s is merged already", out)
    return out


def _merged_targets(out: Path, shards: list[Records]) -> Targets:
    """The targets of all shards in the order of an unsharded run, none missing and none twice."""
    targets = Targets.joined([records.targets for records in shards])
    targets = targets.take(np.argsort(targets.target_id, kind="stable"))
    if not np.array_equal(targets.target_id, np.arange(len(targets))):
        raise UserError(
            f"the shards of {out} do not hold every target once; measure them again with --overwrite"
        )
    return targets


def _merged_examples(shards: list[Records]) -> Examples:
    """The examples of all shards in the order of their targets, as an unsharded run writes them."""
    tables = [records.examples.to_table() for records in shards if records.examples is not None]
    return Examples.from_table(pa.concat_tables(tables).sort_by("target_id"))


_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)$")


@dataclass(frozen=True, order=True)
class MeasurementShard(Shard):
    """A share of the blocks of targets, with a records folder of its own."""

    @classmethod
    def of_folder(cls, path: Path) -> MeasurementShard | None:
        """The shard whose records are in a folder of this name; None for any other name."""
        match = _FOLDER.match(path.name)
        return cls(int(match[1]), int(match[2])) if match else None

    def folder(self, out: str | Path) -> Path:
        """Where this shard's records go: a folder beneath that of the whole measurement."""
        return Path(out) / f"shard-{self.number}-of-{self.count}"

    def check(self, targets: int, per_block: int) -> None:
        """Raise `UserError` where there are fewer blocks than shards: some would have nothing to do."""
        if self.count > (blocks := -(-targets // per_block)):
            raise UserError(
                f"{targets:,} targets make {blocks} blocks of {per_block}, too few for {self.count} shards; "
                f"take at most {blocks}, or raise --targets"
            )
