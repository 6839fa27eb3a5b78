"""Figure 2: what is drawn is what the summary says, and it is drawn without the model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from analysis import plots
from analysis.summary import summarize
from tests.test_summary import MEASURED, made_up_records

SCRIPT = Path(__file__).parents[1] / "scripts" / "figure2.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_up_records(path := tmp_path_factory.mktemp("records"))
    return path


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return summarize(made_up_records(tmp_path_factory.mktemp("records")), 1000)


@pytest.fixture(scope="module")
def panels(summary: dict) -> list[Axes]:
    return plots.figure2(summary).axes


def curve(axes: Axes, label: str) -> tuple[list, list]:
    line: Any
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(line.get_xdata()), list(line.get_ydata())


def values(summary: dict, selector: str, key: str, bound: str = "value") -> list[float]:
    return [per_k[key][bound] for per_k in summary["selectors"][selector].values()]


def test_curves_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    for selector in MEASURED:
        for axes, keys in ((panels[0], ("loss", "placebo_loss")), (panels[1], ("net_recovery",))):
            for key in keys:
                assert curve(axes, f"{selector} {key}") == ([1, 2, 4, 8], values(summary, selector, key))
    for key in ("loss_short", "loss_long"):
        assert curve(panels[0], key)[1] == [summary[key]["value"]] * 2


def test_bands_are_the_intervals(summary: dict, panels: list[Axes]) -> None:
    bands = [band for band in panels[1].collections if isinstance(band, PolyCollection)]
    assert len(bands) == len(MEASURED)
    for selector, band in zip(MEASURED, bands, strict=True):
        drawn = np.asarray(band.get_paths()[0].vertices)[:, 1]
        low, high = (values(summary, selector, "net_recovery", bound) for bound in ("low", "high"))
        for expected in (*low, *high):
            assert np.isclose(drawn, expected).any()


def bars_of(axes: Axes) -> dict[str, tuple[list, list, list]]:
    """Label to value, lower and upper end of the error bars of panel (c)."""
    found = {}
    container: Any
    for container in axes.containers:
        points, _, (bars,) = container.lines
        ends = np.array([path.vertices[:, 1] for path in bars.get_paths()])
        found[container.get_label()] = (list(points.get_ydata()), *ends.T.tolist())
    return found


def test_bins_are_the_summary(summary: dict, panels: list[Axes]) -> None:
    bars = bars_of(panels[2])
    assert list(bars) == [
        f"{name} {kind}" for name in ("leave-one-out", "random") for kind in ("recovery", "placebo_recovery")
    ]
    for label, (middle, low, high) in bars.items():
        name, kind = label.split()
        expected = [each["selectors"][name][kind] for each in summary["gain_bins"]["bins"]]
        for drawn, bound in ((middle, "value"), (low, "low"), (high, "high")):
            of_summary = np.array([each[bound] for each in expected], dtype=float)  # None, no interval: NaN
            np.testing.assert_allclose(drawn, of_summary)
        assert np.isfinite(low[:3]).all()
    ticks = [tick.get_text() for tick in panels[2].get_xticklabels()]
    counts = [each["targets"] for each in summary["gain_bins"]["bins"]]
    assert ticks == [f"{name}\nn = {n}" for name, n in zip(("1–2", "2–3", "3–5", "> 5"), counts, strict=True)]


def test_axes_name_quantity_and_unit(summary: dict, panels: list[Axes]) -> None:
    assert panels[0].get_ylabel() == "mean loss [nats per token]"
    assert "[fraction of $L_{short} - L_{long}$]" in panels[1].get_ylabel()
    assert panels[2].get_xlabel().endswith("[nats]") and "k = 4" in panels[2].get_title("left")
    for axes in panels[:2]:
        assert "[far tokens" in axes.get_xlabel() and axes.get_xscale() == "log"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "2", "4", "8"]


def test_legend_is_outside_and_names_everything(summary: dict) -> None:
    figure = plots.figure2(summary)
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*MEASURED, "placebo far context: dashed, hollow"]
    figure.draw_without_rendering()
    boxes: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
    assert legend.get_window_extent().y1 <= min(box.y0 for box in boxes)


def test_heading_says_what_was_measured(summary: dict) -> None:
    text = plots.describe(summary)
    over = summary["targets_over_tau"]
    for part in (
        "N = 128, M = 16",
        "400 targets",
        f"{summary['documents']} documents",
        f"{over} with",
        "1 nat ",
    ):
        assert part in text
    assert "measured so far" not in text


def test_styles_are_stable_and_distinct() -> None:
    known = ["leave-one-out", "leave-one-in", "greedy", "gradient", "attention", "random", "nearest"]
    alone = plots.selector_styles(["greedy"])["greedy"]
    everything = plots.selector_styles(["oracle", *known, "shapley"])
    assert everything["greedy"] == alone
    assert len({colour for colour, _, _ in everything.values()}) == 9
    assert len({marker for _, marker, _ in everything.values()}) == 9


def test_other_selectors_and_no_intervals_can_be_drawn(tmp_path: Path) -> None:
    """An unknown selector without controls, of one document: no interval exists, and no bar is drawn."""
    summary = summarize(made_up_records(tmp_path, documents=1, selectors=("oracle",)), 100)
    panels = plots.figure2(summary).axes
    for middle, low, high in bars_of(panels[2]).values():
        assert np.isfinite(middle[:3]).all() and np.isnan(low).all() and np.isnan(high).all()
    plots.save_figure(plots.figure2(summary), tmp_path)


def test_further_panels_fit_in(summary: dict) -> None:
    panels = (*plots.PANELS, lambda axes, summary: axes.set_title("(d)", loc="left"))
    assert [axes.get_title("left")[:3] for axes in plots.figure2(summary, panels).axes] == [
        "(a)",
        "(b)",
        "(c)",
        "(d)",
    ]


def test_saved_files_are_reproducible_and_leave_no_state(summary: dict, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    first = plots.save_figure(plots.figure2(summary), tmp_path / "one")
    second = plots.save_figure(plots.figure2(summary), tmp_path / "two")
    assert [path.name for path in first] == ["figure2.png", "figure2.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[0].read_bytes().startswith(b"\x89PNG") and first[1].read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["figure2.pdf", "figure2.png"]
    assert dict(matplotlib.rcParams) == before


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_writes_figure_summary_and_table(folder: Path, tmp_path: Path) -> None:
    result = run_script(folder, "--out", tmp_path, "--resamples", 1000, "--k", 2)
    assert result.returncode == 0 and result.stderr == ""
    assert "leave-one-out" in result.stdout and "net [%]" in result.stdout
    names = ["figure2.pdf", "figure2.png", "summary.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["gain_bins"]["k"] == 2 and summary["settings"]["resamples"] == 1000
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert run_script(folder, "--out", tmp_path, "--resamples", 1000, "--k", 2).returncode == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--k", 3], "k = 3 was not measured"), (["--resamples", 10], "too few"), ([], "has no records")],
)
def test_script_refuses_in_one_line(folder: Path, tmp_path: Path, arguments: list, said: str) -> None:
    result = run_script(folder if arguments else tmp_path / "none", *arguments, "--out", tmp_path / "out")
    assert result.returncode == 1 and not (tmp_path / "out").exists()
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and said in result.stderr


@pytest.mark.parametrize("module", ["records", "statistics", "summary", "plots"])
def test_needs_neither_torch_nor_the_training_package(module: str) -> None:
    heavy = "torch|accelerate|deepspeed|transformers|olmo|olmo_sparsity.training"
    code = f"import sys, analysis.{module}; sys.exit(', '.join(set('{heavy}'.split('|')) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stderr.strip() == ""
