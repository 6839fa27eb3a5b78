"""`metrics.jsonl`: one JSON object a logged step, which plots read. Every row carries a checksum of itself."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.files import write_text

METRICS_NAME = "metrics.jsonl"
_CHECKSUM = "crc32"


def rows_of_done_steps(run: str | Path, done_steps: int, *, finished: bool = False) -> list[dict[str, Any]]:
    """What a run's `metrics.jsonl` has of its first ``done_steps`` steps.

    Raises `UserError` where it is missing though steps are done, where a line is damaged, and where it is cut off in
    the row of a step that is done, or before that of the last step of a ``finished`` run. An empty file is taken: who
    made it wants no metrics.
    """
    path = Path(run) / METRICS_NAME
    if not done_steps:
        return []
    if not path.exists():
        raise UserError(
            f"{path} is missing, though {done_steps} steps are done; restore it, or make an empty file of that name "
            "to go on without their metrics"
        )
    rows = [row for row in read_metrics(path) if row["step"] <= done_steps]
    content = path.read_bytes()
    last_line = content.rpartition(b"\n")[2]
    begun = re.match(rb'{"step": (\d+),', last_line) if _row(last_line) is None else None
    lacks_last = finished and content and (not rows or rows[-1]["step"] < done_steps)
    if lacks_last or (begun and int(begun[1]) <= done_steps):
        raise UserError(
            f"{path} is cut off, with rows of the {done_steps} steps that are done; restore it, or make an empty file "
            "of that name to go on without the metrics"
        )
    return rows


class MetricsFile:
    """Appends to a run's `metrics.jsonl`; rows beyond ``done_steps``, left by a run that was cut off, are dropped.

    Raises `UserError` as `rows_of_done_steps` does.
    """

    def __init__(self, run: str | Path, done_steps: int):
        self.path = Path(run) / METRICS_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = rows_of_done_steps(run, done_steps)
        write_text(self.path, "".join(map(_line, kept)))
        self.file = open(self.path, "a", encoding="utf8")  # noqa: SIM115 (open as long as the run)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
        self.file.write(_line(row))
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, in order; none where there is no file.

    A last line that was cut off by a kill is left out. Raises `UserError` that names any other damaged line.
    """
    path = Path(path)
    if not path.is_file():
        return []
    *lines, cut_off = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            raise UserError(f"{path}: line {number} is damaged; remove that line to go on without its step")
        rows.append(row)
    last = _row(cut_off)
    return rows if last is None else [*rows, last]


def _line(row: dict[str, Any]) -> str:
    return json.dumps({**row, _CHECKSUM: _checksum(row)}) + "\n"


def _row(line: bytes) -> dict[str, Any] | None:
    """The values of a line; None where it is damaged. Rows of older versions have no checksum."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    noted = row.pop(_CHECKSUM, None)
    return row if noted in (None, _checksum(row)) else None


def _checksum(row: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(row).encode()):08x}"
