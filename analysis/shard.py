"""One of n parts of a measurement, so that n jobs can share it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from olmo_sparsity.errors import UserError

_FOLDER = re.compile(r"shard-(\d+)-of-(\d+)$")


@dataclass(frozen=True, order=True)
class Shard:
    """Shard ``number`` of ``count``. Targets are dealt out in blocks, as cards are: block b to shard b mod count."""

    number: int
    """1 to ``count``."""
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Shard | None:
        """The shard of ``i/n``; None for 1/1, which is everything."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard is i/n with i from 1 to n, such as 3/8, not {text!r}")
        return cls(int(match[1]), int(match[2])) if match[2] != "1" else None

    @classmethod
    def of_folder(cls, path: Path) -> Shard | None:
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

    def takes(self, block: int) -> bool:
        """Whether this shard measures that block, counted from 0."""
        return block % self.count == self.number - 1

    def check(self, targets: int, per_block: int) -> None:
        """Raise `UserError` where there are fewer blocks than shards: some would have nothing to do."""
        if self.count > (blocks := -(-targets // per_block)):
            raise UserError(
                f"{targets:,} targets make {blocks} blocks of {per_block}, too few for {self.count} shards; "
                f"take at most {blocks}, or raise --targets"
            )
