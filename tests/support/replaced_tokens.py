"""What every measurement of a corpus does with held-out tokens that were replaced by others of equal size."""

from __future__ import annotations

from pathlib import Path


def change_one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4] ^= 1
    path.write_bytes(data)
