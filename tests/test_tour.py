"""The notebook docs/tour.ipynb: what is committed was run from top to bottom, and it still runs."""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"
SHORTER = {"--max_duration=400": "--max_duration=40 --scheduler.t_warmup=10", "tau_nats=0.5": "tau_nats=0.01",
           "--tau 0.5": "--tau 0.01", "--targets 300": "--targets 60", "max_targets=200": "max_targets=60"}  # fmt: skip


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_what_is_committed_was_run_in_order_without_an_error():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert TOUR.stat().st_size < 1_000_000 and str(Path.home()) not in TOUR.read_text(encoding="utf8")


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(TOUR, as_version=4)
    for shorter in SHORTER:
        assert sum(shorter in cell.source for cell in code_cells(notebook)) == 1
    for cell in code_cells(notebook):
        for longer, shorter in SHORTER.items():
            cell.source = cell.source.replace(longer, shorter)
    (tmp_path / "docs").mkdir()
    for name in ("configs", "docs/method.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(tmp_path / "docs")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    shown = code_cells(notebook)[2].outputs[-1]["data"]
    assert "targets gain more than 0.01 nats" in shown["text/plain"] and "<style" in shown["text/html"]
