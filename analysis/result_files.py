"""Results as one JSON file in a folder, which says of what kind and version it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_sparsity.errors import UserError

Json = dict[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """A kind of result."""

    name: str
    """Of the file, such as length.json."""
    kind: str
    """What the file calls itself."""
    version: int
    holds: str
    """What is in it, for messages."""
    script: str
    """What makes it."""

    def stamped(self, result: Json) -> Json:
        """``result`` with kind and version before it."""
        return {"kind": self.kind, "version": self.version, **result}

    def load(self, path: str | Path) -> Json:
        """The result, given its file or folder. Raises `UserError` where it is none, or of another version."""
        path = Path(path)
        path = path / self.name if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"{path} is missing; make it with {self.script}")
        try:
            found = json.loads(path.read_text(encoding="utf8"))
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}); measure again with {self.script}") from error
        named = found if isinstance(found, dict) else {}
        if (named.get("kind"), named.get("version")) != (self.kind, self.version):
            raise UserError(
                f"{path} holds no {self.holds} of format version {self.version}; make it with {self.script}"
            )
        return found
