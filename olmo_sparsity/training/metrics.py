"""`metrics.jsonl`: one JSON object a logged step, which plots read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_text

METRICS_NAME = "metrics.jsonl"


def rows_of_done_steps(run: str | Path, done_steps: int, *, finished: bool = False) -> list[dict[str, Any]]:
    """What a run's `metrics.jsonl` has of its first ``done_steps`` steps.

    Raises `UserError` where rows of them are lost: the file is missing, or cut off in the row of a step that is done,
    or before that of the last step of a ``finished`` run. An empty file is taken: who made it wants no metrics.
    """
    path = Path(run) / METRICS_NAME
    if not done_steps:
        return []
    remedy = "restore it, or make an empty file of that name to go on without the metrics"
    if not path.exists():
        raise UserError(f"{path} is missing, though {done_steps} steps are done; {remedy}")
    rows = [row for row in read_metrics(path) if row["step"] <= done_steps]
    content = path.read_bytes()
    begun = re.match(rb'{"step": (\d+),(?!.*}$)', content.rpartition(b"\n")[2])  # a line without its end
    lacks_last = finished and content and (not rows or rows[-1]["step"] < done_steps)
    if lacks_last or (begun and int(begun[1]) <= done_steps):
        raise UserError(f"{path} is cut off, with rows of the {done_steps} steps that are done; {remedy}")
    return rows


class MetricsFile:
    """Appends to a run's `metrics.jsonl`; rows beyond ``done_steps``, left by a run that was cut off, are dropped.

    Raises `UserError` as `rows_of_done_steps` does.
    """

    def __init__(self, run: str | Path, done_steps: int):
        self.path = Path(run) / METRICS_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = rows_of_done_steps(run, done_steps)
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
