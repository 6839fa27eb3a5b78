"""`metrics.jsonl`: one JSON object a logged step, which plots read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_text

METRICS_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends to a run's `metrics.jsonl`; rows beyond ``done_steps``, left by a run that was cut off, are dropped.

    Raises `UserError` where the file is missing though steps are done: their metrics would be lost without a word.
    """

    def __init__(self, run: str | Path, done_steps: int):
        self.path = Path(run) / METRICS_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if done_steps and not self.path.exists():
            raise UserError(
                f"{self.path} is missing, though {done_steps} steps are done; restore it, or make an empty file of "
                "that name to go on without their metrics"
            )
        kept = [row for row in read_metrics(self.path) if row["step"] <= done_steps]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.file = open(self.path, "a", encoding="utf8")  # noqa: SIM115 (open as long as the run)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, in order; none where there is no file.

    A last line that was cut off by a kill is left out. Raises `UserError` that names any other damaged line.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row.pop("crc32", None)  # rows of versions before 0.3 have a checksum
            rows.append({"step": row.pop("step"), **row})
        except (ValueError, KeyError, TypeError, RecursionError):
            if number < len(lines):
                raise UserError(
                    f"{path}: line {number} is damaged; remove that line to go on without its step"
                ) from None
    return rows
