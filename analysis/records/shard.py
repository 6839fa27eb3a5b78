"""One of n parts of a measurement, so that n jobs can share it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.shard import Shard

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

    @property
    def options(self) -> dict[str, str]:
        """What the manifest of a shard holds besides that of the whole measurement."""
        return {"shard": str(self)}

    def check(self, targets: int, per_block: int) -> None:
        """Raise `UserError` where there are fewer blocks than shards: some would have nothing to do."""
        if self.count > (blocks := -(-targets // per_block)):
            raise UserError(
                f"{targets:,} targets make {blocks} blocks of {per_block}, too few for {self.count} shards; "
                f"take at most {blocks}, or raise --targets"
            )
