"""Figure 1: what is drawn and written is what the rows say."""

import json
import sys
from itertools import product

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection

from analysis.synthetic import figure1
from analysis.synthetic.exact_match import NAME, describe, describe_bands, load, save
from analysis.synthetic.figure1 import accuracy_by_length_figure, scheme_comparison_figure
from tests.analysis.figures.drawn import line
from tests.analysis.synthetic.made_up import pooled, row, rows

LENGTHS = (20, 50, 100, 200)


def right(length, worse, seed):
    """Of 200 samples; fewer at longer lengths, the faster the ``worse``."""
    return 200 - round(worse * length / 4) - seed


def test_accuracy_by_length_draws_the_points_of_every_k():
    frames = []
    for k_train, seed in product((4, 8), (1, 2)):
        rows_of_run = [row(n, right(n, k / k_train, seed), k, (200 - right(n, k / k_train, seed), 0, 0))
               for k in (4, 8) for n in LENGTHS]  # fmt: skip
        frames.append(rows(rows_of_run, seed=seed, task_changes={"k_train": k_train}))
    points = pooled(*frames)
    figure = accuracy_by_length_figure(points)
    assert [axes.get_title("left") for axes in figure.axes] == [f"$K_{{train}}$ = {k}" for k in (4, 8)]
    for axes, (_, group) in zip(figure.axes, points.groupby("k_train"), strict=True):
        bands = [band for band in axes.collections if isinstance(band, PolyCollection)]
        for band, (k, of_k) in zip(bands, group.groupby("k"), strict=True):
            x, y = line(axes, f"k = {k}")
            assert x.tolist() == [*of_k["length"]] == [*LENGTHS]
            np.testing.assert_allclose(y, 100 * of_k["value"])
            drawn = np.asarray(band.get_paths()[0].vertices)[:, 1]
            for bound in (*of_k["low"], *of_k["high"]):
                assert np.isclose(drawn, 100 * bound).any()
        assert line(axes, "chance")[1].tolist() == [50, 50]
        assert sorted({x for x, _ in axes.patches[0].get_corners()}) == [20, 50]
    assert describe(points).startswith("RoPE + PoSE; 2 training seeds; 3,000 steps; 400 samples a point")
    assert figure.get_suptitle().endswith("bands: 95 %, of the samples, two seeds pooled")


@pytest.mark.parametrize(
    ("seeds", "bands"),
    [
        ([1], "of the samples"),
        ([1, 2], "of the samples, two seeds pooled"),
        ([3, 4], "over seeds"),
        ([1, 3], "over 3 seeds or more, else of the samples"),
        ([2, 3], "over 3 seeds or more, else of the samples, two seeds pooled"),
    ],
)
def test_the_heading_says_what_bands_are_of(seeds, bands):
    assert describe_bands(pd.DataFrame({"seeds": seeds})) == f"bands: 95 %, {bands}"


def test_schemes_are_curves_and_multiples_of_the_trained_length_are_marked():
    places = {"scratchpad_parity": (5, 10, 20, 40, 200), "variable_assignment": (1, 4, 12)}
    frames = []
    for (task, lengths), (worse, scheme) in product(places.items(), enumerate(("contiguous", "pose"))):
        rows_of_run = [
            row(n, right(n, worse + 1, 0), None, (200 - right(n, worse + 1, 0), 0, 0)) for n in lengths
        ]
        frames.append(rows(rows_of_run, task, scheme=scheme))
    points = pooled(*frames)
    figure = scheme_comparison_figure(points)
    parity, assignment = figure.axes
    assert [text.get_text() for text in parity.texts] == ["1× = 20", "3×", "5×", "10×"]
    assert [text.get_text() for text in assignment.texts] == ["1× = 4", "3×"]
    for axes, task in zip(figure.axes, places, strict=True):
        for name in ("RoPE", "RoPE + PoSE"):
            of_curve = points[(points["task"] == task) & (points["model"] == name)]
            x, y = line(axes, name)
            assert x.tolist() == [*places[task]]
            np.testing.assert_allclose(y, 100 * of_curve["value"])


def test_chance_of_planted_labels_and_what_else_differs():
    two_rows = [row(20, 190, 4, (10, 0, 0)), row(100, 100, 4, (100, 0, 0))]
    even = {"label_function": "sum", "planted_distribution": "uniform", "num_planted": 5}
    # that steps differ follows from the label function, and is not named
    first = rows(two_rows, "planted", task_changes=even, options={"max_duration": 100})
    largest = rows(
        two_rows, "planted", task_changes={**even, "label_function": "max"}, options={"max_duration": 200}
    )
    figure = accuracy_by_length_figure(pooled(first, largest))
    for axes, label, chance in zip(figure.axes, ("max", "sum"), (np.nan, 20), strict=True):
        assert axes.get_title("left") == f"$K_{{train}}$ = 4\nRoPE + PoSE, label_function {label}"
        np.testing.assert_allclose(line(axes, "chance")[1], chance)


def test_the_command_writes_what_it_draws_and_keeps_the_rows(tmp_path, monkeypatch, capsys):
    planted = [row(20, 196, 4, (4, 0, 0)), row(100, 150, 4, (50, 0, 0)), row(200, 120, 4, (80, 0, 0))]
    save(tmp_path / "in" / "a" / NAME, rows(planted))
    save(tmp_path / "in" / "b" / NAME, rows([row(5, 9), row(40, 4, None, (1, 3, 2))], "scratchpad_parity"))
    out, kept = tmp_path / "out", tmp_path / "kept.parquet"
    command = ["figure1", tmp_path / "in", "--out", out, "--rows", kept]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in command])
    figure1.main()
    names = ("sparse_parity", "schemes")
    drawn = {f"figure1-{name}.png" for name in names}
    assert {path.name for path in out.iterdir()} == {"figure1.json", *drawn}
    written = json.loads((out / "figure1.json").read_text())
    first = written["points"][2]
    assert (first["task"], first["k"], first["length"], first["value"]) == ("sparse_parity", 4, 20, 0.98)
    assert [*load([kept], ["a"])["exact"]] == [196, 150, 120]
    assert "98.0 [95.0, 99.2]" in capsys.readouterr().out
