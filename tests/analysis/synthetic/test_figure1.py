"""Figure 1: what is drawn and written is what the rows say."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
from matplotlib.collections import PolyCollection

from analysis.synthetic import figure1
from analysis.synthetic.exact_match import NAME, describe, load, save
from analysis.synthetic.figure1 import SPAN, accuracy_by_length_figure, scheme_comparison_figure
from tests.analysis.synthetic.made_up import pooled, row, rows, schemes, sparse
from tests.support.drawn import curve

RESULTS = Path(__file__).parents[3] / "results"
ERRORS = runpy.run_path(str(RESULTS / "synthetic" / "errors_figure.py"))
SCHEMES = ["RoPE", "RoPE + PoSE", "coupled ids (oracle)", "Predictive Position Coupling"]


def test_accuracy_by_length_draws_the_points_of_every_k():
    points = sparse()
    figure = accuracy_by_length_figure(points)
    assert [axes.get_title("left") for axes in figure.axes] == [f"$K_{{train}}$ = {k}" for k in (4, 8, 12)]
    for axes, (k_train, group) in zip(figure.axes, points.groupby("k_train"), strict=True):
        bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
        assert len(bands) == 7
        for band, (k, of_k) in zip(bands, group.groupby("k"), strict=True):
            line = curve(axes, f"k = {k}")
            assert [*line.get_xdata()] == [*of_k["length"]] and line.is_dashed() == (k > k_train)
            np.testing.assert_allclose(line.get_ydata(), 100 * of_k["value"])
            drawn = np.asarray(band.get_paths()[0].vertices)[:, 1]
            for bound in (*of_k["low"], *of_k["high"]):
                assert np.isclose(drawn, 100 * bound).any()
        (chance,) = [line for line in axes.lines if [*line.get_ydata()] == [50, 50]]
        assert chance.get_linestyle() == ":"
        assert sorted({x for x, _ in axes.patches[0].get_corners()}) == [20, 50]
    assert describe(points).startswith("RoPE + PoSE; 3 training seeds; 3,000 steps; 600 samples a point; ")


def test_chance_of_planted_labels_and_what_else_differs():
    own = [row(20, 190, 4, (10, 0, 0)), row(100, 100, 4, (100, 0, 0))]
    even = {"label_function": "sum", "planted_distribution": "uniform", "num_planted": 5}
    # that steps differ follows from the label function, and is not named
    first = rows(own, "planted", task_changes=even, options={"max_duration": 100})
    largest = rows(
        own, "planted", task_changes={**even, "label_function": "max"}, options={"max_duration": 200}
    )
    figure = accuracy_by_length_figure(pooled(first, largest))
    for axes, label, chance in zip(figure.axes, ("max", "sum"), (np.nan, 20), strict=True):
        assert axes.get_title("left") == f"$K_{{train}}$ = 4\nRoPE + PoSE, label_function {label}"
        np.testing.assert_allclose(curve(axes, "chance").get_ydata(), chance)


def test_schemes_are_curves_and_multiples_of_the_trained_length_are_marked():
    points = schemes()
    figure = scheme_comparison_figure(points)
    parity, assignment = figure.axes
    assert [text.get_text() for text in parity.texts] == ["1× = 20", "3×", "5×", "10×"]
    assert [text.get_text() for text in assignment.texts] == ["1× = 4", "3×"]
    marked = [line.get_xdata()[0] for line in parity.lines if line.get_linestyle() == ":"]
    assert marked == [20, 60, 100, 200]
    for axes, task in zip(figure.axes, ("scratchpad_parity", "variable_assignment"), strict=True):
        for name in SCHEMES:
            of_curve = points[(points["task"] == task) & (points["model"] == name)]
            np.testing.assert_allclose(curve(axes, name).get_ydata(), 100 * of_curve["value"])


def test_bars_of_first_errors_reach_what_is_not_exact():
    points = schemes()
    figure = ERRORS["errors_figure"](points)
    curves = points.groupby(["task", "model"], sort=False)
    for axes, ((_, name), of_curve) in zip(figure.axes, curves, strict=True):
        assert axes.get_title("left").replace("\n", " ") == name
        for container, sort in zip(axes.containers, ("token", "id", "stop"), strict=True):
            np.testing.assert_allclose([b.get_height() for b in container], 100 * of_curve[f"wrong_{sort}"])
        tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
        np.testing.assert_allclose(tops, 100 * (1 - of_curve["value"]), atol=1e-9)
        [span] = [each for each in axes.patches if each.get_alpha() == SPAN["alpha"]]
        trained = of_curve["length"].between(of_curve["shortest"], of_curve["longest"])
        assert {x for x, _ in span.get_corners()} == {-0.5, trained.sum() - 0.5}


def test_the_command_writes_what_it_draws_and_keeps_the_rows(tmp_path, monkeypatch, capsys):
    planted = [row(20, 196, 4, (4, 0, 0)), row(100, 150, 4, (50, 0, 0)), row(200, 120, 4, (80, 0, 0))]
    save(tmp_path / "in" / "a" / NAME, rows(planted))
    save(tmp_path / "in" / "b" / NAME, rows([row(5, 9), row(40, 4, None, (1, 3, 2))], "scratchpad_parity"))
    out, kept = tmp_path / "out", tmp_path / "kept.parquet"
    command = ["figure1", tmp_path / "in", "--out", out, "--rows", kept]
    monkeypatch.setattr(sys, "argv", [str(each) for each in command])
    figure1.main()
    names = ("sparse_parity", "schemes")
    drawn = {f"figure1-{name}.png" for name in names}
    assert {path.name for path in out.iterdir()} == {"figure1.json", *drawn}
    written = json.loads((out / "figure1.json").read_text())
    first = written["points"][2]
    assert (first["task"], first["k"], first["length"], first["value"]) == ("sparse_parity", 4, 20, 0.98)
    assert [*load([kept], ["a"])["exact"]] == [196, 150, 120]
    assert "98.0 [95.0, 99.2]" in capsys.readouterr().out
