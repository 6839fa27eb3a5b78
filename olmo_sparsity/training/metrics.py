"""`metrics.jsonl`: one JSON object a logged step, which plots read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olmo_sparsity.files import atomic_path

METRICS_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends to a run's `metrics.jsonl`; rows beyond ``done_steps``, left by a run that was cut off, are dropped."""

    def __init__(self, run: str | Path, done_steps: int):
        self.path = Path(run) / METRICS_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(self.path) if row["step"] <= done_steps] if done_steps else []
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf8")
        self.file = open(self.path, "a", encoding="utf8")  # noqa: SIM115 (open as long as the run)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row and hand it to the operating system at once."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, in order; a last line that was cut off by a kill is left out."""
    rows: list[dict[str, Any]] = []
    if not Path(path).is_file():
        return rows
    for line in Path(path).read_text(encoding="utf8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
