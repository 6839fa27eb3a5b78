"""Loss by position and needles: figures with the values of tidy frames made up."""

from itertools import product

import numpy as np
import pandas as pd

from analysis.figures.length import length_figure, lengths_figure
from analysis.figures.needle import needle_figure, needle_lengths_figure
from tests.analysis.figures.drawn import assert_readable, legend, line, points

BINS = [(1, 16), (16, 64), (64, 128)]
LENGTHS, DEPTHS = (64, 128), (0.0, 0.5, 1.0)


def with_interval(rows):
    frame = pd.DataFrame(rows)
    return frame.assign(low=frame["value"] - 0.1, high=frame["value"] + 0.1)


def length_frame(models):
    rows = []
    for number, model in enumerate(models):
        trained = {
            "model": model,
            "trained_window_tokens": 64,
            "trained_reach_tokens": 128 if number else np.nan,
        }
        for place, (start, end) in enumerate(BINS):
            bin_ = {"name": "loss_nats", "from_tokens": start, "to_tokens": end}
            rows.append({**trained, **bin_, "value": 5 - place + 0.1 * number})
        for length in LENGTHS:
            at = {"name": "loss_at_length_nats", "from_tokens": length // 2, "to_tokens": length}
            rows.append({**trained, **at, "value": length / 64 + number})
    return with_interval(rows)


def cells_frame(models, ks):
    rows = []
    for number, model in enumerate(models):
        for k in ks:
            for length in LENGTHS:
                cell = {"model": model, "value_tokens": k, "length": length, "trained_window_tokens": 64}
                for depth in DEPTHS:
                    exact = (1 + number + depth) / (k + length / 16)
                    rows.append({**cell, "depth": depth, "name": "exact", "value": exact})
                rows.append({**cell, "depth": np.nan, "name": "exact", "value": k / length})
    return with_interval(rows)


def test_curves_of_the_loss_are_the_bins():
    frame = length_frame(["RoPE", "RoPE + PoSE"])
    figure = length_figure(frame)
    assert_readable(figure)
    [axes] = figure.axes
    for number, model in enumerate(("RoPE", "RoPE + PoSE")):
        x, y = line(axes, model)
        np.testing.assert_allclose(x, [15**0.5, (16 * 63) ** 0.5, (64 * 127) ** 0.5])
        np.testing.assert_allclose(y, np.array([5, 4, 3]) + 0.1 * number)
    assert legend(figure) == ["RoPE", "RoPE + PoSE", "trained window: 64", "reach of trained ids: 128"]


def test_points_are_the_loss_at_each_length():
    figure = lengths_figure(length_frame(["a", "b"]))
    assert [axes.get_title("left") for axes in figure.axes] == ["at 64 tokens", "at 128 tokens"]
    for place, axes in enumerate(figure.axes):
        for number, model in enumerate("ab"):
            assert points(axes, model)[0].get_xdata().tolist() == [1 + place + number]


def test_heat_maps_of_needles_are_the_cells():
    cells = cells_frame(["a", "b"], [1, 4])
    figure = needle_figure(cells)
    for place, (model, k) in enumerate(product("ab", (1, 4))):
        rows = cells[(cells["name"] == "exact") & (cells["value_tokens"] == k) & (cells["model"] == model)]
        [image] = figure.axes[place].images
        expected = rows.dropna(subset="depth")["value"].to_numpy().reshape(len(LENGTHS), len(DEPTHS)).T
        np.testing.assert_allclose(np.asarray(image.get_array()), 100 * expected)
    first = figure.axes[0]
    assert first.get_title("left") == "k = 1" and first.get_ylabel().startswith("a\nwindow 64\n")


def test_curves_of_needles_are_means_over_depths():
    figure = needle_lengths_figure(cells_frame(["a", "b"], [1, 4]))
    assert line(figure.axes[1], "k = 4")[1].tolist() == [4 / 64, 4 / 128]
