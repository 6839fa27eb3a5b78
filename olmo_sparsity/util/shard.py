"""One of n parts of a long job, as ``--shard i/n`` names it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from olmo_sparsity.util.errors import UserError


@dataclass(frozen=True, order=True)
class Shard:
    """Share ``number`` (from 1) of ``count`` of the units of a job, dealt out as cards are."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "3/8". Raises `UserError` for anything that is no such share."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text.strip())
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard is i/n with i from 1 to n, such as 3/8, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    def has(self, index: int) -> bool:
        """Whether unit ``index`` (from 0) is in this share."""
        return index % self.count == self.number - 1
