"""The notebook docs/tour.ipynb: what is committed was run from top to bottom, and it still runs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "docs" / "tour.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_what_is_committed_was_run_in_order_without_an_error():
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= 10
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert TOUR.stat().st_size < 500_000
    text = TOUR.read_text(encoding="utf8")
    assert str(ROOT) not in text and str(Path.home()) not in text


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    notebook = nbformat.read(TOUR, as_version=4)
    cells = code_cells(notebook)
    (measured,) = [cell for cell in cells if "targets=800" in cell.source]
    measured.source = measured.source.replace("targets=800", "targets=160")
    (tmp_path / "docs").mkdir()
    for page in (ROOT / "docs").glob("*.md"):
        (tmp_path / "docs" / page.name).symlink_to(page)
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    resources = {"metadata": {"path": str(tmp_path / "docs")}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert "targets" in "".join(output.get("text", "") for output in measured.outputs)
